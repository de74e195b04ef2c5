"""Off-policy estimates: near the truth where it is known, as sure as they say, silent where nothing can be told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.controller.evaluate.evaluation import JudgedLog, fold_sums, judge
from specpilot.controller.evaluate.fold_models import fit_folds
from specpilot.controller.trace.checked_reader import Chunk
from specpilot.policies.interface import Grid, Plan
from specpilot.policies.offpolicy.bootstrap import poisson_weights
from specpilot.policies.offpolicy.estimators import ESTIMATORS
from specpilot.policies.offpolicy.follower import Follower
from specpilot.policies.offpolicy.overlap import Unanswered, needed_floor
from specpilot.sglang_hooks.table_policy import CompiledTable, uniform
from tests.support.logs import ARMS, Log, draws, table

LESS = table((1, 3), (7, 1), (13, 0))
MORE = table((1, 3), (13, 1), (33, 1))
BUSY = Log(30_000, 1, exploration=0.1)
"""Explored so much that 30,000 steps tell what 300,000 do at 1 %."""


def judged(log: Log, **plans: Plan | None) -> JudgedLog:
    folds = fold_sums(log.chunks(), log.hello)
    assert folds is not None
    tables = {name: None if plan is None else [plan] for name, plan in plans.items()}
    return judge(log.chunks(), log.hello, tables, fit_folds(folds, log.hello))


@pytest.mark.slow
@pytest.mark.parametrize("target", [LESS, MORE], ids=["less", "more"])
def test_intervals_hold_the_truth(target: Plan) -> None:
    held = dict.fromkeys(ESTIMATORS, 0)
    errors = []
    for seed in range(24):
        log = replace(BUSY, seed=seed)
        evaluation = judged(log, target=target)
        truth = log.truth(target)
        for estimator in ESTIMATORS:
            estimate = evaluation.sums["target"].estimate(estimator, evaluation.switches)
            assert estimate is not None
            assert estimate.answered == 1.0
            held[estimator] += estimate.low <= truth <= estimate.high
            errors.append(abs(estimate.estimate / truth - 1.0))
            assert estimate.high - estimate.low < 0.1 * truth
    # benchmarks/evaluate_coverage.py has 200 repetitions of a million steps.
    assert min(held.values()) >= 21
    assert max(errors) < 0.05


def test_where_acceptance_drifts_and_the_log_follows_it_only_by_its_draws() -> None:
    log = replace(BUSY, steps=60_000, drift=0.25)
    evaluation = judged(log, target=LESS)
    for estimator in ESTIMATORS:
        estimate = evaluation.sums["target"].estimate(estimator, evaluation.switches)
        assert estimate is not None
        assert estimate.estimate == pytest.approx(log.truth(LESS), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("target", [table((1, 3), (49, 1)), table((1, 1)), LESS])
def test_gain_is_in_speed_for_the_same_work(target: Plan) -> None:
    log = replace(BUSY, steps=120_000, exploration=0.03)
    evaluation = judged(log, target=target)
    for estimator in ESTIMATORS:
        estimate = evaluation.sums["target"].estimate(estimator, evaluation.switches)
        assert estimate is not None
        # What is logged also explores and switches, which costs a little.
        assert estimate.gain == pytest.approx(log.gain(target), abs=0.02)


def test_policies_that_tie_are_a_tie() -> None:
    log = replace(BUSY, tie=True, ending=0.0)
    plans = {"none": table((1, 0)), "one": table((1, 1)), "three": table((1, 3)), "less": LESS}
    evaluation = judged(log, **plans, logged=None)
    for name in plans:
        for estimator in ESTIMATORS:
            estimate = evaluation.sums[name].estimate(estimator, evaluation.switches)
            assert estimate is not None
            assert abs(estimate.gain) < 0.01
            assert estimate.gain_low - 2e-3 < 0.0 < estimate.gain_high + 2e-3


def test_what_was_logged_is_what_it_earned() -> None:
    log = replace(BUSY, prefills=0.0)
    evaluation = judged(log, logged=None)
    tokens = seconds = 0.0
    for chunk in log.chunks():
        accepted = chunk.columns.ragged("accepted_drafts").values
        tokens += float((accepted + 1)[accepted >= 0].sum())
        seconds += float(chunk.columns["seconds"].sum())
    for estimator in ESTIMATORS:
        estimate = evaluation.sums["logged"].estimate(estimator, evaluation.switches)
        assert estimate is not None
        assert estimate.estimate == pytest.approx(tokens / seconds, rel=2e-3)
        assert estimate.gain == pytest.approx(0.0, abs=1e-4)


def test_a_hiccup_of_the_host_is_no_property_of_a_k() -> None:
    class Hiccups(Log):
        def chunks(self) -> Iterator[Chunk]:
            for chunk in super().chunks():
                seconds = chunk.columns["seconds"]
                seconds = seconds.copy()
                explored = np.flatnonzero(chunk.columns["probability"] < 0.5)
                seconds[explored[::40]] = 30.0
                chunk.columns._arrays["seconds"] = seconds
                yield chunk

    calm, rough = (kind(30_000, 3, exploration=0.1) for kind in (Log, Hiccups))
    values = []
    for log in (calm, rough):
        evaluation = judged(log, target=LESS)
        estimate = evaluation.sums["target"].estimate("snips", evaluation.switches)
        assert estimate is not None
        values.append(estimate.estimate)
    assert evaluation.switches.outliers > 10
    assert values[1] == pytest.approx(values[0], rel=0.02)


# -- what cannot be told --


def test_without_exploration_only_what_ran_is_told() -> None:
    log = replace(BUSY, exploration=0.0)
    evaluation = judged(log, same=log.logged, less=LESS, logged=None)
    same = evaluation.sums["same"].estimate("doubly-robust", evaluation.switches)
    assert same is not None
    assert same.estimate == pytest.approx(log.truth(log.logged), rel=5e-3)
    assert evaluation.sums["less"].estimate("snips", evaluation.switches) is None
    cells = evaluation.sums["less"].overlap.unanswered()
    assert {cell.steps for cell in cells} == {0, 1}
    assert all("nothing was explored" in cell.reason for cell in cells)
    # Batch 7 and 8 lie in the region from 5 on; K=0 begins at 13.
    assert {cell.batch for cell in cells} == {(5, 8), (9, 16), (17, 32)}
    assert sum(cell.logged_steps for cell in cells) == pytest.approx(log.differing(LESS) * log.steps)


def test_a_k_that_was_no_alternative_is_named() -> None:
    class OnlyThree(Log):
        """Explores, but K=0 is never among the alternatives."""

        def chunks(self) -> Iterator[Chunk]:
            for chunk in super().chunks():
                steps = chunk.columns["steps"]
                never = (steps == 0) & (chunk.columns["probability"] < 0.5)
                for name in ("steps", "proposed_steps"):
                    chunk.columns._arrays[name] = np.where(never, 3, steps)
                chunk.columns._arrays["draft_tokens"] = chunk.columns._arrays["steps"] + 1
                yield chunk

    evaluation = judged(OnlyThree(30_000, 2, exploration=0.1), target=table((1, 3), (9, 0)))
    assert evaluation.sums["target"].estimate("doubly-robust", evaluation.switches) is None
    reasons = {cell.reason for cell in evaluation.sums["target"].overlap.unanswered()}
    assert reasons == {"K=0 was never drawn there: it was not among what was explored"}


def test_blocks_of_one_step_tell_no_time() -> None:
    evaluation = judged(replace(BUSY, block_steps=1), target=LESS)
    assert evaluation.sums["target"].estimate("snips", evaluation.switches) is None
    assert all("first steps after a switch" in cell.reason for cell in evaluation.sums["target"].overlap.unanswered())


@pytest.mark.slow
def test_the_floor_that_is_named_is_enough() -> None:
    log = replace(BUSY, steps=100_000, exploration=0.0)
    silent = judged(log, target=LESS)
    sums = silent.sums["target"]
    floor = needed_floor(sums.overlap.unanswered(), silent.steps, silent.switches.spread, 4)
    assert 1e-4 < floor < 0.02
    # The floor is of each other K.
    evaluation = judged(replace(log, exploration=2 * floor), target=LESS)
    estimate = evaluation.sums["target"].estimate("snips", evaluation.switches)
    assert estimate is not None
    assert (estimate.high - estimate.low) / 2.0 / estimate.estimate < 0.03


def test_no_floor_makes_a_short_log_answer() -> None:
    assert needed_floor([], 1000, 0.3, 4) == 0.0
    assert needed_floor([Unanswered((1, 1), (0, 1024), 3, 100, 0.0, "")], 1000, 0.3, 4) == math.inf


# -- the parts --


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_follower_runs_what_the_hooks_would(data: st.DataObject) -> None:
    arms = st.sampled_from(ARMS)
    grid = Grid((2, 5), (100,))
    choice = tuple(data.draw(st.lists(arms, min_size=6, max_size=6)))
    keep = tuple(data.draw(st.lists(st.frozensets(arms), min_size=6, max_size=6)))
    plan = Plan(grid, choice, keep, "", min_dwell_steps=data.draw(st.integers(0, 3)))
    states = data.draw(st.lists(st.tuples(st.integers(1, 7), st.sampled_from([50.0, 100.0, 150.0])), max_size=60))
    compiled = CompiledTable.compile(plan.table(1, 5.0, "p"), list(ARMS))
    held, since, expected = 3, 0, []
    for batch, context in states:
        now = compiled.choose(batch, context, held, since, 1).held
        held, since = now, since + 1 if now == held else 0
        expected.append(ARMS.index(now))
    follower = Follower([plan], ARMS, 3)
    batch, context = np.array([b for b, _ in states], int), np.array([c for _, c in states], float)
    cut = len(states) // 2
    numbers = [
        follower.follow(batch[part], context[part], np.zeros(len(batch[part]), int)).tolist()
        for part in (slice(0, cut), slice(cut, None))
    ]
    assert numbers[0] + numbers[1] == expected


def test_draws_are_those_of_the_hooks() -> None:
    blocks = np.array([0, 1, 77, 10**6])
    assert draws(1 << 60, blocks).tolist() == [uniform(1 << 60, int(block)) for block in blocks]


def test_bootstrap_weights_are_poisson_and_repeat() -> None:
    weights = poisson_weights(np.arange(20_000), 64)
    assert (weights[:, 0] == 1.0).all()
    assert abs(np.corrcoef(weights[:, 1:9].T)[0, 1:]).max() < 0.03
    assert (poisson_weights(np.array([7, 19_999]), 64) == weights[[7, 19_999]]).all()
