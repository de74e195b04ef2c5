"""The hooks' thread and socket against a real ROUTER that lies, sleeps, floods and restarts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from specpilot.sglang_hooks import link as link_module
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.broadcast import BURST, Confirmation, UpdateSource, apply_update
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import CompiledTable, TablePolicy
from specpilot.sglang_hooks.wire import (
    MAX_TABLE_BYTES,
    WIRE_VERSION,
    DecisionSource,
    DecisionTable,
    HelloRequest,
    Lease,
    encode,
)
from tests.support.messages import record, table
from tests.support.peers import Peer
from tests.support.waiting import PATIENCE, until

Start = Callable[..., Agent]


class Clock:
    """Monotonic seconds of the hooks, which a test lets go on by more than it waits: leases end when it says so."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(link_module, "monotonic", made)
    return made


@pytest.fixture
def start(tmp_path: Path, clock: Clock) -> Iterator[Start]:
    agents = []

    def make(**settings: object) -> Agent:
        values = {"endpoint": f"ipc://{tmp_path}/c.ipc", "min_table_interval_seconds": 0.0} | settings
        chosen = Settings(**values)  # type: ignore[arg-type]
        agent = Agent(chosen, TablePolicy(chosen, [0, 1, 3], 3, clock))
        agent.start(ServerFacts(server_id="s"))
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.stop()


def passes(agent: Agent, count: int = 1) -> None:
    """Receiving passes of a single rank."""
    for _ in range(count):
        received: list[object] = []
        agent.pull(received)
        for update in received:
            agent.apply(update)  # type: ignore[arg-type]


def leased(agent: Agent, clock: Clock, seconds: float) -> bool:
    """Has a lease arrived that lasts for more than ``seconds``?"""
    assert agent._source is not None
    return agent._source._mailbox.lease[1] > clock() + seconds


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        bytes((WIRE_VERSION,)),
        b"\xff",
        os.urandom(64),
        bytes((WIRE_VERSION + 1,)) + encode(Lease(1, 5.0))[1:],
        encode(table())[:-3],
        bytes((WIRE_VERSION,)) + b"\x93" * 5000,
        encode(table(epoch=-4)),
        encode(table(steps=2)),
        encode(table(lease_seconds=float("nan"))),
    ],
    ids=[
        "empty",
        "version-only",
        "byte",
        "random",
        "other-version",
        "cut",
        "nested",
        "epoch",
        "undeclared",
        "nan",
    ],
)
def test_bad_messages_are_counted_and_change_nothing(frame: bytes, start: Start, tmp_path: Path) -> None:
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send_raw(frame)
        counters = agent._link.counters  # type: ignore[union-attr]
        refusals = "messages_refused", "tables_refused", "tables_replayed"
        until(lambda: sum(counters[name] for name in refusals) == 1)
        passes(agent, 3)
        assert agent.policy.source == DecisionSource.FALLBACK
        peer.send_table(table(epoch=1, steps=0), agent)
        passes(agent)
        assert agent.policy.get_steps_for_batch(1) == 0
        peer.until(lambda: peer.states and peer.states[-1].epoch == 1)
        sent = peer.states[-1].counters
        assert sum(sent[name] for name in refusals) == 1


@pytest.mark.parametrize("size", [MAX_TABLE_BYTES + 1, 4 * MAX_TABLE_BYTES])
def test_the_link_survives_an_oversized_message(size: int, start: Start, tmp_path: Path) -> None:
    """ZMQ gives such a connection up for good; the link must make itself a new one."""
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        first = peer.address
        peer.send_raw(bytes((WIRE_VERSION,)) * size)
        peer.until(lambda: peer.address != first)
        peer.send_table(table(epoch=1, steps=0), agent)
        passes(agent)
        assert agent.policy.get_steps_for_batch(1) == 0


