"""What a change of K costs: the seconds that first steps after it take longer, by kind of switch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specpilot.policies.models.cost_cell import CLIP, MEMORY, SPREAD_FLOOR
from specpilot.policies.models.cost_prior import MOST_SECONDS, PRIOR_WEIGHT, StoredSwitch

SWITCH_KINDS = ("up", "down", "other")
"""Kinds that switches are priced by: from K=0, to K=0, between others."""


def switch_kind(from_steps: int, to_steps: int) -> str:
    """Return the kind of a switch, one of SWITCH_KINDS."""
    return "up" if from_steps == 0 else "down" if to_steps == 0 else "other"


@dataclass
class SwitchExtra:
    """Running robust mean of what first steps after one kind of switch take longer; four zeros at first."""

    n: float = 4.0
    """Switches that the mean counts as."""
    mean: float = 0.0
    """Seconds beyond those of a settled step."""
    deviation: float = 0.0
    """Mean absolute deviation in seconds; 0 before any switch."""

    def learn(self, extra: float, usual: float) -> None:
        """Add a switch whose first step took ``extra`` seconds more than the ``usual`` ones."""
        self.deviation = self.deviation or usual / 2.0
        bound = CLIP * max(self.deviation, SPREAD_FLOOR * usual)
        error = min(max(extra - self.mean, -bound), bound)
        self.n = min(self.n + 1.0, MEMORY)
        self.mean += error / self.n
        self.deviation += (abs(error) - self.deviation) / self.n

    def error(self, unknown: float) -> float:
        """Return the standard error of the mean in seconds, taking ``unknown`` for a deviation not seen yet."""
        # The mean absolute deviation of a Gaussian is sqrt(2/pi) standard deviations.
        return (self.deviation or unknown) * math.sqrt(math.pi / 2.0 / self.n)

    def stored(self) -> StoredSwitch:
        """Return what is kept for the next start."""
        mean = min(max(self.mean, -MOST_SECONDS), MOST_SECONDS)
        return StoredSwitch(self.n, mean, min(self.deviation, MOST_SECONDS))

    @classmethod
    def of(cls, stored: StoredSwitch) -> SwitchExtra:
        """Return the mean to begin with, from what was stored."""
        return cls(min(stored.n, PRIOR_WEIGHT), stored.mean, stored.deviation)
