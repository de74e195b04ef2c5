"""What a simulated server has done so far, and the summary of its run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class SimSummary:
    """A run of a simulated server in figures."""

    steps: int
    """Decode steps that were settled."""
    tokens: int
    """Tokens of all requests, as far as their clients saw them."""
    seconds: float
    """Seconds since the start of the server."""
    tokens_per_second: float
    share_by_k: dict[str, float]
    """Share of the decode steps, by K."""
    switches: int
    """Decode steps at another K than the one before."""
    tables_applied: int
    dropped_records: int
    started_at: float
    """Seconds since the Unix epoch at which the workload's time 0 was."""


class SimTotals:
    """Counts what a simulated server does."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all requests, as far as their clients saw them."""
        self.tables_applied = 0
        self._steps: Counter[int] = Counter()
        self._previous_steps: int | None = None
        self._switches = 0

    def settled(self, steps: int) -> None:
        """Count a decode step of K = ``steps``."""
        self._steps[steps] += 1
        self._switches += self._previous_steps not in (None, steps)
        self._previous_steps = steps

    def summary(self, seconds: float, dropped_records: int, started_at: float) -> SimSummary:
        """Return the figures after ``seconds``; ``started_at`` in seconds since the Unix epoch."""
        steps = self._steps.total()
        return SimSummary(
            steps=steps,
            tokens=self.tokens,
            seconds=seconds,
            tokens_per_second=self.tokens / seconds if seconds else 0.0,
            share_by_k={str(k): count / steps for k, count in sorted(self._steps.items())},
            switches=self._switches,
            tables_applied=self.tables_applied,
            dropped_records=dropped_records,
            started_at=started_at,
        )