def test_replayed_and_older_tables_are_refused(start: Start, tmp_path: Path) -> None:
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send_table(table(epoch=5, steps=0), agent)
        passes(agent)
        peer.send(table(epoch=5, steps=1))
        peer.send(table(epoch=4, steps=1))
        until(lambda: agent._link.counters["tables_replayed"] == 2)  # type: ignore[union-attr]
        passes(agent, 3)
        assert agent.policy.get_steps_for_batch(1) == 0


def test_lease_stale_fallback_and_back(start: Start, clock: Clock, tmp_path: Path) -> None:
    agent = start(stale_seconds=6000.0)
    policy = agent.policy
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send_table(table(epoch=1, steps=0, lease_seconds=3000.0), agent)
        passes(agent)
        assert policy.source == DecisionSource.TABLE
        clock.ahead += 2000.0
        peer.send(Lease(1, 3000.0))
        until(lambda: leased(agent, clock, 2000.0))
        clock.ahead += 2000.0
        passes(agent)
        assert policy.source == DecisionSource.TABLE
        clock.ahead += 2000.0
        passes(agent)
        assert policy.source == DecisionSource.STALE
        assert policy.get_steps_for_batch(1) == 0  # the last table, without its randomness
        peer.send(Lease(1, 3000.0))
        until(lambda: leased(agent, clock, 2000.0))
        passes(agent)
        assert policy.source == DecisionSource.TABLE
        clock.ahead += 4000.0
        passes(agent)
        assert policy.source == DecisionSource.STALE
        clock.ahead += 6000.0
        passes(agent)
        assert policy.source == DecisionSource.FALLBACK
        assert policy.get_steps_for_batch(1) == 3
        assert policy.lease_expiries == 2
        peer.send(Lease(1, 3000.0))
        until(lambda: leased(agent, clock, 2000.0))
        passes(agent, 3)
        assert policy.source == DecisionSource.FALLBACK  # a table once given up needs a new one
        peer.send_table(table(epoch=2, steps=1), agent)
        passes(agent)
        assert policy.get_steps_for_batch(1) == 1


def test_the_fallback_is_in_force_at_the_first_pass_after_expiry(start: Start, clock: Clock, tmp_path: Path) -> None:
    """However late that pass comes: passes count, not milliseconds."""
    agent = start(stale_seconds=0.0)
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send_table(table(epoch=1, steps=0, lease_seconds=3000.0), agent)
        passes(agent)
        clock.ahead += 4000.0
        assert agent.policy.get_steps_for_batch(1) == 0
        passes(agent)
        assert agent.policy.get_steps_for_batch(1) == 3


def test_a_flood_of_tables_changes_the_policy_only_so_often(start: Start, clock: Clock, tmp_path: Path) -> None:
    interval = 10_000.0
    agent = start(min_table_interval_seconds=interval)
    adopted: list[int] = []

    def look() -> None:
        passes(agent)
        if agent.policy.table is not None and agent.policy.table.epoch not in adopted:
            adopted.append(agent.policy.table.epoch)

    def offer(epoch: int) -> DecisionTable:
        return table(epoch=epoch, steps=epoch % 2, lease_seconds=1e6)

    with Peer(tmp_path) as peer:
        peer.hello()
        for epoch in range(1, 30):
            peer.send_table(offer(epoch), agent)
            look()
        assert adopted == list(range(1, 1 + BURST + 1))
        for epoch in range(30, 300):
            peer.send(offer(epoch))
            look()
        peer.until(lambda: look() or agent._link.newest_epoch == 299)  # type: ignore[union-attr]
        assert len(adopted) == 1 + BURST
        clock.ahead += interval
        look()
        assert adopted[1 + BURST :] == [299]
        for epoch in range(300, 310):
            peer.send_table(offer(epoch), agent)
            look()
        assert len(adopted) == 1 + BURST + 1


