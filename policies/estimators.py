"""What another policy would have earned in the states that were logged: off-policy estimates of efficiency.

    Steps ──► PolicySums.add (streamed, by stratum and bootstrap replicate) ──► PolicySums.estimate

*Efficiency* is a ratio of sums: tokens of decoding over seconds of decoding, both of the target policy
pi in the logged states. For step t with batch, context and so on x_t:

    V(pi) = sum_t E[tokens | x_t, pi_t]  /  ( sum_t E[seconds | x_t, pi_t] + sum_t switch(pi_{t-1}, pi_t) )

V counts each logged step once, however many tokens it brings. So it is no measure to choose by: where batches
are large, a K of shorter steps with more tokens per second makes these states, which bring the most tokens,
weigh less. The *gain* is free of that: the time that the logged tokens took, over the time that pi needs
for as many tokens in each group of states,

    1 + gain  =  sum_t s_t  /  ( sum_c tokens_c E_c[seconds | pi] / E_c[tokens | pi] + switches )

What the log offers for each term follows from how a chain drafts and how the hooks explore:

- *Tokens are nearly full information.* Of a request that accepted a of K drafts, K' < K drafts would have
  had min(a, K') accepted. So with h_t the K that the table held (what it runs unless exploration draws
  something else), the tokens at min(pi_t, h_t) are observed in every ordinary step. Only what drafts
  beyond h_t add has to come from steps that explored pi_t.
- *Seconds are bandit feedback.* They come from steps that ran pi_t, each weighted by one over the
  probability of its draw. One draw holds for a block of forward passes, and the first step of a block
  carries the switch, so only *settled* steps count: the step before was of the same K, cell, table and,
  where pi_t is not h_t, block. Where a block begins does not depend on the draw. A step that goes on
  with h_t across two blocks has both draws' probabilities.
- *Switches are paid where pi switches*, not where the log did: the mean that first steps took longer, by
  kind (from K=0, to K=0, other), times the switches that pi makes along the logged states.

Estimators, computed by stratum (region of batch size x region of context x pi_t x how pi_t compares to
h_t) and weighed by the number of logged steps in each, with w = 1/probability where the draw is the one
asked for, else 0:

- ``snips``: the self-normalised mean sum(w y) / sum(w) of each stratum (Swaminathan & Joachims, "The
  self-normalized estimator for counterfactual learning", NeurIPS 2015).
- ``doubly-robust``: the mean of a model's m(x, pi) over all steps of the stratum plus the self-normalised
  mean of y - m in the steps drawn (Dudik, Langford & Li, "Doubly robust policy evaluation and learning",
  ICML 2011). Right where either the probabilities or the model are; the model is of the other fold.

Intervals: the steps of a block share their draw, so blocks are resampled, with Poisson(1) weights that
are hashed from the block's number, in one pass (the online bootstrap of Oza & Russell 2001; Chamandy et
al. 2012). The numbers of steps by stratum are held fixed: the estimate is about the states that were
logged. The deviation of log V over the replicates gives a Student interval whose degrees of freedom are
Welch & Satterthwaite's over the strata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.acceptance import BANDS
from policies.interface import Grid, Plan

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

REGIONS = Grid((1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1024, 4096, 16384))
"""Batch sizes and context tokens per request within which steps are taken together."""

REPLICATES = 256
"""Of the bootstrap: a standard error is known to 1/sqrt(2 * 256) = 4.4 % of itself."""

LEAST_BLOCKS = 10.0
"""Effective blocks from which on a stratum's mean is used: below, its own bootstrap is too coarse to trust."""

LEAST_SUPPORT = 0.8
"""Share of a stratum's steps in which the draw must have been possible, as far as the weights can tell."""

LEAST_ANSWERED = 0.95
"""Share of the logged steps that the answered strata must hold, or there is no estimate."""

OUTLIER = 8.0
"""Times what the model expects from which on a step's time is the host's affair, whatever the K."""

RELATIONS = 3
SAME, BELOW, ABOVE = range(RELATIONS)
"""The target's K against the one held: equal, less, more."""

KINDS = 3
"""Of switches: from K=0, to K=0, between others."""

ESTIMATORS = ("snips", "doubly-robust")


