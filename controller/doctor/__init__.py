"""``specpilot doctor``: what would keep a server from being steered, and what to change."""
