"""While a server skips, nothing is seen of its draft but probes: which K to probe, and has acceptance come back?

A probe tells little, and one every hundred steps makes waiting for many of them slow. So a
sequential test runs over what probes accept (Page's CUSUM, 1954): for the acceptance at which
speculating would win clearly, against the acceptance known. While it leans towards the former,
probes follow each other closely; once it is sure, the acceptance model is told to restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specpilot.policies.models.acceptance_length import chain_lengths
from specpilot.policies.models.trials import trials_of
from specpilot.sglang_hooks.wire import StepRecord

FloatArray = npt.NDArray[np.float64]

PLAUSIBLE = np.linspace(0.05, 0.95, 19)
"""Acceptance per draft that a drafter may have; what no value of these could make pay is not probed."""

FOLLOW_NATS = 1.5
"""Evidence from which on probes follow each other: three accepted drafts of one request, or one each of several."""
SURE_NATS = 8.0
"""Evidence that is a recovery: under unchanged acceptance one series of probes in e^8 reaches it (Wald 1945).
A wrong one costs some steps, not more."""
FOLLOW_PROBABILITY = 0.5
"""Probability that a step is a probe while probes follow each other."""
RECORD_NATS = 5.0
"""A single step says no more than this: its requests may be alike."""


def plausible_lengths(max_steps: int) -> FloatArray:
    """Return tokens per request and step for K = 0..max_steps at each PLAUSIBLE, shape (19, max_steps + 1)."""
    return chain_lengths(np.repeat(PLAUSIBLE[:, None], max_steps, axis=1))


def worth_probing(scores: FloatArray, to_beat: float) -> tuple[int, float] | None:
    """Return the arm to probe, and the acceptance per draft at which it wins; None if no plausible one wins.

    ``scores``: tokens per second at each PLAUSIBLE and arm, shape (19, arms), where arm 0 is K=0.
    ``to_beat``: tokens per second above which an arm wins. The acceptance is halfway from the least at
    which some arm wins to the largest plausible one, and the arm the best at that.
    """
    speculating = scores[:, 1:]
    wins = np.flatnonzero(speculating.max(axis=1) > to_beat)
    if not len(wins):
        return None
    row = (int(wins[0]) + len(PLAUSIBLE) - 1) // 2
    return int(np.argmax(speculating[row])) + 1, float(PLAUSIBLE[row])


class RecoveryTest:
    """The sequential test of one server; ``learn`` every speculative step of a cell that skips."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self.clear()

    def clear(self) -> None:
        """Forget what was seen: speculation is on, or what was known has changed."""
        self.nats = 0.0
        """Log-likelihood ratio of the probes since it was last 0."""
        self.trials = [0.0] * self._max_steps
        """Trials by position of these probes."""
        self.passed = [0.0] * self._max_steps
        """Accepted drafts by position of these probes."""

    @property
    def following(self) -> bool:
        """Is there reason to probe at once again?"""
        return self.nats >= FOLLOW_NATS

    @property
    def sure(self) -> bool:
        """Has acceptance come back?"""
        return self.nats >= SURE_NATS

    def learn(self, step: StepRecord, hazards: Sequence[float], winning: float) -> None:
        """Add one probe.

        ``hazards``: the acceptance known, by position, shape (max_steps,). ``winning``: acceptance per
        draft of the alternative; where it is not above a hazard, that position says nothing.
        """
        gain = 0.0
        trials, passed = trials_of(step, self._max_steps)
        for position, (tried, accepted) in enumerate(zip(trials, passed, strict=True)):
            self.trials[position] += tried
            self.passed[position] += accepted
            hazard = min(max(hazards[position], 0.01), 0.99)
            if hazard < winning:
                gain += accepted * math.log(winning / hazard)
                gain += (tried - accepted) * math.log((1.0 - winning) / (1.0 - hazard))
        self.nats += min(gain, RECORD_NATS)
        if self.nats <= 0.0:
            self.clear()
