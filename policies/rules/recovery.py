"""While a server skips, nothing is seen of its draft but probes: has acceptance come back?

A probe tells little, and one every hundred steps makes waiting for many of them slow. So a
sequential test runs over what probes accept (Page's CUSUM, 1954): for the acceptance at which
speculating would win clearly, against the acceptance known. While it leans towards the former,
probes follow each other closely; once it is sure, the acceptance model is told to start anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specpilot.policies.models.trials import trials_of
from specpilot.sglang_hooks.wire import StepRecord

FOLLOW_NATS = 1.5
"""From here on probes follow each other: three accepted drafts of one request, or one each of several."""
SURE_NATS = 8.0
"""Under unchanged acceptance one probe series in e^8 gets here (Wald); a wrong one costs some steps, not more."""
FOLLOW_PROBABILITY = 0.5
"""Of a step being a probe meanwhile."""
RECORD_NATS = 5.0
"""A single step says no more than this: its requests may be alike."""


class Watch:
    """The test for one server; ``learn`` every speculative step of a cell that skips."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self.clear()

    def clear(self) -> None:
        """Forget what was seen: speculation is on, or what was known has changed."""
        self.nats = 0.0
        self.trials = [0.0] * self._max_steps
        self.passed = [0.0] * self._max_steps

    @property
    def following(self) -> bool:
        """Is there reason to probe at once again?"""
        return self.nats >= FOLLOW_NATS

    @property
    def sure(self) -> bool:
        """Has acceptance come back?"""
        return self.nats >= SURE_NATS

    def learn(self, step: StepRecord, hazards: Sequence[float], winning: float) -> None:
        """Take one probe in.

        ``hazards``: those known, by position, shape (max_steps,). ``winning``: acceptance per
        draft of the alternative; where it is not above a hazard, that position says nothing.
        """
        gain = 0.0
        trials, passed = trials_of(step, self._max_steps)
        for position, (tried, good) in enumerate(zip(trials, passed, strict=True)):
            self.trials[position] += tried
            self.passed[position] += good
            hazard = min(max(hazards[position], 0.01), 0.99)
            if hazard < winning:
                gain += good * math.log(winning / hazard)
                gain += (tried - good) * math.log((1.0 - winning) / (1.0 - hazard))
        self.nats += min(gain, RECORD_NATS)
        if self.nats <= 0.0:
            self.clear()
