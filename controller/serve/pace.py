"""When to decide for a server: regularly, and at once when its policy has learned of a change."""

from __future__ import annotations

URGENT_SECONDS = 0.02
"""Seconds between two decisions, however urgent: about what a record needs to get here (``link.DRAIN_SECONDS``)."""


class Pace:
    """The pace of one server; ``due`` is asked whenever records came in, or time went by.

    >>> pace = Pace(0.5)
    >>> pace.due(0.0, urgent=False), pace.due(0.1, urgent=False), pace.due(0.1, urgent=True)
    (True, False, True)
    >>> pace.due(0.11, urgent=True), pace.due(0.59, urgent=False), pace.due(0.6, urgent=False)
    (False, False, True)
    """

    def __init__(self, decide_seconds: float) -> None:
        self._period = decide_seconds
        self._decided_at = float("-inf")

    def due(self, now: float, urgent: bool) -> bool:
        """Is it time to decide? True at most once: the answer counts as the decision."""
        if now - self._decided_at < (URGENT_SECONDS if urgent else self._period):
            return False
        self._decided_at = now
        return True