def test_leases_too_short_to_live_cost_no_broadcast_a_pass(start: Start, clock: Clock, tmp_path: Path) -> None:
    agent = start(min_table_interval_seconds=100_000.0, stale_seconds=1e6)
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send_table(table(epoch=1, steps=0, lease_seconds=300.0), agent)
        passes(agent)
        updates = []
        for _ in range(100):
            for ahead in (0.0, 400.0):
                clock.ahead += ahead
                received: list[object] = []
                agent.pull(received)
                updates.append(len(received))
                for update in received:
                    agent.apply(update)  # type: ignore[arg-type]
            peer.send(Lease(1, 300.0))
            until(lambda: leased(agent, clock, 100.0))
        # Out of force and back into it as often as the credit lasts, and out of it for the last time.
        assert sum(updates) == 2 * BURST + 1


def test_losses_are_countable_when_the_controller_does_not_read(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "SEND_HIGH_WATER", 4)
    total, row = 3000, [2] * 256
    agent = start(queue_records=100)
    with Peer(tmp_path) as peer:
        peer.hello()  # and now it reads nothing
        for seq in range(total):
            agent._queue.put(record(record_seq=seq, batch_size=256, accepted_drafts=row))
            if seq % 100 == 0:
                time.sleep(0.01)
        dropped = agent._queue.dropped
        assert dropped > 0
        peer.until(lambda: len(peer.received) + dropped >= total)
        seqs = [r.record_seq for r in peer.received]
        assert seqs == sorted(set(seqs))
        assert total - len(seqs) == dropped
        agent._queue.put(record(record_seq=total))
        peer.until(lambda: peer.received[-1].record_seq == total)
        assert peer.dropped == dropped


def test_either_side_may_start_first_and_the_controller_may_restart(start: Start, tmp_path: Path) -> None:
    agent = start()
    agent._queue.put(record(record_seq=0))
    tried: list[bool] = []
    agent._link._hello = lambda: tried.append(True) or agent.hello()  # type: ignore[union-attr, func-returns-value]
    until(lambda: len(tried) > 2)  # in vain
    with Peer(tmp_path) as peer:
        assert peer.hello().epoch == 0
        assert peer.records(1)[0].record_seq == 0
        peer.send_table(table(epoch=7, steps=0), agent)
    agent._queue.put(record(record_seq=1))
    with Peer(tmp_path) as peer:
        peer.until(lambda: peer.received or peer.states)
        peer.send(HelloRequest())
        assert peer.hello().epoch == 7
        assert peer.records(1)[0].record_seq == 1


