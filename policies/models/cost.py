"""What a decode step costs: seconds by steps (K), batch size and context, learned from served steps.

    record ─► fit_to_learn ─► its cell's robust running line ─► (every 64 records) backbone fit
                                     │           │                       │
                              common level ◄─────┘                       │
                                     └────────► predict ◄────────────────┘

Three parts. A *cell* (``cost_cell``) is one K at one size the server really runs: the captured
CUDA-graph size the batch is padded to, or a narrow band of batch sizes above the largest, where
steps run eagerly. It holds a line, log-level and slope over context tokens, followed robustly and
with a memory of its own: only its own records age it. The *common level* (``cost_common``) lets
cells that do not run take part in the drift of those that do. The *backbone* (``cost_backbone``) is
a smooth model of all cells. A tried cell is predicted by its line, an untried one by the backbone
with the error the fit gives it. What is kept for the next start is in ``cost_prior``. All bounds
are relative and the backbone's scale is free, so nothing depends on how fast the hardware is.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import msgspec
import numpy as np

from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.cost_backbone import Array, Backbone, Design, design_row, stack
from specpilot.policies.models.cost_cell import (
    MEMORY,
    SETTLED,
    SLOPE_ERROR,
    SPREAD_CEILING,
    SPREAD_FLOOR,
    CostCell,
)
from specpilot.policies.models.cost_drift import CommonLevel
from specpilot.policies.models.cost_prior import (
    LEAST_LEVEL,
    MOST_LEVEL,
    PRIOR_WEIGHT,
    StoredCell,
    StoredCosts,
    StoredSwitches,
    fingerprint,
    read_prior,
)
from specpilot.policies.models.cost_switches import SWITCH_KINDS, SwitchExtra, switch_kind
from specpilot.sglang_hooks.wire import ForwardKind, Hello, StepRecord

# -- which records tell a step's own time --

OVERLAP_GAP = 0.02
"""Launch gap, as a share of the step, above which the host was seen to wait though it overlaps."""
HOST_GAP = 0.5
"""Launch gap, as a share of the step, that counts as a wait without overlap: there every step has a gap, which is
part of what it costs."""

REFIT = 64
"""Records between fits, or as many as there are cells: a constant price per record. A quarter of all at first."""
START_FITS = 16
"""Fits to a stored prior, one after the other: each begins from the result of the one before, misfit included."""
UNKNOWN_SECONDS, UNKNOWN_ERROR = 0.02, 3.0
"""Answered with nothing learned at all: a step's usual order of magnitude, give or take a factor of 20."""


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


