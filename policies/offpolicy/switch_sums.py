"""What switches of K cost in a log, and how often a policy would have switched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from specpilot.policies.models.cost_switches import SWITCH_KINDS
from specpilot.policies.offpolicy.bootstrap import REPLICATES, Blocks
from specpilot.policies.offpolicy.logged_steps import BoolArray, FloatArray, IntArray, LoggedSteps
from specpilot.policies.offpolicy.step_model import Predicted

OUTLIER = 8.0
"""Multiple of the expected seconds above which a step's time is due to the host, whatever the K."""

KINDS = len(SWITCH_KINDS)
"""Number of kinds of switches: from K=0, to K=0, between others."""


@dataclass
class SwitchSums:
    """What first steps after a switch take longer than the model says of their K, by kind; and how well it fits."""

    replicates: int = REPLICATES
    """Number of bootstrap replicates."""
    sums: FloatArray = field(init=False)
    """Weighted number of switches and their extra seconds, shape (1 + replicates, KINDS, 2)."""
    outliers: int = 0
    """Steps whose time was left out."""
    rates: FloatArray = field(default_factory=lambda: np.zeros(3))
    """Number of settled steps, and sum and sum of squares of their tokens per second over the model's."""

    def __post_init__(self) -> None:
        self.sums = np.zeros((1 + self.replicates, KINDS, 2))

    def add(self, steps: LoggedSteps, predicted: Predicted, arms: IntArray, blocks: Blocks) -> BoolArray:
        """Add a chunk of steps; return which of their times are outliers, shape (steps,)."""
        everywhere = np.arange(len(steps))
        own = predicted.seconds[everywhere, steps.arm]
        outlier: BoolArray = np.logical_and(steps.timed, steps.seconds > OUTLIER * own)
        self.outliers += int(outlier.sum())
        first = np.flatnonzero(steps.timed & ~outlier & (steps.previous_arm >= 0) & (steps.previous_arm != steps.arm))
        kind = switch_kinds(arms, steps.previous_arm[first], steps.arm[first])
        extra = steps.seconds[first] - own[first]
        for index in range(KINDS):
            of_kind = kind == index
            weights = blocks.weights[blocks.index[first[of_kind]]]
            self.sums[:, index, 0] += weights.sum(axis=0)
            self.sums[:, index, 1] += extra[of_kind] @ weights
        fine = np.flatnonzero(steps.settled & ~outlier & steps.informative & (steps.live > 0))
        expected = steps.live[fine] * predicted.lengths[fine, arms[steps.arm[fine]]] / own[fine]
        rate = steps.tokens[fine, arms[steps.arm[fine]]] / steps.seconds[fine] / expected
        self.rates += len(rate), rate.sum(), (rate**2).sum()
        return outlier

    def seconds(self) -> FloatArray:
        """Return mean extra seconds by kind, shape (1 + replicates, KINDS).

        A kind that was never seen costs what the others do.
        """
        total = self.sums.sum(axis=1)
        overall = total[:, 1] / np.maximum(total[:, 0], 1.0)
        means = np.where(
            self.sums[:, :, 0] > 0.0, self.sums[:, :, 1] / np.maximum(self.sums[:, :, 0], 1.0), overall[:, None]
        )
        return np.asarray(np.where(total[:, :1] > 0.0, means, 0.0), np.float64)

    @property
    def spread(self) -> float:
        """Relative standard deviation of a single step's tokens per second about the model."""
        count, total, square = self.rates.tolist()
        if count < 2:
            return 1.0
        mean = total / count
        return float(math.sqrt(max(square / count - mean**2, 0.0)) / mean)


def switch_kinds(arms: IntArray, before: IntArray, after: IntArray) -> IntArray:
    """Return the kind of each switch between two arms, as an index of SWITCH_KINDS; all of shape (switches,).

    ``arms``: the candidate K, shape (arms,).
    """
    return np.where(arms[before] == 0, 0, np.where(arms[after] == 0, 1, 2))
