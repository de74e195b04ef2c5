"""The controller as a process: real sockets, real signals, servers that come, go and lie."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from specpilot.controller.client.status import StatusError, fetch_status
from specpilot.controller.config import (
    Config,
    ControllerConfig,
    GoodputPolicy,
    PriorConfig,
    ThresholdPolicy,
    TraceConfig,
    load_config,
)
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.endpoint import Endpoint
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.controller.serve.service import Service
from specpilot.policies.interface import Grid, Plan, Policy
from specpilot.policies.threshold import Threshold
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    DecisionSource,
    DecisionTable,
    FrameDecoder,
    Hello,
    HookState,
    StatusReport,
    StatusRequest,
    StepBatch,
    StepRecord,
    ToHook,
    encode,
)
from tests.faults import shifted
from tests.support.messages import hello, record
from tests.support.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
THRESHOLD = '[policy]\nname = "threshold"\nthreshold = 5\nsteps = 3\nband = 1\n'


Make = Callable[..., "Controller"]
Agents = Callable[..., Agent]


class Controller:
    """``specpilot controller`` as an operator runs it, but for its clock, which can be set forward."""

    def __init__(self, folder: Path, policy: str = THRESHOLD, controller: str = "", trace: str = "") -> None:
        self.folder = folder
        self.endpoint = f"ipc://{folder}/c.ipc"
        self.config = folder / "controller.toml"
        self.config.write_text(
            f'[controller]\nendpoint = "{self.endpoint}"\n{controller}\n{policy}\n'
            '[web]\nlisten = "127.0.0.1:0"\n'  # several controllers run side by side
            f'[trace]\ndirectory = "{folder}/trace"\nflush_seconds = 0.1\n{trace}\n'
        )
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Controller:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.shifted", "specpilot.controller.cli", "controller",
             "--config", str(self.config)],
            stderr=(self.folder / "log").open("a"),
            cwd=ROOT,
            env=os.environ | {"SHIFT_FILE": str(self.folder / "shift")},
        )  # fmt: skip
        until(lambda: self.answers() or self.process.poll() is not None)  # type: ignore[union-attr]
        assert self.process.poll() is None, self.log()[-2000:]
        return self

    def goes_on(self, seconds: float) -> None:
        """Let so much time pass for the controller, at once."""
        shifted.shift_other(self.folder / "shift", "monotonic", seconds)

    def answers(self) -> bool:
        try:
            fetch_status(self.endpoint, 0.5)
        except StatusError:
            return False
        return True

    def status(self) -> ControllerStatus:
        return fetch_status(self.endpoint, PATIENCE)

    def server(self, key: str = "s/0") -> ServerStatus:
        """Wait for a server to be known and return its status."""
        until(lambda: any(server.server == key for server in self.status().servers))
        return next(server for server in self.status().servers if server.server == key)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self, how: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(how)
        return self.process.wait(PATIENCE)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    made = []

    def factory(**options: str) -> Controller:
        made.append(Controller(tmp_path, **options))
        return made[-1]

    yield factory
    for controller in made:
        if controller.process is not None and controller.process.poll() is None:
            controller.end(signal.SIGKILL)


@pytest.fixture
def agents() -> Iterator[Callable[..., Agent]]:
    made = []

    def factory(
        endpoint: str,
        server_id: str = "s",
        candidates: tuple[int, ...] = (0, 1, 3),
        dp_rank: int = 0,
        stale_seconds: float = 1.0,
    ) -> Agent:
        settings = Settings(endpoint=endpoint, min_table_interval_seconds=0.0, stale_seconds=stale_seconds)
        agent = Agent(settings, TablePolicy(settings, candidates, 3))
        agent.start(ServerFacts(server_id, dp_rank=dp_rank, dp_size=2))
        made.append(agent)
        return agent

    yield factory
    for agent in made:
        agent.stop()


def passes(agent: Agent) -> None:
    received: list[object] = []
    agent.pull(received)
    for update in received:
        agent.apply(update)  # type: ignore[arg-type]


def in_command(agent: Agent) -> bool:
    passes(agent)
    return agent.policy.source == DecisionSource.TABLE


def lease_end(agent: Agent) -> float:
    """Monotonic seconds until when the newest table may be in force, as the controller last said."""
    assert agent._source is not None
    return agent._source._mailbox.lease[1]


def time_passes(controller: Controller, agent: Agent, seconds: float) -> None:
    """Let so much time pass for the controller, and wait until it has done all that is due then."""
    for _ in range(2):  # the first lease may have been on its way already
        leased_until = lease_end(agent)
        controller.goes_on(seconds / 2)
        until(lambda leased_until=leased_until: lease_end(agent) > leased_until)  # the last thing in a turn


def test_steps_in_table_out_and_status_tells_both(make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent))
    assert [agent.policy.get_steps_for_batch(n) for n in (1, 4, 7, 100, 4)] == [3, 3, 0, 0, 3]
    for seq in range(300):
        agent._queue.put(record(record_seq=seq, seconds=0.01, accepted_drafts=[2, 3]))
    until(lambda: (server := controller.server()).records == 300 and server.source == "TABLE")
    server = controller.server()
    assert server.table is not None
    assert (server.table.policy, server.table.epoch, server.confirmed_ranks, server.tp_size) == ("threshold", 1, 1, 1)
    assert "K=3 up to 5 running requests" in server.reason
    assert server.tokens_per_second == pytest.approx(700)
    assert server.share_by_steps == {"3": 1.0}
    assert (server.records_lost, server.pending_epoch, server.note) == (0, 0, "")
    until(lambda: controller.status().trace_written == 300)
    shown = subprocess.run(
        [sys.executable, "-m", "specpilot.controller.cli", "status", "--endpoint", controller.endpoint],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for text in ("s/0", "batch 1-4: K=3 | 5: K=3 (keeps 0) | 6: K=0 (keeps 3) | 7+: K=0", "confirmed by 1 of 1 ranks",
                 "policy threshold", "now K=3"):  # fmt: skip
        assert text in shown
    assert controller.end() == 0
    assert not (controller.folder / "c.ipc").exists()


def test_several_servers_and_replicas_at_once(make: Make, agents: Agents) -> None:
    controller = make().start()
    first, replica = agents(controller.endpoint, "a", dp_rank=0), agents(controller.endpoint, "a", dp_rank=1)
    narrow = agents(controller.endpoint, "b", candidates=(1, 3))
    until(lambda: in_command(first) and in_command(replica))
    until(lambda: len(controller.status().servers) == 3)
    until(lambda: controller.server("b/0").note != "")
    passes(narrow)
    assert narrow.policy.source == DecisionSource.FALLBACK
    note = controller.server("b/0").note
    assert "cannot skip" in note
    assert "--speculative-adaptive-config" in note
    folders = sorted(path.name for path in (controller.folder / "trace").iterdir())
    assert folders == []  # a folder begins with its first record
    replica._queue.put(record())
    until(lambda: [path.name for path in (controller.folder / "trace").iterdir()] == ["a%2F1"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_controller_goes_on_above_the_servers_epoch(how: int, make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent))
    agent._queue.put(record(record_seq=0))
    until(lambda: controller.server().records == 1)
    controller.end(how)
    agent._queue.put(record(record_seq=1))
    assert agent.policy.get_steps_for_batch(9) == 0
    controller.start()
    until(lambda: passes(agent) or (agent.policy.table is not None and agent.policy.table.epoch == 2))
    until(lambda: controller.server().records == 1 and controller.server().table is not None)
    server = controller.server()
    assert server.table is not None
    assert server.records_lost == 0
    passes(agent)
    # One table, however often the server was asked who it is.
    assert server.table.epoch == agent.policy.table.epoch == agent._link.newest_epoch == 2  # type: ignore[union-attr]
    assert server.pending_epoch == 0


def test_a_stopped_controller_costs_the_lease_and_then_the_table(make: Make, agents: Agents) -> None:
    controller = make(controller="lease_seconds = 0.6").start()
    agent = agents(controller.endpoint, stale_seconds=1e6)
    until(lambda: in_command(agent))
    first = lease_end(agent)
    until(lambda: lease_end(agent) > first + 1.0 and in_command(agent))  # renewed
    assert controller.process is not None
    controller.process.send_signal(signal.SIGSTOP)
    until(lambda: passes(agent) or agent.policy.source == DecisionSource.STALE)
    assert agent.policy.get_steps_for_batch(9) == 0
    assert agent._source is not None
    agent._source._stale_seconds = 0.5
    until(lambda: passes(agent) or agent.policy.source == DecisionSource.FALLBACK)
    assert agent.policy.get_steps_for_batch(9) == 3
    controller.process.send_signal(signal.SIGCONT)
    until(lambda: in_command(agent))  # with a new table, and no restart of the server
    assert agent.policy.table is not None
    assert agent.policy.table.epoch >= 2


def test_a_second_controller_is_refused(make: Make) -> None:
    controller = make().start()
    second = subprocess.run(
        [sys.executable, "-m", "specpilot.controller.cli", "controller", "--config", str(controller.config)],
        capture_output=True,
        text=True,
    )
    assert second.returncode == 2
    assert f"another specpilot controller (pid {controller.process.pid}) serves" in second.stderr
    assert controller.answers()
    controller.end(signal.SIGKILL)
    controller.start()  # neither the lock nor the socket of a killed one stands in the way


def test_a_second_server_of_one_name_waits_until_the_first_is_gone(make: Make, agents: Agents) -> None:
    controller = make().start()
    first = agents(controller.endpoint)
    until(lambda: in_command(first))
    second = agents(controller.endpoint)
    until(lambda: "two servers call themselves" in controller.server().note)
    passes(second)
    assert second.policy.source == DecisionSource.FALLBACK
    assert in_command(first)
    assert controller.log().count("two servers call themselves") == 1
    assert controller.status().refused_messages == 0
    first.stop()
    until(lambda: in_command(second))
    assert controller.server().note == ""


def test_the_note_about_a_second_server_goes_with_it(make: Make, agents: Agents) -> None:
    controller = make().start()
    first, second = agents(controller.endpoint), agents(controller.endpoint)
    until(lambda: "two servers call themselves" in controller.server().note)
    until(lambda: in_command(first) or in_command(second))
    (second if first.policy.source == DecisionSource.TABLE else first).stop()
    until(lambda: controller.server().note == "")


def test_losses_are_counted_by_record_number(make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    for seq in (0, 1, 2, 10, 11, 20):
        agent._queue.put(record(record_seq=seq))
    until(lambda: controller.server().records == 6)
    assert controller.server().records_lost == 7 + 8


def test_bad_messages_are_counted_and_hurt_nobody(make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent))
    version = bytes((WIRE_VERSION,))
    frames = [b"", version, b"\xff", os.urandom(200), b"\x07" + encode(hello())[1:], encode(hello())[:-1]]
    frames += 101 * [version + b"\x92\xa5steps\x01"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(controller.endpoint)
        for frame in frames:
            stranger.send(frame)
        stranger.send_multipart([b"a", b"b"])
        until(lambda: controller.status().refused_messages == len(frames) + 1)
        ended = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send(b"\x01" * (MAX_MESSAGE_BYTES + 1))  # ZMQ drops this peer, and this peer only
        assert ended.poll(1000 * PATIENCE)
    agent._queue.put(record())
    until(lambda: controller.server().records == 1)
    assert in_command(agent)
    assert 1 < controller.log().count("was refused") <= 8  # each cause said once, then counted


def test_a_hello_that_no_policy_could_take_is_refused(make: Make) -> None:
    controller = make().start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as server:
        server.connect(controller.endpoint)
        for changes in ({"candidate_steps": []}, {"candidate_steps": [-1]}, {"server_id": ""}, {"tp_size": -1},
                        {"gpu": "x" * 5000}, {"captured_batch_sizes": [1 << 60]}):  # fmt: skip
            server.send(encode(hello(**changes)))
        server.send(encode(hello(server_id="sane")))
        until(lambda: [s.server for s in controller.status().servers] == ["sane/0"])
        for bad in (
            record(seconds=float("nan")),
            record(accepted_drafts=[-2]),
            record(source=9),
            record(draft_tokens=-1),
        ):
            server.send(encode(StepBatch([bad], 0)))
        server.send(encode(StepBatch([record()], 0)))
        until(lambda: controller.server("sane/0").records == 1)
    assert controller.status().refused_messages == 6 + 4


class Failing(Policy):
    name = "failing"

    def __init__(self) -> None:
        self.broken: set[str] = set()

    def learn(self, step: StepRecord) -> None:
        if step.step == 13:
            raise ZeroDivisionError

    def decide(self, server: Hello, now: float) -> Plan:
        if server.server_id == "undecidable":
            raise KeyError
        return Plan(Grid(), (1,), (frozenset(),), "always 1")


def test_a_policy_that_fails_for_one_server_goes_on_for_the_others(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("specpilot.controller.config.ThresholdPolicy.build", lambda self, prior=None: Failing())
    settings = ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc", lease_seconds=0.5)
    service = Service(Config(controller=settings, policy=ThresholdPolicy(5), trace=TraceConfig(directory="")))
    good, bad = agents(settings.endpoint, "good"), agents(settings.endpoint, "bad")
    agents(settings.endpoint, "undecidable")
    until(lambda: service.turn() or (in_command(good) and in_command(bad)))
    good._queue.put(record(record_seq=0))
    bad._queue.put(record(record_seq=0, step=13))
    until(lambda: service.turn() or passes(bad) or bad.policy.source == DecisionSource.FALLBACK)
    for _ in range(10):
        service.turn()
    until(lambda: service.turn() or in_command(good))
    notes = {server.server: server.note for server in service.status().servers}
    assert notes["good/0"] == ""
    assert "failed in learning from a step" in notes["bad/0"]
    assert "failed in deciding" in notes["undecidable/0"]
    assert sum("failed in" in r.getMessage() for r in caplog.records) == 2
    service.stop()
    service.run()


@pytest.fixture
def learning(tmp_path: Path) -> Iterator[Callable[[], Service]]:
    """Services with the learned policy, one after the other on one endpoint."""
    config = Config(
        controller=ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc"),
        policy=GoodputPolicy(),
        trace=TraceConfig(directory=""),
        prior=PriorConfig(directory=str(tmp_path / "prior")),
    )
    made: list[Service] = []

    def start() -> Service:
        if made:
            made[-1].stop()
            made[-1].run()
        made.append(Service(config))
        return made[-1]

    yield start
    made[-1].stop()
    made[-1].run()


def serve(service: Service, agent: Agent, accepted: int, count: int = 400) -> None:
    """Let ``service`` learn from a server on which K=3 accepts ``accepted`` drafts of each request."""
    first = agent._queue.waiting()
    for seq in range(first, first + count):
        agent._queue.put(record(record_seq=seq, batch_size=8, padded_batch_size=8, accepted_drafts=[accepted] * 8))
    until(lambda: service.turn() or service.status().servers[0].records == count)


def test_what_was_learned_outlives_the_controller(
    learning: Callable[[], Service], agents: Agents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = learning()
    agent = agents(service.endpoint)
    until(lambda: service.turn() or in_command(agent))
    serve(service, agent, accepted=2)
    assert not list((tmp_path / "prior").iterdir())
    service = learning()  # the one before stops, and writes
    (path,) = (tmp_path / "prior").iterdir()
    until(lambda: service.turn() or service._sessions)
    assert "stored prior" in service._sessions["s/0"].plan.reason  # type: ignore[union-attr]
    service = learning()
    path.write_text("no JSON")
    until(lambda: service.turn() or service._sessions)
    assert f"{path} is not used" in caplog.text
    assert "stored prior" not in service._sessions["s/0"].plan.reason  # type: ignore[union-attr]


def test_a_broken_drafter_is_in_the_status(learning: Callable[[], Service], agents: Agents) -> None:
    service = learning()
    agent = agents(service.endpoint)
    until(lambda: service.turn() or in_command(agent))
    serve(service, agent, accepted=0)
    until(lambda: service.turn() or "drafter broken" in service.status().servers[0].note)


def test_a_prior_that_cannot_be_written_is_in_the_status(
    learning: Callable[[], Service], agents: Agents, tmp_path: Path
) -> None:
    service = learning()
    agent = agents(service.endpoint)
    until(lambda: service.turn() or in_command(agent))
    (tmp_path / "prior").rmdir()
    for session in service._sessions.values():
        session.saved_at = float("-inf")
    service.turn()
    assert str(tmp_path / "prior") in service.status().prior_error
    until(lambda: service.turn() or in_command(agent))


def test_a_policy_that_learned_of_a_change_decides_at_once(learning: Callable[[], Service], agents: Agents) -> None:
    service = learning()
    config = service._live.config
    service._live.config = msgspec.structs.replace(
        config, controller=msgspec.structs.replace(config.controller, decide_seconds=3600.0)
    )
    agent = agents(service.endpoint)
    until(lambda: service.turn() or in_command(agent))
    serve(service, agent, accepted=3)
    until(lambda: service.turn() or "K=3" in service.status().servers[0].reason)


def test_records_of_a_server_that_nobody_asked_yet_are_kept(tmp_path: Path) -> None:
    """After a restart of the controller they arrive before the answer to its question."""
    config = Config(
        controller=ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc"),
        policy=ThresholdPolicy(5),
        trace=TraceConfig(directory=str(tmp_path / "t")),
    )
    service = Service(config)
    with zmq.Context() as context, context.socket(zmq.DEALER) as server:
        server.connect(config.controller.endpoint)
        server.send(encode(StepBatch([record(record_seq=40)], 0)))
        server.send(encode(StepBatch([record(record_seq=41)], 0)))
        while not server.poll(0):
            service.turn()
        server.send(encode(hello(epoch=6)))
        server.send(encode(StepBatch([record(record_seq=43)], 0)))
        until(lambda: service.turn() or any(s.records == 3 for s in service.status().servers))
        (status,) = service.status().servers
        assert (status.records_lost, status.pending_epoch) == (1, 7)
    service.stop()
    service.run()


def test_a_table_that_was_lost_or_given_up_is_sent_again_at_once(tmp_path: Path) -> None:
    config = Config(
        controller=ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc", decide_seconds=3600.0),
        trace=TraceConfig(directory=""),
    )
    now = 100.0
    service = Service(config, clock=lambda: now)
    decoder = FrameDecoder(ToHook | StatusReport)

    def epochs() -> list[int]:
        """Tables that are sent in answer to what was, and in the turn after that."""
        sent = []
        for _ in range(2):
            server.send(encode(StatusRequest()))
            message: object = None
            while not isinstance(message, StatusReport):
                until(lambda: service.turn() or server.poll(0))
                message = decoder.decode(server.recv())
                sent += [message.epoch] if isinstance(message, DecisionTable) else []
        return sent

    with zmq.Context() as context, context.socket(zmq.DEALER) as server:
        server.connect(config.controller.endpoint)
        server.send(encode(hello(epoch=0)))
        assert epochs() == [1]
        server.send(encode(hello(epoch=0)))
        assert epochs() == []  # it may be on its way
        now += 0.6
        server.send(encode(hello(epoch=0)))
        assert epochs() == [2]
        server.send(encode(state(DecisionSource.TABLE, 2)))
        server.send(encode(state(DecisionSource.FALLBACK, 0)))
        assert epochs() == [3]
        server.send(encode(state(DecisionSource.FALLBACK, 0)))
        assert epochs() == []  # as it still is, until the new one arrives
        server.send(encode(state(DecisionSource.STALE, 2)))
        server.send(encode(state(DecisionSource.FALLBACK, 0)))
        assert epochs() == [4]  # an older one: ours was too late to be taken
    service.stop()
    service.run()


def state(source: DecisionSource, epoch: int) -> HookState:
    return HookState("i1", source, epoch, epoch, 1, 3, 1, {}, "")


def test_a_full_or_broken_trace_never_stops_control(make: Make, agents: Agents) -> None:
    controller = make().start()
    agent = agents(controller.endpoint)
    until(lambda: in_command(agent))
    folder = controller.folder / "trace"
    folder.rmdir()
    folder.write_text("a file where the folder was")
    agent._queue.put(record(record_seq=0))
    until(lambda: controller.status().trace_lost == 1)
    status = controller.status()
    assert str(folder) in status.trace_error
    assert in_command(agent)
    assert controller.server().records == 1


# -- configuration and endpoint --


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[policy]\nname = "threshold"\nthreshhold = 5', "threshhold"),
        ('[policy]\nname = "threshold"', "missing required field `threshold`"),
        ('[policy]\nname = "learned"', r"'learned' - at `\$\.policy\.name`"),
        ('[policy]\nname = "static"', "steps"),
        ('[policy]\nname = "threshold"\nthreshold = 3\nband = 3', r"band = 3 must be smaller than threshold = 3"),
        ('[policy]\nname = "static"\nsteps = -1', r"\$\.policy\.steps"),
        ("[polcy]", "polcy"),
        ("[controller]\nlease_seconds = 0", r"lease_seconds"),
        ('[controller]\nlease_seconds = "5"', r"\$\.controller\.lease_seconds"),
        ('[controller]\nendpoint = "tcp://0.0.0.0:1"', "specpilot keygen"),
        ('[controller]\nendpoint = "ipc://relative"', "absolute path"),
        ("[trace]\nsegment_bytes = 1000000\ntotal_bytes = 100000", "segment_bytes is larger"),
        ("[trace", "controller.toml"),
        ("\xff", "controller.toml"),
    ],
)
def test_a_wrong_key_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "controller.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        load_config(path)
    run = subprocess.run(
        [sys.executable, "-m", "specpilot.controller.cli", "controller", "--config", str(path)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr.startswith(f"specpilot: {path}")
    assert "Traceback" not in run.stderr


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_every_default_is_valid() -> None:
    config = load_config(None)
    assert config == msgspec.convert(msgspec.to_builtins(config), Config)


@pytest.mark.parametrize(
    ("variable", "home", "state"),
    [("{0}/xdg", "{0}/home", "{0}/xdg"), ("", "{0}/home", "{0}/home/.local/state"),
     ("relative", "{0}/home", "{0}/home/.local/state")],
)  # fmt: skip
def test_traces_and_priors_lie_in_the_state_directory_unless_a_folder_is_named(
    variable: str, home: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", variable.format(tmp_path))
    monkeypatch.setenv("HOME", home.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = Path(state.format(tmp_path), "specpilot")
    assert (TraceConfig().folder, PriorConfig().folder) == (folder / "trace", folder / "prior")
    assert (TraceConfig(directory="").folder, PriorConfig(directory="").folder) == (None, None)
    assert TraceConfig(directory="mine").folder == Path("mine")
    service = Service(Config(controller=ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc")))
    assert service.status().trace_directory == str(folder / "trace")
    service.stop()
    service.run()
    assert sorted(path.name for path in folder.iterdir()) == ["prior", "trace"]
    assert {path.name for path in tmp_path.iterdir()} <= {"home", "xdg", "c.ipc.lock"}


def test_a_home_that_is_missing_or_cannot_be_written_names_key_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", f"{tmp_path}/file")
    with pytest.raises(ConfigError, match=r"file/specpilot/trace: Not a directory.* set trace\.directory .*\"\""):
        Service(Config(controller=controller))
    with pytest.raises(ConfigError, match=r"file/specpilot/prior: Not a directory.* set prior\.directory .*\"\""):
        Service(Config(controller=controller, trace=TraceConfig(directory="")))

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as for a user id that the system does not know

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(ConfigError, match=r"trace\.directory is not set, .* set trace\.directory to a folder"):
        Service(Config(controller=controller))
    with pytest.raises(ConfigError, match=r"prior\.directory is not set, .* set prior\.directory to a folder"):
        Service(Config(controller=controller, trace=TraceConfig(directory="")))


def test_an_open_folder_is_refused_and_a_new_one_is_private(tmp_path: Path) -> None:
    opened = tmp_path / "open"
    opened.mkdir()
    opened.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        Endpoint(f"ipc://{opened}/c.ipc")
    endpoint = Endpoint(f"ipc://{tmp_path}/new/c.ipc")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "c.ipc").stat().st_mode & 0o777 == 0o600
    endpoint.close()


def test_a_socket_of_another_program_is_not_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/c.ipc")
        other.listen()
        with pytest.raises(ConfigError, match="in use by another program"):
            Endpoint(f"ipc://{tmp_path}/c.ipc")
    Endpoint(f"ipc://{tmp_path}/c.ipc").close()  # and its leftover is no obstacle


def test_an_endpoint_that_cannot_be_bound_is_an_error_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        Endpoint(f"ipc://{tmp_path}/{'x' * 200}.ipc")
    Endpoint(f"ipc://{tmp_path}/c.ipc").close()


def test_status_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StatusError, match="no controller at"):
        fetch_status(f"ipc://{tmp_path}/none.ipc")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/c.ipc")
        silent.listen()
        with pytest.raises(StatusError, match="did not answer"):
            fetch_status(f"ipc://{tmp_path}/c.ipc", 0.3)


def test_policies_are_asked_only_so_often_and_tables_sent_only_when_they_differ(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    class Asked(Threshold):
        def decide(self, server: Hello, now: float) -> Plan:
            asked.append(now)
            return super().decide(server, now)

    monkeypatch.setattr("specpilot.controller.config.ThresholdPolicy.build", lambda self, prior=None: Asked(5, 3))
    own = ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc", decide_seconds=0.05)
    now = 100.0
    service = Service(
        Config(controller=own, policy=ThresholdPolicy(5), trace=TraceConfig(directory="")), clock=lambda: now
    )
    agent = agents(own.endpoint)
    until(lambda: service.turn() or in_command(agent))
    asked.clear()
    for _ in range(40):
        now += 0.02
        service._tend()
    assert 10 <= len(asked) <= 16
    leased_until = lease_end(agent)
    now += own.lease_seconds
    until(lambda: service.turn() or lease_end(agent) > leased_until)  # sent after all that was
    assert agent.state().counters["tables_received"] == 1
    service.stop()
    service.run()


def test_status_starts_without_what_only_policies_need() -> None:
    """An operator waits for it: numpy alone would take as long as all the rest."""
    code = "import sys, specpilot.controller.cli, specpilot.controller.serve.report; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
