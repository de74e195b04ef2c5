"""Step seconds from a trace's statistics: a robust line for each K at each size, and how well it predicts.

Seconds are a line over context (Huber 1964, by scikit-learn's ``HuberRegressor``), from the sample of a cell.
Held-out error: five folds of blocks of records, each predicted by the line through the other four.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import numpy as np
from numpy.typing import NDArray

from specpilot.controller.errors import ConfigError
from specpilot.controller.fit.by_k import KAndSize, StatisticsByK
from specpilot.controller.fit.statistics import Sample
from specpilot.controller.statistics import weighted_median
from specpilot.policies.models.cost import CostModel
from specpilot.policies.models.cost_cell import CLIP, FIRST, MEMORY, SPREAD_FLOOR
from specpilot.policies.models.cost_prior import (
    StoredCell,
    StoredCosts,
    StoredSwitch,
    StoredSwitches,
    fingerprint,
)
from specpilot.policies.models.cost_switches import switch_kind
from specpilot.policies.student import NORMAL_975
from specpilot.sglang_hooks.wire import Hello

Array = NDArray[np.float64]
RobustLine = Callable[[Array, Array], tuple[float, float]]
"""Fits a line to x and y of order 1, and returns intercept and slope."""

LINE_RECORDS = 32
"""Records of a cell from which on it has a line of its own; with fewer it has a median, and the controller's slope."""
LEAST_CONTEXT_SPREAD = 1e-3
"""Spread relative to the mean context below which context does not vary, and a slope means nothing."""
LEAST_SPREAD, LEAST_LINE = 1e-4, 0.05
"""Least relative noise, and least share of the seconds at the mean context, that a line may have."""
OUTLIER = 8.0
"""Robust standard deviations at which a record is cut off before the line is fitted: a stall may be 1,000 off."""
MOST_CELLS = 16384
"""Largest number of cells in a stored prior."""
UNSEEN_SWITCHES = 4.0
"""Switches that a kind of switch which never happened counts as: nothing, as in a new ``CostModel``."""


class CellQuality(msgspec.Struct, frozen=True):
    """A cell of the cost model, and how well its line predicts records that it was not fitted to."""

    steps: int
    size: float
    """Captured batch size, or the middle of a band above the largest."""
    records: int
    """Records of the cell whose seconds are a step's own."""
    sample: int
    """Records that the line was fitted to."""
    seconds: float
    """Seconds of a step at the mean context."""
    mean_context: float
    """Mean context of a step, in tokens of all requests."""
    slope_per_1000_tokens: float
    """Relative rise of the seconds per 1,000 tokens of context."""
    spread: float
    """Relative noise of one record's seconds."""
    held_out_error: float | None
    """Median of |predicted - true| / true seconds; None with too few records for folds."""
    held_out_bias: float | None
    """Median of (predicted - true) / true seconds; None with too few records for folds."""
    coverage: float | None
    """Share of the held-out records within the 95 % interval; None with too few records for folds."""
    prior_error: float | None
    """Mean of |predicted - true| / true seconds of a controller that starts from the prior of the other folds."""


class SwitchQuality(msgspec.Struct, frozen=True):
    """Extra time of the first step after a kind of switch."""

    kind: str
    """Kind of switch: ``up`` from K=0, ``down`` to K=0, ``other``."""
    switches: int
    """Switches of that kind in the trace."""
    seconds: float
    """Mean extra seconds of the first step after one."""
    deviation: float
    """Mean absolute deviation of those seconds."""


class CostLine(msgspec.Struct, frozen=True):
    """exp(level) * (1 + slope * (context - mean)) seconds, with relative noise ``spread``."""

    level: float
    """Logarithm of the seconds at the mean context."""
    slope: float
    """Relative rise of the seconds per token of context."""
    mean: float
    """Mean context, in tokens of all requests."""
    spread: float
    """Relative noise of one record's seconds."""
    variance: float
    """Variance of the contexts, in tokens squared."""
    n: int
    """Records that the line was fitted to."""

    def seconds(self, context: Array) -> Array:
        """Return the seconds at these contexts, in tokens of all requests."""
        predicted: Array = math.exp(self.level) * np.maximum(1.0 + self.slope * (context - self.mean), LEAST_LINE)
        return predicted


