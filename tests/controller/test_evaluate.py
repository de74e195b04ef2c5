"""``specpilot evaluate``: rows, refusals, and agreement with the truth where the real hooks made the log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specpilot.controller.cli import main
from specpilot.controller.config import SwitchbackConfig, TraceConfig
from specpilot.controller.evaluate.evaluation import evaluate
from specpilot.controller.evaluate.report import EFFECT, EFFICIENCY
from specpilot.controller.replay.run import ReplayRun, serve
from specpilot.controller.replay.scenario import Scenario
from specpilot.controller.serve.switchback import Arm, Switchback, fallback_plan
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import generated_requests
from specpilot.controller.trace.reader import TraceError
from specpilot.controller.trace.writer import TraceWriter
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Grid, Plan, Policy
from specpilot.policies.offpolicy.estimators import ESTIMATORS
from specpilot.sglang_hooks.wire import MASKED, Hello, StepRecord
from tests.support.logs import Log, table
from tests.support.messages import hello, record

CONFIG = TraceConfig(segment_bytes=1 << 24, total_bytes=1 << 28, flush_seconds=1.0)


def written(directory: Path, server: Hello, records: list[StepRecord]) -> Path:
    writer = TraceWriter(directory, f"{server.server_id}/0", server, CONFIG)
    for start in range(0, len(records), 2000):
        writer.append(records[start : start + 2000])
        writer.tick(start / 10.0)
    writer.close()
    assert not writer.last_error
    return directory


@pytest.mark.slow
def test_rows_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Log(40_000, 1, exploration=0.1).write(tmp_path / "trace")
    out = tmp_path / "rows.json"
    policies = ["logged", "static:3", "threshold:8", "goodput"]
    arguments = [word for policy in policies for word in ("--policy", policy)]
    assert main(["evaluate", str(trace), *arguments, "--replay-seconds", "5", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(row["policy"], row["estimator"]) for row in rows] == [
        *((policy, estimator) for policy in policies for estimator in ESTIMATORS),
        *((policy, "replay") for policy in policies[1:]),
    ]
    for row in rows:
        assert row["low"] <= row["estimate"] <= row["high"], row
        assert row["effective_samples"] > 0
        assert row["model_based"] == (row["estimator"] == "replay")
        assert row["kind"] == (EFFECT if row["model_based"] else EFFICIENCY)
    told = capsys.readouterr().out
    assert "model-based" in told
    assert "per-step efficiency" in told


@pytest.mark.slow
def test_the_fitted_table_is_at_least_as_good_as_any_other(tmp_path: Path) -> None:
    trace = Log(60_000, 4, exploration=0.1).write(tmp_path)
    found = evaluate([trace], ["goodput", "static:0", "static:1", "static:3", "logged"], replay_seconds=0.0)
    gains = {row.policy: row.gain for row in found.rows if row.estimator == "doubly-robust"}
    assert gains["goodput"] is not None
    assert all(gain is not None and gain < gains["goodput"] + 0.005 for gain in gains.values())


# -- against the real hooks --


class Exploring(Policy):
    """One K, and the others now and then; keeps every record."""

    name = "exploring"

    def __init__(self, steps: int, probability: float) -> None:
        self._steps, self._probability = steps, probability
        self.records: list[StepRecord] = []

    def learn(self, step: StepRecord) -> None:
        self.records.append(step)

    def decide(self, server: Hello, now: float) -> Plan:
        others = tuple((k, self._probability) for k in sorted(server.candidate_steps) if k != self._steps)
        grid = Grid((4, 12))
        explore = dict.fromkeys(range(grid.cells), others)
        return Plan(grid, (self._steps,) * 3, (frozenset[int](),) * 3, "", explore=explore, block_steps=4)


def logged(policy: Policy, seconds: float, acceptance: float = 0.75) -> tuple[ReplayRun, Hello]:
    """A server under changing load, run by the real hooks; what it is."""
    servers: list[Hello] = []

    def make(server: Hello, _truth: object) -> Policy:
        servers.append(server)
        return policy

    requests = generated_requests(400, 3)
    limits = [(float(at), 2 + (7 * at) % 19) for at in range(0, int(seconds), 3)]
    scenario = Scenario(
        load_surface("moe"), requests, seconds, 1, concurrency=24, acceptance=acceptance, resume_seconds=0.004,
        decode_limits=limits,
    )  # fmt: skip
    return serve("exploring", scenario, make), servers[0]


def truth(run: ReplayRun, records: list[StepRecord], steps: int, acceptance: float = 0.75) -> float:
    """Tokens per second that K = ``steps`` was to earn in the states of ``logged``; switches left out."""
    surface = load_surface("moe").speculating
    lives = sum(len(one.accepted_drafts) - one.accepted_drafts.count(MASKED) for one in records)
    decodes = run.decodes[: len(records)]
    assert [one.batch_size for one in decodes] == [one.batch_size for one in records]
    seconds = sum(surface.decode_seconds(steps, one.batch_size, one.mean_context) for one in decodes)
    return lives * sum(acceptance**j for j in range(steps + 1)) / seconds


@pytest.mark.slow
def test_a_log_of_the_real_hooks(tmp_path: Path) -> None:
    policy = Exploring(1, 0.03)
    run, server = logged(policy, 240.0)
    trace = written(tmp_path, server, policy.records)
    found = evaluate([trace], ["static:0", "static:1", "static:3", "static:5"], replay_seconds=0.0)
    for row in found.rows:
        assert row.estimate is not None, row
        # A request's last step is cut short at its end, and the surface knows nothing of that.
        assert row.estimate == pytest.approx(truth(run, policy.records, int(row.policy[-1])), rel=0.03), row


@pytest.mark.slow
def test_a_floor_makes_the_log_of_goodput_answer(tmp_path: Path) -> None:
    class Recorded(Goodput):
        def __init__(self, floor: float) -> None:
            super().__init__(exploration_floor=floor)
            self.records: list[StepRecord] = []

        def learn(self, step: StepRecord) -> None:
            self.records.append(step)
            super().learn(step)

    answered, drawn = {}, {}
    for floor in (0.0, 0.02):
        policy = Recorded(floor)
        _, server = logged(policy, 240.0)
        late = policy.records[len(policy.records) // 3 :]
        trace = written(tmp_path / str(floor), server, late)
        found = evaluate([trace], ["static:5"], replay_seconds=0.0)
        answered[floor] = found.rows[0].answered
        drawn[floor] = {record.steps for record in late if record.probability < 0.5}
        assert found.rows[0].estimate is None or floor
    assert drawn[0.02] == set(server.candidate_steps)
    assert answered[0.02] > answered[0.0]


class SwitchingBack(Exploring):
    """One K by batch size, and the fallback's table of one cell in the blocks of a switchback."""

    choice = (5, 1, 0)

    def __init__(self, share: float) -> None:
        super().__init__(1, 0.05)
        self._config = SwitchbackConfig(share=share, block_seconds=2.0, washout_seconds=0.5)
        self._switchback: Switchback | None = None

    def decide(self, server: Hello, now: float) -> Plan:
        if self._switchback is None:
            self._switchback = Switchback(self._config, server, 1, now)
        if self._switchback.arm(now) is Arm.FALLBACK:
            return fallback_plan(server)
        explore = {
            cell: tuple((k, 0.05) for k in sorted(server.candidate_steps) if k != held)
            for cell, held in enumerate(self.choice)
        }
        return Plan(Grid((4, 12)), self.choice, (frozenset[int](),) * 3, "", explore=explore, block_steps=4)


