"""From the statistics of a trace to a stored prior, and how well it holds for what it was not fitted to.

Cost, for each K at each size: seconds as a robust line over context (Huber 1964, by scikit-learn's
``HuberRegressor``), from the cell's sample. Held-out error: five folds of blocks of records, each
predicted by the line through the other four. The same for acceptance: tokens per step of a fold,
against what the trials of the other four promise.

The prior is what ``Goodput(prior=...)`` reads: the cells' lines in ``specpilot.policies.models.cost_prior.StoredCosts``
and the pool's trials of ``specpilot.policies.models.acceptance``. A controller lets it count for a few dozen steps.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from specpilot.controller.errors import ConfigError
from specpilot.controller.fit.statistics import FOLDS, SAMPLE, Part, Sample, kind_steps
from specpilot.policies.models.acceptance import BANDS, AcceptanceModel
from specpilot.policies.models.acceptance_evidence import CHAIN_DECAY, FIRST_MEAN
from specpilot.policies.models.cost import CostModel
from specpilot.policies.models.cost_cell import CLIP, FIRST, MEMORY, SPREAD_FLOOR
from specpilot.policies.models.cost_prior import (
    StoredCell,
    StoredCosts,
    StoredSwitch,
    StoredSwitches,
    fingerprint,
    read_prior,
)
from specpilot.policies.models.cost_switches import switch_kind
from specpilot.sglang_hooks.wire import Hello

Array = NDArray[np.float64]
Cell = tuple[int, float]
"""K and size."""
Tables = dict[tuple[int, int, int], NDArray[np.int64]]
"""By K, band and fold: requests that accepted so many drafts, shape (K + 1, 2); [:, 1] ended there."""

LINE_RECORDS = 32
"""Records of a cell from which on it has a line of its own; with fewer it has a median, and the controller's slope."""
LEAST_CONTEXT_SPREAD = 1e-3
"""Relative to the mean context: below it, context does not vary and a slope means nothing."""
LEAST_SPREAD, LEAST_LINE = 1e-4, 0.05
"""Relative noise, and share of the seconds at the mean context, below which nothing is taken to be."""
OUTLIER = 8.0
"""Robust standard deviations at which a record is cut off before the line is fitted: a stall may be 1,000 off."""
MOST_CELLS = 16384
"""Of a stored prior."""
MOST_SAMPLES = 16.0
"""What acceptance counts as at most, at a position: half of what a controller gives its own, which is a minute old."""
LEAST_BLOCKS, BLOCK_TRIALS = 8, 32
"""Blocks with so many trials at a position, from which on they tell how acceptance varies."""
DESIGN_EFFECT = 2.0
"""Of a request's trials, which are alike: as ``specpilot.policies.models.acceptance`` allows for."""
UNSEEN_SWITCHES = 4.0
"""What a kind of switch counts as that never happened: nothing, as in a new ``CostModel``."""
NORMAL_95 = 1.96


class CellQuality(msgspec.Struct, frozen=True):
    """A cell of the cost model, and how well its line predicts records that it was not fitted to."""

    steps: int
    size: float
    """Captured batch size, or the middle of a band above the largest."""
    records: int
    sample: int
    """Records that the line was fitted to."""
    seconds: float
    """At the mean context."""
    mean_context: float
    """Tokens of all requests."""
    slope_per_1000_tokens: float
    """Relative rise of the seconds."""
    spread: float
    """Relative noise of one record."""
    held_out_error: float | None
    """Median of |predicted - true| / true; None with too few records for folds."""
    held_out_bias: float | None
    """Median of (predicted - true) / true."""
    coverage: float | None
    """Share of the held-out records within the 95 % interval."""
    prior_error: float | None
    """|predicted - true| / true, on average, of a controller that starts from the prior of the other folds."""


class BandQuality(msgspec.Struct, frozen=True):
    """Acceptance in a band of batch size and context, and how well it is predicted."""

    batch_sizes: str
    mean_contexts: str
    """Tokens per request."""
    requests: int
    """Rows with drafts, each step counted."""
    hazards: list[float]
    """P(draft j accepted | those before it were), by position; as far as there were trials."""
    tokens_per_step: float
    """Per request, over the K as they ran, truncated rows left out."""
    held_out_error: float | None
    """|predicted - true| / true tokens per step of the folds, on average; the band's own hazards predict."""
    pooled_error: float | None
    """The same, predicted by the pool: what a controller starts from."""


class SwitchQuality(msgspec.Struct, frozen=True):
    """What the first step after a kind of switch takes longer."""

    kind: str
    """``up``: from K=0, ``down``: to K=0, ``other``."""
    switches: int
    seconds: float
    deviation: float


