"""Replay of a recorded trace: what is inferred of requests, acceptance and costs, and how near it comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specpilot.controller.cli import main
from specpilot.controller.config import TraceConfig
from specpilot.controller.replay.inference.infer import Inferred, infer
from specpilot.controller.replay.inference.requests import TracedRequests
from specpilot.controller.replay.policies import ReplayError
from specpilot.controller.replay.run import ReplayRun, examine, serve
from specpilot.controller.replay.scenario import Scenario, at_rate
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import Phase, generated_requests
from specpilot.controller.trace.writer import TraceWriter
from specpilot.policies.interface import Grid, Plan, Policy
from specpilot.sglang_hooks.wire import Hello, StepRecord
from tests.support.messages import hello, record

PATH = (Phase(0.0, "code", 0.8), Phase(60.0, "chat", 0.45), Phase(120.0, "code", 0.7))
SECONDS = 180.0


class Trying(Policy):
    """Every K in blocks of 8 steps, each as often, and a trace of it."""

    name = "trying"

    def __init__(self, folder: Path, server: Hello) -> None:
        self.writer = TraceWriter(folder, "sim/0", server, TraceConfig())
        self.records: list[StepRecord] = []

    def learn(self, step: StepRecord) -> None:
        self.records.append(step)

    def decide(self, server: Hello, now: float) -> Plan:
        share = 1.0 / len(server.candidate_steps)
        explore = {0: tuple((k, share) for k in server.candidate_steps[1:])}
        return Plan(Grid(), (server.candidate_steps[0],), (frozenset(),), "tried", 0, explore, block_steps=8)

    def write(self, records: Sequence[StepRecord] | None = None) -> None:
        self.writer.append(self.records if records is None else records)
        self.writer.tick(0.0)
        self.writer.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scenario, ReplayRun, Path, list[StepRecord]]:
    """An open loop near saturation whose text changes twice, recorded."""
    folder = tmp_path_factory.mktemp("trace")
    requests = at_rate(generated_requests(800, seed=3), 9.0, SECONDS)
    scenario = Scenario(load_surface("h200-sglang"), requests, SECONDS, seed=5, load=0.5, acceptance=PATH)
    made: list[Trying] = []

    def make(server: Hello, truth: object) -> Policy:
        made.append(Trying(folder, server))
        return made[-1]

    run = serve("trying", scenario, make)
    made[0].write()
    return scenario, run, folder, made[0].records


@pytest.fixture(scope="module")
def inferred(recorded: tuple[Scenario, ReplayRun, Path, list[StepRecord]]) -> Inferred:
    return infer([recorded[2]])


@pytest.mark.slow
def test_requests_are_found_again(
    recorded: tuple[Scenario, ReplayRun, Path, list[StepRecord]], inferred: Inferred
) -> None:
    """Outputs exactly, prompts up to how many came together, arrivals within a step and a prefill."""
    scenario, _, _, records = recorded
    # A request of one token never decodes.
    asked = [request for request in scenario.requests if request.output_tokens > 1]
    found = inferred.arrivals
    assert len(asked) - 40 <= len(found) <= len(asked)
    ended = len(found) - records[-1].running
    same = [a.output_tokens == b.output_tokens for a, b in zip(asked, found[:ended], strict=False)]
    assert np.mean(same) > 0.97
    # The trace's time begins with its first record.
    late = np.array([b.at + records[0].time - a.at for a, b in zip(asked, found, strict=False)])
    assert abs(np.median(late)) < 0.05
    assert np.quantile(np.abs(late), 0.95) < 1.0
    prompts = [sum(request.prompt_tokens for request in some) for some in (found, asked[: len(found)])]
    assert prompts[0] == pytest.approx(prompts[1], rel=0.03)


@pytest.mark.slow
def test_acceptance_follows_the_text(inferred: Inferred) -> None:
    for phase in inferred.acceptance:
        middle = phase.start + 10.0
        if all(abs(middle - change) > 21.0 for change in (60.0, 120.0)):
            truth = PATH[int(middle // 60)].acceptance
            assert phase.acceptance == pytest.approx(truth, abs=0.04), phase
    assert len(inferred.acceptance) >= 6


def test_costs_are_found_again(
    recorded: tuple[Scenario, ReplayRun, Path, list[StepRecord]], inferred: Inferred
) -> None:
    scenario, run, _, _ = recorded
    assert inferred.fitted is not None
    truth, fitted = scenario.surface.speculating, inferred.fitted.speculating
    assert fitted.steps == truth.steps
    errors = [
        fitted.decode_seconds(one.steps, one.batch_size, one.mean_context) / one.seconds - 1 for one in run.decodes[::7]
    ]
    assert np.quantile(np.abs(errors), 0.95) < 0.05
    assert fitted.prefill_seconds(2000) == pytest.approx(truth.prefill_seconds(2000), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static:0", "static:3", "threshold:16", "goodput"])
def test_policies_earn_what_they_earn_on_the_server_itself(
    policy: str, recorded: tuple[Scenario, ReplayRun, Path, list[StepRecord]], inferred: Inferred
) -> None:
    """Within 2.5 percentage points of the best K's share, and within 5 % of the tokens per second."""
    scenario = recorded[0]
    assert inferred.fitted is not None
    truth = examine(policy, scenario)[0]
    found = examine(policy, inferred.scenario(inferred.fitted, SECONDS, seed=5))[0]
    assert found.reference_share == pytest.approx(truth.reference_share, abs=0.025)
    assert found.tokens_per_second == pytest.approx(truth.tokens_per_second, rel=0.05)