@pytest.mark.slow
def test_blocks_of_a_switchback_are_of_another_table(tmp_path: Path) -> None:
    policy = SwitchingBack(0.15)
    run, server = logged(policy, 240.0)
    fallback = [one for one in policy.records if one.block < 0]
    assert len({one.epoch for one in fallback}) > 5
    # A cell's number means something within its own table only, and so does what was held there.
    assert {(one.cell, one.held_steps) for one in fallback if one.epoch} == {(0, server.fallback_steps)}
    explored = [one for one in policy.records if one.block >= 0]
    assert all(one.held_steps == policy.choice[np.searchsorted((4, 12), one.batch_size)] for one in explored)

    policies = ["batch-table:1:5,5:1,13:0", "static:0", "static:1", "logged"]
    found = evaluate([written(tmp_path, server, policy.records)], policies, replay_seconds=0.0)
    for row in found.rows:
        assert row.estimate is not None, row
        assert row.answered == 1.0, row
        if row.policy.startswith("static"):
            assert row.estimate == pytest.approx(truth(run, policy.records, int(row.policy[-1])), rel=0.03), row


# -- refusals and errors --


def test_what_a_log_cannot_tell_is_refused_with_reason_cells_and_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Log(50_000, 1, exploration=0.0).write(tmp_path / "trace")
    out = tmp_path / "rows.json"
    arguments = ["--policy", "static:3", "--replay-seconds", "0", "--json", str(out)]
    assert main(["evaluate", str(trace), *arguments]) == 1
    rows = json.loads(out.read_text())
    assert [row["estimate"] for row in rows] == [None, None]
    assert 0.001 < rows[0]["exploration_floor"] < 0.1
    assert {cell["steps"] for cell in rows[0]["unanswered"]} == {3}
    told = capsys.readouterr().out
    assert "batch 9 to 16, context 0 to 1,024: K=3 was never drawn there: nothing was explored" in told
    assert "recorded with policy.exploration_floor" in told


