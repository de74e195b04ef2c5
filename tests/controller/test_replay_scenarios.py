"""What a replayed server can be made to do beyond a steady load, and that the learned policy copes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.replay.run import ReplayRun, examine, serve, simulate
from specpilot.controller.replay.scenario import Scenario
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.surface import acceptance_length
from specpilot.controller.simulation.workload import Arrival, KeyedDraws, Phase, generated_requests
from specpilot.policies.baselines import Truth
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Policy
from specpilot.sglang_hooks.wire import Hello

REQUESTS = generated_requests(500, seed=3)


def scenario(surface: str, seconds: float, **changes: Any) -> Scenario:
    given = {"concurrency": 8, "requests": REQUESTS, "seed": 1} | changes
    return Scenario(load_surface(surface), given.pop("requests"), seconds, given.pop("seed"), **given)


def settled_share(judged: JudgedSteps, begin: int) -> float:
    rest = judged.between(begin)
    return float(rest.expected.sum() / rest.best.sum())


# -- the ends of a run --


def test_a_run_ends_after_so_many_steps() -> None:
    run = serve("static:3", scenario("moe", np.inf, acceptance=0.6, steps=321))
    assert len(run.decodes) == 321
    assert run.seconds < 20.0


# -- a batch size that follows the time --


def test_the_batch_size_follows_the_time() -> None:
    limits = [(index * 0.5, (3, 8)[index % 2]) for index in range(20)]
    run = serve("static:3", scenario("h200-sglang", 10.0, decode_limits=limits, acceptance=0.6))
    for decode in run.decodes:
        assert decode.batch_size <= (3, 8)[int(decode.at / 0.5) % 2]
    sizes = [decode.batch_size for decode in run.decodes]
    assert sizes.count(3) > 300
    assert sizes.count(8) > 200
    # Those that pause lose nothing: all that was asked for is served in the end.
    assert run.tokens > 0
    assert len(run.ended_at) > 20


def test_resuming_is_charged_once_to_every_policy_alike() -> None:
    limits = [(index * 0.5, (2, 8)[index % 2]) for index in range(20)]
    asked = scenario("h200-sglang", 10.0, decode_limits=limits, acceptance=0.6, resume_seconds=0.5)
    surface = asked.surface.speculating

    def beyond(run: ReplayRun) -> list[float]:
        return [
            decode.seconds - surface.decode_seconds(decode.steps, decode.batch_size, decode.mean_context)
            for decode in run.decodes
        ]

    run = serve("batch-table:1:0,4:3", asked)
    resumed = [previous.steps == 0 and decode.steps > 0 for previous, decode in itertools.pairwise(run.decodes)]
    assert sum(resumed) >= 4
    assert beyond(run)[1:] == pytest.approx([0.5 if one else 0.0 for one in resumed], abs=1e-12)
    assert max(beyond(serve("static:3", asked))) == pytest.approx(0.0, abs=1e-12)
    assert simulate("batch-table:1:0,4:3", asked).reference_share < 0.9


# -- requests that differ --


def test_requests_with_acceptances_of_their_own() -> None:
    """Each accepts as often as its own says, and a step is judged by the sum of its requests."""
    mixed = [Arrival(0.0, 100, 400, acceptance=(0.9, 0.4)[index % 2]) for index in range(2)]
    run = serve("static:3", scenario("h200-sglang", 40.0, requests=mixed, concurrency=2))
    assert {(0.9, 0.4), (0.4, 0.9)} <= {decode.acceptances for decode in run.decodes}
    assert all(len(decode.acceptances) == decode.batch_size for decode in run.decodes)
    expected = sum(sum(acceptance_length(p, 3) for p in decode.acceptances) for decode in run.decodes)
    assert run.tokens == pytest.approx(expected, rel=0.02)
    judged = JudgedSteps.of(run.decodes, load_surface("h200-sglang").speculating)
    assert judged.expected.sum() == pytest.approx(expected)


def test_requests_that_are_alike_are_judged_as_one_acceptance() -> None:
    alike = [replace(request, acceptance=0.7) for request in REQUESTS]
    one, other = (
        simulate("static:5", scenario("moe", 10.0, requests=requests, acceptance=0.7)) for requests in (alike, REQUESTS)
    )
    assert one.reference_share == pytest.approx(other.reference_share)
    assert one.tokens_per_second == other.tokens_per_second


@pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.9, 1.0])
def test_draws_of_a_batch_are_those_of_its_requests(acceptance: float) -> None:
    class Request:
        def __init__(self, index: int, position: int) -> None:
            self.index, self.position = index, position

    draws = KeyedDraws(2)
    requests = [Request(index, 997 * index) for index in range(300)]
    for steps in (0, 1, 7):
        each = draws.accepted_each(requests, steps, acceptance)
        assert each == [draws.accepted(one.index, one.position, steps, acceptance) for one in requests]


# -- costs that drift --


def test_costs_drift_evenly_and_are_judged_as_they_are() -> None:
    drifting = scenario("h200-native-skip", 20.0, drifts_to=load_surface("h200-triton"), acceptance=0.6)
    run = serve("static:3", drifting)
    begin, end = drifting.surface.speculating, load_surface("h200-triton").speculating
    for decode in run.decodes[:: len(run.decodes) // 10]:
        of = decode.steps, decode.batch_size, decode.mean_context
        costs = begin.decode_seconds(*of), end.decode_seconds(*of)
        assert decode.seconds == pytest.approx(costs[0] + decode.at / 20.0 * (costs[1] - costs[0]))
    judged = drifting.judge(run.decodes)
    assert judged.goodput[3] == pytest.approx(judged.expected / judged.seconds)
    assert (judged.expected <= judged.best * (1.0 + 1e-9)).all()


# -- the learned policy --


def test_goodput_with_costs_that_drift() -> None:
    """Skipping costs half of K=3 at first and more than it at last."""
    drifting = scenario(
        "h200-native-skip", 90.0, drifts_to=load_surface("h200-triton"), concurrency=32, acceptance=0.35
    )
    _, judged = examine("goodput", drifting)
    assert settled_share(judged, 1000) >= 0.97


@pytest.mark.slow
def test_goodput_where_requests_differ() -> None:
    """No single acceptance says what a second draft brings; what positions were seen to accept does."""
    mixed = [replace(request, acceptance=(0.92, 0.3)[index % 2]) for index, request in enumerate(REQUESTS)]
    _, judged = examine("goodput", scenario("h200-sglang", 60.0, requests=mixed, concurrency=24))
    assert settled_share(judged, 1000) >= 0.97


def test_goodput_where_prefills_take_most_of_the_time() -> None:
    """As in Azure's code trace, 2,048 tokens in and 28 out: most decode steps follow a prefill."""
    requests = [replace(request, prompt_tokens=2048, output_tokens=28) for request in REQUESTS]
    heavy = scenario("h200-sglang", 60.0, requests=requests, acceptance=0.4)
    run = serve("goodput", heavy)
    judged = heavy.judge(run.decodes)
    assert judged.seconds.sum() < 0.2 * run.seconds
    assert settled_share(judged, 500) >= 0.98


