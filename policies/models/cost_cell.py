"""A cell of the cost model: the step seconds of one K at one captured batch size, as a robust line.

exp(level) * (1 + slope * (context - mean context)), followed record by record. The memory is the
cell's own: it ages by its own records only, so that what is not run stays as it was. Levels are
logs, bounds are relative, and a level is over the *common* one, which moves all cells alike and is
kept by ``specpilot.policies.models.cost_drift``.
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
RETURNED = 16.0
"""Records that a cell counts as, from which on its level is known again."""
SETTLED = 64
"""Records of a cell after which its movement is drift; before, its level is still being learned."""
SLOPE_ERROR = 0.6
"""Relative error of the backbone's context slope in a cell that shows none of its own."""
SLOPE_DOUBT = 0.1
"""Relative error at most that a record far from the mean context is allowed for the slope."""
CURVE_ERROR = 0.15
"""Error per unit of log seconds that a line is followed away from its mean context."""


@dataclass(slots=True)
class CostCell:
    """exp(level) * (1 + slope * (context - mean_context)) seconds over the common level."""

    n: float = 0.0
    """Records that the level counts as; 0 before the cell has a line."""
    level: float = 0.0
    """Log seconds over the common level, at the mean context."""
    mean_context: float = 0.0
    """Mean context of the remembered records, in tokens of all requests."""
    context_n: float = 0.0
    """Records that the two sums below are of: a level in doubt counts as fewer, what shows the slope does not."""
    context_square: float = 0.0
    """Sum over the remembered records of (context - mean)^2, in squared tokens."""
    context_time: float = 0.0
    """Sum over the remembered records of (context - mean) * relative time, in tokens."""
    slope: float = 0.0
    """Relative rise of seconds per context token."""
    prior_slope: float = 0.0
    """Slope of the backbone, which counts as ``prior_weight`` of ``context_square``."""
    prior_weight: float = math.inf
    """Squared tokens that ``prior_slope`` counts as; infinite before the first fit of the backbone."""
    variance: float = FIRST_SPREAD**2
    """Estimated variance of the relative noise of one record, without bounds."""
    spread: float = FIRST_SPREAD
    """Standard deviation of the relative noise of one record, within SPREAD_FLOOR and SPREAD_CEILING."""
    fast_error: float = 0.0
    """Mean error of the last FAST records or so, in log seconds."""
    run: list[float] = field(default_factory=list)
    """Levels that the newest records would have, while they are far off to one side or while ``uncertain``."""
    uncertain: bool = False
    """The level may have moved far, or is of a stored prior: the next FIRST records, in ``run``, decide about it."""
    records: int = 0
    """Records ever learned."""
    drifted: float = 0.0
    """How far the level has drifted since the last movement that was shared, in log seconds."""
    common_seen: float = 0.0
    """The common level at the cell's last record."""
    last_record: int = 0
    """Number, by the model's count, of the cell's last record; 0 before any."""
    known_record: int = 0
    """Number, by the model's count, of the last record at which the level was known to hold."""
    corrects: bool = False
    """The level is as of ``known_record`` or older, moved since only with the common level, or of a stored prior."""
    unshared: float = 0.0
    """Common movement that the level was not moved by, since the cell may have been seen after it, in log seconds."""
    jump_variance: float = 0.0
    """``CommonLevel.jump_variance`` at the cell's last record."""
    stored_level: float | None = None
    """Log seconds, common level included, in the stored prior; None once the cell's own records outweigh it."""

    def start(self, level: float, context: float) -> bool:
        """Add one of the first records; return True once the cell has a line."""
        self.run.append(level)
        self.mean_context += (context - self.mean_context) / len(self.run)
        if len(self.run) < FIRST:
            return False
        self.level, self.n, self.context_n, self.run = median(self.run), float(FIRST), float(FIRST), []
        return True

    def doubt(self, variance: float) -> None:
        """Let the level count as fewer records: it may have moved by ``variance``, in squared logs, while none came."""
        noises = variance / (self.spread * self.spread)
        self.n = 1.0 / (1.0 / self.n + noises)
        self.uncertain |= noises * FIRST > 1.0

    def learn(self, log_seconds: float, context: float) -> tuple[float, bool]:
        """Follow one record, ``log_seconds`` over the common level.

        Return how far the level moved, and whether it jumped or was set again: by a run of records far
        off to one side, or by the first records after it had become uncertain.
        """
        self.records += 1
        off = context - self.mean_context
        line = max(self.slope * off, -0.95)
        surprise = log_seconds - self.level - math.log1p(line)
        if self.uncertain:
            self.run.append(self.level + surprise)
            return (self._return(), True) if len(self.run) >= FIRST else (0.0, False)
        bound = CLIP * math.hypot(self.spread, self._slope_error(off / (1.0 + line)))
        error = min(max(surprise, -bound), bound)
        if error != surprise:
            if self.run and (surprise > 0.0) != (self.run[-1] > self.level):
                self.run.clear()
            self.run.append(self.level + surprise)
            if len(self.run) >= max(FIRST, min(RUN, self.n)):
                return self._jump(), True
        elif self.run:
            self.run.clear()
        self.n = n = min(self.n + 1.0, MEMORY)
        keep = 1.0 - 1.0 / n
        fade = 1.0 if self.context_n < MEMORY else 1.0 - 1.0 / MEMORY
        self.context_n = min(self.context_n + 1.0, MEMORY)
        self.context_square = fade * self.context_square + keep * off * off
        # Moving the mean along the line changes the unit of relative time as well.
        shift = 1.0 + line / n
        self.context_time = (fade * self.context_time + keep * off * (line + error)) / shift
        self.mean_context += off / n
        self.level += math.log(shift) + error / n
        if len(self.run) < 2:  # a run is a level that moved until the opposite is shown, not noise
            self.variance += (error * error - self.variance) / (n + 1.0)
            self.spread = min(max(math.sqrt(self.variance), SPREAD_FLOOR), SPREAD_CEILING)
        self.fast_error += (error - self.fast_error) / FAST
        if abs(self.fast_error) > ALARM * self.spread / math.sqrt(2.0 * FAST - 1.0):
            self.n = min(n, FAST)
        self.set_slope()
        return error / n, False

    def _slope_error(self, off: float) -> float:
        """Return how far the line may be off at so many tokens from its mean context: what is no outlier there."""
        total = self.context_square + self.prior_weight
        return min(self.spread * abs(off) / math.sqrt(total), SLOPE_DOUBT) if total > 0.0 else SLOPE_DOUBT

    def _return(self) -> float:
        """Weigh the level known against the median of some records, which counts as 2/pi of them; or jump there."""
        self.uncertain = False
        bound = CLIP * self.spread
        if min(self.run) > self.level + bound or max(self.run) < self.level - bound:
            return self._jump()
        fresh = 2.0 / math.pi * len(self.run)
        moved = (median(self.run) - self.level) * fresh / (fresh + self.n)
        self.level += moved
        self.n, self.run, self.fast_error = self.n + fresh, [], 0.0
        return moved

    def _jump(self) -> float:
        level, n = median(self.run), float(len(self.run))
        moved = level - self.level
        keep = min(n / self.n, 1.0)
        self.context_n *= keep
        self.context_square *= keep
        self.context_time *= keep
        # Twice what the run's median absolute deviation says: it is of few records.
        self.spread = min(max(3.0 * median([abs(each - level) for each in self.run]), SPREAD_FLOOR), SPREAD_CEILING)
        self.variance = self.spread**2
        self.level, self.n, self.run, self.fast_error = level, n, [], 0.0
        return moved

    def set_slope(self) -> None:
        """Shrink the cell's own slope to the backbone's; never falling, nor negative at no context."""
        total = self.context_square + self.prior_weight
        slope = self.prior_slope
        if total < math.inf and total > 0.0:
            slope += (self.context_time - slope * self.context_square) / total
        self.slope = min(max(slope, 0.0), 0.95 / max(self.mean_context, 1.0))

    def at(self, context: float, doubt: float) -> tuple[float, float]:
        """Return log seconds over the common level at ``context`` tokens, and their variance.

        ``doubt`` is the variance of what may have happened to the level since the last record.
        """
        off = context - self.mean_context
        line = max(self.slope * off, -0.95)
        log_line = math.log1p(line)
        noise = self.spread * self.spread
        variance = noise / self.n + (CURVE_ERROR * log_line) ** 2 + doubt
        total = self.context_square + self.prior_weight
        if total > 0.0:
            variance += noise / total * (off / (1.0 + line)) ** 2
        return self.level + log_line, variance
