"""The lookup: pure, hysteretic, bounded, and equal on every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot.policies.interface import PolicyError
from specpilot.policies.static import Static
from specpilot.policies.threshold import Threshold
from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.table_policy import CompiledTable, TableError, TablePolicy
from specpilot.sglang_hooks.wire import DecisionSource, DecisionTable
from tests.support.messages import hello, table

CANDIDATES = [0, 1, 3]


def policy(settings: Settings | None = None, initial: int = 3) -> TablePolicy:
    return TablePolicy(settings or Settings(), CANDIDATES, initial)


def adopt(target: TablePolicy, message: DecisionTable) -> None:
    target.adopt(CompiledTable.compile(message, CANDIDATES))


def steps_of(target: TablePolicy, batches: list[int]) -> list[int]:
    answers = []
    for batch in batches:
        target.forward_iter += 1
        answers.append(target.get_steps_for_batch(batch))
    return answers


def switches(answers: list[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(answers))


def test_fallback_until_a_table_arrives_and_again_after_it() -> None:
    target = policy(Settings(fallback=1))
    assert steps_of(target, [1, 64]) == [1, 1]
    adopt(target, table(steps=0))
    assert steps_of(target, [1, 64]) == [0, 0]
    target.set_source(DecisionSource.FALLBACK)
    assert steps_of(target, [1, 64]) == [1, 1]


def test_a_batch_hovering_at_the_threshold_does_not_flap() -> None:
    """Sawtooth 3..6 over a threshold of 5: the public failure had two switches a period."""
    plan = Threshold(threshold=5, steps=3, band=1).decide(hello(candidate_steps=CANDIDATES), 0.0)
    target = policy()
    adopt(target, plan.table(1, 5.0, "threshold"))
    sawtooth = [3, 4, 5, 6, 5, 4] * 200
    assert switches(steps_of(target, sawtooth)) == 0
    assert steps_of(target, [7, 6, 5, 6, 5]) == [0, 0, 0, 0, 0]
    assert steps_of(target, [4, 5, 6, 7, 4]) == [3, 3, 3, 0, 3]
    without = Threshold(threshold=5, steps=3, band=0).decide(hello(candidate_steps=CANDIDATES), 0.0)
    adopt(target, without.table(2, 5.0, "threshold"))
    assert switches(steps_of(target, sawtooth)) == pytest.approx(400, abs=2)


@given(
    st.integers(1, 300),
    st.integers(0, 40),
    st.lists(st.integers(1, 400), min_size=1, max_size=200),
)
def test_threshold_is_obeyed_outside_its_band(threshold: int, band: int, batches: list[int]) -> None:
    if band >= threshold:
        with pytest.raises(ValueError, match="smaller than threshold"):
            Threshold(threshold, 3, band)
        return
    plan = Threshold(threshold, 3, band).decide(hello(candidate_steps=CANDIDATES), 0.0)
    target = policy()
    adopt(target, plan.table(1, 5.0, "threshold"))
    before = 3
    for batch, steps in zip(batches, steps_of(target, batches), strict=True):
        if batch <= threshold - band:
            assert steps == 3
        elif batch > threshold + band:
            assert steps == 0
        else:
            assert steps == before or band == 0
        before = steps


@pytest.mark.parametrize("threshold", range(1, 70))
def test_whatever_the_threshold_speculation_comes_back_for_one_request(threshold: int) -> None:
    target = policy()
    adopt(target, Threshold(threshold).decide(hello(candidate_steps=CANDIDATES), 0.0).table(1, 5.0, "threshold"))
    assert steps_of(target, [1, 1000, 1]) == [3, 0, 3]


def test_dwell_holds_a_switch_back() -> None:
    target = policy()
    adopt(target, table(choice=[3, 0], keep=[[], []], batch_edges=[5], min_dwell_steps=4))
    answers = steps_of(target, [3, 6] * 50)
    assert switches(answers) <= 100 // 4


def test_the_servers_own_bound_beats_every_table() -> None:
    target = policy(Settings(max_steps_by_batch=((8, 1), (32, 0))))
    adopt(target, table(steps=3))
    assert steps_of(target, [1, 7, 8, 31, 32, 400]) == [3, 3, 1, 1, 0, 0]
    capped = target.take_launch(target.forward_iter)
    assert capped is not None
    assert (capped.steps, capped.proposed_steps, capped.held_steps) == (0, 0, 0)
    assert (capped.probability, capped.block) == (1.0, -1)


def test_a_draw_beyond_the_servers_bound_is_no_exploration() -> None:
    target = policy(Settings(max_steps_by_batch=((1, 1),)))
    adopt(target, table(steps=0, explore={0: [(3, 0.5)]}, block_steps=1))
    launches = []
    for _ in range(64):
        steps_of(target, [2])
        launches.append(target.take_launch(target.forward_iter))
    found = {(one.proposed_steps, one.held_steps, one.probability, one.block >= 0) for one in launches if one}
    assert found == {(0, 0, 0.5, True), (1, 1, 1.0, False)}


def test_context_regions() -> None:
    target = policy()
    adopt(target, table(choice=[3, 0], keep=[[], []], context_edges=[1024]))
    target.mean_context = 1024.0
    assert steps_of(target, [1]) == [3]
    target.mean_context = 1024.5
    assert steps_of(target, [1]) == [0]


EXPLORING = table(epoch=9, steps=3, explore={0: [(1, 0.2), (0, 0.1)]}, block_steps=5)


def test_exploration_comes_in_blocks_with_its_probability_and_is_equal_on_every_rank() -> None:
    ranks = [policy(), policy()]
    launches = []
    for rank in ranks:
        adopt(rank, EXPLORING)
        seen = []
        for _ in range(20_000):
            steps_of(rank, [4])
            launch = rank.take_launch(rank.forward_iter)
            assert launch is not None
            seen.append(launch)
        launches.append(seen)
    assert launches[0] == launches[1]
    assert ranks[0].decision_hash == ranks[1].decision_hash
    for block, members in itertools.groupby(launches[0], key=lambda launch: launch.block):
        drawn = list(members)
        assert {launch.forward_iter // 5 for launch in drawn} == {block}
        assert len({launch.steps for launch in drawn}) == 1
    blocks = {launch.block: launch for launch in launches[0]}
    for steps, probability in ((3, 0.7), (1, 0.2), (0, 0.1)):
        share = sum(launch.steps == steps for launch in blocks.values()) / len(blocks)
        assert share == pytest.approx(probability, abs=0.03)
        (logged,) = {launch.probability for launch in blocks.values() if launch.steps == steps}
        assert logged == pytest.approx(probability)


def test_a_probe_does_not_stick_though_its_k_may_be_kept() -> None:
    target = policy()
    adopt(target, table(epoch=9, steps=3, keep=[[0, 1]], explore={0: [(1, 0.5)]}, block_steps=4))
    steps_of(target, [4] * 4000)
    assert target.held_steps == 3


def test_a_stale_table_explores_nothing() -> None:
    target = policy()
    adopt(target, EXPLORING)
    target.set_source(DecisionSource.STALE)
    assert set(steps_of(target, [4] * 2000)) == {3}
    launch = target.take_launch(target.forward_iter)
    assert launch is not None
    assert (launch.source, launch.probability, launch.block) == (DecisionSource.STALE, 1.0, -1)


def test_halting_stops_at_one_k_whatever_arrives() -> None:
    target = policy(Settings(max_steps_by_batch=((8, 1),)))
    assert target.halt_steps == 1
    target.halt(target.halt_steps, "why")
    adopt(target, table(steps=3))
    target.set_source(DecisionSource.TABLE)
    assert steps_of(target, [1, 100]) == [1, 1]
    assert (target.source, target.halt_reason) == (DecisionSource.HALTED, "why")


def test_a_failing_lookup_halts_and_never_raises() -> None:
    target = policy()
    adopt(target, table(steps=0))
    target.mean_context = None  # type: ignore[assignment]
    adopt(target, table(epoch=2, choice=[0, 0], keep=[[], []], context_edges=[10]))
    assert steps_of(target, [4, 4]) == [3, 3]
    assert target.source == DecisionSource.HALTED


def test_launches_are_found_by_their_forward_and_bounded() -> None:
    target = policy()
    steps_of(target, [1] * 100)
    assert target.take_launch(1) is None
    newest = target.take_launch(100)
    assert newest is not None
    assert newest.forward_iter == 100
    assert target.take_launch(100) is None
    assert target.take_launch(101) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"choice": [7]}, r"steps \[7\] were not declared"),
        ({"keep": [[5]]}, r"steps \[5\] were not declared"),
        ({"explore": {0: [(2, 0.1)]}}, r"steps \[2\] were not declared"),
        ({"choice": [1, 1]}, "choice has 2 cells, the edges make 1"),
        ({"keep": []}, "keep has 0 cells"),
        ({"batch_edges": [4, 4], "choice": [1] * 3, "keep": [[]] * 3}, "batch_edges must rise"),
        ({"batch_edges": [-1], "choice": [1] * 2, "keep": [[]] * 2}, "not be negative"),
        ({"batch_edges": list(range(600))}, "at most 511"),
        ({"explore": {3: [(1, 0.1)]}}, "explore names cell 3"),
        ({"explore": {0: [(1, 0.7), (3, 0.7)]}}, "probabilities"),
        ({"explore": {0: [(1, float("nan"))]}}, "probabilities"),
        ({"epoch": 0}, "epoch 0"),
        ({"block_steps": 0}, "block_steps 0"),
        ({"lease_seconds": float("inf")}, "lease_seconds"),
        ({"lease_seconds": -1.0}, "lease_seconds"),
    ],
)
def test_a_table_that_must_not_be_applied_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(TableError, match=says):
        CompiledTable.compile(table(**changes), CANDIDATES)


def test_policies_refuse_servers_they_cannot_serve() -> None:
    with pytest.raises(PolicyError, match="cannot skip"):
        Threshold(5).decide(hello(candidate_steps=[1, 3]), 0.0)
    with pytest.raises(PolicyError, match=r"policy\.steps = 2"):
        Threshold(5, steps=2).decide(hello(), 0.0)
    with pytest.raises(PolicyError, match=r"policy\.steps = 7"):
        Static(7).decide(hello(), 0.0)
    with pytest.raises(SettingsError, match="SPECPILOT_FALLBACK=2"):
        policy(Settings(fallback=2))
