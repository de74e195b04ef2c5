"""What went wrong at the controller without ending it, counted by name and logged once per cause.

The server's side has its own in ``sglang_hooks/counters.py``; ``docs/operations.md`` says what to do about each.
"""

from __future__ import annotations

import logging
import re

SERVER_COUNTERS = ("tables_resent", "policy_failures", "rivals_turned_away")
"""Names of the counters that are kept for each server."""

CONTROLLER_COUNTERS = ("messages_unclaimed", "trace_failures", "prior_failures")
"""Names of the counters that are kept once, whatever server they concern."""

MOST_CAUSES = 256
"""Causes that are logged at most: a peer that finds ever new ways to be wrong must not fill the log."""


class Once:
    """Logs the first occurrence of every cause."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def warn(self, cause: str, text: str, counter: str) -> None:
        """Log ``text`` unless ``cause`` has been logged, and say where the others are counted."""
        if cause not in self._said and len(self._said) < MOST_CAUSES:
            self._said.add(cause)
            self._logger.warning("%s (counted from now on as %s)", text, counter)


def cause(error: Exception) -> str:
    """Return what an error has in common with others of its kind: its text without the numbers in it.

    >>> cause(ValueError("message of 17 bytes")) == cause(ValueError("message of 9 bytes"))
    True
    """
    return re.sub(r"\d+", "N", str(error))[:200]
