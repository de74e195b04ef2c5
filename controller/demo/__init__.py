"""``specpilot demo``: a simulated server, a real controller, a live view and a picture."""