class CostModel:
    """Decode step seconds of one server, learned online.

    One record moves its cell's level by at most CLIP * spread / n, of n records remembered and a
    spread of their noise of at most SPREAD_CEILING, and any other by no more. At least three in
    a row, all off to one side by more than that, make a level jump to their median.

    >>> from tests.support.messages import hello, record
    >>> model = CostModel(hello())
    >>> model.predict(3, 2, 100.0)
    (0.02, 3.0)
    >>> for seq in range(1, 41):
    ...     used = model.learn(record(record_seq=seq, seconds=0.010))
    >>> model.steps_learned, [round(x, 4) for x in model.predict(3, 2, 100.0)]
    (39, [0.01, 0.005])
    >>> [round(x, 3) for x in model.predict(1, 2, 100.0)]
    [0.009, 0.093]
    """

    def __init__(self, hello: Hello, prior: object = None) -> None:
        """``prior``: what ``to_prior`` of an earlier model of the same fingerprint returned, or nothing.

        Anything else is ignored, and ``note`` says why.
        """
        self.steps_learned = 0
        """Records that went into a cell."""
        self.note = ""
        """What became of the prior, in a sentence for an operator."""
        self._fingerprint = fingerprint(hello)
        self._captured = sorted(hello.captured_batch_sizes)
        self._candidates = tuple(sorted(hello.candidate_steps))
        self._decode_skip = hello.skip == "decode"
        self._sizes: dict[int, float] = {}
        self._designs: dict[tuple[float, tuple[int, ...]], Design] = {}
        self._cells: dict[tuple[int, float], CostCell] = {}
        self._fitted: list[tuple[int, float]] = []
        self._stacked: Design = stack([])
        self._backbone = Backbone()
        self._common = CommonLevel()
        self._since_fit = 0
        self._applied = AppliedSteps(hello.topk)
        self._previous: StepRecord | None = None
        self._previous_steps: int | None = None
        self._extras = {kind: SwitchExtra() for kind in SWITCH_KINDS}
        self._usual = 0.0
        if prior is not None:
            stored, wrong = read_prior(prior, hello)
            if stored is None:
                self.note = f"cost prior ignored: {wrong}"
            else:
                self._take_prior(stored)

    def learn(self, step: StepRecord) -> bool:
        """Learn from one record, in order, as it was applied; return whether its time was used."""
        previous, self._previous = self._previous, step
        before, steps = self._previous_steps, self._applied.of(step)
        self._previous_steps = steps
        if steps is None or before is None or not _follows(step, previous):
            return False
        key = (steps, self.size(step.batch_size))
        cell = self._cells.get(key)
        if steps != before:
            if cell is None or not cell.n:
                return False
            usual = math.exp(cell.at(step.context_tokens, 0.0)[0] + self._common.level)
            self._extras[switch_kind(before, steps)].learn(step.seconds - usual, usual)
            return True
        if cell is None:
            cell = self._cells[key] = CostCell()
        self.steps_learned += 1
        self._usual = step.seconds
        self._since_fit += 1
        log_seconds = math.log(step.seconds) - self._common.level
        if not cell.n:
            if cell.start(log_seconds, step.context_tokens):
                self._common.touch(cell, self.steps_learned)
                self._fitted.append(key)
                self._refit()
            return True
        self._common.before(cell)
        moved, jumped = cell.learn(log_seconds, step.context_tokens)
        self._common.follow(cell, moved, jumped, self._cells.values(), self.steps_learned)
        self._common.touch(cell, self.steps_learned)
        self._common.judge_prior(cell, jumped)
        if jumped or self._since_fit >= max(min(REFIT, self.steps_learned // 4), len(self._fitted)):
            self._refit()
        return True

    @property
    def cells(self) -> int:
        """Number of cells that have a line; of a stored prior, as long as nothing was learned."""
        return len(self._fitted)

    def predict(self, steps: int, batch_size: int, mean_context: float) -> tuple[float, float]:
        """Return seconds and their relative standard error; ``mean_context`` in tokens per request."""
        seconds, covariance = self._predict((steps,), batch_size, mean_context)
        return float(seconds[0]), math.sqrt(covariance[0, 0])

    def predict_all(self, batch_size: int, mean_context: float) -> tuple[Array, Array]:
        """Return seconds and relative standard errors of all candidate steps, ascending."""
        seconds, covariance = self._predict(self._candidates, batch_size, mean_context)
        return seconds, np.sqrt(covariance.diagonal())

    def predict_together(self, batch_size: int, mean_context: float) -> tuple[Array, Array]:
        """Return seconds of all candidate steps, ascending, and the covariance of their logs.

        What two K have in common, such as how much more expensive a batch size is that was never tried, is
        in both their errors but not in that of their ratio, which is the one that decides between
        them: its square is C[i, i] + C[j, j] - 2 C[i, j].
        """
        return self._predict(self._candidates, batch_size, mean_context)

    def tried(self, steps: int, batch_size: int) -> bool:
        """Did steps of this K run at this batch size, here or for a stored prior?"""
        cell = self._cells.get((steps, self.size(batch_size)))
        return cell is not None and cell.n > 0.0

    def switch_seconds(self, from_steps: int, to_steps: int) -> tuple[float, float]:
        """Return what the first step after this switch takes longer, and the standard error, in seconds."""
        if from_steps == to_steps:
            return 0.0, 0.0
        extra = self._extras[switch_kind(from_steps, to_steps)]
        return extra.mean, extra.error(self._usual / 2.0 or UNKNOWN_SECONDS * UNKNOWN_ERROR)

    def to_prior(self) -> dict[str, object]:
        """Return what was learned, fit for JSON."""
        cells = []
        for steps, size in self._fitted:
            cell = self._cells[steps, size]
            # As many records as the level is still worth.
            n = 1.0 / (1.0 / cell.n + self._common.doubt(cell) / cell.spread**2)
            level = min(max(cell.level + self._common.level, LEAST_LEVEL), MOST_LEVEL)
            moments = (cell.context_square / cell.context_n, cell.context_time / cell.context_n)
            cells.append(StoredCell(steps, size, n, level, cell.mean_context, *moments, cell.variance, cell.context_n))
        switches = StoredSwitches(**{kind: extra.stored() for kind, extra in self._extras.items()})
        stored: dict[str, object] = msgspec.to_builtins(StoredCosts(2, self._fingerprint, cells, switches))
        return stored

    def _take_prior(self, stored: StoredCosts) -> None:
        for old in stored.cells:
            key = (old.steps, old.size)
            if key in self._cells or not self._runs(*key):
                continue
            n = min(old.n, PRIOR_WEIGHT)
            spread = min(max(math.sqrt(old.variance), SPREAD_FLOOR), SPREAD_CEILING)
            # Contexts deviate by no more than their mean, and relative time by less than 1. Version 1 had moments over
            # too few records, but both of them, so their ratio is the slope.
            square = min(old.context_variance, old.mean_context**2)
            bound = 1.0 / max(old.mean_context, 1.0)
            slope = min(max(old.context_time / max(old.context_variance, 1e-9), -bound), bound)
            context_n = min(old.context_n or n, MEMORY)
            self._cells[key] = CostCell(
                n=n,
                level=old.level,
                mean_context=old.mean_context,
                context_n=context_n,
                context_square=square * context_n,
                context_time=slope * square * context_n,
                variance=spread**2,
                spread=spread,
                records=SETTLED,
                stored_level=old.level,
                corrects=True,
                uncertain=True,
            )
            self._fitted.append(key)
        for kind in self._extras:
            self._extras[kind] = SwitchExtra.of(getattr(stored.switches, kind))
        if self._fitted:
            for _ in range(START_FITS):
                self._refit()
        self.note = f"cost prior of {len(self._fitted)} cells"
        if len(self._fitted) < len(stored.cells):
            self.note += f"; {len(stored.cells) - len(self._fitted)} more are of steps or batch sizes not run here"

    def _runs(self, steps: int, size: float) -> bool:
        """Can this server run such a cell?"""
        eager = not self._captured or size > self._captured[-1]
        return steps in self._candidates and (eager or size in self._captured)

    def size(self, batch_size: int) -> float:
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
        return design_row(steps, size, not self._captured or size > self._captured[-1], self._decode_skip)

    def _predict(self, steps: tuple[int, ...], batch_size: int, mean_context: float) -> tuple[Array, Array]:
        """Return seconds, shape (steps,), and the covariance of their logs, (steps, steps).

        A tried cell's line and the backbone are weighed by their precision.
        """
        if not self._fitted:
            return np.full(len(steps), UNKNOWN_SECONDS), np.diag(np.full(len(steps), UNKNOWN_ERROR**2))
        size, context = self.size(batch_size), batch_size * mean_context
        design = self._designs.get((size, steps))
        if design is None:
            design = self._designs[size, steps] = stack([self._design(k, size) for k in steps])
        means, covariance = self._backbone.at(design, context)
        apart = np.full(len(steps), self._backbone.misfit)
        for row, k in enumerate(steps):
            cell = self._cells.get((k, size))
            if cell is not None and cell.n:
                own, variance = cell.at(context, self._common.doubt(cell))
                rest = variance / (covariance[row, row] + apart[row] + variance)
                means[row] += (1.0 - rest) * (own - means[row])
                covariance[row] *= rest
                covariance[:, row] *= rest
                apart[row] = rest**2 * apart[row] + (1.0 - rest) ** 2 * variance
        covariance[np.diag_indices(len(steps))] += apart
        return np.exp(means + self._common.level), covariance

    def _refit(self) -> None:
        """Fit the backbone to all cells, and tell them its slopes.

        A stored prior is fitted as it is until cells turn out to be off by more than was assumed. Where it is
        wrong about a K, it is so at every size: what those of its cells that were not seen yet err by
        beyond that is theirs in common.
        """
        self._since_fit = 0
        if len(self._stacked[0]) != len(self._fitted):
            self._stacked = stack([self._design(*key) for key in self._fitted])
        cells = [self._cells[key] for key in self._fitted]
        unseen = sorted({steps for (steps, _), cell in zip(self._fitted, cells, strict=True) if not cell.last_record})
        shared, error = np.zeros((len(cells), len(unseen))), self._common.prior_excess
        for row, ((steps, _), cell) in enumerate(zip(self._fitted, cells, strict=True)):
            if not cell.last_record:
                shared[row, unseen.index(steps)] = error
        doubts = [self._common.moved_variance(cell) for cell in cells]
        level, context, n, context_n, square, time, spread = np.array(
            [(c.level, c.mean_context, c.n, c.context_n, c.context_square, c.context_time, c.spread) for c in cells]
        ).T
        half = np.minimum(np.sqrt(square / context_n), context)
        lean = np.clip(half * time / np.maximum(square, 1e-9), -0.9, 0.9)
        noise = spread**2 / n + doubts
        self._backbone = self._backbone.fitted(self._stacked, level, noise, context, half, lean, shared)
        for cell, slope in zip(cells, self._backbone.slopes(self._stacked, context).tolist(), strict=True):
            cell.prior_slope, cell.prior_weight = slope, (cell.spread / (SLOPE_ERROR * slope)) ** 2
            cell.set_slope()