def robust_line() -> RobustLine:
    """Return Huber's regression; ConfigError without scikit-learn."""
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import HuberRegressor
    except ImportError as error:
        raise ConfigError(
            f"fitting needs scikit-learn: pip install '.[fit]' in Specpilot's checkout ({error})"
        ) from error

    def fitted(x: Array, y: Array) -> tuple[float, float]:
        """Return intercept and slope of a robust line; x and y are of order 1."""
        with warnings.catch_warnings():
            # The line is as good as it gets: a flat likelihood far from any outlier.
            warnings.simplefilter("ignore", ConvergenceWarning)
            try:
                line = HuberRegressor(alpha=0.0, max_iter=200).fit(x[:, None], y)
            except ValueError:
                return float(np.median(y)), 0.0
        return float(line.intercept_), float(line.coef_[0])

    return fitted


def one_thread() -> AbstractContextManager[object]:
    """Keep linear algebra to one thread: for two columns, more of them take twenty times as long on a busy machine."""
    from threadpoolctl import threadpool_limits  # of scikit-learn

    limits: AbstractContextManager[object] = threadpool_limits(1)
    return limits


def cost_lines(records: StatisticsByK, robust: RobustLine, without: int = -1) -> dict[KAndSize, CostLine]:
    """Return the line of each cell that has enough records outside the fold ``without``."""
    lines = {}
    for cell, sample in records.cells.items():
        rows = sample.rows[sample.rows["fold"] != without]
        if len(rows) >= FIRST:
            lines[cell] = cost_line(rows["seconds"], rows["context"].astype(np.float64), robust)
    return lines


def cost_line(seconds: Array, context: Array, robust: RobustLine) -> CostLine:
    """Return a line through ``seconds`` over ``context`` (tokens of all requests), both of shape (records,)."""
    logs = np.log(seconds)
    level, slope = float(np.median(logs)), 0.0
    mean, deviation = float(context.mean()), float(context.std())
    if len(seconds) >= LINE_RECORDS and deviation > LEAST_CONTEXT_SPREAD * max(mean, 1.0):
        relative = np.expm1(np.minimum(logs - level, 50.0))
        scale = max(_robust_deviation(relative), LEAST_SPREAD)
        intercept, rise = robust((context - mean) / deviation, np.clip(relative / scale, -OUTLIER, OUTLIER))
        at_mean = max(1.0 + intercept * scale, 0.05)
        level, slope = level + math.log(at_mean), rise * scale / at_mean / deviation
    else:
        deviation = 0.0
    errors = logs - level - np.log(np.maximum(1.0 + slope * (context - mean), LEAST_LINE))
    bound = CLIP * max(_robust_deviation(errors), LEAST_SPREAD)
    spread = max(math.sqrt(float(np.mean(np.clip(errors, -bound, bound) ** 2))), LEAST_SPREAD)
    return CostLine(level, slope, mean, spread, deviation**2, len(seconds))