def test_rare_cells_are_left_out_and_said(tmp_path: Path) -> None:
    plan = table((1, 3), (9, 1), (33, 0))
    trace = Log(40_000, 1, logged=plan, exploration=0.0, mean_batch=4.0).write(tmp_path)
    found = evaluate([trace], ["batch-table:1:3,9:1,41:1"], replay_seconds=0.0)
    assert all(row.estimate is not None and 0.95 < row.answered < 1.0 and row.unanswered for row in found.rows)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("best", "policy 'best' cannot be evaluated: use static:K"),
        ("informed-greedy", "cannot be evaluated"),
        ("static:x", "a whole number must follow the colon"),
        ("static:2", "K=2 is not among the candidate steps"),
        ("", "--policy names none"),
    ],
)
def test_policies_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, said: str
) -> None:
    trace = Log(3000, 1).write(tmp_path / "trace")
    assert main(["evaluate", str(trace), "--policy", policy]) == 2
    assert said.replace("K=2 is", "= 2 is") in capsys.readouterr().err


def test_traces_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    assert main(["evaluate", str(tmp_path / "none"), "--policy", "logged"]) == 1
    assert "no trace is there" in capsys.readouterr().err
    for name in ("a:1", "b:2"):
        written(tmp_path / "mixed", hello(server_id=name), [record(record_seq=n, step=n) for n in range(10)])
    with pytest.raises(TraceError, match="several servers"):
        evaluate([tmp_path / "mixed"], ["logged"])
    assert main(["evaluate", str(tmp_path / "mixed"), "--policy", "logged", "--replay-seconds", "-1"]) == 2
    assert "--replay-seconds" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "mixed"), "--policy", "logged", "--json", "/nowhere/x"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_steps_without_a_time_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [record(record_seq=n, step=2 * n, time=1.7e9 + 0.01 * n, forwards=2) for n in range(50)]
    trace = written(tmp_path, hello(), steps)
    assert main(["evaluate", str(trace), "--policy", "logged"]) == 2
    assert "no step of node:30000/0 has a time of its own" in capsys.readouterr().err


def test_trees_of_several_k_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, hello(topk=4), [record(record_seq=n, step=n, time=1.7e9 + 0.01 * n) for n in range(9)])
    assert main(["evaluate", str(trace), "--policy", "static:1"]) == 2
    assert "drafts trees" in capsys.readouterr().err


def test_shadow_mode_explores_nothing(tmp_path: Path) -> None:
    steps = [
        record(record_seq=n, step=n, time=1.7e9 + 0.01 * n, steps=3, proposed_steps=3, probability=0.01, block=n // 4)
        for n in range(2000)
    ]
    trace = written(tmp_path, hello(mode="shadow"), steps)
    found = evaluate([trace], ["static:3", "static:1"], replay_seconds=0.0)
    by_policy = {row.policy: row for row in found.rows}
    assert by_policy["static:3"].estimate is not None
    assert by_policy["static:1"].estimate is None
    assert "nothing was explored" in by_policy["static:1"].unanswered[0].reason
