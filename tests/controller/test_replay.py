"""Replay: repeatable, fair between policies, right by hand-made cases, and clear about wrong input."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from specpilot.controller.cli import main
from specpilot.controller.replay import policies as replay_policies
from specpilot.controller.replay.in_process import InProcessAgent
from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.replay.policies import ReplayError, parse_policy, split_policies
from specpilot.controller.replay.result import ReplayResult
from specpilot.controller.replay.run import ReplayRun, saturation, serve, simulate
from specpilot.controller.replay.scenario import Scenario, at_rate
from specpilot.controller.simulation.clock import VirtualClock
from specpilot.controller.simulation.gpu import Decode
from specpilot.controller.simulation.named_surfaces import NamedSurface, load_surface, surface_names
from specpilot.controller.simulation.server import SimServer
from specpilot.controller.simulation.surface import CAPTURED_BATCH_SIZES, ContextSurface, Costs, acceptance_length
from specpilot.controller.simulation.workload import (
    Arrival,
    ArrivalsError,
    KeyedDraws,
    Phase,
    Workload,
    acceptance_path,
    generated_requests,
    read_arrivals,
)
from specpilot.policies.interface import Grid, Plan, Policy
from specpilot.sglang_hooks.agent import ServerFacts
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import Hello, StepRecord

ROOT = Path(__file__).parents[2]
REQUESTS = generated_requests(300, seed=1)


def scenario(surface: str = "h200-sglang", seconds: float = 20.0, seed: int = 1, **changes: Any) -> Scenario:
    given = {"concurrency": 6} | changes
    return Scenario(load_surface(surface), given.pop("requests", REQUESTS), seconds, seed, **given)


class Recording(Policy):
    """A policy that keeps what it learns, switches K at 1 s, and explores from then on."""

    name = "recording"

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.decided_at: list[float] = []

    def learn(self, step: StepRecord) -> None:
        self.records.append(step)

    def decide(self, server: Hello, now: float) -> Plan:
        self.decided_at.append(now)
        early = now < 1.0
        explore = {} if early else {0: ((1, 0.2),)}
        return Plan(Grid(), (2 if early else 5,), (frozenset(),), "test", 0, explore, block_steps=4)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    policy = Recording()
    monkeypatch.setitem(replay_policies.POLICIES, "recording", lambda argument: lambda hello, truth: policy)
    return policy


# -- fairness --


@pytest.mark.parametrize("policy", ["static:3", "informed-greedy", "recording"])
@pytest.mark.parametrize("loop", ["open", "closed"])
def test_a_seed_repeats_itself(policy: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[Recording] = []
    monkeypatch.setitem(
        replay_policies.POLICIES,
        "recording",
        lambda argument: lambda hello, truth: policies.append(Recording()) or policies[-1],
    )

    def run(seed: int) -> ReplayRun:
        if loop == "closed":
            return serve(policy, scenario(seed=seed, seconds=10.0))
        return serve(
            policy, scenario(seed=seed, seconds=10.0, concurrency=None, load=0.5, requests=at_rate(REQUESTS, 8.0, 10.0))
        )

    first = run(1)
    assert len(first.decodes) > 500
    assert first == run(1)
    assert first != run(2)
    if policies:
        assert policies[0].records == policies[1].records


def test_equal_plans_give_equal_runs() -> None:
    """Common random numbers: the same accepted drafts for whoever asks."""
    one, other = (serve(policy, scenario()) for policy in ("static:3", "batch-table:1:3"))
    assert one == other


def test_draws_do_not_depend_on_the_steps_taken() -> None:
    """One long run of drafts or many short ones: the same positions are foreseen."""
    draws = KeyedDraws(seed=5)
    foreseen = [draws.accepted(3, position, 1, 0.6) for position in range(200)]
    assert 90 < sum(foreseen) < 150
    for steps in (1, 3, 7):
        for position in range(150):
            run = list(itertools.takewhile(bool, foreseen[position : position + steps]))
            assert draws.accepted(3, position, steps, 0.6) == len(run)
    assert foreseen != [draws.accepted(4, position, 1, 0.6) for position in range(200)]
    # A text that is foreseen more is foreseen wherever it was before.
    assert all(draws.accepted(3, position, 1, 0.8) >= was for position, was in enumerate(foreseen))


def test_drafts_are_accepted_as_often_as_the_path_says() -> None:
    run = serve("static:7", scenario(acceptance=0.7, seconds=60.0, concurrency=32))
    tokens = sum(decode.batch_size for decode in run.decodes) * acceptance_length(0.7, 7)
    # Ends cut runs short, and prefills give a token each.
    assert run.tokens == pytest.approx(tokens, rel=0.03)


@pytest.mark.slow
def test_the_acceptance_path_is_the_seeds_alone() -> None:
    path = acceptance_path(600.0, seed=4)
    assert [phase.start for phase in path] == [60.0 * minute for minute in range(10)]
    assert all(0.3 <= phase.acceptance <= 0.9 for phase in path)
    assert len({phase.acceptance for phase in path}) == 10
    assert acceptance_path(61.0, seed=4) == path[:2]
    assert acceptance_path(61.0, seed=5) != path[:2]
    for policy in ("none", "static:1"):
        seen = dict.fromkeys(decode.acceptance for decode in serve(policy, scenario(seconds=130.0, seed=4)).decodes)
        assert list(seen) == [phase.acceptance for phase in path[:3]]


# -- the loop around the policy --


def test_records_come_in_order_and_tables_come_late(recording: Recording) -> None:
    run = serve("recording", scenario(seconds=5.0))
    records = recording.records
    assert [record.record_seq for record in records] == list(range(len(records)))
    assert 0.0 < records[0].time < records[-1].time < 5.0 + 0.1
    assert len(recording.decided_at) == 10
    # A pass takes as long as its prefill: 8,192 tokens are 0.27 s.
    assert all(0.5 <= b - a < 0.8 for a, b in itertools.pairwise(recording.decided_at))
    # Two plans, so two tables; each in force after its round trip, and by the next receiving pass.
    switched = next(at for at in recording.decided_at if at >= 1.0)
    for epoch, decided_at, steps in ((1, 0.0, {2}), (2, switched, {1, 5})):
        own = [record for record in records if record.epoch == epoch]
        assert {record.steps for record in own} == steps
        assert decided_at + 0.02 < own[0].time < decided_at + 0.02 + 4 * 0.03
    assert {record.steps for record in records if record.epoch == 0} == {3}
    explored = [decode for decode in run.decodes if decode.steps != decode.held_steps]
    assert 0.1 < len(explored) / len([record for record in records if record.epoch == 2]) < 0.3
    assert {decode.steps for decode in explored} == {1}


def test_exploration_is_counted(recording: Recording) -> None:
    # At 0.9, K=5 is far better than K=1: what is explored is lost.
    result = simulate("recording", scenario(seconds=30.0, acceptance=0.9))
    assert 0.02 < result.exploration_loss < 0.2
    # The table's own change, from the fallback and to the second plan; one of them may fall next to a draw.
    ordinary = (result.switches_per_100_steps - result.probe_switches_per_100_steps) * result.steps / 100
    assert round(ordinary) in (1, 2)
    assert result.probe_switches_per_100_steps > 3.0


def test_a_closed_loop_stays_full() -> None:
    run = serve("static:3", scenario(concurrency=20))
    assert max(decode.batch_size for decode in run.decodes) == 20
    sizes = [decode.batch_size for decode in run.decodes[50:]]
    assert np.mean(sizes) > 18
    assert len(run.ended_at) > 40
    assert all(a <= b for a, b in itertools.pairwise(run.ended_at))


@pytest.mark.parametrize(("max_running_requests", "kv_tokens"), [(7, 1_000_000), (256, 6000), (5, 6000)])
def test_limits_are_kept(max_running_requests: int, kv_tokens: int) -> None:
    clock = VirtualClock()
    surface = load_surface("h200-sglang").speculating
    agent = InProcessAgent(Settings(queue_records=10**9), TablePolicy(Settings(), surface.steps, 7, clock.now))
    workload = Workload(
        tuple(Arrival(0.01 * index, 100 + 37 * index % 1000, 20 + 13 * index % 300) for index in range(80)),
        (Phase(0.0, "all", 0.8),),
    )
    server = SimServer(
        Settings(), workload, surface, KeyedDraws(1), clock,
        agent=agent, max_running_requests=max_running_requests, kv_tokens=kv_tokens,
    )  # fmt: skip
    server.start()
    while not server.drained:
        server.turn()
    records = agent.records.take(10**9)
    assert agent.hello().kv_tokens == kv_tokens
    assert server.tokens == sum(arrival.output_tokens for arrival in workload.arrivals)
    running, used = max(record.running for record in records), max(record.kv_used_tokens for record in records)
    assert running <= max_running_requests
    assert used <= kv_tokens
    assert running == max_running_requests or used > 0.5 * kv_tokens
    assert max(record.queued for record in records) > 10


def test_an_in_process_agent_starts_as_any_other() -> None:
    """Also for a tree, whose verify has as many tokens whatever K is."""
    clock = VirtualClock()
    clock.sleep(5.0)
    agent = InProcessAgent(Settings(), TablePolicy(Settings(), (1, 3), 3, clock.now))
    agent.start(ServerFacts("tree", topk=4, tree_tokens=8))
    assert agent.recorder is not None
    assert (agent.recorder._width(1), agent.recorder._width(3)) == (8, 8)
    assert agent.recorder._clock_offset == 0.0
    assert agent.ready
    assert agent.state().counters["tables_received"] == 0
    assert agent.hello().epoch == 0
    agent.stop()


def test_a_request_that_never_fits_is_an_error() -> None:
    with pytest.raises(
        ReplayError, match=r"a request of 700 and 400 tokens needs 1,116 of KV cache, the server has 1,000"
    ):
        serve("static:3", scenario(requests=[Arrival(0.0, 700, 400)], kv_tokens=1000))


@pytest.mark.slow
def test_load_1_is_what_no_speculation_just_serves() -> None:
    surface = load_surface("h200-sglang")
    rate = saturation(surface, REQUESTS)

    def left(load: float) -> int:
        arrivals = at_rate(REQUESTS, load * rate, 60.0)
        return len(arrivals) - len(
            serve("none", scenario(requests=arrivals, concurrency=None, load=load, seconds=60.0)).ended_at
        )

    assert left(0.6) < 0.2 * 0.6 * rate * 60.0
    assert left(1.6) > 0.3 * 1.6 * rate * 60.0


# -- the judgement --


def flat_surface() -> NamedSurface:
    """Costs depend on K alone."""

    def costs(seconds: float) -> Costs:
        return Costs((0.0, 1000.0), ((seconds, seconds),) * len(CAPTURED_BATCH_SIZES))

    speculating = {k: costs(0.005 * (1.1 + 0.2 * k)) for k in (0, 1, 3, 7)}
    return NamedSurface(
        "flat",
        "test",
        ContextSurface(CAPTURED_BATCH_SIZES, speculating),
        ContextSurface(CAPTURED_BATCH_SIZES, {0: costs(0.005)}),
    )


@pytest.mark.parametrize("steps", [0, 1, 3, 7, None])
def test_the_reference_share_of_a_constant_state(steps: int | None) -> None:
    """By hand: goodput of the K over that of the best; for no speculation, of its own cost line."""
    surface = flat_surface()
    goodput = {k: acceptance_length(0.6, k) / (0.005 * (1.1 + 0.2 * k)) for k in (0, 1, 3, 7)}
    own = goodput[steps] if steps is not None else 1.0 / 0.005
    policy = "none" if steps is None else f"static:{steps}"
    result = simulate(policy, Scenario(surface, REQUESTS, 20.0, seed=1, concurrency=4, acceptance=0.6))
    assert result.reference_share == pytest.approx(own / max(goodput.values()), rel=1e-9)
    assert result.switches_per_100_steps == pytest.approx(0.0 if steps in (3, None) else 100.0 / result.steps)


@pytest.mark.slow
@pytest.mark.parametrize("surface", surface_names())
@pytest.mark.parametrize("concurrency", [3, 48])
def test_no_single_k_beats_informed_greedy(surface: str, concurrency: int) -> None:
    one = scenario(surface, seconds=65.0, seed=2, concurrency=concurrency)
    shares = {k: simulate(f"static:{k}", one).reference_share for k in one.surface.speculating.steps}
    informed = simulate("informed-greedy", one)
    # Half a second after the change at 60 s it goes by an acceptance that has passed.
    assert informed.reference_share >= max(0.99, max(shares.values()) - 0.001)
    assert informed.steps_to_95 is not None
    assert informed.steps_to_95 < 50
    assert max(shares.values()) <= 1.0 + 1e-9


def decodes(*steps: int, held: int | None = None) -> list[Decode]:
    surface = flat_surface().speculating
    return [
        Decode(0.0, k, k if held is None else held, 4, 100.0, 0.6, surface.decode_seconds(k, 4, 100.0)) for k in steps
    ]


def test_steps_to_95_counts_the_window() -> None:
    surface = flat_surface().speculating
    good, bad = decodes(3), decodes(0)

    def steps(*runs: list[Decode]) -> int | None:
        return JudgedSteps.of([decode for run in runs for decode in run], surface).steps_to_95()

    assert steps(good * 399) == 0
    assert steps(good * 398) is None
    assert steps(bad * 1000) is None
    # Windows that begin a little early are good as well, but their first step is not.
    assert steps(bad * 500, good * 600) == 500
    # A good spell that does not last does not count, and a bad step or two afterwards does not either.
    assert steps(good * 300, bad * 300, good * 600) == 600
    assert steps(bad * 20, good * 100, bad * 2, good * 600) == 20


def test_steps_to_choose_goes_by_the_table_alone() -> None:
    surface = flat_surface().speculating
    good, bad, probes = decodes(3), decodes(0), decodes(0, held=3)

    def steps(begin: int, *runs: list[Decode]) -> int | None:
        return JudgedSteps.of([decode for run in runs for decode in run], surface).steps_to_choose(begin)

    assert steps(100, good * 100, bad * 30, probes * 60, good * 60) == 30
    assert steps(100, good * 100, bad * 30, decodes(3, held=0) * 8, bad * 20, good * 120) == 58
    assert steps(100, good * 100, bad * 30, good * 98) is None


def test_exploration_loss_is_time_against_the_held_k() -> None:
    surface = flat_surface().speculating
    judged = JudgedSteps.of([*decodes(3, 3), *decodes(0, held=3)], surface)
    needed = surface.decode_seconds(3, 4, 100.0) / acceptance_length(0.6, 3)
    lost = surface.decode_seconds(0, 4, 100.0) - needed
    assert judged.exploration_loss() == pytest.approx(lost / judged.seconds.sum())
    assert judged.switches_per_100_steps() == (pytest.approx(100 / 3), pytest.approx(100 / 3))


# -- surfaces --


def make_surfaces() -> Any:
    spec = importlib.util.spec_from_file_location("make_surfaces", ROOT / "benchmarks/make_surfaces.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_packaged_surfaces_are_what_the_script_makes() -> None:
    script = make_surfaces()
    packaged = {path.stem: path.read_text() for path in (ROOT / "controller/simulation/surfaces").glob("*.json")}
    assert packaged == {name: script.text_of(surface) for name, surface in script.surfaces().items()}


@pytest.mark.parametrize(
    ("name", "attention"), [("h200-sglang", "fa3"), ("h200-native-skip", "fa3"), ("h200-triton", "triton")]
)
def test_a_surface_gives_back_every_measured_cell(name: str, attention: str) -> None:
    surface = load_surface(name)
    runs = json.loads((ROOT / "benchmarks/live/surface.json").read_text())
    (cells,) = (run["cells"] for run in runs if run["attention"] == attention)
    for cell in cells:
        own = surface.plain if cell["arm"] == "none" else surface.speculating
        k = 0 if cell["arm"] == "none" else int(cell["arm"].removeprefix("K="))
        at = cell["batch_size"], cell["mean_context"]
        if (name, cell["arm"]) == ("h200-native-skip", "K=0"):
            assert own.decode_seconds(0, *at) == surface.plain.decode_seconds(0, *at)
        else:
            assert own.decode_seconds(k, *at) == pytest.approx(cell["seconds"], rel=1e-4), cell
    assert surface.speculating.steps == (0, 1, 2, 3, 5, 7)
    assert ("decode-mode skip" in surface.label) == (name == "h200-native-skip")
    assert "extrapolated" in surface.label


@pytest.mark.parametrize("name", surface_names())
def test_a_surface_is_a_staircase_that_rises(name: str) -> None:
    for surface in (load_surface(name).speculating, load_surface(name).plain):
        batches, contexts = np.arange(1, 257), np.array([0.0, 300.0, 1000.0, 5000.0, 20_000.0])
        for k in surface.steps:
            costs = np.array([[surface.decode_seconds(k, int(b), float(c)) for c in contexts] for b in batches])
            grid = np.meshgrid(batches, contexts, indexing="ij")
            assert surface.decode_seconds_of(k, grid[0].ravel(), grid[1].ravel()).reshape(costs.shape) == pytest.approx(
                costs
            )
            assert (costs > 0.003).all()
            # In the measured ones a larger batch can be a little faster, tiles being what they are.
            assert (np.diff(costs, axis=0) > -0.2 * costs[:-1]).all()
            assert (np.diff(costs, axis=1) > 0).all()
            assert (costs[2] == costs[3]).all()  # 3 requests are padded to 4
            assert (costs[8] == costs[15]).all()
            assert surface.decode_seconds(k, 300, 300.0) > surface.decode_seconds(k, 256, 300.0)


def test_the_synthetic_surfaces_are_what_they_are_for() -> None:
    def gain(name: str, batch: int, context: float, acceptance: float) -> float:
        surface = load_surface(name)
        plain = surface.plain.decode_seconds(0, batch, context)
        return acceptance_length(acceptance, 3) / surface.speculating.decode_seconds(3, batch, context) * plain

    assert gain("context", 256, 300.0, 0.6) < 1.0 < gain("context", 256, 6000.0, 0.6)
    assert gain("moe", 4, 500.0, 0.5) < 1.0 < gain("moe", 64, 500.0, 0.5)


# -- input --


CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "arrivals.csv"
    path.write_text(text)
    return path


def test_arrivals_are_read_as_azure_writes_them(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.9799600,110,27\r\n\r\n2023-11-16 18:17:04,5,6"
    assert read_arrivals(write(tmp_path, CSV + rows)) == [
        Arrival(0.0, 4808, 10),
        Arrival(pytest.approx(0.02004, abs=1e-6), 5, 6),
        Arrival(pytest.approx(1.0), 110, 27),
    ]
    columns = "GeneratedTokens,extra,TIMESTAMP,ContextTokens\n"
    assert read_arrivals(write(tmp_path, columns + "1,x,10.5,2\n3,y,12,4\n")) == [
        Arrival(0.0, 2, 1),
        Arrival(1.5, 4, 3),
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "arrivals.csv:1: column TIMESTAMP is missing"),
        ("TIMESTAMP,ContextTokens,Tokens\n1,2,3\n", "arrivals.csv:1: column GeneratedTokens is missing"),
        (CSV + "1,2,3\n2,0,3\n", "arrivals.csv:3: ContextTokens is '0', not a whole number above 0"),
        (CSV + "1,2,3\n2,2,1.5\n", "arrivals.csv:3: GeneratedTokens is '1.5'"),
        (CSV + "1,2,3\n2,2\n", "arrivals.csv:3: 2 values, the header has 3"),
        (CSV + "1,2,3\nnoon,2,4\n", "arrivals.csv:3: TIMESTAMP is 'noon', neither a time nor seconds"),
        (CSV + "1,2,3\ninf,2,4\n", "arrivals.csv:3: TIMESTAMP is 'inf'"),
        (CSV + "1,2,3\n", "arrivals.csv: 1 requests, at least 2 are needed"),
        (CSV + "1,2,3\n1,2,3\n", "arrivals.csv: all requests have one TIMESTAMP"),
    ],
)  # fmt: skip
def test_bad_arrivals_name_file_line_and_column(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ArrivalsError) as caught:
        read_arrivals(write(tmp_path, text))
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("fastest", "no policy is called 'fastest': use one of batch-table, goodput, informed-greedy, neural, none, sglang, static, threshold"),  # noqa: E501
        ("static", "policy 'static': a whole number must follow the colon"),
        ("static:x", "policy 'static:x': a whole number must follow the colon, not 'x'"),
        ("batch-table:8:1", "policy 'batch-table:8:1': batch sizes must rise from 1 on"),
        ("none:1", "policy 'none:1': it takes no argument"),
        ("informed-greedy:1", "policy 'informed-greedy:1': it takes no argument"),
    ],
)  # fmt: skip
def test_bad_policies_are_named(text: str, error: str) -> None:
    with pytest.raises(ReplayError) as caught:
        parse_policy(text)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("words", "policies"),
    [
        (["none", "static:3"], ["none", "static:3"]),
        (["none,static:3"], ["none", "static:3"]),
        (["none,", "static:3, goodput"], ["none", "static:3", "goodput"]),
        (["batch-table:1:5,8:3,goodput"], ["batch-table:1:5,8:3", "goodput"]),
        (["batch-table:1:5,8:3", "batch-table:1:5"], ["batch-table:1:5,8:3", "batch-table:1:5"]),
    ],
)
def test_policies_are_separated_by_spaces_and_commas(words: list[str], policies: list[str]) -> None:
    assert split_policies(words) == policies


def test_a_policy_that_the_server_cannot_serve_is_named() -> None:
    with pytest.raises(ReplayError, match=r"policy 'static:4': policy.steps = 4 is not among the candidate steps"):
        serve("static:4", scenario())


# -- the command --


def small_csv(folder: Path) -> Path:
    rows = "".join(f"{0.3 * index},{50 + 7 * index % 300},{10 + 5 * index % 60}\n" for index in range(60))
    return write(folder, CSV + rows)


FIELDS = {
    "policy", "surface", "load", "concurrency", "seed", "tokens_per_second", "time_per_output_token", "reference_share",
    "switches_per_100_steps", "probe_switches_per_100_steps", "exploration_loss", "steps_to_95", "steps",
}  # fmt: skip


@pytest.mark.parametrize("loop", [["--load", "0.4"], ["--concurrency", "4"]], ids=["open", "closed"])
def test_the_command_end_to_end(tmp_path: Path, loop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    policies = ["none", "static:3", "threshold:16", "batch-table:1:5,8:3", "informed-greedy"]
    asked = ["none,static:3,threshold:16,batch-table:1:5,8:3", "informed-greedy"]
    arguments = ["replay", "--surface", "moe", "--arrivals", str(small_csv(tmp_path)), *loop, "--seeds", "2"]
    assert main([*arguments, "--seconds", "6", "--policies", *asked, "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert [(one["policy"], one["seed"]) for one in results] == [
        (policy, seed) for seed in (1, 2) for policy in policies
    ]
    for one in results:
        assert one.keys() == FIELDS
        assert one["surface"] == "moe"
        assert (one["load"], one["concurrency"]) == ((0.4, None) if loop[0] == "--load" else (None, 4))
        assert 0.0 < one["time_per_output_token"]["mean"] <= one["time_per_output_token"]["p99"] < 1.0
        assert one["steps"] > 100
        assert one["tokens_per_second"] > 50
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in policies)
    assert "synthetic" in printed


def test_requests_are_made_up_where_no_file_is_given(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["replay", "--load", "0.2", "--policies", "static:1", "--seconds", "5", "--json", str(out)]) == 0
    (result,) = msgspec.json.decode(out.read_bytes(), type=list[ReplayResult])
    assert (result.surface, result.load) == ("h200-sglang", 0.2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--policies", "fastest"], "no policy is called 'fastest'"),
        (["--policies", "none", "--surface", "a100"], "no surface is called 'a100': use one of context, h200-native-skip"),  # noqa: E501
        (["--policies", "none", "--arrivals", "/nowhere.csv"], "/nowhere.csv: No such file or directory"),
        (["--policies", "none", "--load", "0"], "--load, --seconds, --seeds, --concurrency and --workers must be above 0"),  # noqa: E501
        (["--policies", "none", "--concurrency", "0"], "must be above 0"),
        (["--policies", "none", "--seeds", "0"], "must be above 0"),
        (["--policies", "none", "--workers", "0"], "must be above 0"),
        (["--policies", ","], "--policies names none"),
        (["--policies", "none,fastest"], "no policy is called 'fastest'"),
        (["--policies", "none", "--report", "/dev/null/report"], "--report /dev/null/report: Not a directory"),
        (["--policies", "none", "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--policies", "static:4", "--concurrency", "1"], "static:4"),
    ],
)  # fmt: skip
def test_wrong_input_ends_with_2_and_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "--seconds", "5", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("specpilot: ")
    assert error in lines[0]
