"""What a decode step costs: seconds by steps (K), batch size and context, learned from served steps.

    record ─► fit_to_learn ─► its cell's robust running line ─► (every 64 records) backbone fit
                                     │                                   │
                                     └────────► predict ◄────────────────┘

Two layers. A *cell* is one K at one size the server really runs: the captured CUDA-graph size
the batch is padded to, or a narrow band of batch sizes above the largest, where steps run
eagerly. It holds a line, log-level and slope over context tokens, followed robustly and with a
memory of its own: only its own records age it. The *backbone* is a smooth model of all cells,

    log seconds = s + log sum_j exp(theta_j) f_j(K, size, context) + h(K, size) . g,

positive terms for what a step is made of, and a small bend for what they miss. A tried cell is
predicted by its line, an untried one by the backbone with the error the fit gives it. All
bounds are relative and s is free, so nothing depends on how fast the hardware is.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hooks.wire import ForwardKind, Hello, StepRecord

Array = NDArray[np.float64]

# -- which records tell a step's own time --

OVERLAP_GAP = 0.02
"""Launch gap, as a share of the step, above which the host was seen to wait though it overlaps."""
HOST_GAP = 0.5
"""The same without overlap, where every step has a gap, which is part of what it costs."""

# -- a cell's line --

FIRST = 3
"""Records a cell starts from, by their median: one gross outlier among them does no harm."""
MEMORY = 128.0
"""Records a cell remembers: 3 % of noise leaves 0.2 %; at 100 steps/s a drift shows in a second."""
PRIOR_WEIGHT = 24.0
"""Records that a cell of a stored prior counts as, at most."""
FIRST_SPREAD, SPREAD_FLOOR, SPREAD_CEILING = 0.1, 0.01, 0.5
"""Relative noise of one record: assumed at first (for four records), and the bounds of its estimate."""
CLIP = 4.0
"""A record counts as at most this many spreads off, so it moves a level by at most CLIP * spread / n."""
RUN = 8
"""Records in a row beyond CLIP on one side that are a new level, not outliers."""
FAST, ALARM = 16.0, 5.0
"""A mean over the last FAST records off by ALARM standard errors cuts the memory to FAST: a small shift."""
COMMON = 0.8
"""Share of a settled cell's movement that all cells take part in: clocks slow every K alike."""
DRIFT = 0.05
"""Movement, at least one spread as well, from which on it is shared; less is noise or a slope still unsure."""
SETTLED = 16.0
"""Records after which movement is drift, not a cell finding its level."""
DRIFT_ERROR = 0.5
"""Error of an untouched cell per unit of common movement since its last record: twice (1 - COMMON) / COMMON."""
SLOPE_ERROR = 0.3
"""Relative error of the backbone's context slope in a cell that shows none of its own."""
CURVE_ERROR = 0.15
"""Error per unit of log seconds that a line is followed away from its mean context."""

# -- the backbone --

REFIT = 64
"""Records between fits, or as many as there are cells: a constant price per record."""
KNEE_TOKENS = 256.0
"""Tokens around which a step turns from memory-bound to compute-bound (peak FLOP / bandwidth: H200 206, A100 156)."""
TERM_WEIGHTS: Array = np.array([1.0, 0.05, 0.05, 2e-3, 4e-3, 0.3, 5e-6, 1e-6, 2e-7, 2e-5])
"""Prior medians of the terms of ``_design`` against the first: an 8B-shaped model on an H200."""
TERM_ERRORS: Array = np.array([1e-3, 1.5, 1.0, 1.0, 1.0, 1.5, 1.2, 1.5, 1.5, 2.0])
"""Their prior standard deviations on the log scale; the first is pinned, since s scales it."""
SIZE_NODES = 11
"""Nodes of the bend, one an octave of size from 1 to 1024; and STEPS_NODES at K = 0, 1, 3, 7, 15."""
STEPS_NODES = 5
BEND_ERRORS: Array = np.array([0.15] * SIZE_NODES + [0.08] * STEPS_NODES + [0.08] * SIZE_NODES)
MISFIT = 0.04
"""Relative deviation of one cell from the backbone, at first (for ten cells)."""
UNKNOWN_SECONDS, UNKNOWN_ERROR = 0.02, 3.0
"""Answered with nothing learned at all: a step's usual order of magnitude, give or take a factor of 20."""


