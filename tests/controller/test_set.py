"""Hot change: ``specpilot set``, an edited file, per server and for a time, all or nothing, kept in the trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from specpilot.controller.client.settings import change_settings
from specpilot.controller.config import Config, ControllerConfig, GoodputPolicy, PriorConfig, TraceConfig, load_config
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.live_config import SetReport
from specpilot.controller.serve.service import Service
from specpilot.controller.trace.export import export_trace
from specpilot.controller.trace.info import trace_info
from specpilot.policies.goodput import Goodput
from specpilot.sglang_hooks.agent import Agent
from specpilot.sglang_hooks.wire import SetRequest, StepBatch, encode
from tests.controller.test_service import Agents, Make, agents, in_command, make, passes, time_passes
from tests.support.messages import hello, record
from tests.support.waiting import until

__all__ = ["agents", "make"]


def set_it(controller: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specpilot.controller.cli", "set", "--endpoint", controller.endpoint, *arguments],
        capture_output=True,
        text=True,
    )


def steps_at(agent: Agent, batch_size: int = 1) -> int:
    passes(agent)
    agent.policy.get_steps_for_batch(batch_size)
    return agent.policy.applied_steps


def origins(report: SetReport, server: str = "") -> dict[str, tuple[object, str]]:
    return {one.key: (one.value, one.origin) for one in report.settings if one.server == server}


# -- the real controller, its file and its command --


def test_set_is_applied_shown_and_taken_back(make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent) and steps_at(agent) == 3)
    done = set_it(controller, "policy.name=static", "policy.steps=1")
    assert done.returncode == 0, done.stderr
    assert f"until the controller restarts; write it into {controller.config} to keep it" in done.stdout
    until(lambda: steps_at(agent) == 1)
    shown = set_it(controller, "--json").stdout
    now = origins(msgspec.json.decode(shown, type=SetReport))
    assert now["policy.name"] == ("static", "set")
    assert now["switchback.share"] == (0.0, "default")
    assert "policy.threshold" not in now
    assert set_it(controller, "--reset").returncode == 0
    until(lambda: steps_at(agent) == 3)
    report = change_settings(controller.endpoint, SetRequest({}))
    assert origins(report)["policy.threshold"] == (5, "file")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["policy.threshhold=7"], "threshhold"),
        (["policy.threshold=-1"], "policy.threshold"),
        (["policy.name=static", "policy.steps=7"], "policy.steps = 7 is not among the candidate steps [0, 1, 3] of s"),
        (["policy.name=neural", "policy.model=/none"], "/none"),
        (["policy.steps=1", "mode=shado"], "shado"),
        (["controller.endpoint=ipc:///x"], "controller.endpoint cannot be changed while the controller runs"),
        (["trace.directory=x"], "restart the controller"),
        (["polcy.steps=1"], "polcy.steps is no key"),
        (["policy=1"], "policy is a section"),
        (["servers.s.mode=shadow"], "--server"),
        (["policy.steps"], "use KEY=VALUE"),
        (["policy.steps=1", "--server", "other"], "no server other is known"),
        (["policy.steps=1", "--for", "-3"], "--for"),
        (["policy.steps=1 2"], "policy.steps"),
        (["bounds.steps=[2]"], "bounds.steps = [2] has none of the candidate steps [0, 1, 3]"),
        (["bounds.max_steps_by_batch=16:x"], "bounds.max_steps_by_batch = '16:x'"),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(
    arguments: list[str], says: str, running: tuple[Any, Agent]
) -> None:
    controller, agent = running
    before = change_settings(controller.endpoint, SetRequest({})).settings
    done = set_it(controller, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.startswith("specpilot: ")
    assert "Traceback" not in done.stderr
    assert change_settings(controller.endpoint, SetRequest({})).settings == before
    assert steps_at(agent) == 3


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Agent]]:
    from specpilot.sglang_hooks.agent import ServerFacts
    from specpilot.sglang_hooks.settings import Settings
    from specpilot.sglang_hooks.table_policy import TablePolicy
    from tests.controller.test_service import Controller

    controller = Controller(tmp_path_factory.mktemp("set")).start()
    settings = Settings(endpoint=controller.endpoint, min_table_interval_seconds=0.0)
    agent = Agent(settings, TablePolicy(settings, (0, 1, 3), 3))
    agent.start(ServerFacts("s"))
    until(lambda: in_command(agent))
    yield controller, agent
    agent.stop()
    controller.end(signal.SIGKILL)


def test_an_edited_file_is_followed_and_a_wrong_one_is_not(make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent) and steps_at(agent) == 3)
    text = controller.config.read_text()
    controller.config.write_text(text.replace("steps = 3", "steps = 1"))
    until(lambda: steps_at(agent) == 1)
    controller.config.write_text(text.replace("steps = 3", "steps = 2"))  # no candidate
    until(lambda: "policy.steps = 2 is not among" in controller.status().config_error)
    controller.config.write_text("[policy")
    until(lambda: str(controller.config) in controller.status().config_error)
    controller.config.write_text(text.replace("[trace]", "[trace]\nsegment_bytes = 1_000_000"))
    until(lambda: "trace.segment_bytes cannot be changed" in controller.status().config_error)
    assert steps_at(agent) == 1
    # As an editor does it: another file under the same name.
    other = controller.config.with_name("other")
    other.write_text(text)
    other.replace(controller.config)
    until(lambda: steps_at(agent) == 3)
    assert not controller.status().config_error
    controller.config.unlink()
    until(lambda: "No such file" in controller.status().config_error)
    assert steps_at(agent) == 3


def test_sighup_reads_the_file_again(make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent))
    stamp = controller.config.stat()
    controller.config.write_text(controller.config.read_text().replace("steps = 3", "steps = 1"))
    os.utime(controller.config, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same inode, size and time
    time_passes(controller, agent, 60.0)
    assert steps_at(agent) == 3
    assert controller.process is not None
    controller.process.send_signal(signal.SIGHUP)
    until(lambda: steps_at(agent) == 1)


def test_a_pin_of_one_server_ends_by_itself(make: Make, agents: Agents) -> None:
    controller = make().start()
    pinned, other = agents(controller.endpoint, "a"), agents(controller.endpoint, "b")
    until(lambda: in_command(pinned) and in_command(other))
    assert set_it(controller, "policy.steps=1", "--server", "a").returncode == 0
    until(lambda: steps_at(pinned) == 1)
    pin = SetRequest({"policy.name": "static", "policy.steps": "0"}, "a", seconds=3000.0)
    report = change_settings(controller.endpoint, pin)
    assert origins(report, "a")["policy.steps"] == (0, "set for a time")
    until(lambda: steps_at(pinned) == 0)
    assert steps_at(other) == 3
    time_passes(controller, pinned, 2000.0)
    assert steps_at(pinned) == 0
    controller.goes_on(1000.0)
    until(lambda: steps_at(pinned) == 1)
    assert origins(change_settings(controller.endpoint, SetRequest({})), "a")["policy.steps"] == (1, "set")


def test_bounds_hold_whatever_decides(make: Make, agents: Agents) -> None:
    controller = make(policy='[policy]\nname = "static"\nsteps = 3\n').start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent) and steps_at(agent) == 3)
    assert set_it(controller, "bounds.steps=[0, 1]", "bounds.max_steps_by_batch=8:0").returncode == 0
    until(lambda: steps_at(agent) == 1)
    assert [steps_at(agent, batch) for batch in (7, 8, 64)] == [1, 0, 0]
    assert set_it(controller, "bounds.steps=").returncode == 0
    until(lambda: steps_at(agent, 7) == 3)
    assert steps_at(agent, 8) == 0


def test_shadow_is_decided_recorded_and_not_applied(make: Make, agents: Agents) -> None:
    controller = make(policy='[policy]\nname = "static"\nsteps = 1\n').start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent) and steps_at(agent) == 1)
    assert set_it(controller, "mode=shadow").returncode == 0
    until(lambda: steps_at(agent) == 3)  # the fallback
    agent.policy.forward_iter += 1
    steps_at(agent)
    launch = agent.policy.take_launch(agent.policy.forward_iter)
    assert launch is not None
    assert (launch.steps, launch.proposed_steps) == (3, 1)
    assert controller.server().mode == "shadow"
    assert set_it(controller, "mode=control").returncode == 0
    until(lambda: steps_at(agent) == 1)


def test_sections_of_servers_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[policy]\nname = "goodput"\nmax_steps = 3\n[servers.a]\nmode = "shadow"\n[servers."a/1".policy]\n'
        'max_steps = 1\n[servers.b.policy]\nname = "static"\nsteps = 2\n'
    )
    config = load_config(path)
    assert config.for_server("a/0").policy == GoodputPolicy(max_steps=3)
    assert config.for_server("a/1").policy == GoodputPolicy(max_steps=1)
    assert [config.for_server(name).mode for name in ("a/0", "a/1", "b/0", "c/0")] == [
        "shadow", "shadow", "control", "control"
    ]  # fmt: skip
    assert config.for_server("c/0").policy == config.policy
    for wrong in ("[servers.a.trace]\nx = 1", '[servers.a]\nmode = "x"', "servers = 3", "[servers]\na = 3"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"servers"):
            load_config(path)


# -- one loop, by hand --


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(
        Config(
            controller=ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc"),
            policy=GoodputPolicy(),
            trace=TraceConfig(directory=f"{tmp_path}/trace"),
            prior=PriorConfig(directory=f"{tmp_path}/prior"),
        )
    )
    made._endpoint.send = lambda address, message: None  # type: ignore[method-assign]
    made._receive([b"peer", encode(hello(server_id="s"))])
    yield made
    made.stop()
    made.run()


def change(service: Service, *, server: str = "", seconds: float = 0.0, reset: bool = False, **values: str) -> str:
    named = {key.replace("__", "."): text for key, text in values.items()}
    return service._settings.change(SetRequest(named, server, seconds, reset))


def test_a_changed_objective_or_bound_forgets_nothing_that_was_learned(service: Service) -> None:
    session = service._sessions["s/0"]
    learned = session.policy
    assert isinstance(learned, Goodput)
    epoch = session.epoch
    service._receive([b"peer", encode(StepBatch([record(record_seq=i, step=i, epoch=epoch) for i in range(200)], 0))])
    hazard = learned.acceptance.hazard(2, 100.0).tolist()
    assert not change(service, policy__max_steps="1", policy__time_per_output_token="0.5")
    assert session.policy is learned
    assert learned.acceptance.hazard(2, 100.0).tolist() == hazard
    assert session.plan is not None
    assert set(session.plan.choice) <= {0, 1}
    assert not change(service, policy__max_steps="")
    assert "at most" not in session.plan.reason
    # Another policy for a while, and back.
    assert not change(service, server="s", seconds=60.0, policy__name="static", policy__steps="0")
    assert session.policy is not learned
    assert set(session.plan.choice) == {0}
    assert not change(service, server="s", seconds=1.0, reset=True)
    assert session.policy is learned


def test_what_was_learned_is_kept_on_disk_when_another_policy_takes_over(service: Service, tmp_path: Path) -> None:
    session = service._sessions["s/0"]
    batch = [record(record_seq=i, step=i, epoch=session.epoch) for i in range(100)]
    service._receive([b"peer", encode(StepBatch(batch, 0))])
    assert not change(service, policy__name="static", policy__steps="1")
    (path,) = (tmp_path / "prior").glob("*.json")
    kept = path.read_bytes()
    path.unlink()
    service._priors.save(session)
    assert path.read_bytes() == kept
    assert service.status().changes == ["policy.name=static policy.steps=1"]


def test_a_policy_that_failed_is_not_taken_back(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    session = service._sessions["s/0"]
    broken = session.policy

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(broken, "decide", fail)
    service._tables.decide(session, 0.0)
    assert session.failed
    assert not change(service, policy__max_steps="1")
    assert session.policy is not broken
    assert not session.failed
    assert session.plan is not None


def test_the_trace_tells_which_configuration_made_a_table(service: Service, tmp_path: Path) -> None:
    session = service._sessions["s/0"]

    def step(seq: int, epoch: int) -> None:
        service._receive([b"peer", encode(StepBatch([record(record_seq=seq, step=seq, epoch=epoch)], 0))])

    first = session.epoch
    step(0, first)
    assert not change(service, policy__name="static", policy__steps="1")
    step(1, first)  # was still on its way
    step(2, session.epoch)
    assert session.epoch > first
    assert not change(service, mode="shadow")
    step(3, session.epoch)
    assert session.trace is not None
    session.trace.close()
    (info,) = trace_info([tmp_path / "trace"]).values()
    assert info.records == 4
    assert [(one.policy, one.config["mode"]) for one in info.configurations] == [
        ("goodput", "control"), ("static", "control"), ("static", "shadow")
    ]  # fmt: skip
    assert [one.epoch for one in info.configurations] == sorted({first, first + 1, session.epoch})
    export_trace([tmp_path / "trace"], tmp_path / "t.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "t.parquet")
    assert rows["policy"].to_pylist() == ["goodput", "goodput", "static", "static"]


def test_a_switchback_goes_on_where_its_share_alone_changes(service: Service) -> None:
    session = service._sessions["s/0"]
    assert not change(service, switchback__share="0.5")
    first = session.switchback
    assert first is not None
    first._log_ratios.extend([0.1] * 12)
    assert not change(service, switchback__share="0.2")
    assert session.switchback is not first
    assert session.switchback is not None
    assert session.switchback.status(0.0).pairs == 12
    assert not change(service, policy__max_steps="1")
    assert session.switchback is not None
    assert session.switchback.status(0.0).pairs == 0
    assert not change(service, mode="shadow")
    assert session.switchback is None


def test_a_temporary_change_that_ends_leaves_a_whole_configuration(service: Service) -> None:
    """Whatever is set below a temporary change must also hold without it."""
    assert not change(service, seconds=60.0, policy__name="static", policy__steps="1")
    assert "max_stps" in change(service, policy__max_stps="1")
    refused = change(service, policy__steps="3")  # of the goodput below, which has no such key
    assert "steps" in refused
    assert service._live.config.policy == msgspec.convert(
        {"name": "static", "steps": 1}, type(service._live.config.policy)
    )