def _robust_deviation(values: Array) -> float:
    """Return 1.4826 median absolute deviations: a Gaussian's standard deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def stored_costs(hello: Hello, lines: dict[KAndSize, CostLine], records: StatisticsByK) -> dict[str, object]:
    """Return the costs of a stored prior, fit for JSON."""
    most = sorted(lines, key=lambda cell: (-records.cells[cell].seen, cell))[:MOST_CELLS]
    cells = []
    for steps, size in sorted(most):
        line = lines[steps, size]
        # As many as a cell of the controller remembers; of a stored prior it counts fewer.
        n = min(float(records.cells[steps, size].seen), MEMORY)
        covariance = line.slope * line.variance
        cells.append(StoredCell(steps, size, n, line.level, line.mean, line.variance, covariance, line.spread**2, n))
    seen = {quality.kind: quality for quality in switch_qualities(lines, records)}
    switches = StoredSwitches(
        **{
            kind: StoredSwitch(min(float(switch.switches), MEMORY), switch.seconds, switch.deviation)
            if (switch := seen.get(kind))
            else StoredSwitch(UNSEEN_SWITCHES, 0.0, 0.0)
            for kind in StoredSwitches.__struct_fields__
        }
    )
    stored: dict[str, object] = msgspec.to_builtins(StoredCosts(2, fingerprint(hello), cells, switches))
    return stored


def switch_qualities(lines: dict[KAndSize, CostLine], records: StatisticsByK) -> list[SwitchQuality]:
    """Return what switching takes, of the kinds that were seen."""
    extras: dict[str, list[tuple[Array, Array, float]]] = {}
    counts: Counter[str] = Counter()
    for before, after, sample in records.switches:
        kind = switch_kind(before, after)
        for size in np.unique(sample.rows["size"]).tolist():
            line = lines.get((after, size))
            if line is not None:
                rows = sample.rows[sample.rows["size"] == size]
                usual = line.seconds(rows["context"].astype(np.float64))
                extras.setdefault(kind, []).append((rows["seconds"] - usual, usual, sample.seen / len(sample.rows)))
        counts[kind] += sample.seen
    qualities = []
    for kind, parts in sorted(extras.items()):
        extra, usual = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        weight = np.concatenate([np.full(len(part[0]), part[2]) for part in parts])
        middle = weighted_median(extra, weight)
        deviation = max(weighted_median(np.abs(extra - middle), weight), SPREAD_FLOOR * float(np.median(usual)))
        error = np.clip(extra - middle, -CLIP * deviation, CLIP * deviation)
        mean = middle + float(np.average(error, weights=weight))
        off = np.clip(np.abs(extra - mean), 0.0, CLIP * deviation)
        qualities.append(SwitchQuality(kind, counts[kind], mean, float(np.average(off, weights=weight))))
    return qualities


def cell_quality(
    cell: KAndSize, line: CostLine, sample: Sample, folds: list[dict[KAndSize, CostLine]], starts: list[CostModel]
) -> CellQuality:
    """Return a cell's line and how well the lines, and the priors, of the other folds predict each fold."""
    errors, inside, of_start = [], [], []
    for fold, (of_fold, start) in enumerate(zip(folds, starts, strict=True)):
        held, other = sample.rows[sample.rows["fold"] == fold], of_fold.get(cell)
        if len(held) < FIRST or other is None:
            continue
        context = held["context"].astype(np.float64)
        predicted = other.seconds(context)
        errors.append(predicted / held["seconds"] - 1.0)
        margin = NORMAL_975 * other.spread * math.sqrt(1.0 + 1.0 / other.n)
        inside.append(np.abs(np.log(held["seconds"] / predicted)) <= margin)
        steps, batch = cell[0], max(round(cell[1]), 1)
        middle = float(np.median(context))
        truth = float(np.median(held["seconds"] / predicted) * other.seconds(np.array([middle]))[0])
        of_start.append(abs(start.predict(steps, batch, middle / batch)[0] / truth - 1.0))
    error = np.concatenate(errors) if errors else None
    return CellQuality(
        steps=cell[0],
        size=cell[1],
        records=sample.seen,
        sample=len(sample.rows),
        seconds=math.exp(line.level),
        mean_context=line.mean,
        slope_per_1000_tokens=1000.0 * line.slope,
        spread=line.spread,
        held_out_error=None if error is None else float(np.median(np.abs(error))),
        held_out_bias=None if error is None else float(np.median(error)),
        coverage=None if error is None else float(np.concatenate(inside).mean()),
        prior_error=None if error is None else float(np.mean(of_start)),
    )
