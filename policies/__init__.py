"""Decision policies: pure objects that learn from steps and answer with a plan.

No sockets, files, clocks or globals; time and randomness are passed in, so that live control,
replay and evaluation run the very same objects.
"""
