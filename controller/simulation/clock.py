"""Where a simulated server's time comes from: the host's clock, or one that moves only when somebody sleeps."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time of a simulated server, in seconds."""

    def now(self) -> float:
        """Return the seconds since some fixed moment."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` (not negative) pass."""


class WallClock:
    """The host's monotonic clock, which the hooks read as well."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``."""
        time.sleep(seconds)


class VirtualClock:
    """Time that passes only when somebody sleeps.

    >>> clock = VirtualClock()
    >>> clock.sleep(1.5)
    >>> clock.now()
    1.5
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Return the seconds slept so far."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Move on by ``seconds``."""
        self._now += seconds
