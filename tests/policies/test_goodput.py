"""The learned policy, run as the controller runs it, against servers whose truth is known (virtual time)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.replay.run import ReplayRun, serve, simulate
from specpilot.controller.replay.scenario import Scenario
from specpilot.controller.simulation.named_surfaces import NamedSurface, load_surface
from specpilot.controller.simulation.workload import generated_requests
from specpilot.policies.goodput import Goodput
from specpilot.sglang_hooks.table_policy import CompiledTable
from tests.support.messages import hello, record

REQUESTS = generated_requests(2000, seed=5)
SERVER = hello(candidate_steps=[0, 1, 3], captured_batch_sizes=[1, 2, 4, 8, 16], max_running_requests=16)


def scenario(surface: str | NamedSurface, concurrency: int, seconds: float, **changes: Any) -> Scenario:
    named = load_surface(surface) if isinstance(surface, str) else surface
    return Scenario(named, REQUESTS, seconds, changes.pop("seed", 1), concurrency=concurrency, **changes)


def share(run: ReplayRun, surface: NamedSurface, first: int, last: int | None = None) -> float:
    """Goodput of these decode steps, as a share of the best K's in each of their states."""
    judged = JudgedSteps.of(run.decodes[first:last], surface.speculating)
    return float(judged.expected.sum() / judged.best.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    "surface", ["h200-sglang", "h200-native-skip", "h200-triton", "h200-triton-skip", "moe", "context"]
)
@pytest.mark.parametrize(("concurrency", "seconds"), [(1, 100.0), (16, 130.0), (64, 200.0)])
def test_close_to_the_best_k_in_every_state(surface: str, concurrency: int, seconds: float) -> None:
    result = simulate("goodput", scenario(surface, concurrency, seconds))
    assert result.reference_share >= 0.97
    assert result.exploration_loss <= 0.005
    assert result.switches_per_100_steps - result.probe_switches_per_100_steps <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.35, 0.85])
@pytest.mark.parametrize("surface", ["h200-sglang", "h200-native-skip"])
def test_never_behind_the_best_fixed_k_at_constant_load(surface: str, acceptance: float) -> None:
    constant = scenario(surface, 32, 120.0, acceptance=acceptance)
    fixed = max(simulate(f"static:{k}", constant).reference_share for k in (0, 1, 2, 3, 5, 7))
    assert simulate("goodput", constant).reference_share >= fixed - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.2, 1.0, 8.0])
def test_cold_to_within_five_percent_whatever_a_step_costs(scale: float) -> None:
    """Nothing in the policy is in absolute seconds."""
    plain = load_surface("h200-sglang")
    costs = {
        k: replace(cost, seconds=tuple(tuple(scale * s for s in row) for row in cost.seconds))
        for k, cost in plain.speculating.costs.items()
    }
    surface = replace(plain, speculating=replace(plain.speculating, costs=costs))
    run = serve("goodput", scenario(surface, 8, 30.0 + 40.0 * scale, acceptance=0.75))
    settled = 300 if scale == 1.0 else 1500
    assert share(run, surface, settled, settled + 1000) >= 0.95


def decided(policy: Goodput, batch: int) -> int:
    plan = policy.decide(SERVER, 0.0)
    table = CompiledTable.compile(plan.table(1, 5.0, "goodput"), SERVER.candidate_steps)
    return table.choose(batch, 300.0, 3, 99, 1, explore=False).steps


SECONDS = {0: 0.005, 1: 0.0055, 3: 0.0065}