class Fitted(msgspec.Struct, frozen=True):
    """A prior, and its quality."""

    prior: dict[str, Any]
    cells: list[CellQuality]
    switches: list[SwitchQuality]
    bands: list[BandQuality]


class Line(msgspec.Struct, frozen=True):
    """exp(level) * (1 + slope * (context - mean)) seconds, with relative noise ``spread``."""

    level: float
    slope: float
    mean: float
    spread: float
    variance: float
    """Of the contexts."""
    n: int

    def seconds(self, context: Array) -> Array:
        """Return the seconds at these contexts, in tokens of all requests."""
        predicted: Array = math.exp(self.level) * np.maximum(1.0 + self.slope * (context - self.mean), LEAST_LINE)
        return predicted


class _Records:
    """The records of a trace by K and size, and those after a switch, with K told from the kind of step."""

    def __init__(self, part: Part) -> None:
        self.steps = kind_steps(part.kinds, part.tree)
        self.cells: dict[Cell, Sample] = {}
        for (kind, size), sample in part.cells.items():
            steps = self.steps[kind]
            if steps is not None:
                self.cells.setdefault((steps, size), Sample(SAMPLE)).add(sample.rows, sample.seen)
        self.switches = [
            (before, after, sample)
            for (old, new), sample in sorted(part.switches.items(), key=lambda item: item[0])
            if (before := self.steps[old]) is not None and (after := self.steps[new]) is not None and before != after
        ]
        self.tables: Tables = {}
        for (kind, band, fold), counted in part.accepted.items():
            steps = self.steps[kind]
            if steps:
                key = steps, band, fold
                # Of a tree, K is the depth of the path that can be accepted; the width is more.
                counted = counted[: steps + 1]
                self.tables[key] = self.tables[key] + counted if key in self.tables else counted
        self.blocks: list[Tables] = []
        for _, by_kind in sorted(part.blocks.items()):
            # Kinds of one K, if there are several, are apart in the key's place for the band.
            told = {
                (steps, kind, 0): counts[: steps + 1] for kind, counts in by_kind.items() if (steps := self.steps[kind])
            }
            if told:
                self.blocks.append(told)


def fit(part: Part, hello: Hello) -> Fitted:
    """Return the prior for servers of ``hello``'s fingerprint, and its quality.

    Raises ConfigError where no step time can be learned, or scikit-learn is missing.
    """
    huber = _huber()
    records = _Records(part)
    with _one_thread():
        lines = _lines(records, huber)
        folds = [_lines(records, huber, without=fold) for fold in range(FOLDS)]
    if not lines:
        why = "; ".join(f"{count:,}: {reason}" for reason, count in part.reasons.most_common() if count)
        raise ConfigError(
            f"no step time can be learned from these traces: {part.used:,} records tell a step's own time, and at "
            f"least {FIRST} of one K and batch size are needed. Of the others: {why or 'there are none'}"
        )
    starts = [CostModel(hello, _costs(hello, of_fold, records)) for of_fold in folds]
    depth = max(1, *hello.candidate_steps, *(steps for steps, _, _ in records.tables))
    acceptance = _stored_acceptance(records, depth)
    prior = {"cost": _costs(hello, lines, records), "acceptance": acceptance}
    _check(prior, hello)
    return Fitted(
        prior,
        [_cell_quality(cell, lines[cell], records.cells[cell], folds, starts) for cell in sorted(lines)],
        _switches(lines, records),
        _bands(records.tables, depth),
    )


def _check(prior: dict[str, Any], hello: Hello) -> None:
    stored, wrong = read_prior(prior["cost"], hello)
    if stored is None:
        raise ConfigError(f"the fit gives no prior that a controller takes: {wrong}. Please report this")
    AcceptanceModel.from_prior(prior["acceptance"])


# -- cost --


def _huber() -> Callable[[Array, Array], tuple[float, float]]:
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import HuberRegressor
    except ImportError as error:
        raise ConfigError(f"fitting needs scikit-learn: pip install 'specpilot[fit]' ({error})") from error

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


def _one_thread() -> AbstractContextManager[object]:
    """Keep linear algebra to one thread: for two columns, more of them take twenty times as long on a busy machine."""
    from threadpoolctl import threadpool_limits  # of scikit-learn

    limits: AbstractContextManager[object] = threadpool_limits(1)
    return limits


def _lines(
    records: _Records, huber: Callable[[Array, Array], tuple[float, float]], without: int = -1
) -> dict[Cell, Line]:
    lines = {}
    for cell, sample in records.cells.items():
        rows = sample.rows[sample.rows["fold"] != without]
        if len(rows) >= FIRST:
            lines[cell] = _line(rows["seconds"], rows["context"].astype(np.float64), huber)
    return lines


