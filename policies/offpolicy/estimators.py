"""What another policy would have earned in the states that were logged: off-policy estimates of efficiency.

    LoggedSteps ──► Follower: what pi runs ──► PolicySums.add, by stratum and replicate ──► PolicySums.estimate

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
  kind (from K=0, to K=0, other), times the switches that pi makes along the logged states (``switch_sums.py``).

Estimators, computed by stratum (``overlap.py``) and weighed by the number of logged steps in each, with
w = 1/probability where the draw is the one asked for, else 0:

- ``snips``: the self-normalised mean sum(w y) / sum(w) of each stratum (Swaminathan & Joachims, "The
  self-normalized estimator for counterfactual learning", NeurIPS 2015).
- ``doubly-robust``: the mean of a model's m(x, pi) over all steps of the stratum plus the self-normalised
  mean of y - m in the steps drawn (Dudik, Langford & Li, "Doubly robust policy evaluation and learning",
  ICML 2011). Right where either the probabilities or the model are; the model is of the other fold.

Intervals: blocks are resampled (``bootstrap.py``). The numbers of steps by stratum are held fixed: the
estimate is about the states that were logged. The deviation of log V over the replicates gives a Student
interval whose degrees of freedom are Welch & Satterthwaite's over the strata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpilot.policies.offpolicy.bootstrap import Blocks, interval
from specpilot.policies.offpolicy.logged_steps import BoolArray, FloatArray, IntArray, LoggedSteps
from specpilot.policies.offpolicy.overlap import ABOVE, BELOW, LEAST_ANSWERED, SAME, Overlap
from specpilot.policies.offpolicy.step_model import Predicted
from specpilot.policies.offpolicy.switch_sums import KINDS, SwitchSums, switch_kinds

ESTIMATORS = ("snips", "doubly-robust")

BASE, MORE, TIME, LOGGED_TOKENS, LOGGED_TIME = range(5)
"""Quantities that are summed: tokens up to the K held, tokens beyond it and seconds, of the target; and the tokens
and seconds of what ran, whatever it was."""
WEIGHT, OUTCOME, RESIDUAL = range(3)
"""What is summed of each quantity: weights, weighted outcomes, and what these are above the model's."""


@dataclass(frozen=True)
class EfficiencyEstimate:
    """Efficiency of one policy by one estimator, tokens per second of decoding."""

    estimator: str
    """Name of the estimator, one of ESTIMATORS."""
    estimate: float
    """Tokens per second of decoding."""
    low: float
    """Lower end of the 95 % interval of ``estimate``."""
    high: float
    """Upper end of the 95 % interval of ``estimate``."""
    effective_samples: float
    """Independent draws that the estimate rests on: a simple mean of so many blocks would be as sure."""
    gain: float
    """Gain in speed over what was logged, as a share, for the same tokens in the same states."""
    gain_low: float
    """Lower end of the 95 % interval of ``gain``."""
    gain_high: float
    """Upper end of the 95 % interval of ``gain``."""
    answered: float
    """Share of the logged steps that the estimate is about."""


