"""Every kind of degradation, caused through the real parts, is a counter in the status and one line in a log."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from rich.console import Console

from specpilot.controller.client.status import print_status
from specpilot.controller.config import (
    Config,
    ControllerConfig,
    GoodputPolicy,
    PriorConfig,
    StaticPolicy,
    TraceConfig,
)
from specpilot.controller.serve import tables
from specpilot.controller.serve.counters import CONTROLLER_COUNTERS, SERVER_COUNTERS
from specpilot.controller.serve.report import ControllerStatus
from specpilot.controller.serve.router import HELD_MESSAGES
from specpilot.controller.serve.service import Service
from specpilot.sglang_hooks import link as link_module
from specpilot.sglang_hooks import skip_hooks
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.counters import COUNTERS
from specpilot.sglang_hooks.installed import installed
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import MAX_TABLE_BYTES, WIRE_VERSION, DecisionSource, Lease, StepBatch, encode
from tests.support.messages import hello, record, table
from tests.support.waiting import until

TIMES = 1000


class Batch:
    """A decode of two requests, as the hooks look at one."""

    def __init__(self, step: int) -> None:
        self.forward_iter, self.launch_ts, self.has_grammar = step, time.monotonic(), False
        self.forward_mode = SimpleNamespace(is_decode=lambda: True, is_idle=lambda: False)
        ends = {"finished_reason": None, "is_retracted": False, "finished_len": None, "output_ids": [0]}
        self.reqs = [SimpleNamespace(seqlen=100, **ends) for _ in range(2)]
        self.spec_info = None


class World:
    """A controller and one server's hooks, in one thread but for the link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        self.policy: Any = StaticPolicy(steps=3)
        self.service: Service
        self.agent: Agent

    def start(self, lease_seconds: float = 5.0, wait: bool = True, all_gather: Any = None, **settings: Any) -> None:
        endpoint = f"ipc://{self.folder}/c.ipc"
        own = ControllerConfig(endpoint=endpoint, lease_seconds=lease_seconds)
        trace = TraceConfig(directory=f"{self.folder}/trace", flush_seconds=0.01)
        prior = PriorConfig(directory=f"{self.folder}/prior")
        self.service = Service(Config(controller=own, policy=self.policy, trace=trace, prior=prior))
        made = Settings(endpoint=endpoint, min_table_interval_seconds=0.0, **settings)
        self.agent = Agent(made, TablePolicy(made, [0, 1, 3], 1))
        gather = {} if all_gather is None else {"all_gather": all_gather}
        self.agent.start(ServerFacts("s", tp_size=1 if all_gather is None else 2), **gather)
        self.until(lambda: self.service._sessions)
        if wait:
            self.until(lambda: self.agent.policy.source == DecisionSource.TABLE)

    def stop(self) -> None:
        self.agent.stop()
        self.service.stop()
        self.service.run()

    @property
    def session(self) -> Any:
        return self.service._sessions["s/0"]

    def send(self, message: Any) -> None:
        """As the controller."""
        self.service._endpoint.send(self.session.address, message)

    def passes(self) -> None:
        received: list[Any] = []
        self.agent.pull(received)
        for update in received:
            self.agent.apply(update)

    def until(self, done: Callable[[], object], serve: bool = True) -> None:
        def go_on() -> None:
            if serve:
                self.service.turn()
            else:
                time.sleep(0.01)
            self.passes()

        until(done, meanwhile=go_on)

    def decode(self, width: int | None = None, quarantined: tuple[int, ...] = (), launch: bool = True) -> None:
        """One decode step, all drafts accepted."""
        self.step += 1
        batch, steps = Batch(self.step), 1
        if launch:
            self.agent.launching(batch)
            steps = self.agent.policy.get_steps_for_batch(2)
            self.agent.launched(batch, decode=True)
        accepted = [steps, steps]
        result = SimpleNamespace(
            speculative_num_draft_tokens=steps + 1 if width is None else width,
            num_correct_drafts_per_req_cpu=accepted,
            can_run_cuda_graph=True,
        )
        self.agent.policy.on_verify_complete(accepted, 2)
        self.agent.settled(batch, result, self.agent.settling(batch), quarantined)

    def status(self) -> dict[str, Any]:
        """What ``specpilot status --json`` prints, and a scraper reads."""
        return json.loads(msgspec.json.encode(self.service.status()))

    def counted(self, name: str) -> int:
        status = self.status()
        counters = {**status["counters"], **status["servers"][0]["counters"], **status, **status["servers"][0]}
        return int(counters.get(name, 0))  # the server's own come with its first state


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def stranger(world: World) -> Iterator[Callable[[Any], None]]:
    """Sends frames to the controller from a socket that it does not know."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)

        def send(message: Any) -> None:
            if not socket.getsockopt(zmq.LAST_ENDPOINT):
                socket.connect(world.service.endpoint)
            socket.send(message if isinstance(message, bytes) else encode(message))
            world.service.turn()

        yield send


def refused(world: World, times: int) -> None:
    for number in range(times):
        world.send(table(epoch=100 + number, steps=7))


def replayed(world: World, times: int) -> None:
    for _ in range(times):
        world.send(table(epoch=1, steps=0))


def garbage(world: World, times: int) -> None:
    for _ in range(times):
        world.service._endpoint.socket.send_multipart([world.session.address, b"\x63garbage"])


def leases_of_others(world: World, times: int) -> None:
    for _ in range(times):
        world.send(Lease(77, 5.0))


FROM_THE_CONTROLLER = {
    "tables_refused": refused,
    "tables_replayed": replayed,
    "messages_refused": garbage,
    "leases_ignored": leases_of_others,
}


def once(caplog: pytest.LogCaptureFixture, name: str) -> bool:
    return sum(f"(counted from now on as {name})" in line.getMessage() for line in caplog.records) == 1


@pytest.mark.parametrize("name", FROM_THE_CONTROLLER)
def test_what_the_controller_sends_wrong(name: str, world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    for sent in range(25, TIMES + 1, 25):  # no more than half of what ZMQ holds, which it makes room for in halves
        FROM_THE_CONTROLLER[name](world, 25)
        world.until(lambda sent=sent: world.agent._link.counters[name] == sent)
    world.until(lambda: world.counted(name) == TIMES)
    assert once(caplog, name)
    assert world.agent.policy.source == DecisionSource.TABLE
    assert world.agent.policy.get_steps_for_batch(2) == 3


def late(world: World) -> None:
    for _ in range(TIMES):
        world.decode(launch=False)


def wide(world: World) -> None:
    for _ in range(TIMES):
        world.decode(width=9)


def long_skipped(world: World) -> None:
    for _ in range(TIMES):
        world.decode(quarantined=(0,))


def decode(world: World) -> None:
    for _ in range(TIMES):
        world.decode()


def own_k0(world: World) -> None:
    installed.agent, worker = world.agent, SimpleNamespace()
    for step in range(TIMES):
        batch = Batch(step)
        skip_hooks.around_build_trivial_verify_input(lambda *_: SimpleNamespace(draft_token=None), worker, batch)
    installed.agent = None


ON_THE_SCHEDULER_THREAD: dict[str, tuple[Callable[[World], None], dict[str, Any]]] = {
    "records_dropped": (decode, {"queue_records": 1}),
    "join_misses": (late, {}),
    "steps_mismatched": (wide, {}),
    "rows_quarantined": (long_skipped, {}),
    "steps_capped": (decode, {"max_steps_by_batch": ((2, 0),)}),
    "skips_as_verify": (own_k0, {}),
}


@pytest.mark.parametrize("name", ON_THE_SCHEDULER_THREAD)
def test_what_goes_wrong_step_by_step(name: str, world: World, caplog: pytest.LogCaptureFixture) -> None:
    cause, settings = ON_THE_SCHEDULER_THREAD[name]
    world.start(**settings)
    cause(world)
    expected = TIMES // 2 if name == "records_dropped" else TIMES  # the link drains one now and then
    world.until(lambda: world.counted(name) >= expected)
    assert once(caplog, name)
    if name == "records_dropped":
        world.until(lambda: world.counted("records") > 0)
        world.decode()
        world.until(lambda: world.counted("records_lost") > 0)


def test_leases_that_run_out(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start(lease_seconds=0.3, stale_seconds=0.1)
    world.until(lambda: world.agent.policy.source == DecisionSource.FALLBACK, serve=False)
    world.until(lambda: world.counted("lease_expiries") == 1)
    world.until(lambda: world.counted("fallbacks") == 1)
    assert once(caplog, "lease_expiries")
    assert once(caplog, "fallbacks")


def test_ranks_that_differ(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start(wait=False, all_gather=lambda held: [held, (held[0], held[1] + 1, held[2])])
    world.until(lambda: world.counted("rank_mismatches") == 1)
    for _ in range(TIMES):
        world.decode()
        world.passes()
    assert world.status()["servers"][0]["source"] == "HALTED"
    assert "decisions" in world.status()["servers"][0]["note"]
    assert sum("the ranks differ" in line.getMessage() for line in caplog.records) == 1


def test_a_hook_that_fails(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    world.agent.recorder._load = lambda: 1 / 0  # type: ignore[union-attr, assignment, return-value]
    for _ in range(TIMES):
        world.decode()
    world.until(lambda: world.counted("hook_failures") == 1)
    assert sum("records no more steps" in line.getMessage() for line in caplog.records) == 1


def test_a_connection_made_anew(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    for times in (1, 2):
        # Larger than a server takes: ZMQ ends the connection there.
        world.service._endpoint.socket.send_multipart([world.session.address, bytes(MAX_TABLE_BYTES + 1)])
        world.until(lambda times=times: world.counted("link_rebuilds") == times)
    assert once(caplog, "link_rebuilds")


def test_a_link_that_fails(world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    monkeypatch.setattr(link_module.Link, "_send_records", lambda self, socket: 1 / 0)
    world.until(lambda: world.agent._link.counters["link_failures"] >= 2)
    monkeypatch.undo()
    world.until(lambda: world.counted("link_failures") >= 2)
    assert once(caplog, "link_failures")


# -- the controller's side --


def test_messages_that_are_none(
    world: World, stranger: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    for number in range(TIMES):
        stranger(bytes((WIRE_VERSION,)) + b"\x01" * (1 + number % 50))
    world.until(lambda: world.counted("refused_messages") == TIMES)
    assert once(caplog, "refused_messages")
    stranger(b"\x09another version")
    world.until(lambda: world.counted("refused_messages") == TIMES + 1)
    assert not once(caplog, "refused_messages")  # another cause, another line


def test_messages_of_a_peer_without_a_name(
    world: World, stranger: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    for number in range(TIMES):
        stranger(StepBatch([record(record_seq=number)], 0))
    world.until(lambda: world.counted("messages_unclaimed") == TIMES - HELD_MESSAGES)
    assert once(caplog, "messages_unclaimed")


def test_a_second_server_of_a_name(world: World, stranger: Callable[[Any], None]) -> None:
    world.start()
    for _ in range(10):
        stranger(hello(server_id="s", instance="another"))
    world.until(lambda: world.counted("rivals_turned_away") == 10)


def test_a_table_that_does_not_come_into_force(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tables, "REPUSH_SECONDS", 0.1)
    world.passes = lambda: None  # type: ignore[method-assign]  # a server that is busy with a long prefill
    world.start(wait=False)
    world.until(lambda: world.counted("tables_resent") >= 2)
    assert once(caplog, "tables_resent")


def test_a_policy_that_fails(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    world.session.policy.learn = lambda step: 1 / 0
    for _ in range(TIMES):
        world.decode()
    world.until(lambda: world.counted("records") == TIMES)
    assert world.counted("policy_failures") == 1
    assert sum("failed in learning" in line.getMessage() for line in caplog.records) == 1


def test_a_trace_that_cannot_be_written(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    shutil.rmtree(world.folder / "trace")
    (world.folder / "trace").write_text("in the way")
    for _ in range(TIMES):
        world.decode()
    world.until(lambda: world.counted("trace_lost") == TIMES)
    assert world.counted("trace_failures") >= 1
    assert sum("steps are not logged" in line.getMessage() for line in caplog.records) == 1


def test_a_prior_that_cannot_be_read_or_kept(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.policy = GoodputPolicy()
    world.start()
    priors = world.service._priors.store
    assert priors is not None
    shutil.rmtree(world.folder / "prior")
    for _ in range(TIMES):
        priors.save(hello(), {})
    assert world.counted("prior_failures") == TIMES
    assert "prior" in world.status()["prior_error"]
    assert sum("cannot be kept" in line.getMessage() for line in caplog.records) == 1


# -- nothing is left out --


def test_every_counter_has_a_test() -> None:
    text = Path(__file__).read_text() + Path(__file__).with_name("test_security.py").read_text()
    tested = {*FROM_THE_CONTROLLER, *ON_THE_SCHEDULER_THREAD}
    for name in (*COUNTERS, *SERVER_COUNTERS, *CONTROLLER_COUNTERS):
        counted = (f'counted("{name}")', f'counters["{name}"]')
        assert name in tested or any(one in text for one in counted) or name == "tables_received", name


def test_a_person_sees_only_what_is_not_zero(world: World) -> None:
    world.start()
    report = world.service.status()
    assert [*report.servers[0].counters] == [*COUNTERS, *SERVER_COUNTERS] or not world.session.state
    assert [*report.counters] == [*CONTROLLER_COUNTERS]
    assert "counters" not in printed(report)
    server = msgspec.structs.replace(report.servers[0], counters={"records_dropped": 3, "join_misses": 0})
    text = printed(msgspec.structs.replace(report, servers=[server], counters={"trace_failures": 2}))
    assert "records_dropped 3" in text
    assert "counters trace_failures 2" in text
    assert "join_misses" not in text


def printed(report: ControllerStatus) -> str:
    out = StringIO()
    print_status(report, Console(file=out, width=200))
    return out.getvalue()