def test_goodput_with_a_drafter_that_breaks_and_is_mended() -> None:
    """Nothing accepted from 15 s on and all as before from 35 s on, where skipping is cheap."""
    phases = [Phase(0.0, "good", 0.8), Phase(15.0, "broken", 0.0), Phase(35.0, "mended", 0.8)]
    broken = scenario("h200-native-skip", 55.0, concurrency=16, acceptance=phases)
    notes: list[tuple[float, str]] = []

    class Noting(Goodput):
        def decide(self, server: Hello, now: float) -> Any:
            plan = super().decide(server, now)
            notes.append((now, self.note))
            return plan

    def make(_hello: Hello, _truth: Truth) -> Policy:
        return Noting()

    judged = broken.judge(serve("goodput", broken, make).decodes)
    warned = [at for at, note in notes if "drafter broken" in note]
    assert 15.0 < warned[0] < 18.0
    # Decisions are half a second apart, and the first after the mend may have seen it already.
    assert 34.5 <= warned[-1] < 45.0
    for begin, end in ((5.0, 15.0), (20.0, 35.0), (42.0, 55.0)):
        part = judged.between(*np.searchsorted(judged.at, [begin, end]).tolist())
        assert part.expected.sum() / part.best.sum() >= 0.97, begin
    down, up = np.searchsorted(judged.at, [15.0, 35.0]).tolist()
    chosen_down, chosen_up = judged.steps_to_choose(down), judged.steps_to_choose(up)
    assert chosen_down is not None
    assert chosen_down <= 60
    assert chosen_up is not None
    assert chosen_up <= 300
