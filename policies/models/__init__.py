"""What the learned policies know: acceptance of drafts and cost of steps, each from step records alone.

    applied, trials (what a record says) ──► acceptance_* ──► acceptance
                                         └─► cost_* ────────► cost

A model asks no rule and no policy: beside the other models it imports ``interface`` and ``knowledge``.
"""
