"""The models that an evaluation leans on: one for each half of the trace, so that none judges its own data.

    LoggedSteps ──► FoldSums (histograms of seconds, trials by position; mergeable) ──► StepModel, a table, a surface

Seconds are kept as histograms by K, size and context region, so that what is far from the middle of a
cell is left out without a second pass, and memory does not depend on the trace's length. Where a K was
never run at a size, the controller's own cost model speaks, given the cells that are known.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from specpilot.policies.interface import Grid, Plan
from specpilot.policies.models.acceptance import BANDS
from specpilot.policies.models.acceptance_evidence import PRIOR_STRENGTH
from specpilot.policies.models.cost import CostModel
from specpilot.policies.models.cost_prior import StoredCell, StoredCosts, StoredSwitch, StoredSwitches, fingerprint
from specpilot.policies.offpolicy.logged_steps import FloatArray, IntArray, LoggedSteps
from specpilot.policies.offpolicy.step_model import StepModel
from specpilot.policies.places import CONTEXT_EDGES
from specpilot.policies.rules.choice import KEEP, STAY
from specpilot.sglang_hooks.wire import Hello

BINS_PER_OCTAVE, FIRST_OCTAVE, OCTAVES = 16, -17, 27
"""Bins of seconds: from 8 us to 17 minutes, 4.4 % a bin."""
TRIM = 2.0
"""Factor to the median of its cell, up or down, beyond which a time is not averaged in."""
LEAST_STEPS = 16
"""Steps of a cell from which on its own mean counts."""
BAND_SAMPLES = 256.0
"""Samples that the pooled acceptance counts as in each band."""
CONTEXTS = (0.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0)

_BINS = BINS_PER_OCTAVE * OCTAVES
_MOMENTS = 4
"""Number of moments: steps, seconds, context tokens of all requests, context tokens per request."""


@dataclass
class FoldSums:
    """What the steps of one fold add up to."""

    arms: IntArray
    times: dict[int, FloatArray] = field(default_factory=dict)
    """Sums over the timed steps by coded (arm, size, context region): shape (bins, moments)."""
    trials: FloatArray = field(init=False)
    """Drafts tried by band and position: shape (bands, largest K)."""
    passed: FloatArray = field(init=False)
    """Drafts accepted by band and position: shape (bands, largest K)."""

    def __post_init__(self) -> None:
        self.trials = np.zeros((BANDS.cells, max(int(self.arms[-1]), 1)))
        self.passed = np.zeros_like(self.trials)

    def add(self, steps: LoggedSteps, rows: IntArray, trials: FloatArray, passed: FloatArray) -> None:
        """Take in ``rows`` of a chunk."""
        band = np.searchsorted(BANDS.batch_edges, steps.batch_size[rows]) * BANDS.shape[1]
        band += np.searchsorted(BANDS.context_edges, steps.mean_context[rows])
        for position in range(trials.shape[1]):
            self.trials[:, position] += np.bincount(band, trials[rows, position], BANDS.cells)
            self.passed[:, position] += np.bincount(band, passed[rows, position], BANDS.cells)
        timed = rows[steps.settled[rows]]
        if not len(timed):
            return
        context: FloatArray = steps.mean_context[timed]
        code = _code(steps.arm[timed], steps.size[timed], np.searchsorted(CONTEXT_EDGES, context))
        seconds = steps.seconds[timed]
        octave = np.log2(seconds) - FIRST_OCTAVE
        place = np.clip(np.floor(octave * BINS_PER_OCTAVE), 0, _BINS - 1).astype(np.int64)
        cells, own = np.unique(code, return_inverse=True)
        moments: tuple[FloatArray, ...] = (np.ones(len(timed)), seconds, context * steps.batch_size[timed], context)
        sums = np.stack([np.bincount(own * _BINS + place, one, len(cells) * _BINS) for one in moments], axis=1)
        parts: FloatArray = sums.astype(np.float64).reshape(len(cells), _BINS, _MOMENTS)
        for cell, part in zip(cells.tolist(), parts, strict=True):
            self.times[cell] = self.times[cell] + part if cell in self.times else part.copy()

    def merged(self, other: FoldSums) -> FoldSums:
        """Return the sums of both."""
        both = FoldSums(self.arms)
        both.trials, both.passed = self.trials + other.trials, self.passed + other.passed
        for sums in (self, other):
            for cell, part in sums.times.items():
                both.times[cell] = both.times[cell] + part if cell in both.times else part.copy()
        return both

    def cells(self) -> dict[tuple[int, int, int], FloatArray]:
        """Return (steps, mean seconds, mean context of all, mean context, relative spread) by arm, size, region."""
        found = {}
        for code, bins in self.times.items():
            summed = np.cumsum(bins[:, 0])
            low, middle, high = np.searchsorted(summed, np.array([0.16, 0.5, 0.84]) * summed[-1]).tolist()
            reach = round(BINS_PER_OCTAVE * math.log2(TRIM))
            total = bins[max(middle - reach, 0) : middle + reach + 1].sum(axis=0)
            if total[0] > 0.0:
                spread = math.log(2.0) * max(high - low, 0.25) / 2.0 / BINS_PER_OCTAVE
                found[_decode(code)] = np.array([total[0], *(total[1:] / total[0]), spread])
        return found


def _code(arm: IntArray, size: IntArray, region: IntArray) -> IntArray:
    return np.asarray((arm * (1 << 24) + size) * (len(CONTEXT_EDGES) + 1) + region, np.int64)


def _decode(code: int) -> tuple[int, int, int]:
    rest, region = divmod(code, len(CONTEXT_EDGES) + 1)
    arm, size = divmod(rest, 1 << 24)
    return arm, size, region


@dataclass(frozen=True)
class FoldModel:
    """What one fold's sums tell: a model of steps, and what an evaluated table is decided from."""

    model: StepModel
    contexts: FloatArray
    """Mean tokens per request seen in each context region: shape (context regions,)."""
    hazards: FloatArray
    """P(draft j accepted | those before it were), of all bands together: shape (largest K,)."""

    @staticmethod
    def of(sums: FoldSums, hello: Hello) -> FoldModel:
        """Fit; costs that were never seen are those of a cost model that knows the rest."""
        cells = sums.cells()
        lengths, hazards = _lengths(sums)
        contexts = _seen_contexts(cells)
        return FoldModel(_seconds(cells, sums.arms, hello, lengths), contexts, hazards)

    def plan(self, hello: Hello) -> Plan:
        """Return the deterministic table of the most expected tokens per second, by the goodput policy's rules.

        The fallback stays where nothing is better by STAY; what is within KEEP of the choice is kept.
        """
        sizes = tuple(size for size in sorted(hello.captured_batch_sizes) if size <= hello.max_running_requests)
        grid = Grid(sizes, tuple(edge for edge in CONTEXT_EDGES if edge < max(hello.context_length, 1)))
        arms = self.model.arms
        fallback = int(np.searchsorted(arms, hello.fallback_steps)) if hello.fallback_steps in arms else 0
        choice, keep = [], []
        for cell in range(grid.cells):
            row, column = divmod(cell, grid.shape[1])
            batch = sizes[row] if row < len(sizes) else (sizes[-1] * 5 // 4 + 1 if sizes else 1)
            scores = self.scores(batch, float(self.contexts[column]))
            best = int(np.argmax(scores))
            chosen = best if scores[best] > scores[fallback] * (1.0 + STAY) else fallback
            choice.append(int(arms[chosen]))
            near = scores > scores[chosen] * (1.0 - KEEP)
            keep.append(frozenset(int(k) for k in arms[near] if k and k != arms[chosen]))
        return Plan(grid, tuple(choice), tuple(keep), "fitted on the other half of the trace")

    def scores(self, batch: int, context: float) -> FloatArray:
        """Return expected tokens per second by arm."""
        arms = self.model.arms
        band = BANDS.cell(batch, context)
        sizes, contexts = np.full(len(arms), batch), np.full(len(arms), context)
        seconds = self.model.step_seconds(np.arange(len(arms)), sizes, contexts)
        return np.asarray(batch * self.model.lengths[band, arms] / seconds, np.float64)


def _lengths(sums: FoldSums) -> tuple[FloatArray, FloatArray]:
    """Return tokens per request by band and K, (bands, largest K + 1), and the pooled hazards.

    Each band is shrunk to the pool, and each position of the pool to the one before.
    """
    trials, passed = sums.trials.sum(axis=0), sums.passed.sum(axis=0)
    hazards = np.empty(len(trials))
    before = 0.5
    for j in range(len(trials)):
        before = hazards[j] = (passed[j] + PRIOR_STRENGTH * before) / (trials[j] + PRIOR_STRENGTH)
    by_band = (sums.passed + BAND_SAMPLES * hazards) / (sums.trials + BAND_SAMPLES)
    lengths = np.ones((len(by_band), len(trials) + 1))
    lengths[:, 1:] += np.cumsum(np.cumprod(by_band, axis=1), axis=1)
    return lengths[:, : int(sums.arms[-1]) + 1], hazards


def _seen_contexts(cells: dict[tuple[int, int, int], FloatArray]) -> FloatArray:
    edges = (0, *CONTEXT_EDGES, 2 * CONTEXT_EDGES[-1])
    weight, total = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for (_, _, region), found in cells.items():
        weight[region] += found[0]
        total[region] += found[0] * found[3]
    middles = np.array([(low + high) / 2.0 for low, high in itertools.pairwise(edges)])
    return np.where(weight > 0.0, total / np.maximum(weight, 1.0), middles)


def _seconds(
    cells: dict[tuple[int, int, int], FloatArray], arms: IntArray, hello: Hello, lengths: FloatArray
) -> StepModel:
    """Return the cost model on a grid, drawn to the means of the cells that were seen."""
    costs = CostModel(hello, _stored(cells, arms, hello))
    captured = sorted(hello.captured_batch_sizes)
    largest = max([hello.max_running_requests, *captured, *(size for _, size, _ in cells)])
    eager = _eager_sizes(captured[-1] if captured else 0, largest)
    sizes = np.array([*(size for size in captured if size <= largest), *eager], np.int64)
    seconds = np.empty((len(arms), len(sizes), len(CONTEXTS)))
    for row, size in enumerate(sizes.tolist()):
        for column, context in enumerate(CONTEXTS):
            seconds[:, row, column] = costs.predict_all(size, context)[0]
    model = StepModel(arms, lengths, sizes, np.array(CONTEXTS), seconds)
    return StepModel(arms, lengths, sizes, model.contexts, seconds * _ratios(cells, model))


def _eager_sizes(captured: int, largest: int) -> list[int]:
    """Sizes above the largest captured one, a sixteenth of an octave apart.

    >>> _eager_sizes(64, 70), _eager_sizes(64, 64)
    ([66, 69, 72], [])
    """
    found: list[int] = []
    at = float(max(captured, 1))
    while (found[-1] if found else captured) < largest:
        at *= 2.0 ** (1.0 / 16.0)
        if math.ceil(at - 1e-9) > max(captured, found[-1] if found else 0):
            found.append(math.floor(at) if math.floor(at) > max([captured, *found]) else math.ceil(at))
    return found


def _ratios(cells: dict[tuple[int, int, int], FloatArray], model: StepModel) -> FloatArray:
    """Return what was seen over what the model says, (arms, sizes, contexts); 1 where nothing was."""
    arms, sizes, contexts = model.seconds.shape
    regions = len(CONTEXT_EDGES) + 1
    weight, total = np.zeros((arms, sizes, regions)), np.zeros((arms, sizes, regions))
    for (arm, size, region), found in cells.items():
        row = min(bisect_left(model.sizes.tolist(), size), sizes - 1)
        said = model.step_seconds(np.array([arm]), np.array([size]), found[3:4])[0]
        weight[arm, row, region] += found[0]
        total[arm, row, region] += found[0] * found[1] / said
    overall = total.sum(axis=2) / np.maximum(weight.sum(axis=2), 1.0)
    overall = np.where(weight.sum(axis=2) >= LEAST_STEPS, overall, 1.0)
    ratios = np.where(weight >= LEAST_STEPS, total / np.maximum(weight, 1.0), overall[:, :, None])
    # At the edge between two regions, the mean of both.
    found = np.empty((arms, sizes, contexts))
    for column, context in enumerate(model.contexts.tolist()):
        low, high = bisect_left(CONTEXT_EDGES, context), bisect_left(CONTEXT_EDGES, context + 1.0)
        found[:, :, column] = (ratios[:, :, low] + ratios[:, :, high]) / 2.0
    return found


def _stored(cells: dict[tuple[int, int, int], FloatArray], arms: IntArray, hello: Hello) -> object:
    """Return the cells as a stored prior of the cost model."""
    by_cell: dict[tuple[int, int], list[FloatArray]] = {}
    for (arm, size, _), found in cells.items():
        by_cell.setdefault((arm, size), []).append(found)
    stored = []
    for (arm, size), parts in sorted(by_cell.items()):
        n, seconds, context, _, spread = np.array(parts).T
        if n.sum() < LEAST_STEPS:
            continue
        share = n / n.sum()
        mean, at = float(share @ seconds), float(share @ context)
        apart = context - at
        stored.append(
            StoredCell(
                int(arms[arm]),
                float(size),
                float(min(n.sum(), 1e9)),
                math.log(mean),
                at,
                float(share @ apart**2),
                float(share @ (apart * (seconds / mean - 1.0))),
                float(share @ spread**2),
            )
        )
    unknown = StoredSwitch(4.0, 0.0, 0.0)
    costs = StoredCosts(1, fingerprint(hello), stored[:16384], StoredSwitches(unknown, unknown, unknown))
    return msgspec.to_builtins(costs)


def fit_folds(sums: Sequence[FoldSums], hello: Hello) -> list[FoldModel]:
    """Return for the steps of each fold what was fitted on the other."""
    return [FoldModel.of(sums[1 - fold], hello) for fold in range(2)]