def _line(seconds: Array, context: Array, huber: Callable[[Array, Array], tuple[float, float]]) -> Line:
    logs = np.log(seconds)
    level, slope = float(np.median(logs)), 0.0
    mean, deviation = float(context.mean()), float(context.std())
    if len(seconds) >= LINE_RECORDS and deviation > LEAST_CONTEXT_SPREAD * max(mean, 1.0):
        relative = np.expm1(np.minimum(logs - level, 50.0))
        scale = max(_robust_deviation(relative), LEAST_SPREAD)
        intercept, rise = huber((context - mean) / deviation, np.clip(relative / scale, -OUTLIER, OUTLIER))
        at_mean = max(1.0 + intercept * scale, 0.05)
        level, slope = level + math.log(at_mean), rise * scale / at_mean / deviation
    else:
        deviation = 0.0
    errors = logs - level - np.log(np.maximum(1.0 + slope * (context - mean), LEAST_LINE))
    bound = CLIP * max(_robust_deviation(errors), LEAST_SPREAD)
    spread = max(math.sqrt(float(np.mean(np.clip(errors, -bound, bound) ** 2))), LEAST_SPREAD)
    return Line(level, slope, mean, spread, deviation**2, len(seconds))


def _robust_deviation(values: Array) -> float:
    """Return 1.4826 median absolute deviations: a Gaussian's standard deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _costs(hello: Hello, lines: dict[Cell, Line], records: _Records) -> dict[str, object]:
    """Return the costs of a stored prior, fit for JSON."""
    most = sorted(lines, key=lambda cell: (-records.cells[cell].seen, cell))[:MOST_CELLS]
    cells = []
    for steps, size in sorted(most):
        line = lines[steps, size]
        # As many as a cell of the controller remembers; of a stored prior it counts fewer.
        n = min(float(records.cells[steps, size].seen), MEMORY)
        covariance = line.slope * line.variance
        cells.append(StoredCell(steps, size, n, line.level, line.mean, line.variance, covariance, line.spread**2, n))
    found = {quality.kind: quality for quality in _switches(lines, records)}
    switches = StoredSwitches(
        **{
            kind: StoredSwitch(min(float(one.switches), MEMORY), one.seconds, one.deviation)
            if (one := found.get(kind))
            else StoredSwitch(UNSEEN_SWITCHES, 0.0, 0.0)
            for kind in StoredSwitches.__struct_fields__
        }
    )
    stored: dict[str, object] = msgspec.to_builtins(StoredCosts(2, fingerprint(hello), cells, switches))
    return stored


def _switches(lines: dict[Cell, Line], records: _Records) -> list[SwitchQuality]:
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
    found = []
    for kind, parts in sorted(extras.items()):
        extra, usual = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        weight = np.concatenate([np.full(len(part[0]), part[2]) for part in parts])
        middle = _weighted_median(extra, weight)
        deviation = max(_weighted_median(np.abs(extra - middle), weight), SPREAD_FLOOR * float(np.median(usual)))
        error = np.clip(extra - middle, -CLIP * deviation, CLIP * deviation)
        mean = middle + float(np.average(error, weights=weight))
        off = np.clip(np.abs(extra - mean), 0.0, CLIP * deviation)
        found.append(SwitchQuality(kind, counts[kind], mean, float(np.average(off, weights=weight))))
    return found


def _weighted_median(values: Array, weight: Array) -> float:
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2.0)])


def _cell_quality(
    cell: Cell, line: Line, sample: Sample, folds: list[dict[Cell, Line]], starts: list[CostModel]
) -> CellQuality:
    errors, inside, of_start = [], [], []
    for fold, (of_fold, start) in enumerate(zip(folds, starts, strict=True)):
        held, other = sample.rows[sample.rows["fold"] == fold], of_fold.get(cell)
        if len(held) < FIRST or other is None:
            continue
        context = held["context"].astype(np.float64)
        predicted = other.seconds(context)
        errors.append(predicted / held["seconds"] - 1.0)
        margin = NORMAL_95 * other.spread * math.sqrt(1.0 + 1.0 / other.n)
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


# -- acceptance --


def _stored_acceptance(records: _Records, depth: int) -> dict[str, list[float]]:
    """Return trials and accepted drafts of a stored prior: as counted, for as many samples as they are worth.

    Where acceptance moves, its mean over a trace says less of any one moment than its trials would
    have it. As a prior of a moment they are worth the s of the Beta(s p, s (1 - p)) from which the
    blocks' acceptances seem drawn: p (1 - p) / variance - 1.
    """
    trials, passed = _trials(records.tables, depth)
    counts = [_trials(block, depth) for block in records.blocks]
    of_blocks = np.array(counts, np.float64) if counts else np.empty((0, 2, depth))
    worth = MOST_SAMPLES
    stored: dict[str, list[float]] = {"trials": [], "passed": []}
    for position, (count, good) in enumerate(zip(trials.tolist(), passed.tolist(), strict=True)):
        worth = min(_samples_worth(of_blocks[:, 0, position], of_blocks[:, 1, position], worth), MOST_SAMPLES)
        samples = min(float(count), worth)
        stored["trials"].append(samples)
        stored["passed"].append(samples * good / count if count else 0.0)
    return stored


def _samples_worth(trials: Array, passed: Array, otherwise: float) -> float:
    """Return s by the method of moments (DerSimonian & Laird 1986); ``otherwise`` where too few blocks have trials.

    >>> n, rng = np.full(400, 500.0), np.random.default_rng(0)
    >>> round(_samples_worth(n, rng.binomial(500, rng.beta(6.0, 4.0, 400)).astype(float), 32.0))
    11
    >>> _samples_worth(n, rng.binomial(500, 0.6, 400).astype(float), 32.0)
    inf
    """
    some = trials >= BLOCK_TRIALS
    n, x = trials[some], passed[some]
    if len(n) < LEAST_BLOCKS:
        return otherwise
    mean = float(x.sum() / n.sum())
    noise = mean * (1.0 - mean)
    spread = float((n * (x / n - mean) ** 2).sum()) - DESIGN_EFFECT * (len(n) - 1) * noise
    variance = spread / float(n.sum() - (n**2).sum() / n.sum())
    return max(noise / variance - 1.0, 1.0) if variance > 0.0 else math.inf


def _trials(tables: Tables, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return trials and accepted drafts by position, shape (depth,): the sum of ``trials_of`` all records."""
    trials, passed = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    for (steps, _, _), counted in tables.items():
        last = min(steps, depth)
        reached = counted.sum(axis=1)[::-1].cumsum()[::-1]
        trials[:last] += reached[:last] - counted[:last, 1]
        passed[:last] += reached[1 : last + 1]
    return trials, passed