def steps(policy: Goodput, count: int, accept: float, batch: int = 8, seed: int = 0) -> None:
    """Feed steps of every K in blocks, with per-token acceptance ``accept``."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        k = (3, 1, 0)[number // 8 % 3]
        accepted = [int(np.argmin([*(rng.random(k) < accept), False])) for _ in range(batch)]
        policy.learn(
            record(
                record_seq=number + seed * 100_000,
                step=number,
                batch_size=batch,
                padded_batch_size=batch,
                context_tokens=300 * batch,
                steps=k,
                draft_tokens=k + 1,
                accepted_drafts=accepted,
                seconds=SECONDS[k] * (1.0 + 0.01 * rng.standard_normal()),
            )
        )


def test_a_drafter_that_breaks_is_switched_off_and_comes_back() -> None:
    policy = Goodput()
    policy.decide(SERVER, 0.0)
    steps(policy, 300, 0.7)
    assert decided(policy, 8) == 3
    steps(policy, 600, 0.0, seed=1)
    assert decided(policy, 8) == 0
    assert policy.acceptance.drafter_broken
    steps(policy, 300, 0.7, seed=2)
    assert decided(policy, 8) == 3
    assert not policy.acceptance.drafter_broken


def test_while_skipping_a_draft_that_could_win_is_probed_and_one_that_cannot_is_not() -> None:
    policy = Goodput()
    policy.decide(SERVER, 0.0)
    steps(policy, 900, 0.02)
    plan = policy.decide(SERVER, 0.0)
    cell = plan.grid.cell(8, 300.0)
    assert plan.choice[cell] == 0
    ((_, probability),) = plan.explore[cell]
    assert 0.0 < probability <= 2 / 140
    expensive = Goodput()
    expensive.decide(SERVER, 0.0)
    SECONDS.update({1: 0.02, 3: 0.05})
    try:
        steps(expensive, 900, 0.02)
    finally:
        SECONDS.update({1: 0.0055, 3: 0.0065})
    assert expensive.decide(SERVER, 0.0).explore == {}


def test_before_any_step_it_is_the_servers_fallback_everywhere() -> None:
    plan = Goodput().decide(SERVER, 0.0)
    assert set(plan.choice) == {SERVER.fallback_steps}
    assert plan.explore == {}
    assert "no steps seen yet" in plan.reason


def test_a_server_that_comes_back_different_is_learned_again() -> None:
    policy = Goodput()
    policy.decide(SERVER, 0.0)
    steps(policy, 300, 0.7)
    other = hello(candidate_steps=[0, 2], fallback_steps=2, captured_batch_sizes=[1, 2], max_running_requests=4)
    plan = policy.decide(other, 0.0)
    assert set(plan.choice) == {2}
    CompiledTable.compile(plan.table(1, 5.0, "goodput"), other.candidate_steps)


@pytest.mark.parametrize("sizes", [[], [1], [4, 8]])
def test_servers_with_few_or_no_graphs(sizes: list[int]) -> None:
    server = hello(candidate_steps=[0, 3], captured_batch_sizes=sizes, max_running_requests=64, context_length=512)
    policy = Goodput()
    for _ in range(5):
        plan = policy.decide(server, 0.0)
        CompiledTable.compile(plan.table(1, 5.0, "goodput"), server.candidate_steps)
        policy.learn(record(batch_size=2, padded_batch_size=2, steps=3, draft_tokens=4, accepted_drafts=[1, 2]))


def test_an_objective_forbids_what_may_not_meet_it_as_long_as_something_does() -> None:
    """K=3 accepts all or nothing, so its time per token is short on average and uncertain at first."""
    policy = Goodput(time_per_output_token=0.0045)
    free = Goodput()
    for each in (policy, free):
        each.decide(SERVER, 0.0)
        steps(each, 600, 0.7)
    assert decided(policy, 8) == decided(free, 8) == 3
    # 0.005 s and one token each: K=0 misses the objective, so it is neither chosen nor tried.
    plan = policy.decide(SERVER, 0.0)
    assert all(k != 0 for row in plan.explore.values() for k, _ in row)
    # An objective that nothing meets changes nothing.
    hopeless = Goodput(time_per_output_token=1e-6)
    hopeless.decide(SERVER, 0.0)
    steps(hopeless, 600, 0.7)
    assert decided(hopeless, 8) == 3


def test_a_switch_with_a_price_is_not_made_for_a_short_spell() -> None:
    policy = Goodput()
    policy.decide(SERVER, 0.0)
    steps(policy, 900, 0.15)  # K=0 is 4 % behind K=1, K=3 is 14 %
    cell = policy._grid.cell(8, 300.0)
    policy.decide(SERVER, 0.0)
    assert (policy._cells[cell].choice, policy._cells[cell].keep) == (1, frozenset())
    for kind in policy.cost._extras.values():
        kind.mean = 0.01
    policy.decide(SERVER, 0.0)
    assert policy._cells[cell].keep == frozenset()  # for hundreds of steps a switch pays
    for choice in [1] * 8 + [0] * 8 + [1] * 8 + [0] * 8:
        policy._spells.step(choice)
    plan = policy.decide(SERVER, 0.0)
    assert policy._cells[cell].keep == frozenset({0})
    assert all(probability < 0.1 for _, probability in plan.explore.get(cell, ()))
    # While K=0 is kept, acceptance is probed as while it is chosen: or it would be kept for ever.
    for seq in range(20):
        policy.learn(
            record(record_seq=10**6 + seq, batch_size=8, padded_batch_size=8, context_tokens=2400, steps=0,
                   draft_tokens=1, accepted_drafts=[0] * 8, seconds=SECONDS[0])
        )  # fmt: skip
    for kind in policy.cost._extras.values():
        kind.mean = 0.01
    plan = policy.decide(SERVER, 0.0)
    assert 0 in policy._cells[cell].keep
    assert plan.explore[cell]
    assert policy._cells[cell].winning > 0.15


def test_what_is_tried_while_skipping_is_known_afterwards() -> None:
    """One step of it would tell no seconds, and it would be tried for ever, at what a guess says it costs."""
    found = scenario("h200-triton-skip", 128, 60.0)
    policy = Goodput()
    run = serve("goodput", found, lambda *_: policy)
    assert share(run, found.surface, 300) >= 0.99
    truth = found.surface.speculating
    for steps in truth.steps:
        context = float(np.mean([decode.mean_context for decode in run.decodes[-200:]]))
        assert policy.cost.predict(steps, 128, context)[0] == pytest.approx(
            truth.decode_seconds(steps, 128, context), rel=0.2
        )


def test_a_stored_prior_decides_before_the_first_step() -> None:
    policy = Goodput()
    policy.decide(SERVER, 0.0)
    steps(policy, 900, 0.02)
    assert decided(policy, 8) == 0
    again = Goodput(prior=policy.to_prior())
    assert decided(again, 8) == 0
    assert "stored prior" in again.decide(SERVER, 0.0).reason
    assert again.note == ""
    assert Goodput().to_prior() is None


def test_a_skip_that_a_stored_prior_began_is_doubted_from_the_second_step_on() -> None:
    policy = Goodput()
    policy.decide(SERVER, 0.0)
    steps(policy, 900, 0.02)
    again = Goodput(prior=policy.to_prior())
    plan = again.decide(SERVER, 0.0)
    cell = plan.grid.cell(8, 300.0)
    assert plan.choice[cell] == 0
    again.learn(
        record(
            batch_size=8,
            padded_batch_size=8,
            context_tokens=2400,
            steps=0,
            draft_tokens=1,
            accepted_drafts=[0] * 8,
            seconds=SECONDS[0],
        )
    )
    assert again.urgent
    assert sum(probability for _, probability in again.decide(SERVER, 0.0).explore[cell]) > 0.4


@pytest.mark.parametrize("context_length", [0, 1000, 1500, 32768])
def test_a_cell_is_decided_at_the_contexts_that_its_steps_have(context_length: int) -> None:
    """Also at those beyond the last edge, which a server that says nothing of its context length may have."""
    policy = Goodput()
    policy.decide(hello(context_length=context_length), 0.0)
    for number in range(800):
        policy.learn(record(record_seq=number, step=number, batch_size=8, padded_batch_size=8, context_tokens=8 * 3000))
    assert "at batch 8, 3,000 tokens" in policy.decide(hello(context_length=context_length), 0.0).reason


def test_a_prior_of_another_server_is_ignored_and_said() -> None:
    policy = Goodput()
    policy.decide(SERVER, 0.0)
    steps(policy, 900, 0.3)
    other = Goodput(prior=policy.to_prior())
    plan = other.decide(hello(gpu="A100"), 0.0)
    assert set(plan.choice) == {3}
    assert "ignored" in other.note


@pytest.mark.parametrize("prior", [{"cost": 7}, {"cost": {}, "acceptance": []}, {"x": None}])
def test_nonsense_as_a_prior_is_ignored(prior: dict[str, Any]) -> None:
    policy = Goodput(prior=prior)
    assert set(policy.decide(SERVER, 0.0).choice) == {3}


def test_a_floor_draws_every_other_k_in_every_cell_but_loses_little() -> None:
    found = scenario("h200-sglang", 8, 60.0)
    policy = Goodput(exploration_floor=0.01)
    run = serve("goodput", found, lambda *_: policy)
    plan = policy.decide(policy._server or SERVER, 1e6)
    arms = set(found.surface.speculating.steps)
    assert set(plan.explore) == set(range(plan.grid.cells))
    assert all({k for k, _ in row} == arms - {plan.choice[cell]} for cell, row in plan.explore.items())
    assert plan.block_steps == 4
    half = found.judge(run.decodes).lost_seconds[len(run.decodes) // 2 :]
    seconds = sum(decode.seconds for decode in run.decodes[len(run.decodes) // 2 :])
    assert half.sum() / seconds < 0.004
