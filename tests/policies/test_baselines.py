"""The policies for comparison: what they choose, what they refuse, and how SGLang's own is driven."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specpilot.controller.replay.run import serve, simulate
from specpilot.controller.replay.scenario import Scenario
from specpilot.controller.simulation.clock import VirtualClock
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.server import SimServer
from specpilot.controller.simulation.workload import Arrival, KeyedDraws, Phase, Workload
from specpilot.policies.baselines import BatchTable, InformedGreedy, SGLangAdaptive, Truth, sglang_params
from specpilot.policies.interface import PolicyError
from specpilot.sglang_hooks.settings import Settings
from tests.support.messages import hello

CANDIDATES = [0, 1, 2, 3, 5, 7]


def choice(policy: BatchTable | InformedGreedy, batch_size: int, context: float = 100.0, now: float = 0.0) -> int:
    plan = policy.decide(hello(candidate_steps=CANDIDATES), now)
    return plan.choice[plan.grid.cell(batch_size, context)]


def test_the_batch_table_has_a_default_and_reads_others() -> None:
    sizes = (1, 7, 8, 31, 32, 63, 64, 500)
    assert [choice(BatchTable.parse(""), size) for size in sizes] == [5, 5, 3, 3, 1, 1, 0, 0]
    assert [choice(BatchTable.parse("1:7,4:2"), size) for size in (1, 3, 4, 9)] == [7, 7, 2, 2]
    assert choice(BatchTable.parse("1:2"), 9) == 2


@pytest.mark.parametrize("text", ["8:3", "1:3,1:2", "1:3,8:2,4:0", "1:3,", "1", "1:-1", "a:3"])
def test_a_batch_table_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"batch size"):
        BatchTable.parse(text)


def test_a_batch_table_with_a_foreign_k_is_refused_for_that_server() -> None:
    with pytest.raises(PolicyError, match=r"K=5 from batch size 1 on is not among the candidate steps \[0, 1, 3\]"):
        BatchTable().decide(hello(), 0.0)


def test_informed_greedy_follows_the_truth_in_batch_context_and_time() -> None:
    def seconds(steps: int, batch_size: int, context: float) -> float:
        return 1.0 + (0.0 if context > 1000 else 0.1 * batch_size) * steps

    policy = InformedGreedy(Truth(seconds, lambda now: 0.8 if now < 60 else 0.0))
    assert choice(policy, 1, context=5000) == choice(policy, 64, context=5000) == 7
    assert choice(policy, 64) == 0
    assert 0 < choice(policy, 2) < 7
    assert choice(policy, 2, now=61.0) == 0
    # Nothing changed, so no new table goes out.
    assert policy.decide(hello(), 61.0) is policy.decide(hello(), 70.0)


def test_without_sglang_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.adaptive_spec_params", None)
    with pytest.raises(PolicyError, match=r"pip install '\.\[sglang\]'"):
        sglang_params(3, [1, 2])


def test_the_sidecar_does_not_import_sglang() -> None:
    code = "import specpilot.controller.replay.run, sys; assert not {'sglang', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Spy:
    """An ``AdaptivePolicy`` that asks for 0, then for 1 after three results, and notes its calls."""

    candidate_steps = [0, 1]  # noqa: RUF012

    def __init__(self) -> None:
        self.calls: list[str] = []

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None: ...

    def get_steps_for_batch(self, batch_size: int) -> int:
        steps = int(self.calls.count("fed [0]") >= 3)
        self.calls.append(f"asked {steps}")
        return steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        assert batch_size == len(num_correct_drafts_per_req)
        self.calls.append(f"fed {num_correct_drafts_per_req}")
        return None


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_a_result_is_fed_as_sglang_feeds_it(overlap: bool) -> None:
    """Under overlap after the next launch, so the first result after a change is still of the old K."""
    from specpilot.controller.replay.in_process import InProcessAgent

    spy = Spy()
    clock = VirtualClock()
    surface = load_surface("h200-sglang").speculating
    agent = InProcessAgent(Settings(), SGLangAdaptive(spy, 1, clock.now))
    workload = Workload((Arrival(0.0, 10, 30),), (Phase(0.0, "certain", 1.0),))
    server = SimServer(Settings(), workload, surface, KeyedDraws(1), clock, overlap=overlap, agent=agent)
    server.start()
    while not server.drained:
        server.turn()
    records = agent.records.take(1000)
    assert [record.steps for record in records][:6] == ([0, 0, 0, 0, 1, 1] if overlap else [0, 0, 0, 1, 1, 1])
    switched = spy.calls.index("asked 1")
    after = spy.calls[switched : switched + 4]
    assert after == (["asked 1", "fed [0]", "asked 1", "fed [1]"] if overlap else ["asked 1", "fed [1]"] * 2)
    assert {record.block for record in records} == {-1}


@pytest.mark.sglang
def test_the_installed_class_runs_with_its_lag() -> None:
    """The class alone, batch 8, acceptance 0.45, 20,000 steps, three seeds: fed at once it makes 2.5 to 3.4
    switches in 100 steps, fed a step late 9.5 to 10.9, two steps late 18.4 to 19.6."""
    surface = load_surface("h200-sglang")
    scenario = Scenario(surface, [Arrival(0.0, 100, 1000)], 120.0, seed=3, concurrency=8, acceptance=0.45)
    result = simulate("sglang", scenario)
    assert result.steps > 16_000
    assert 6.0 < result.switches_per_100_steps < 15.0
    assert result.probe_switches_per_100_steps == result.exploration_loss == 0.0
    assert result == simulate("sglang", scenario)
    steps = [decode.steps for decode in serve("sglang", scenario).decodes]
    assert set(steps) == {0, 1, 3}
    assert steps.count(0) == pytest.approx(steps.count(1), rel=0.05)  # each spell at 0 ends in a probe of 1


@pytest.mark.sglang
@pytest.mark.parametrize(("concurrency", "expected"), [(1, {1, 3, 5, 7}), (32, {0, 1}), (64, {0})])
def test_the_installed_class_keeps_to_its_slots(concurrency: int, expected: set[int]) -> None:
    scenario = Scenario(load_surface("h200-sglang"), [Arrival(0.0, 100, 4_000)], 120.0, seed=3, concurrency=concurrency)
    steps = {decode.steps for decode in serve("sglang", scenario).decodes if decode.batch_size == concurrency}
    assert steps
    assert steps <= expected