def fingerprint(server: Hello) -> str:
    """Return the key of what step times depend on: hardware, models, algorithm, version, graphs."""
    facts = (
        *(server.gpu, server.model, server.draft_model, server.algorithm, server.topk),
        *(server.tp_size, server.sglang_version, sorted(server.captured_batch_sizes)),
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def fit_to_learn(step: StepRecord, previous: StepRecord | None) -> bool:
    """Is ``seconds`` what a step of this K costs in a row of such steps?

    Back to back with a decode of the same K, no idle time or visible host gap before it, no
    grammar. Judged from raw facts only, never from the time itself. Under heavy load, where
    prefills come between decodes, fewer than half of all steps are fit.
    """
    return _follows(step, previous) and previous is not None and step.draft_tokens == previous.draft_tokens


def _follows(step: StepRecord, previous: StepRecord | None) -> bool:
    return (
        previous is not None
        and step.record_seq == previous.record_seq + 1
        and step.forwards == 1
        and step.previous_kind == ForwardKind.DECODE
        and not step.after_idle
        and not step.grammar
        and step.seconds > 0.0
        and step.launch_gap_seconds <= (OVERLAP_GAP if step.overlap else HOST_GAP) * step.seconds
    )


@dataclass(slots=True)
class _Cell:
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


@dataclass
class _Extra:
    """Running robust mean of what first steps after a switch take longer, in seconds; four zeros at first."""

    n: float = 4.0
    mean: float = 0.0
    deviation: float = 0.0

    def learn(self, extra: float, usual: float) -> None:
        self.deviation = self.deviation or usual / 2.0
        bound = CLIP * max(self.deviation, SPREAD_FLOOR * usual)
        error = min(max(extra - self.mean, -bound), bound)
        self.n = min(self.n + 1.0, MEMORY)
        self.mean += error / self.n
        self.deviation += (abs(error) - self.deviation) / self.n


_TERMS = len(TERM_WEIGHTS)
_PARAMETERS = 1 + _TERMS + len(BEND_ERRORS)
_PRIOR_ERRORS: Array = np.concatenate(([1e6], TERM_ERRORS, BEND_ERRORS))


@dataclass
class _Backbone:
    """Posterior of (s, theta, g): mean, covariance, and the estimated variance of cells about it."""

    mean: Array = field(default_factory=lambda: np.zeros(_PARAMETERS))
    covariance: Array = field(default_factory=lambda: np.diag(_PRIOR_ERRORS**2))
    misfit: float = MISFIT**2


Design = tuple[Array, Array, Array]
"""For some cells: terms at no context, their rise per context token, and the bend's row."""


def _design(steps: int, size: float, eager: bool) -> Design:
    """Return what the backbone sees of one cell; ``context`` is the sum of sequence lengths.

    Terms: weights read once, speculating at all, draft forwards, requests, verified tokens
    past the knee, eager launches; then KV read by the target, by a verify, by drafts, and the
    longest single request, which bounds kernels that do not split it.
    """
    tokens = size * (steps + 1)
    speculates = float(steps > 0)
    fixed = np.array([1.0, speculates, steps, size, tokens**2 / (tokens + KNEE_TOKENS), float(eager), 0, 0, 0, 0])
    rise = np.array([0, 0, 0, 0, 0, 0, 1.0, speculates, steps, 1.0 / size])
    depth = math.log2(steps + 1)
    sizes = _hats(math.log2(size), SIZE_NODES)
    bend = np.concatenate((sizes, _hats(depth, STEPS_NODES), sizes * (depth - 1.0)))
    return fixed * TERM_WEIGHTS, rise * TERM_WEIGHTS, bend


def _hats(x: float, nodes: int) -> Array:
    """Return the weights of linear interpolation between nodes 0, 1, 2, ..."""
    hats: Array = np.maximum(1.0 - np.abs(min(max(x, 0.0), nodes - 1.0) - np.arange(nodes)), 0.0)
    return hats


def _linearise(design: Design, context: Any, mean: Array) -> tuple[Array, Array]:
    """Return the backbone's log seconds and its Jacobian, row by row."""
    fixed, rise, bend = design
    terms = (fixed + rise * context) * np.exp(mean[1 : 1 + _TERMS])
    total = terms.sum(axis=1)
    jacobian = np.empty((len(total), _PARAMETERS))
    jacobian[:, 0] = 1.0
    jacobian[:, 1 : 1 + _TERMS] = terms / total[:, None]
    jacobian[:, 1 + _TERMS :] = bend
    return mean[0] + np.log(total) + bend @ mean[1 + _TERMS :], jacobian


class CostModel:
    """Decode step seconds of one server, learned online.

    >>> from tests.messages import hello, record
    >>> model = CostModel(hello())
    >>> model.predict(3, 2, 100.0)
    (0.02, 3.0)
    >>> for seq in range(1, 41):
    ...     used = model.learn(record(record_seq=seq, seconds=0.010))
    >>> model.steps_learned, [round(x, 4) for x in model.predict(3, 2, 100.0)]
    (39, [0.01, 0.0051])
    >>> [round(x, 3) for x in model.predict(1, 2, 100.0)]
    [0.009, 0.179]
    """

    def __init__(self, hello: Hello, prior: dict[str, Any] | None = None) -> None:
        """``prior``: what ``to_prior`` of an earlier model of the same fingerprint returned, or nothing."""
        self.steps_learned = 0
        """Records that went into a cell."""
        self.note = ""
        """What became of the prior; for an operator."""
        self._fingerprint = fingerprint(hello)
        self._chain = hello.topk == 1
        self._captured = sorted(hello.captured_batch_sizes)
        self._candidates = tuple(sorted(hello.candidate_steps))
        self._sizes: dict[int, float] = {}
        self._designs: dict[tuple[float, tuple[int, ...]], Design] = {}
        self._cells: dict[tuple[int, float], _Cell] = {}
        self._fitted: list[tuple[int, float]] = []
        self._stacked: Design = _stack([])
        self._backbone = _Backbone()
        self._common = 0.0
        self._since_fit = 0
        self._shared_at = 0
        self._previous: StepRecord | None = None
        self._extras = {kind: _Extra() for kind in ("up", "down", "other")}
        self._usual = 0.0
        if prior is not None:
            self._take_prior(prior)

    def learn(self, step: StepRecord) -> bool:
        """Take one record in, in order, as it was applied; True if its time was used."""
        previous, self._previous = self._previous, step
        if previous is None or not _follows(step, previous):
            return False
        steps = self._steps_of(step)
        key = (steps, self._size(step.batch_size))
        cell = self._cells.get(key)
        if step.draft_tokens != previous.draft_tokens:
            if cell is None or not cell.n:
                return False
            usual = math.exp(cell.at(step.context_tokens, self._common)[0] + self._common)
            self._extras[_kind(self._steps_of(previous), steps)].learn(step.seconds - usual, usual)
            return True
        if cell is None:
            cell = self._cells[key] = _Cell()
        self.steps_learned += 1
        self._usual = step.seconds
        self._since_fit += 1
        log_seconds = math.log(step.seconds) - self._common
        if not cell.n:
            if cell.start(log_seconds, step.context_tokens):
                cell.seen, cell.last = self._common, self.steps_learned
                self._fitted.append(key)
                self._refit()
            return True
        if cell.seen != self._common:
            cell.held, cell.since_carried = self._shared_at, 0
        jumped = cell.learn(log_seconds, step.context_tokens)
        cell.since_carried += 1
        cell.last = self.steps_learned
        if abs(cell.moved) > max(DRIFT, cell.spread):
            self._share(cell)
        elif cell.since_carried >= SETTLED and abs(cell.moved) < DRIFT / 2.0:
            cell.held = cell.last
        cell.seen = self._common
        if jumped or self._since_fit >= max(REFIT, len(self._fitted)):
            self._refit()
        return True

    def _share(self, cell: _Cell) -> None:
        """Move the common level, but not the cells that were seen since ``cell`` last held: they know better."""
        carried = COMMON * cell.moved
        self._common += carried
        for other in self._cells.values():
            if other is cell or other.last >= cell.held > 0:
                other.level -= carried
                other.seen += carried
        cell.moved = 0.0
        cell.held = self._shared_at = self.steps_learned

    def predict(self, steps: int, batch_size: int, mean_context: float) -> tuple[float, float]:
        """Return seconds and their relative standard error; ``mean_context`` in tokens per request."""
        seconds, error = self._predict((steps,), batch_size, mean_context)
        return float(seconds[0]), float(error[0])

    def predict_all(self, batch_size: int, mean_context: float) -> tuple[Array, Array]:
        """Return seconds and relative standard errors of all candidate steps, ascending."""
        return self._predict(self._candidates, batch_size, mean_context)

    def switch_seconds(self, from_steps: int, to_steps: int) -> tuple[float, float]:
        """Return what the first step after this switch takes longer, and the standard error, in seconds."""
        if from_steps == to_steps:
            return 0.0, 0.0
        extra = self._extras[_kind(from_steps, to_steps)]
        deviation = extra.deviation or self._usual / 2.0 or UNKNOWN_SECONDS * UNKNOWN_ERROR
        # Mean absolute deviation of a Gaussian: sqrt(2/pi) standard deviations.
        return extra.mean, deviation * math.sqrt(math.pi / 2.0 / extra.n)

    def to_prior(self) -> dict[str, Any]:
        """Return what was learned, fit for JSON."""
        rows = []
        for key in self._fitted:
            cell = self._cells[key]
            squares = (cell.context_square / cell.n, cell.context_time / cell.n)
            rows.append([*key, cell.n, cell.level + self._common, cell.mean_context, *squares, cell.variance])
        extras = {kind: [extra.n, extra.mean, extra.deviation] for kind, extra in self._extras.items()}
        return {"version": 1, "fingerprint": self._fingerprint, "cells": rows, "switches": extras}

    def _take_prior(self, prior: dict[str, Any]) -> None:
        if (prior.get("version"), prior.get("fingerprint")) != (1, self._fingerprint):
            self.note = f"cost prior ignored: it is of server {prior.get('fingerprint')}, this is {self._fingerprint}"
            return
        for steps, size, n, level, mean_context, square, time, variance in prior["cells"]:
            cell = self._cells[steps, size] = _Cell()
            cell.n, cell.level, cell.mean_context = min(n, PRIOR_WEIGHT), level, mean_context
            cell.context_square, cell.context_time = square * cell.n, time * cell.n
            cell.variance, cell.spread = variance, max(math.sqrt(variance), SPREAD_FLOOR)
            self._fitted.append((steps, size))
        for kind, (n, mean, deviation) in prior["switches"].items():
            self._extras[kind] = _Extra(min(n, PRIOR_WEIGHT), mean, deviation)
        if self._fitted:
            self._refit()
        self.note = f"cost prior of {len(self._fitted)} cells"

    def _steps_of(self, step: StepRecord) -> int:
        return step.draft_tokens - 1 if self._chain else step.steps

    def _size(self, batch_size: int) -> float:
        """Return the captured size, or above the largest the middle of a sixteenth of an octave."""
        size = self._sizes.get(batch_size)
        if size is None:
            index = bisect_left(self._captured, batch_size)
            if index < len(self._captured):
                size = float(self._captured[index])
            else:
                largest = self._captured[-1] if self._captured else 1
                size = largest * 2.0 ** ((math.ceil(16.0 * math.log2(batch_size / largest)) - 0.5) / 16.0)
            self._sizes[batch_size] = size
        return size

    def _design(self, steps: int, size: float) -> Design:
        return _design(steps, size, not self._captured or size > self._captured[-1])

    def _predict(self, steps: tuple[int, ...], batch_size: int, mean_context: float) -> tuple[Array, Array]:
        if not self._fitted:
            return np.full(len(steps), UNKNOWN_SECONDS), np.full(len(steps), UNKNOWN_ERROR)
        size, context = self._size(batch_size), batch_size * mean_context
        design = self._designs.get((size, steps))
        if design is None:
            design = self._designs[size, steps] = _stack([self._design(k, size) for k in steps])
        means, jacobian = _linearise(design, context, self._backbone.mean)
        variances = (jacobian @ self._backbone.covariance * jacobian).sum(axis=1) + self._backbone.misfit
        for row, k in enumerate(steps):
            cell = self._cells.get((k, size))
            if cell is not None and cell.n:
                own, variance = cell.at(context, self._common)
                share = variances[row] / (variances[row] + variance)
                means[row] += share * (own - means[row])
                variances[row] = share * variance
        return np.exp(means + self._common), np.sqrt(variances)

    def _refit(self) -> None:
        """Fit the backbone to all cells: two Gauss-Newton steps from the last fit.

        Each cell is two points, one standard deviation of its contexts to either side of the
        mean: the same moments, hence the same evidence on level and slope, as all its records.
        """
        self._since_fit = 0
        if len(self._stacked[0]) != len(self._fitted):
            self._stacked = _stack([self._design(*key) for key in self._fitted])
        cells = [self._cells[key] for key in self._fitted]
        level, context, n, square, time, spread, seen = np.array(
            [(c.level, c.mean_context, c.n, c.context_square, c.context_time, c.spread, c.seen) for c in cells]
        ).T
        half = np.minimum(np.sqrt(square / n), context)
        lean = np.clip(half * time / np.maximum(square, 1e-9), -0.9, 0.9)
        contexts = np.concatenate((context - half, context + half))[:, None]
        levels = np.concatenate((level + np.log1p(-lean), level + np.log1p(lean)))
        noise = spread**2 / n + (DRIFT_ERROR * (self._common - seen)) ** 2
        weight = np.tile(0.5 / (self._backbone.misfit + noise), 2)[:, None]
        fixed, rise, bend = (np.concatenate((part, part)) for part in self._stacked)
        mean, precision = self._backbone.mean, _PRIOR_ERRORS**-2
        for _ in range(2):
            guess, jacobian = _linearise((fixed, rise, bend), contexts, mean)
            weighted = (jacobian * weight).T
            covariance = np.linalg.inv(weighted @ jacobian + np.diag(precision))
            target = covariance @ (weighted @ (levels - guess + jacobian @ mean))
            step = target - mean
            step[1 : 1 + _TERMS] = np.clip(step[1 : 1 + _TERMS], -1.0, 1.0)
            mean = mean + step
        off = ((levels - _linearise((fixed, rise, bend), contexts, mean)[0]) ** 2).sum() / 2.0
        free = max(len(cells) - _PARAMETERS + float(covariance.diagonal() @ precision), 0.0)
        self._backbone = _Backbone(mean, covariance, (10.0 * MISFIT**2 + off) / (10.0 + free))
        weights = np.exp(mean[1 : 1 + _TERMS])
        fixed, rise, _ = self._stacked
        slopes = (rise @ weights) / ((fixed + rise * context[:, None]) @ weights)
        for cell, slope in zip(cells, slopes.tolist(), strict=True):
            cell.prior_slope, cell.prior_weight = slope, (cell.spread / (SLOPE_ERROR * slope)) ** 2
            cell.set_slope()


def _kind(from_steps: int, to_steps: int) -> str:
    return "up" if from_steps == 0 else "down" if to_steps == 0 else "other"


def _stack(designs: list[Design]) -> Design:
    if not designs:
        return np.empty((0, _TERMS)), np.empty((0, _TERMS)), np.empty((0, len(BEND_ERRORS)))
    fixed, rise, bend = zip(*designs, strict=True)
    return np.array(fixed), np.array(rise), np.array(bend)
