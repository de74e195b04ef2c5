"""The acceptance of a trace's text: by time, in windows, and by position."""

from __future__ import annotations

from specpilot.controller.simulation.workload import Phase
from specpilot.policies.models.trials import trials_of
from specpilot.sglang_hooks.wire import StepRecord

WINDOW_SECONDS, WINDOW_TRIALS = 20.0, 400
"""A window of acceptance is at least so long and holds at least so many tried drafts: +-0.05 at 95 %."""


class WindowedAcceptance:
    """Drafts tried and drafts that passed, by window and by position."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []
        self._trials_at: list[int] = []
        self._passed_at: list[int] = []
        self._begin = 0.0
        self._trials = self._passed = 0

    def take(self, step: StepRecord, at: float, depth: int) -> None:
        """Count a step that ended ``at`` (seconds since the trace's begin), its drafts up to ``depth`` positions."""
        trials, passed = trials_of(step, depth)
        for position, (tried, accepted) in enumerate(zip(trials, passed, strict=True)):
            if position == len(self._trials_at):
                self._trials_at.append(0)
                self._passed_at.append(0)
            self._trials_at[position] += tried
            self._passed_at[position] += accepted
        self._trials += sum(trials)
        self._passed += sum(passed)
        if at - self._begin >= WINDOW_SECONDS and self._trials >= WINDOW_TRIALS:
            self._close(at)

    def _close(self, at: float) -> None:
        self._phases.append(Phase(self._begin, f"window {len(self._phases) + 1}", self._passed / self._trials))
        self._begin = at
        self._trials = self._passed = 0

    def path(self) -> tuple[Phase, ...]:
        """Return the windows; the last one also if it is short, unless it tells next to nothing."""
        if self._trials >= WINDOW_TRIALS // 4 or (self._trials and not self._phases):
            self._close(self._begin)
        return tuple(self._phases)

    def by_position(self) -> list[float]:
        """Return the share of tried drafts that passed, by position, of those with enough trials."""
        return [
            passed / trials
            for trials, passed in zip(self._trials_at, self._passed_at, strict=True)
            if trials >= WINDOW_TRIALS
        ]
