"""Exploration: worth its price, within its budget, evenly spread."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot.policies.rules.exploration import (
    FLOOR_SHARE,
    LEAST_LOSS,
    MOST_EXPLORED,
    Budget,
    alternatives,
    expected_improvement,
    floored,
    probe,
)

SCORES = st.lists(st.floats(1.0, 1e6), min_size=2, max_size=8)


@given(SCORES, st.floats(0.0, 1.0))
def test_expected_improvement_is_never_negative_and_at_least_the_difference(scores: list[float], error: float) -> None:
    best = max(range(len(scores)), key=scores.__getitem__)
    found = expected_improvement(scores, [error] * len(scores), best)
    assert found[best] == 0.0
    assert all(gain >= -1e-12 for gain in found)
    worse = expected_improvement(scores, [error] * len(scores), 0)
    assert all(
        gain >= score / scores[0] - 1.0 - 1e-9 * score / scores[0]
        for gain, score in zip(worse[1:], scores[1:], strict=True)
    )


def test_expected_improvement_agrees_with_sampling() -> None:
    draws = random.Random(1)
    scores, errors = [100.0, 97.0, 25.0], [0.0, 0.05, 0.8]
    found = expected_improvement(scores, errors, 0)
    for arm in (1, 2):
        drawn = (scores[arm] / 100.0 * math.exp(draws.gauss(0.0, errors[arm])) for _ in range(400_000))
        sampled = [max(ratio - 1.0, 0.0) for ratio in drawn]
        assert found[arm] == pytest.approx(sum(sampled) / len(sampled), rel=0.05)


def test_an_arm_of_which_next_to_nothing_is_known_is_tried_however_bad_it_looks() -> None:
    """A skip by other kernels than the steps it is told from: a factor of four is within its error."""
    scores = [100.0, 25.0, 25.0]
    tried = alternatives([5, 0, 1], scores, [0.0, 0.8, 0.1], 0, loss_of(scores, 0), rate=0.01)
    assert [arm for arm, _ in tried] == [0]


def loss_of(scores: list[float], best: int) -> list[float]:
    return [1.0 - score / scores[best] for score in scores]


def test_what_cannot_win_is_not_tried() -> None:
    scores = [100.0, 60.0, 50.0]
    assert alternatives([0, 1, 3], scores, [0.02] * 3, 0, loss_of(scores, 0), rate=0.1) == ()
    scores = [100.0, 98.0, 50.0]
    ((arm, probability),) = alternatives([0, 1, 3], scores, [0.03] * 3, 0, loss_of(scores, 0), rate=0.1)
    assert arm == 1
    assert 0.0 < probability <= 0.1 / LEAST_LOSS
    ((_, dear),) = alternatives([0, 1, 3], scores, [0.03] * 3, 0, [0.0, 1.0, 1.0], rate=0.1)
    assert 0.0 < dear < probability / 2


@given(SCORES, st.floats(0.001, 0.5), st.floats(0.0, 0.5))
def test_what_is_tried_costs_at_most_the_rate(scores: list[float], error: float, rate: float) -> None:
    best = max(range(len(scores)), key=scores.__getitem__)
    losses = loss_of(scores, best)
    tried = alternatives(list(range(len(scores))), scores, [error] * len(scores), best, losses, rate)
    assert sum(p * losses[arm] for arm, p in tried) <= rate * 1.001
    assert sum(p for _, p in tried) <= 0.501


def test_a_budget_earns_its_rate_and_keeps_little_of_it() -> None:
    budget = Budget()
    for _ in range(10_000):
        budget.spend(0.0)
    assert budget.saved <= budget.credit < 2.5 * budget.saved
    spent = 0.0
    for _ in range(100_000):
        lost = min(budget.affordable_rate(100), 0.5)
        spent += lost
        budget.spend(lost)
    assert spent <= budget.initial + 100_000 * budget.rate
    budget.reopen()
    assert budget.credit == budget.initial / 2
    for _ in range(1000):
        budget.spend(0.02)
    budget.reopen()
    assert budget.credit == pytest.approx(1000 * budget.rate)


@given(st.floats(0.0, 1.0))
def test_a_probe_loses_half_a_percent_at_most(loss: float) -> None:
    assert probe(loss) * loss <= 0.004 * 1.006
    assert probe(loss) <= 1 / 90


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans(), st.floats(0.0, 0.08)), min_size=2, max_size=6),
    st.floats(0.0, 0.1),
)
def test_a_floor_draws_every_k_and_loses_little(arms: list[tuple[float, bool, float]], floor: float) -> None:
    steps = list(range(len(arms)))
    losses = [0.0, *(loss for loss, _, _ in arms[1:])]
    allowed = [True, *(within for _, within, _ in arms[1:])]
    tried = tuple((k, p) for k, (_, within, p) in enumerate(arms) if k and within and p > 1e-3)
    found = dict(floored(tried, steps, 0, losses, allowed, floor, rate=0.004))
    before = dict(tried)
    assert 0 not in found
    assert all(allowed[k] for k in found)
    assert all(found[k] >= p for k, p in before.items())
    assert sum(found.values()) < MOST_EXPLORED + max(sum(before.values()) - MOST_EXPLORED, 0.0) + 1e-9
    added = {k: p - before.get(k, 0.0) for k, p in found.items()}
    assert sum(p * losses[k] for k, p in added.items()) <= FLOOR_SHARE * 0.004 + 1e-9
    for k in steps[1:]:
        if allowed[k] and losses[k] * floor * len(steps) < 1e-3 and floor > 1e-3 and sum(before.values()) < 0.1:
            assert found[k] > 0.8 * floor / 1.2 or floor * len(steps) > 0.3