@pytest.mark.slow
def test_the_command_says_that_it_is_model_based_and_what_was_inferred(
    recorded: tuple[Scenario, ReplayRun, Path, list[StepRecord]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    arguments = ["replay", str(recorded[2]), "--policies", "none,static:3", "--seconds", "30", "--workers", "1"]
    assert main([*arguments, "--json", str(output)]) == 0
    shown = capsys.readouterr().out
    for text in ("model-based", "requests from the rows of the batches", "acceptance in", "the trace's own load"):
        assert text in shown
    written = json.loads(output.read_text())
    assert written["model_based"] is True
    assert written["surface"].startswith("model-based: fitted to the steps of replay/0")
    assert [run["policy"] for run in written["runs"]] == ["none", "static:3"]
    assert main([*arguments, "--surface", "h200-triton"]) == 0
    assert "h200-triton" in capsys.readouterr().out


# -- hand-made --


def test_rows_under_overlap_tell_who_ended() -> None:
    """A (3 tokens) ends in step 1 and is masked in step 2; C takes the last row of step 3."""
    requests = TracedRequests()
    steps = [
        record(batch_size=2, accepted_drafts=[1, 3], truncated=[0], prefill_tokens=100, context_tokens=100),
        record(batch_size=2, accepted_drafts=[-1, 0], context_tokens=104),
        record(batch_size=2, accepted_drafts=[2, 0], prefill_tokens=40, context_tokens=90, queued=1),
        record(batch_size=2, accepted_drafts=[3, 1], truncated=[0], context_tokens=95, queued=1),
        record(batch_size=2, accepted_drafts=[0, 2], prefill_tokens=60, context_tokens=95),
    ]
    for at, step in enumerate(steps):
        requests.take(step, at > 0, float(at))
    requests.close()
    # The two of the first record have its context; B's outputs are 1 + 4 + 1 + 3 + 4.
    assert requests.lengths == [(50, 3, False), (50, 13, False), (40, 5, True), (60, 4, True)]
    # The fourth was queued while the third was started.
    assert requests.arrived == [0.0, 0.0, 2.0, 2.0]
    assert requests.guessed == 0


def test_rows_without_overlap_leave_at_once() -> None:
    requests = TracedRequests()
    requests.take(record(batch_size=3, accepted_drafts=[1, 0, 2], truncated=[1], prefill_tokens=90), False, 0.0)
    requests.take(record(batch_size=2, accepted_drafts=[3, 0]), True, 0.1)
    requests.close()
    assert [length and length[1] for length in requests.lengths] == [7, 2, 5]
    assert requests.guessed == 0


def test_missing_records_cost_identity_and_are_counted() -> None:
    requests = TracedRequests()
    requests.take(record(batch_size=3, accepted_drafts=[1, 0, 2]), False, 0.0)
    requests.take(record(batch_size=2, accepted_drafts=[3, 0]), False, 0.1)
    requests.close()
    assert len(requests.lengths) == 3
    assert requests.guessed == 3


def write(folder: Path, records: Sequence[StepRecord], **of_hello: object) -> None:
    Trying(folder, hello(**of_hello)).write(records)


def test_an_idle_night_is_cut(tmp_path: Path) -> None:
    day = [record(record_seq=n, step=n, time=1e9 + n, seconds=0.01) for n in range(200)]
    next_day = [
        record(record_seq=n, step=2 * n, time=1e9 + 50_000 + n, seconds=0.01 if n > 200 else 50_000.0,
               launch_gap_seconds=49_999.9 if n == 200 else 0.0, after_idle=n == 200)
        for n in range(200, 400)
    ]  # fmt: skip
    write(tmp_path, [*day, *next_day])
    found = infer([tmp_path])
    assert 60.0 < found.seconds < 70.0
    assert any("49,940 s without steps are cut" in note for note in found.notes)


def test_what_a_trace_cannot_tell_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one", [record(record_seq=n, step=n + 1, time=1e9 + n, seconds=0.01) for n in range(300)])
    write(tmp_path / "none", [
        record(record_seq=n, step=n + 1, time=1e9 + n, draft_tokens=1, steps=0, accepted_drafts=[0, 0])
        for n in range(9)
    ])  # fmt: skip
    folder = str(tmp_path / "one")
    for arguments, says in (
        ([folder], "tells the cost of 1 K (K=3 299 steps"),
        ([str(tmp_path / "none")], "holds no step with drafts"),
        ([str(tmp_path / "nowhere")], "No such file"),
        ([folder, "--load", "1"], "leave out --arrivals, --load and --concurrency"),
        (["--server", "x"], "name the trace"),
    ):
        assert main(["replay", *arguments, "--policies", "static:3", "--workers", "1"]) == 2
        assert says in capsys.readouterr().err
    # With a surface from elsewhere, one K is enough; and a server need not say how much KV cache it has.
    write(tmp_path / "one", [record(record_seq=300, step=301, time=1e9 + 300, seconds=0.01)], kv_tokens=0)
    assert main(["replay", folder, "--policies", "static:3", "--surface", "moe", "--workers", "1"]) == 0


def test_two_servers_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, [record(record_seq=n, step=n + 1, time=1e9 + n) for n in range(9)])
    TraceWriter(tmp_path, "other/0", hello(server_id="other"), TraceConfig())
    other = TraceWriter(tmp_path, "other/0", hello(server_id="other"), TraceConfig())
    other.append([record(record_seq=n, step=n + 1, time=1e9 + n) for n in range(9)])
    other.tick(0.0)
    other.close()
    with pytest.raises(ReplayError, match="--server"):
        infer([tmp_path])
    assert infer([tmp_path], "other/0").records == 9
