"""``specpilot evaluate``: what another policy would have earned, judged by the log of the one that ran."""
