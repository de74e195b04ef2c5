"""A cell of the cost model: the step seconds of one K at one captured batch size, as a robust line.

exp(level) * (1 + slope * (context - mean context)), followed record by record. The memory is the
cell's own: it ages by its own records only, so that what is not run stays as it was. Levels are
logs, bounds are relative. Movement that other cells take part in is told by ``moved``; who shares
it out is ``policies.cost.CostModel``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

FIRST = 3
"""Records a cell starts from, by their median: one gross outlier among them does no harm."""
MEMORY = 128.0
"""Records a cell remembers: 3 % of noise leaves 0.2 %; at 100 steps/s a drift shows in a second."""
FIRST_SPREAD, SPREAD_FLOOR, SPREAD_CEILING = 0.1, 0.01, 0.5
"""Relative noise of one record: assumed at first (for four records), and the bounds of its estimate."""
CLIP = 4.0
"""A record counts as at most this many spreads off, so it moves a level by at most CLIP * spread / n."""
RUN = 8
"""Records in a row beyond CLIP on one side that are a new level, not outliers."""
FAST, ALARM = 16.0, 5.0
"""A mean over the last FAST records off by ALARM standard errors cuts the memory to FAST: a small shift."""
SETTLED = 16.0
"""Records after which movement is drift, not a cell finding its level."""
DRIFT_ERROR = 0.5
"""Error of an untouched cell per unit of common movement since its last record: twice (1 - COMMON) / COMMON."""
SLOPE_ERROR = 0.3
"""Relative error of the backbone's context slope in a cell that shows none of its own."""
CURVE_ERROR = 0.15
"""Error per unit of log seconds that a line is followed away from its mean context."""


@dataclass(slots=True)
class Cell:
    """exp(level) * (1 + slope * (context - mean_context)) seconds over the common level."""

    n: float = 0.0
    level: float = 0.0
    mean_context: float = 0.0
    context_square: float = 0.0
    """Sum over the remembered records of (context - mean)^2."""
    context_time: float = 0.0
    """The same of (context - mean) * relative time."""
    slope: float = 0.0
    prior_slope: float = 0.0
    """The backbone's, which counts as ``prior_weight`` of ``context_square``."""
    prior_weight: float = math.inf
    variance: float = FIRST_SPREAD**2
    spread: float = FIRST_SPREAD
    fast: float = 0.0
    run: list[float] = field(default_factory=list)
    moved: float = 0.0
    """How far the level went since it was settled, or since this was last shared."""
    seen: float = 0.0
    """The common level at the last record."""
    last: int = 0
    """``steps_learned`` at the last record, and at the newest record at which the level was known to hold."""
    held: int = 0
    since_carried: int = 0
    """Records since the common level moved without this cell."""

    def start(self, level: float, context: float) -> bool:
        """Take one of the first records; True once the cell has a line."""
        self.run.append(level)
        self.mean_context += (context - self.mean_context) / len(self.run)
        if len(self.run) < FIRST:
            return False
        self.level, self.n, self.run = median(self.run), float(FIRST), []
        return True

    def learn(self, log_seconds: float, context: float) -> bool:
        """Follow one record, ``log_seconds`` over the common level; True if that made it jump to a new one."""
        off = context - self.mean_context
        line = max(self.slope * off, -0.95)
        surprise = log_seconds - self.level - math.log1p(line)
        bound = CLIP * self.spread
        error = min(max(surprise, -bound), bound)
        if error != surprise:
            if self.run and (surprise > 0.0) != (self.run[-1] > self.level):
                self.run.clear()
            self.run.append(self.level + surprise)
            if len(self.run) >= max(FIRST, min(RUN, self.n)):
                self._jump()
                return True
        elif self.run:
            self.run.clear()
        if self.n >= SETTLED:
            self.moved += error / self.n
        self.n = n = min(self.n + 1.0, MEMORY)
        keep = 1.0 - 1.0 / n
        fade = keep if n == MEMORY else 1.0
        self.context_square = fade * self.context_square + keep * off * off
        # Moving the mean along the line changes the unit of relative time as well.
        shift = 1.0 + line / n
        self.context_time = (fade * self.context_time + keep * off * (line + error)) / shift
        self.mean_context += off / n
        self.level += math.log(shift) + error / n
        if len(self.run) < 2:  # a run is a level that moved until the opposite is shown, not noise
            self.variance += (error * error - self.variance) / (n + 1.0)
            self.spread = min(max(math.sqrt(self.variance), SPREAD_FLOOR), SPREAD_CEILING)
        self.fast += (error - self.fast) / FAST
        if abs(self.fast) > ALARM * self.spread / math.sqrt(2.0 * FAST - 1.0):
            self.n = min(n, FAST)
        self.set_slope()
        return False

    def _jump(self) -> None:
        level, n = median(self.run), float(len(self.run))
        if self.n >= SETTLED:
            self.moved += level - self.level
        keep = min(n / self.n, 1.0)
        self.context_square *= keep
        self.context_time *= keep
        # Twice what the run's median absolute deviation says: it is of few records.
        self.spread = min(max(3.0 * median([abs(each - level) for each in self.run]), SPREAD_FLOOR), SPREAD_CEILING)
        self.variance = self.spread**2
        self.level, self.n, self.run, self.fast = level, n, [], 0.0

    def set_slope(self) -> None:
        """Shrink the cell's own slope to the backbone's; never falling, nor negative at no context."""
        total = self.context_square + self.prior_weight
        slope = self.prior_slope
        if total < math.inf and total > 0.0:
            slope += (self.context_time - slope * self.context_square) / total
        self.slope = min(max(slope, 0.0), 0.95 / max(self.mean_context, 1.0))

    def at(self, context: float, common: float) -> tuple[float, float]:
        """Return log seconds over the common level, and their variance, at ``context`` tokens."""
        off = context - self.mean_context
        line = max(self.slope * off, -0.95)
        log_line = math.log1p(line)
        noise = self.spread * self.spread
        variance = noise / self.n + (CURVE_ERROR * log_line) ** 2 + (DRIFT_ERROR * (common - self.seen)) ** 2
        total = self.context_square + self.prior_weight
        if total > 0.0:
            variance += noise / total * (off / (1.0 + line)) ** 2
        return self.level + log_line, variance