@dataclass(frozen=True)
class Steps:
    """Logged decode steps in order, as columns of shape (steps,) unless said otherwise.

    K stands as an *arm*, its index among the server's candidates; -1 is none.
    """

    batch_size: IntArray
    size: IntArray
    """Captured size that such a batch is padded to, or its own above the largest: the step of the staircase."""
    mean_context: FloatArray
    """Tokens per request."""
    arm: IntArray
    """Applied."""
    held: IntArray
    """What runs there unless exploration draws something else."""
    ordinary: BoolArray
    """The draw was for ``held``."""
    probability: FloatArray
    """Of the draw."""
    explorable: BoolArray
    """The cell explored at all: another draw was possible."""
    block: IntArray
    """Number of the block, of blocks of one draw in the order of the log."""
    tokens: FloatArray
    """(steps, largest K + 1): tokens of the live requests, had each been given k drafts; true up to the applied K."""
    live: FloatArray
    """Requests that had not ended."""
    informative: BoolArray
    """``tokens`` are known."""
    seconds: FloatArray
    timed: BoolArray
    """``seconds`` is the step's own; it may be the first after a switch."""
    same_cell: BoolArray
    """The step before was of the same cell and table."""
    same_block: BoolArray
    """And of the same draw."""
    previous_probability: FloatArray
    """Of the draw of the step before."""
    previous_arm: IntArray
    """Of the decode step right before; -1 where that is not known."""
    fold: IntArray
    """0 or 1: the model and the table to judge it by are fitted on the other one."""

    def __len__(self) -> int:
        return len(self.arm)

    @property
    def settled(self) -> BoolArray:
        """Steps whose ``seconds`` tell what this K takes in a row of such steps."""
        return np.asarray(self.timed & (self.previous_arm == self.arm), np.bool_)


@dataclass(frozen=True)
class StepModel:
    """What steps cost and bring, fitted on one fold."""

    arms: IntArray
    """Candidate K, rising."""
    lengths: FloatArray
    """(bands, largest K + 1): tokens per request and step, by band of ``policies.acceptance``."""
    sizes: IntArray
    """Rising."""
    contexts: FloatArray
    """Tokens per request, rising."""
    seconds: FloatArray
    """(arms, sizes, contexts): of a settled step, linear in the context between."""

    def step_lengths(self, steps: Steps) -> FloatArray:
        """Return tokens per request at every K, (steps, largest K + 1)."""
        rows, columns = (
            np.searchsorted(edges, values)
            for edges, values in (
                (BANDS.batch_edges, steps.batch_size),
                (BANDS.context_edges, steps.mean_context),
            )
        )
        return np.asarray(self.lengths[rows * BANDS.shape[1] + columns], np.float64)

    def step_seconds(self, arm: IntArray, size: IntArray, mean_context: FloatArray) -> FloatArray:
        """Return seconds, all of shape (steps,); sizes above the largest known cost what that does."""
        row = np.minimum(np.searchsorted(self.sizes, size), len(self.sizes) - 1)
        right = np.clip(np.searchsorted(self.contexts, mean_context), 1, len(self.contexts) - 1)
        low, high = self.contexts[right - 1], self.contexts[right]
        part = np.clip((mean_context - low) / (high - low), 0.0, 1.0)
        return np.asarray(
            self.seconds[arm, row, right - 1] * (1.0 - part) + self.seconds[arm, row, right] * part, np.float64
        )


# -- what a policy would have run --