class PolicySums:
    """One target policy: what there is of it in the log, streamed; memory does not depend on the log's length."""

    def __init__(self, arms: Sequence[int], logged: bool = False) -> None:
        """``arms``: candidate K. ``logged``: the target is what was run, exploration included."""
        self._arms = np.array(arms, np.int64)
        self._logged = logged
        self.overlap = Overlap(self._arms)
        count = self.overlap.strata.count
        self._sums: dict[int, FloatArray] = {}
        """Sums of shape (1 + replicates, quantities, 3), by stratum."""
        self._model = np.zeros((count, 4))
        """Tokens and seconds that the model expects of the target, and of what was run, summed, shape (strata, 4)."""
        self._switches = np.zeros((count, KINDS))
        """Switches of the target, shape (strata, KINDS); those of the log are in the times of its steps."""
        self._last = -1

    def add(
        self, steps: LoggedSteps, target: IntArray, predicted: Predicted, outlier: BoolArray, blocks: Blocks
    ) -> None:
        """Add a chunk of steps; ``target``: the arm that the policy runs in each, shape (steps,)."""
        if not len(steps):
            return
        rows = np.arange(len(steps))
        timed = steps.timed & ~outlier
        if self._logged:
            held, weight = steps.arm, np.ones(len(steps))
            can_settle, of_pair, drawn = timed, weight, np.ones(len(steps), bool)
        else:
            held, weight = steps.held, 1.0 / steps.probability
            # A row of the held K goes on from block to block; what is explored begins again with each.
            can_settle = timed & np.where(target == held, steps.same_cell, steps.same_block)
            of_pair = np.where(steps.same_block, weight, weight / steps.previous_probability)
            drawn = (steps.arm == target) & (steps.previous_arm == steps.arm)
        relation = np.where(target == held, SAME, np.where(target < held, BELOW, ABOVE))
        wanted, known, ran = self._arms[target], self._arms[np.minimum(target, held)], self._arms[steps.arm]
        lengths = steps.live[:, None] * predicted.lengths
        model_seconds, model_ran_seconds = predicted.seconds[rows, target], predicted.seconds[rows, steps.arm]

        base = np.where(steps.informative & (steps.arm == held), weight, 0.0)
        more = np.where(steps.informative & (steps.arm == target) & (relation == ABOVE), weight, 0.0)
        time = np.where(drawn & can_settle, of_pair, 0.0)
        tokens = steps.tokens
        quantities = (
            (base, tokens[rows, known], lengths[rows, known]),
            (more, tokens[rows, wanted] - tokens[rows, known], lengths[rows, wanted] - lengths[rows, known]),
            (time, steps.seconds, model_seconds),
            (steps.informative, tokens[rows, ran], lengths[rows, ran]),
            (timed, steps.seconds, model_ran_seconds),
        )
        stratum = self.overlap.strata.of(steps.batch_size, steps.mean_context, target, relation)
        squares = self._bootstrap(stratum, quantities, blocks)

        def total(values: FloatArray | BoolArray | None) -> FloatArray:
            return np.bincount(stratum, values, self.overlap.strata.count).astype(np.float64)

        here = self.overlap
        here.steps += total(None)
        here.explorable += total(steps.explorable)
        here.ran += total(steps.arm == target)
        here.can_settle += total(can_settle)
        here.weight += total(time)
        here.squares += squares
        here.tokens += total(np.where(relation == ABOVE, more, base))
        modelled = (lengths[rows, wanted], model_seconds, lengths[rows, ran], model_ran_seconds)
        self._model += np.stack([total(values) for values in modelled], axis=1)
        if not self._logged:
            self._count_switches(stratum, np.concatenate(([self._last], target[:-1])), target)
        self._last = int(target[-1])

    def _bootstrap(
        self,
        stratum: IntArray,
        quantities: Sequence[tuple[FloatArray | BoolArray, FloatArray, FloatArray]],
        blocks: Blocks,
    ) -> FloatArray:
        """Add to the sums of every replicate, by way of those of each block and stratum.

        ``quantities``: weight, outcome and what the model says, each (steps,). Returns the
        squared weights of the times, summed over blocks, (strata,).
        """
        pairs, pair_of = np.unique(stratum * len(blocks.weights) + blocks.index, return_inverse=True)
        columns = (
            np.bincount(pair_of, column, len(pairs))
            for weight, outcome, model in quantities
            for column in (weight, weight * outcome, weight * (outcome - model))
        )
        sums = np.stack(list(columns), axis=1)
        strata, block = np.divmod(pairs, len(blocks.weights))
        present, begins = np.unique(strata, return_index=True)
        for index, begin, end in zip(present.tolist(), begins, [*begins[1:], len(pairs)], strict=True):
            added = blocks.weights[block[begin:end]].T @ sums[begin:end]
            added = added.reshape(len(added), len(quantities), 3)
            self._sums[index] = self._sums[index] + added if index in self._sums else added
        squares = np.bincount(strata, sums[:, 3 * TIME + WEIGHT] ** 2, self.overlap.strata.count)
        return squares.astype(np.float64)

    def _count_switches(self, stratum: IntArray, before: IntArray, after: IntArray) -> None:
        at = np.flatnonzero((before >= 0) & (before != after))
        code = stratum[at] * KINDS + switch_kinds(self._arms, before[at], after[at])
        counts = np.bincount(code, minlength=self.overlap.strata.count * KINDS)
        self._switches += counts.reshape(self.overlap.strata.count, KINDS)

    def estimate(self, estimator: str, switches: SwitchSums) -> EfficiencyEstimate | None:
        """Return what the policy earns by one of ESTIMATORS; None where too few steps are answered."""
        groups, _ = self.overlap.groups()
        answered = self.overlap.answered
        if not groups or answered < LEAST_ANSWERED:
            return None
        number = np.array([self.overlap.steps[group.strata].sum() for group in groups])
        effective = np.array([max(self.overlap.effective(group.drawn), 1.5) for group in groups])
        outcome = OUTCOME if estimator == "snips" else RESIDUAL

        def mean(quantity: int) -> FloatArray:
            # What ran is known of every step, the target only of those where it could be drawn.
            logged = quantity in (LOGGED_TOKENS, LOGGED_TIME)
            sums = [
                sum(self._sums[stratum][:, quantity] for stratum in (group.strata if logged else group.drawn))
                for group in groups
            ]
            return _self_normalised(np.stack(sums), outcome, effective)

        tokens, seconds = mean(BASE) + mean(MORE), mean(TIME)
        logged_tokens, logged_seconds = mean(LOGGED_TOKENS), mean(LOGGED_TIME)
        if estimator == "doubly-robust":
            model = np.stack([self._model[group.strata].sum(axis=0) for group in groups]) / number[:, None]
            tokens, seconds = tokens + model[:, :1], seconds + model[:, 1:2]
            logged_tokens, logged_seconds = logged_tokens + model[:, 2:3], logged_seconds + model[:, 3:]
        made = self._switches[[stratum for group in groups for stratum in group.strata]].sum(axis=0)
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
        low, high = interval(value, freedom)
        gain_low, gain_high = interval(speedup, freedom)
        share = number / number.sum()
        return EfficiencyEstimate(
            estimator=estimator,
            estimate=float(value[0]),
            low=low,
            high=high,
            effective_samples=float(1.0 / (share**2 / effective).sum()),
            gain=float(speedup[0] - 1.0),
            gain_low=gain_low - 1.0,
            gain_high=gain_high - 1.0,
            answered=answered,
        )


def _self_normalised(sums: FloatArray, outcome: int, effective: FloatArray) -> FloatArray:
    """Return means of ``sums``, (groups, 1 + replicates, 3), as (groups, 1 + replicates); 0 where nothing has weight.

    A replicate without the group takes the mean of the whole. The bootstrap of n blocks shows
    (n-1)/n of the variance, so deviations are widened by as much.
    """
    weight = sums[:, :, WEIGHT]
    whole = sums[:, :1, outcome] / np.where(weight[:, :1] > 0.0, weight[:, :1], 1.0)
    means = np.where(weight > 0.0, sums[:, :, outcome] / np.where(weight > 0.0, weight, 1.0), whole)
    widened = np.sqrt(effective / (effective - 1.0))[:, None]
    return np.asarray(whole + (means - whole) * widened, np.float64)