def _hazards(tables: Tables, depth: int) -> Array:
    """Return h_1..h_depth as counted; where there was no trial, as of the position before, a little lower."""
    hazards, before = [], FIRST_MEAN / CHAIN_DECAY
    for count, good in zip(*(counts.tolist() for counts in _trials(tables, depth)), strict=True):
        before = good / count if count else CHAIN_DECAY * before
        hazards.append(before)
    return np.array(hazards)


def _tokens(hazards: Array, tables: Tables) -> float:
    """Return tokens per request and step at these hazards, averaged over the K that ``tables`` ran."""
    lengths = np.concatenate(([1.0], 1.0 + np.cumprod(hazards).cumsum()))
    weights = Counter[int]()
    for (steps, _, _), counted in tables.items():
        weights[min(steps, len(hazards))] += int(counted.sum())
    return float(sum(weight * lengths[steps] for steps, weight in weights.items()) / sum(weights.values()))


def _bands(tables: Tables, depth: int) -> list[BandQuality]:
    columns = len(BANDS.context_edges) + 1
    found = []
    for band in sorted({band for _, band, _ in tables}):
        own = {key: counted for key, counted in tables.items() if key[1] == band}
        errors, pooled = [], []
        for fold in range(FOLDS):
            held = {key: counted for key, counted in own.items() if key[2] == fold}
            rest = {key: counted for key, counted in own.items() if key[2] != fold}
            others = {key: counted for key, counted in tables.items() if key[2] != fold}
            if held and rest:
                truth = _tokens(_hazards(held, depth), held)
                errors.append(abs(_tokens(_hazards(rest, depth), held) / truth - 1.0))
                pooled.append(abs(_tokens(_hazards(others, depth), held) / truth - 1.0))
        trials = _trials(own, depth)[0]
        hazards = _hazards(own, depth)
        found.append(
            BandQuality(
                batch_sizes=_span(BANDS.batch_edges, band // columns),
                mean_contexts=_span(BANDS.context_edges, band % columns),
                requests=sum(int(counted.sum()) for counted in own.values()),
                hazards=hazards[: int((trials > 0).sum())].tolist(),
                tokens_per_step=_tokens(hazards, own),
                held_out_error=float(np.mean(errors)) if errors else None,
                pooled_error=float(np.mean(pooled)) if errors else None,
            )
        )
    return found


def _span(edges: tuple[int, ...], region: int) -> str:
    """Return the values of a region.

    >>> _span((4, 32), 0), _span((4, 32), 1), _span((4, 32), 2)
    ('up to 4', '5 to 32', 'over 32')
    """
    if region == len(edges):
        return f"over {edges[-1]:,}"
    return f"up to {edges[0]:,}" if region == 0 else f"{edges[region - 1] + 1:,} to {edges[region]:,}"