class Follower:
    """The K that a deterministic table runs along logged states; a plan for each fold.

    What is held goes on from step to step as in ``sglang_hooks.table_policy``: keep sets and dwell
    are the target's own, whatever the log held.

    >>> plan = Plan(Grid((4, 6)), (3, 3, 0), (frozenset(), frozenset({0}), frozenset()), "threshold")
    >>> follower = Follower([plan], [0, 3], 0)
    >>> batch = np.array([4, 5, 7, 5, 4])
    >>> follower.follow(batch, np.zeros(5), np.zeros(5, int)).tolist()
    [1, 1, 0, 0, 1]
    """

    def __init__(self, plans: Sequence[Plan], arms: Sequence[int], held: int) -> None:
        """``held``: K in force before the first step."""
        arm_of = {steps: arm for arm, steps in enumerate(arms)}
        self._plans = plans
        self._choice = [np.array([arm_of[steps] for steps in plan.choice]) for plan in plans]
        self._keep = [[frozenset(arm_of[k] for k in kept if k in arm_of) for kept in plan.keep] for plan in plans]
        self._memoryless = not any(plan.min_dwell_steps or any(plan.keep) for plan in plans)
        self._held = arm_of.get(held, 0)
        self._since_switch = 0

    def follow(self, batch_size: IntArray, mean_context: FloatArray, fold: IntArray) -> IntArray:
        """Return the arm of each step; the states go on from those of the last call."""
        cells = np.empty(len(batch_size), np.int64)
        chosen = np.empty(len(batch_size), np.int64)
        for index, plan in enumerate(self._plans):
            own = fold == index if len(self._plans) > 1 else slice(None)
            grid = plan.grid
            cells[own] = np.searchsorted(grid.batch_edges, batch_size[own]) * grid.shape[1]
            cells[own] += np.searchsorted(grid.context_edges, mean_context[own])
            chosen[own] = self._choice[index][cells[own]]
        if self._memoryless or not len(cells):
            return chosen
        dwells = any(plan.min_dwell_steps for plan in self._plans)
        moves = np.ones(len(cells), bool)
        # Within a cell what is held does not change, unless it only dwells.
        if not dwells:
            moves[1:] = (cells[1:] != cells[:-1]) | (fold[1:] != fold[:-1])
        begins = np.flatnonzero(moves)
        which = fold[begins] if len(self._plans) > 1 else np.zeros(len(begins), np.int64)
        found = np.empty(len(begins), np.int64)
        held, since = self._held, self._since_switch
        rows = zip(cells[begins].tolist(), chosen[begins].tolist(), which.tolist(), strict=True)
        for i, (cell, choice, index) in enumerate(rows):
            plan_dwell = self._plans[index].min_dwell_steps
            if held != choice and held not in self._keep[index][cell] and since >= plan_dwell:
                held, since = choice, 0
            else:
                since += 1
            found[i] = held
        self._held, self._since_switch = held, since
        return np.repeat(found, np.diff(np.append(begins, len(cells))))


# -- the bootstrap --

_POISSON = np.repeat(np.arange(6, dtype=np.float64), (94, 94, 47, 16, 4, 1))
"""Poisson(1) by a byte: probabilities in 256ths, mean and variance 1.004."""


