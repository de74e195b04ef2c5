"""Everything that can go wrong on the server's side without ending it, each a counter with one name.

The counters travel in ``HookState`` once a second and stand in ``specpilot status`` under these names;
``docs/operations.md`` says what to do about each. The log gets one line for each that leaves 0, written by
the link's thread: what happens a thousand times on the scheduler thread costs it a thousand additions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

COUNTERS = {
    "tables_received": "",
    "tables_refused": "",
    "tables_replayed": "",
    "messages_refused": "",
    "leases_ignored": "",
    "link_rebuilds": "the connection to the controller ended and is made again",
    "link_failures": "",
    "handshakes_failed": "",
    "records_dropped": "step records are dropped, the controller does not read them fast enough",
    "join_misses": "a decode result came without its launch, that step is not recorded",
    "steps_mismatched": "a step had another width than was decided for it",
    "rows_quarantined": "requests that were skipped for longer than SPECPILOT_SKIP_RING_MB holds are not learned from",
    "lease_expiries": "the controller was not heard for the length of a lease, the last table goes on unexplored",
    "fallbacks": "the last table is too old, steps are those of the fallback until a new one comes",
    "rank_mismatches": "",
    "steps_capped": "SPECPILOT_MAX_STEPS_BY_BATCH lowered the steps that were asked for",
    "skips_as_verify": "a step with K=0 ran as SGLang's own verify, not as a decode step",
    "hook_failures": "",
}
"""What the log says the first time; empty for what is no fault, or is logged in more detail where it happens."""


class Announcer:
    """Logs once for each counter that has left 0."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look(self, counters: Mapping[str, int]) -> None:
        """Log what is new in ``counters``."""
        for name, count in counters.items():
            if count and name not in self._said and COUNTERS[name]:
                self._said.add(name)
                logger.warning("specpilot: %s (counted from now on as %s)", COUNTERS[name], name)