def test_hello_is_repeated_to_a_silent_controller(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(link_module, "STATE_SECONDS", 0.1)
    start()
    with Peer(tmp_path) as peer:
        peer.until(lambda: len(peer.hellos) >= 3)


def test_queued_records_are_sent_when_the_server_stops(start: Start, tmp_path: Path) -> None:
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        for seq in range(500):
            agent._queue.put(record(record_seq=seq))
        agent.stop()
        assert [r.record_seq for r in peer.records(500)] == list(range(500))


def test_a_table_that_waited_for_longer_than_its_lease_explores_nothing(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    """Behind a long prefill, say; and one that is older than ``stale_seconds`` too is not taken at all."""
    agent = start(stale_seconds=5000.0)
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send_table(table(epoch=1, steps=0, lease_seconds=500.0), agent)
        clock.ahead += 1000.0
        passes(agent)
        assert agent.policy.source == DecisionSource.STALE
        assert agent.policy.lease_expiries == 1
        peer.send_table(table(epoch=2, steps=1, lease_seconds=500.0), agent)
        clock.ahead += 7000.0
        passes(agent)
        assert agent.policy.source == DecisionSource.FALLBACK
        assert agent.policy.table is None


def test_a_comparison_of_the_ranks_delays_no_expiry() -> None:
    settings = Settings(check_steps=1, stale_seconds=0.0)
    policy = TablePolicy(settings, [0, 1, 3], 3)
    mailbox = link_module.Mailbox()
    source = UpdateSource(settings, policy, mailbox, ranks=2)
    mailbox.tables.append(link_module.Delivery(CompiledTable.compile(table(steps=0), [0, 1, 3]), 10.0, 0.0))
    for now, expected in ((1.0, DecisionSource.TABLE), (11.0, DecisionSource.FALLBACK)):
        policy.forward_iter += 1
        update = source.poll(now)
        assert update is not None
        assert update.check  # due at every pass, and on board of the change
        apply_update(update, policy, 0, lambda value: [value, value], Confirmation())
        assert policy.source == expected


def test_a_record_that_cannot_be_encoded_is_dropped_and_counted(start: Start, tmp_path: Path) -> None:
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        agent._queue.put(record(record_seq=0, steps=object()))
        until(lambda: agent._queue.dropped == 1)
        agent._queue.put(record(record_seq=1))
        assert peer.records(1)[0].record_seq == 1
        peer.until(lambda: peer.states and peer.states[-1].counters["link_failures"] == 1)


def test_whoever_knows_another_epoch_is_told_ours(start: Start, tmp_path: Path) -> None:
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send_table(table(epoch=5, steps=0), agent)
        for message in (table(epoch=4), Lease(3, 5.0), Lease(7, 5.0)):
            greeted = len(peer.hellos)
            peer.send(message)
            peer.until(lambda greeted=greeted: len(peer.hellos) > greeted)
            assert peer.hellos[-1].epoch == 5


def test_a_table_that_was_refused_leaves_nothing_to_the_next_of_its_epoch(
    start: Start, clock: Clock, tmp_path: Path
) -> None:
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send(table(epoch=1, steps=2))
        peer.send_table(table(epoch=1, steps=0, lease_seconds=5.0), agent)
        passes(agent)
        peer.send(Lease(1, 6000.0))
        until(lambda: leased(agent, clock, 5000.0))


def test_one_lie_does_not_use_up_the_epochs(start: Start, tmp_path: Path) -> None:
    agent = start()
    with Peer(tmp_path) as peer:
        peer.hello()
        peer.send(table(epoch=(1 << 53) - 1))
        until(lambda: agent._link.counters["tables_refused"] == 1)  # type: ignore[union-attr]
        peer.send_table(table(epoch=1, steps=0), agent)
        passes(agent)
        assert agent.policy.get_steps_for_batch(1) == 0


def test_a_flood_of_messages_is_read_in_turns(start: Start, tmp_path: Path) -> None:
    """Decoding holds the lock that the scheduler thread needs."""
    agent = start()
    link = agent._link
    assert link is not None
    turns: list[tuple[int, float]] = []
    receive = link._receive

    def watched(socket: zmq.Socket[bytes]) -> bool:
        before, begun = link.counters["messages_refused"], time.monotonic()
        known = receive(socket)
        turns.append((link.counters["messages_refused"] - before, time.monotonic() - begun))
        return known

    link._receive = watched  # type: ignore[method-assign]
    with Peer(tmp_path) as peer:
        peer.hello()
        sent, most = 0, link_module.MESSAGES_PER_TURN
        while not any(messages == most for messages, _ in turns):  # a slow sender is no flood
            for _ in range(10 * most):
                peer.send_raw(b"\xff")
            sent += 10 * most
            until(lambda sent=sent: link.counters["messages_refused"] == sent)
        assert max(messages for messages, _ in turns) == most
        rests = [seconds for messages, seconds in turns if messages == most]
        assert min(rests) >= 0.99 * link_module.DRAIN_SECONDS


def test_connections_that_end_at_once_are_tried_anew(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often, and whatever ZMQ still has to say of them when their socket is closed."""
    monkeypatch.setattr(link_module, "RECONNECT_SECONDS", 0.001)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/c.ipc")
        listener.listen()
        listener.settimeout(PATIENCE)
        start()
        for _ in range(1000):
            listener.accept()[0].close()
    (tmp_path / "c.ipc").unlink()
    with Peer(tmp_path) as peer:
        peer.hello()