def poisson_weights(blocks: IntArray, replicates: int) -> FloatArray:
    """Return a Poisson(1) weight for each block and replicate, (blocks, 1 + replicates); the first column is 1.

    A pure function of the block's number, so a block that is met twice has its weights again
    (SplitMix64, Steele et al. 2014).

    >>> weights = poisson_weights(np.arange(4000), 64)[:, 1:]
    >>> weights.shape, round(float(weights.mean()), 1), round(float(weights.var()), 1)
    ((4000, 64), 1.0, 1.0)
    """
    words = -(-replicates // 8)
    gamma = 0x9E3779B97F4A7C15
    state = (blocks.astype(np.uint64)[:, None] * np.uint64(words) + np.arange(words, dtype=np.uint64)) * np.uint64(
        gamma
    )
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    weights = np.empty((len(blocks), 1 + replicates))
    weights[:, 0] = 1.0
    weights[:, 1:] = _POISSON[state.view(np.uint8)[:, :replicates]]
    return weights


@dataclass(frozen=True)
class Blocks:
    """The blocks of some steps, and their bootstrap weights."""

    index: IntArray
    """(steps,): into ``weights``."""
    weights: FloatArray
    """(blocks, 1 + replicates)."""

    @staticmethod
    def of(steps: Steps, replicates: int = REPLICATES) -> Blocks:
        """Return the blocks of ``steps``."""
        blocks, index = np.unique(steps.block, return_inverse=True)
        return Blocks(index, poisson_weights(blocks, replicates))


# -- sums --

_BASE, _MORE, _TIME = 0, 3, 6
"""Columns of the sums, each (weight, weighted outcome, weighted outcome less model): tokens up to the K held,
tokens beyond it, seconds."""
_LOGGED, _LOGGED_TIME = 9, 12
"""The same of what was run in these steps, whatever it was, each with weight 1: tokens, seconds."""
_COLUMNS = 15


@dataclass(frozen=True)
class Strata:
    """How strata are numbered."""

    arms: int

    @property
    def count(self) -> int:
        """Number of strata."""
        return REGIONS.cells * self.arms * RELATIONS

    def of(self, steps: Steps, target: IntArray, relation: IntArray) -> IntArray:
        """Return the stratum of each step."""
        region = np.searchsorted(REGIONS.batch_edges, steps.batch_size) * REGIONS.shape[1]
        region += np.searchsorted(REGIONS.context_edges, steps.mean_context)
        return np.asarray((region * self.arms + target) * RELATIONS + relation, np.int64)

    def named(self, stratum: int) -> tuple[int, int, int]:
        """Return region, arm and relation."""
        rest, relation = divmod(stratum, RELATIONS)
        region, arm = divmod(rest, self.arms)
        return region, arm, relation


@dataclass(frozen=True)
class Predicted:
    """A chunk's steps by the model of the other fold, shared by all policies."""

    lengths: FloatArray
    """(steps, largest K + 1)."""
    seconds: FloatArray
    """(steps, arms)."""

    @staticmethod
    def of(steps: Steps, models: Sequence[StepModel]) -> Predicted:
        """``models[f]`` judges the steps of fold f."""
        lengths = np.empty(steps.tokens.shape)
        arms = len(models[0].arms)
        seconds = np.empty((len(steps), arms))
        for fold, model in enumerate(models):
            own = np.flatnonzero(steps.fold == fold)
            if len(own):
                part = _rows(steps, own)
                lengths[own] = model.step_lengths(part)
                for arm in range(arms):
                    seconds[own, arm] = model.step_seconds(np.full(len(own), arm), part.size, part.mean_context)
        return Predicted(lengths, seconds)


def _rows(steps: Steps, rows: IntArray) -> Steps:
    return Steps(**{name: getattr(steps, name)[rows] for name in Steps.__dataclass_fields__})


@dataclass
class SwitchSums:
    """What first steps after a switch take longer than the model says of their K, by kind; and how well it fits."""

    replicates: int = REPLICATES
    sums: FloatArray = field(init=False)
    """(1 + replicates, KINDS, 2): switches, seconds."""
    outliers: int = 0
    """Steps whose time was left out."""
    rates: FloatArray = field(default_factory=lambda: np.zeros(3))
    """Settled steps: number, sum and square sum of their tokens per second over the model's."""

    def __post_init__(self) -> None:
        self.sums = np.zeros((1 + self.replicates, KINDS, 2))

    def add(self, steps: Steps, predicted: Predicted, arms: IntArray, blocks: Blocks) -> BoolArray:
        """Take a chunk in; return which of its times are outliers."""
        everywhere = np.arange(len(steps))
        own = predicted.seconds[everywhere, steps.arm]
        outlier: BoolArray = np.logical_and(steps.timed, steps.seconds > OUTLIER * own)
        self.outliers += int(outlier.sum())
        first = np.flatnonzero(steps.timed & ~outlier & (steps.previous_arm >= 0) & (steps.previous_arm != steps.arm))
        kind = switch_kind(arms, steps.previous_arm[first], steps.arm[first])
        extra = steps.seconds[first] - own[first]
        for one in range(KINDS):
            of_kind = kind == one
            weights = blocks.weights[blocks.index[first[of_kind]]]
            self.sums[:, one, 0] += weights.sum(axis=0)
            self.sums[:, one, 1] += extra[of_kind] @ weights
        fine = np.flatnonzero(steps.settled & ~outlier & steps.informative & (steps.live > 0))
        expected = steps.live[fine] * predicted.lengths[fine, arms[steps.arm[fine]]] / own[fine]
        rate = steps.tokens[fine, arms[steps.arm[fine]]] / steps.seconds[fine] / expected
        self.rates += len(rate), rate.sum(), (rate**2).sum()
        return outlier

    def seconds(self) -> FloatArray:
        """Return the mean by kind, (1 + replicates, KINDS); a kind that was never seen costs what the others do."""
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


def switch_kind(arms: IntArray, before: IntArray, after: IntArray) -> IntArray:
    """Return 0 from K=0, 1 to K=0, 2 for others; all of shape (switches,)."""
    return np.where(arms[before] == 0, 0, np.where(arms[after] == 0, 1, 2))


@dataclass(frozen=True)
class Unanswered:
    """A cell for which the log cannot tell what the target would have done there."""

    batch: tuple[int, int | None]
    """Sizes from and to; to None: and above."""
    context: tuple[int, int | None]
    """Tokens per request from and to."""
    steps: int
    """K of the target."""
    logged_steps: int
    """Decode steps there."""
    effective_blocks: float
    reason: str


@dataclass(frozen=True)
class Estimate:
    """Efficiency of one policy by one estimator, tokens per second of decoding."""

    estimator: str
    estimate: float
    low: float
    high: float
    """95 % interval."""
    effective_samples: float
    """Independent draws that it rests on: a simple mean of so many blocks would be as sure."""
    gain: float
    """In speed over what was logged, as a share, for the same tokens in the same states."""
    gain_low: float
    gain_high: float
    answered: float
    """Share of the logged steps that it is about."""


class PolicySums:
    """One target policy: what there is of it in the log, streamed; memory does not depend on the log's length."""

    def __init__(self, arms: Sequence[int], replicates: int = REPLICATES, logged: bool = False) -> None:
        """``logged``: the target is what was run, exploration included."""
        self._arms = np.array(arms, np.int64)
        self._strata = Strata(len(arms))
        self._logged = logged
        count = self._strata.count
        self._sums: dict[int, FloatArray] = {}
        """(1 + replicates, _COLUMNS) by stratum."""
        self._replicates = replicates
        self._counts = np.zeros((count, 5))
        """Steps, those that can settle, those explorable, those that ran the target, sum of squared block weights."""
        self._model = np.zeros((count, 4))
        """The model's tokens and seconds of the target in every step, and of what was run."""
        self._switches = np.zeros((count, KINDS))
        """Of the target; what the log's own took is in the times of its steps."""
        self._last = -1

    def add(self, steps: Steps, target: IntArray, predicted: Predicted, outlier: BoolArray, blocks: Blocks) -> None:
        """Take a chunk in; ``target``: the arm that the policy runs in each step."""
        if not len(steps):
            return
        rows = np.arange(len(steps))
        arms = self._arms
        if self._logged:
            held, ordinary, weight = steps.arm, np.ones(len(steps), bool), np.ones(len(steps))
        else:
            held, ordinary, weight = steps.held, steps.ordinary, 1.0 / steps.probability
        timed = steps.timed & ~outlier
        relation = np.where(target == held, SAME, np.where(target < held, BELOW, ABOVE))
        stratum = self._strata.of(steps, target, relation)
        wanted, known = arms[target], arms[np.minimum(target, held)]
        drawn = (steps.arm == target) & np.where(relation == SAME, ordinary, ~ordinary)
        if self._logged:
            can_settle, of_pair = timed, weight
        else:
            # A row of the held K goes on from block to block; what is explored begins anew with each.
            can_settle = timed & np.where(relation == SAME, steps.same_cell, steps.same_block)
            of_pair = np.where(steps.same_block, weight, weight / steps.previous_probability)
            drawn &= steps.previous_arm == steps.arm
        of_model = steps.live[:, None] * predicted.lengths
        model_base, model_more = of_model[rows, known], of_model[rows, wanted] - of_model[rows, known]
        model_seconds = predicted.seconds[rows, target]

        columns = np.zeros((_COLUMNS, len(steps)))
        base = np.where(ordinary & steps.informative, weight, 0.0)
        columns[_BASE] = base
        columns[_BASE + 1] = base * steps.tokens[rows, known]
        columns[_BASE + 2] = columns[_BASE + 1] - base * model_base
        more = np.where((steps.arm == target) & ~ordinary & steps.informative & (relation == ABOVE), weight, 0.0)
        columns[_MORE] = more
        columns[_MORE + 1] = more * (steps.tokens[rows, wanted] - steps.tokens[rows, known])
        columns[_MORE + 2] = columns[_MORE + 1] - more * model_more
        time = np.where(drawn & can_settle, of_pair, 0.0)
        columns[_TIME] = time
        columns[_TIME + 1] = time * steps.seconds
        columns[_TIME + 2] = columns[_TIME + 1] - time * model_seconds
        ran = arms[steps.arm]
        columns[_LOGGED] = steps.informative
        columns[_LOGGED + 1] = steps.informative * steps.tokens[rows, ran]
        columns[_LOGGED + 2] = columns[_LOGGED + 1] - steps.informative * of_model[rows, ran]
        columns[_LOGGED_TIME] = timed
        columns[_LOGGED_TIME + 1] = timed * steps.seconds
        columns[_LOGGED_TIME + 2] = columns[_LOGGED_TIME + 1] - timed * predicted.seconds[rows, steps.arm]
        self._bootstrap(stratum, columns, blocks)

        count = self._strata.count
        for column, values in enumerate((None, can_settle, steps.explorable, steps.arm == target)):
            self._counts[:, column] += np.bincount(stratum, values, count)
        modelled = (of_model[rows, wanted], model_seconds, of_model[rows, ran], predicted.seconds[rows, steps.arm])
        for column, values in enumerate(modelled):
            self._model[:, column] += np.bincount(stratum, values, count)
        if not self._logged:
            self._count_switches(stratum, np.concatenate(([self._last], target[:-1])), target)
        self._last = int(target[-1])

    def _bootstrap(self, stratum: IntArray, columns: FloatArray, blocks: Blocks) -> None:
        """Add to the sums of every replicate, by way of the sums of each block and stratum."""
        pairs, pair_of = np.unique(stratum * len(blocks.weights) + blocks.index, return_inverse=True)
        found = np.stack([np.bincount(pair_of, column, len(pairs)) for column in columns], axis=1)
        strata, block = np.divmod(pairs, len(blocks.weights))
        present, begins = np.unique(strata, return_index=True)
        for one, begin, end in zip(present.tolist(), begins, [*begins[1:], len(pairs)], strict=True):
            part = found[begin:end]
            added = blocks.weights[block[begin:end]].T @ part
            if one in self._sums:
                self._sums[one] += added
            else:
                self._sums[one] = added
            self._counts[one, 4] += (part[:, _TIME] ** 2).sum()

    def _count_switches(self, stratum: IntArray, before: IntArray, after: IntArray) -> None:
        at = np.flatnonzero((before >= 0) & (before != after))
        code = stratum[at] * KINDS + switch_kind(self._arms, before[at], after[at])
        counts = np.bincount(code, minlength=self._strata.count * KINDS)
        self._switches += counts.reshape(self._strata.count, KINDS)

    # -- what it comes to --

    @property
    def steps(self) -> int:
        """Logged steps."""
        return int(self._counts[:, 0].sum())

    def unanswered(self) -> list[Unanswered]:
        """Return the cells that the log says nothing about, those of most steps first."""
        found = []
        for stratum, reason in self._grouped()[1].items():
            region, arm, _ = self._strata.named(stratum)
            row, column = divmod(region, REGIONS.shape[1])
            found.append(
                Unanswered(
                    _range(REGIONS.batch_edges, row, 1),
                    _range(REGIONS.context_edges, column, 0),
                    int(self._arms[arm]),
                    int(self._counts[stratum, 0]),
                    self._effective([stratum]),
                    reason,
                )
            )
        return sorted(found, key=lambda cell: -cell.logged_steps)

    @property
    def answered(self) -> float:
        """Share of the logged steps whose stratum is answered."""
        refused = sum(self._counts[stratum, 0] for stratum in self._grouped()[1])
        return float(1.0 - refused / max(self.steps, 1))

    def _effective(self, strata: Sequence[int]) -> float:
        """Kish's effective number of blocks that the seconds of some strata rest on."""
        squares = self._counts[strata, 4].sum()
        weight = sum(self._sums[stratum][0, _TIME] for stratum in strata)
        return float(weight**2 / squares) if squares else 0.0

    def _grouped(self) -> tuple[list[list[int]], dict[int, str]]:
        """Return the strata that are estimated together, and why the others are not.

        Neighbours of one K and relation are put together until they have LEAST_BLOCKS: that is as
        right as each by itself, only less sharp. Left out before is where the draw was not possible.
        """
        by_kind: dict[tuple[int, int], list[int]] = {}
        for stratum in np.flatnonzero(self._counts[:, 0]).tolist():
            _, arm, relation = self._strata.named(stratum)
            by_kind.setdefault((arm, relation), []).append(stratum)
        groups: list[list[int]] = []
        refused: dict[int, str] = {}
        for (arm, relation), strata in by_kind.items():
            reasons = {stratum: self._refusal(stratum, strata) for stratum in strata} if relation != SAME else {}
            refused.update({stratum: reason for stratum, reason in reasons.items() if reason})
            possible = [stratum for stratum in strata if not reasons.get(stratum)]
            found: list[list[int]] = []
            enough = False
            for stratum in possible:
                if found and not enough:
                    found[-1].append(stratum)
                else:
                    found.append([stratum])
                enough = self._effective(found[-1]) >= LEAST_BLOCKS
            if len(found) > 1 and not enough:
                last = found.pop()
                found[-1] += last
            for group in found:
                reason = self._too_few(arm, relation, group)
                if reason:
                    refused.update(dict.fromkeys(group, reason))
                else:
                    groups.append(group)
        return groups, refused

    def _refusal(self, stratum: int, alike: Sequence[int]) -> str:
        """Say why the target's K could not be drawn there; empty if it could.

        The weights tell: over the steps where the draw was possible they sum up to the number of these steps,
        with an error that is taken from the strata ``alike``, since a stratum without a draw shows none.
        """
        k = f"K={self._arms[self._strata.named(stratum)[1]]}"
        number, can_settle, explorable, ran, squares = self._counts[stratum].tolist()
        ran_anywhere = self._counts[alike, 3].sum()
        weight = sum(self._sums[one][0, _TIME] for one in alike)
        if not explorable:
            return f"{k} was never drawn there: nothing was explored"
        if explorable < LEAST_SUPPORT * number:
            return f"{k} was not drawn there: {100.0 * explorable / number:.0f} % of these steps explored"
        if not ran_anywhere:
            return f"{k} was never drawn there: it was not among what was explored"
        if not weight:
            return f"{k} was run only in first steps after a switch, whose time is not that of a step of {k}"
        if can_settle:
            own = self._sums[stratum][0, _TIME]
            usual = self._counts[alike, 4].sum() / weight
            error = max(math.sqrt(squares) / can_settle, math.sqrt(usual / can_settle))
            if own / can_settle + 2.0 * error < LEAST_SUPPORT:
                if not ran:
                    return f"{k} was never drawn there: it was not among what was explored"
                return f"{k} could be drawn in about {100.0 * own / can_settle:.0f} % of these steps only"
        return ""

    def _too_few(self, arm: int, relation: int, group: Sequence[int]) -> str:
        k = f"K={self._arms[arm]}"
        blocks = self._effective(group)
        weight = sum(self._sums[stratum][0, _TIME] for stratum in group)
        tokens = sum(self._sums[stratum][0, _MORE if relation == ABOVE else _BASE] for stratum in group)
        if not weight or not tokens:
            return f"no step of {k} there has a time and an acceptance of its own"
        if blocks >= LEAST_BLOCKS:
            return ""
        everything = relation == SAME and weight >= LEAST_SUPPORT * self._counts[group, 1].sum()
        if everything and blocks >= 2.0:
            return ""
        return f"{k} was drawn too rarely: {blocks:.1f} effective blocks, {LEAST_BLOCKS:g} are needed"

    def estimate(self, estimator: str, switches: SwitchSums) -> Estimate | None:
        """Return what the policy earns; None where too few steps are answered."""
        groups, refused = self._grouped()
        answered = 1.0 - sum(self._counts[stratum, 0] for stratum in refused) / max(self.steps, 1)
        if not groups or answered < LEAST_ANSWERED:
            return None
        sums = np.stack([sum(self._sums[s] for s in group) for group in groups])  # (groups, 1 + replicates, columns)
        number = np.array([self._counts[group, 0].sum() for group in groups])
        effective = np.array([max(self._effective(group), 1.5) for group in groups])
        outcome = 1 if estimator == "snips" else 2
        tokens = self._mean(sums, _BASE, outcome, effective) + self._mean(sums, _MORE, outcome, effective)
        seconds = self._mean(sums, _TIME, outcome, effective)
        logged_tokens = self._mean(sums, _LOGGED, outcome, effective)
        logged_seconds = self._mean(sums, _LOGGED_TIME, outcome, effective)
        if estimator == "doubly-robust":
            model = np.array([self._model[group].sum(axis=0) for group in groups]) / number[:, None]
            tokens, seconds = tokens + model[:, :1], seconds + model[:, 1:2]
            logged_tokens, logged_seconds = logged_tokens + model[:, 2:3], logged_seconds + model[:, 3:]
        made = self._switches[[stratum for group in groups for stratum in group]].sum(axis=0)
        paid = switches.seconds() @ made
        value = (number @ tokens) / (number @ seconds + paid)
        # The same tokens in the same states: a step that brings more of them is needed less often.
        work = number @ (logged_tokens * seconds / np.maximum(tokens, 1e-9)) + paid
        speedup = (number @ logged_seconds) / work
        # Each group's part in the variance of log V, for its degrees of freedom.
        of_tokens, of_seconds = number @ tokens[:, 0], number @ seconds[:, 0] + paid[0]
        part = number[:, None] * (tokens / of_tokens - seconds / of_seconds)
        variance = part[:, 1:].var(axis=1)
        freedom = variance.sum() ** 2 / max((variance**2 / (effective - 1.0)).sum(), 1e-300)
        low, high = _interval(value, freedom)
        gain_low, gain_high = _interval(speedup, freedom)
        share = number / number.sum()
        return Estimate(
            estimator,
            float(value[0]),
            low,
            high,
            float(1.0 / (share**2 / effective).sum()),
            float(speedup[0] - 1.0),
            gain_low - 1.0,
            gain_high - 1.0,
            answered,
        )

    @staticmethod
    def _mean(sums: FloatArray, column: int, outcome: int, effective: FloatArray) -> FloatArray:
        """Return self-normalised means, (strata, 1 + replicates); 0 where nothing has weight.

        A replicate without the stratum takes the mean of the whole. The bootstrap of n blocks shows
        (n-1)/n of the variance, so deviations are widened by as much.
        """
        weight = sums[:, :, column]
        whole = sums[:, :1, column + outcome] / np.where(weight[:, :1] > 0.0, weight[:, :1], 1.0)
        means = np.where(weight > 0.0, sums[:, :, column + outcome] / np.where(weight > 0.0, weight, 1.0), whole)
        widened = np.sqrt(effective / (effective - 1.0))[:, None]
        return np.asarray(whole + (means - whole) * widened, np.float64)


def needed_floor(
    cells: Sequence[Unanswered], steps: int, spread: float, block_steps: int, half_width: float = 0.02
) -> float:
    """Return the exploration floor at which a log of as many steps would answer; inf if none could.

    Two things are asked. Each K that the target runs in more than the 1 - LEAST_ANSWERED of the steps that
    may be left out must get LEAST_BLOCKS blocks, with half as many to spare. And the interval must come
    down to +-``half_width`` of the estimate: with floor e, m of N steps in question and blocks of B, whose
    settled steps are taken to be as alike as one, its variance is (m/N)^2 spread^2 / (e m / B), so
    e = (1.96 / half_width)^2 spread^2 B m / N^2.

    >>> cell = Unanswered((1, 1), (0, 1024), 3, 200_000, 0.0, "never run")
    >>> round(needed_floor([cell], 1_000_000, 0.3, 4), 4)
    0.0007
    """
    concerned = sum(cell.logged_steps for cell in cells)
    if not concerned:
        return 0.0
    # Neighbours of one K are estimated together; the K of fewest steps may go without.
    of_each: dict[int, int] = {}
    for cell in cells:
        of_each[cell.steps] = of_each.get(cell.steps, 0) + cell.logged_steps
    passed_over, smallest = 0, max(of_each.values())
    for count in sorted(of_each.values()):
        passed_over += count
        if passed_over > (1.0 - LEAST_ANSWERED) * steps:
            smallest = count
            break
    by_count = 1.5 * LEAST_BLOCKS * block_steps / smallest
    by_width = (1.96 / half_width) ** 2 * spread**2 * block_steps * concerned / steps**2
    needed = max(by_count, by_width)
    return needed if needed <= 0.25 else math.inf


def _range(edges: Sequence[int], row: int, least: int) -> tuple[int, int | None]:
    low = edges[row - 1] + 1 if row else least
    return low, edges[row] if row < len(edges) else None


def _interval(values: FloatArray, freedom: float) -> tuple[float, float]:
    """Return the 95 % interval of ``values[0]``, by the others, in logs."""
    error = float(np.log(values[1:]).std(ddof=1)) * student(max(freedom, 3.0))
    return float(values[0] * math.exp(-error)), float(values[0] * math.exp(error))


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t (Cornish & Fisher's expansion; within 1 % from 3 degrees on).

    >>> [round(student(freedom), 2) for freedom in (5.0, 30.0, 1e9)]
    [2.57, 2.04, 1.96]
    """
    z = 1.959964
    terms: tuple[Any, ...] = (
        z,
        (z**3 + z) / (4.0 * freedom),
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2),
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (384.0 * freedom**3),
    )
    return float(sum(terms))
