"""``specpilot fit`` and ``fit-neural``: from traces to what a controller starts from."""
