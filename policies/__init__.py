"""Decision policies: pure objects that learn from steps and answer with a plan.

No sockets, files, clocks or globals; time and randomness are passed in, so that live control,
replay and evaluation run the very same objects.

Imports go against the arrows, and out of the package only down to ``sglang_hooks``:

    student ──► knowledge ──► interface ──► models ──► rules ──► goodput, neural
                                  │            └─────► offpolicy
                                  └──► places, static, threshold, baselines
"""
