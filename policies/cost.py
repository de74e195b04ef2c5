"""What a decode step costs: seconds by steps (K), batch size and context, learned from served steps.

    record ─► fit_to_learn ─► its cell's robust running line ─► (every 64 records) backbone fit
                                     │                                   │
                                     └────────► predict ◄────────────────┘

Two layers. A *cell* (``cost_cell``) is one K at one size the server really runs: the captured
CUDA-graph size the batch is padded to, or a narrow band of batch sizes above the largest, where
steps run eagerly. It holds a line, log-level and slope over context tokens, followed robustly and
with a memory of its own: only its own records age it. The *backbone* (``cost_backbone``) is a
smooth model of all cells. A tried cell is predicted by its line, an untried one by the backbone
with the error the fit gives it. All bounds are relative and the backbone's scale is free, so
nothing depends on how fast the hardware is.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.cost_backbone import Array, Backbone, Design, design_row, stack
from policies.cost_cell import CLIP, DRIFT_ERROR, MEMORY, SETTLED, SLOPE_ERROR, SPREAD_FLOOR, Cell
from sglang_hooks.wire import ForwardKind, Hello, StepRecord

# -- which records tell a step's own time --

OVERLAP_GAP = 0.02
"""Launch gap, as a share of the step, above which the host was seen to wait though it overlaps."""
HOST_GAP = 0.5
"""The same without overlap, where every step has a gap, which is part of what it costs."""

REFIT = 64
"""Records between fits, or as many as there are cells: a constant price per record."""
PRIOR_WEIGHT = 24.0
"""Records that a cell of a stored prior counts as, at most."""
COMMON = 0.8
"""Share of a settled cell's movement that all cells take part in: clocks slow every K alike."""
DRIFT = 0.05
"""Movement, at least one spread as well, from which on it is shared; less is noise or a slope still unsure."""
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
        self._cells: dict[tuple[int, float], Cell] = {}
        self._fitted: list[tuple[int, float]] = []
        self._stacked: Design = stack([])
        self._backbone = Backbone()
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
            cell = self._cells[key] = Cell()
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

    def _share(self, cell: Cell) -> None:
        """Move the common level, but not the cells that were seen since ``cell`` last held: they know better."""
        carried = COMMON * cell.moved
        self._common += carried
        for other in self._cells.values():
            if other is cell or other.last >= cell.held > 0:
                other.level -= carried
                other.seen += carried
        cell.moved = 0.0
        cell.held = self._shared_at = self.steps_learned

    @property
    def cells(self) -> int:
        """Number of cells that have a line; of a stored prior, as long as nothing was learned."""
        return len(self._fitted)

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
            cell = self._cells[steps, size] = Cell()
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
        return design_row(steps, size, not self._captured or size > self._captured[-1])

    def _predict(self, steps: tuple[int, ...], batch_size: int, mean_context: float) -> tuple[Array, Array]:
        if not self._fitted:
            return np.full(len(steps), UNKNOWN_SECONDS), np.full(len(steps), UNKNOWN_ERROR)
        size, context = self._size(batch_size), batch_size * mean_context
        design = self._designs.get((size, steps))
        if design is None:
            design = self._designs[size, steps] = stack([self._design(k, size) for k in steps])
        means, covariance = self._backbone.at(design, context)
        apart = np.full(len(steps), self._backbone.misfit)
        for row, k in enumerate(steps):
            cell = self._cells.get((k, size))
            if cell is not None and cell.n:
                own, variance = cell.at(context, self._common)
                rest = variance / (covariance[row, row] + apart[row] + variance)
                means[row] += (1.0 - rest) * (own - means[row])
                covariance[row] *= rest
                covariance[:, row] *= rest
                apart[row] = rest * rest * apart[row] + (1.0 - rest) ** 2 * variance
        covariance[np.diag_indices(len(steps))] += apart
        return np.exp(means + self._common), np.sqrt(covariance.diagonal())


    def _refit(self) -> None:
        """Fit the backbone to all cells, and tell them its slopes."""
        self._since_fit = 0
        if len(self._stacked[0]) != len(self._fitted):
            self._stacked = stack([self._design(*key) for key in self._fitted])
        cells = [self._cells[key] for key in self._fitted]
        level, context, n, square, time, spread, seen = np.array(
            [(c.level, c.mean_context, c.n, c.context_square, c.context_time, c.spread, c.seen) for c in cells]
        ).T
        half = np.minimum(np.sqrt(square / n), context)
        lean = np.clip(half * time / np.maximum(square, 1e-9), -0.9, 0.9)
        noise = spread**2 / n + (DRIFT_ERROR * (self._common - seen)) ** 2
        self._backbone = self._backbone.fitted(self._stacked, level, noise, context, half, lean)
        for cell, slope in zip(cells, self._backbone.slopes(self._stacked, context).tolist(), strict=True):
            cell.prior_slope, cell.prior_weight = slope, (cell.spread / (SLOPE_ERROR * slope)) ** 2
            cell.set_slope()


def _kind(from_steps: int, to_steps: int) -> str:
    return "up" if from_steps == 0 else "down" if to_steps == 0 else "other"
