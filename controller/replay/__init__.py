"""``specpilot replay``: policies against each other in virtual time."""
