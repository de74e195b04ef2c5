"""``specpilot compare``: arms against each other on a live server."""
