"""The simulated scheduler drives the real hooks as SGLang would, and their records add up."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from specpilot.controller.simulation.clock import VirtualClock, WallClock
from specpilot.controller.simulation.server import CANDIDATE_STEPS, SimServer
from specpilot.controller.simulation.surface import H200_8B, LatencySurface, acceptance_length
from specpilot.controller.simulation.workload import Arrival, Clients, Phase, Workload
from specpilot.sglang_hooks.link import Delivery
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import CompiledTable
from specpilot.sglang_hooks.wire import (
    MASKED,
    DecisionTable,
    ForwardKind,
    FrameDecoder,
    FromHook,
    Hello,
    HookState,
    StepBatch,
    StepRecord,
    encode,
)
from tests.support.peers import Peer
from tests.support.waiting import PATIENCE, until

LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])


def batch_table(epoch: int, edge: int, below: int, above: int) -> DecisionTable:
    return DecisionTable(epoch, 600.0, "test", [edge], [], [below, above], [[], []])


def mixed_workload(seed: int, crowds: int) -> Workload:
    """Crowds of 90, larger than any captured graph, and 40 one by one; some end at their first token."""
    rng = random.Random(seed)
    at = 0.0
    arrivals = []
    for _ in range(crowds):
        for gap in [0.0] * 90 + [2.0] + rng.choices([0.001, 0.02, 0.3], k=39):
            at += gap
            arrivals.append(Arrival(at, rng.randint(1, 300), rng.choice([1, 2, 3, 17, 90, 250])))
    return Workload(tuple(arrivals), (Phase(0.0, "one", 0.8), Phase(at / 2, "other", 0.3)))


def make_server(tmp_path: Path, asked: Workload | Clients, seed: int = 1, overlap: bool = True) -> SimServer:
    # Nobody listens there: records stay in the queue, and the link's thread puts back what it took.
    settings = Settings(
        endpoint=f"ipc://{tmp_path}/none.ipc",
        server_id="sim:1",
        queue_records=10**9,
        min_table_interval_seconds=0.0,
    )
    return SimServer(
        settings,
        asked.workload if isinstance(asked, Clients) else asked,
        H200_8B,
        random.Random(seed),
        VirtualClock(),
        overlap=overlap,
        max_running_requests=80,
        on_end=asked.again if isinstance(asked, Clients) else None,
    )


def serve(server: SimServer, before_turn: Callable[[SimServer, int], None] = lambda *_: None) -> list[StepRecord]:
    """Serve every request and return all records."""
    server.start()
    turns = 0
    while not server.drained:
        before_turn(server, turns)
        server.turn()
        turns += 1
    server.agent.stop()
    return server.agent._queue.take(10**9)


def deliver(server: SimServer, table: DecisionTable) -> None:
    """Put a table where the link puts it: the next receiving pass broadcasts it."""
    source = server.agent._source
    assert source is not None
    source._mailbox.tables.append(Delivery(CompiledTable.compile(table, CANDIDATE_STEPS), float("inf"), 0.0))


def change_tables(server: SimServer, turn: int) -> None:
    """Another line between speculating and skipping every 50 passes: lands at any point of the lag."""
    if turn % 50 == 3:
        edge = (2, 10, 30)[turn // 50 % 3]
        below, above = ((3, 0), (1, 3), (0, 1))[turn // 150 % 3]
        deliver(server, batch_table(turn, edge, below, above))


def tokens_of(records: list[StepRecord]) -> int:
    return sum(n + 1 for record in records for n in record.accepted_drafts if n != MASKED)


@LOOPS
def test_records_add_up_to_the_tokens_that_clients_saw(tmp_path: Path, overlap: bool) -> None:
    workload = mixed_workload(seed=3, crowds=10)
    server = make_server(tmp_path, workload, overlap=overlap)
    records = serve(server, change_tables)
    summary = server.summary()

    assert len(records) > 3000
    assert [record.record_seq for record in records] == list(range(len(records)))
    assert [record.step for record in records] == sorted({record.step for record in records})
    recorder = server.agent.recorder
    assert (recorder.join_misses, recorder.steps_mismatched, server.agent.failures) == (0, 0, 0)

    for record in records:
        assert record.draft_tokens == record.steps + 1 == record.proposed_steps + 1
        assert len(record.accepted_drafts) == record.batch_size
        assert all(MASKED <= n <= record.steps for n in record.accepted_drafts)
        assert all(record.accepted_drafts[row] != MASKED for row in record.truncated)
    steps = Counter(record.steps for record in records)
    assert set(steps) == set(CANDIDATE_STEPS)
    assert {str(k): n / len(records) for k, n in steps.items()} == summary.share_by_k
    assert summary.steps == len(records)
    assert summary.switches == sum(a.steps != b.steps for a, b in itertools.pairwise(records)) > 30

    # The first token of a request is its prefill's; all others are some record's.
    emitted = sum(arrival.output_tokens for arrival in workload.arrivals)
    assert summary.tokens == emitted
    assert tokens_of(records) == emitted - len(workload.arrivals)
    # Each request ends in one decode step, unless its prefill was all.
    ends = sum(len(record.truncated) for record in records)
    assert ends == sum(arrival.output_tokens > 1 for arrival in workload.arrivals)
    masked = sum(record.accepted_drafts.count(MASKED) for record in records)
    # A request that ends shows up once more, unless a prefill came before the next decode.
    assert 0 < masked <= len(workload.arrivals) if overlap else masked == 0


@LOOPS
def test_a_record_carries_its_own_steps_time_and_batch(tmp_path: Path, overlap: bool) -> None:
    """Without any cost on the host, a step's seconds are the surface's: also when its neighbours differ."""
    records = serve(make_server(tmp_path, mixed_workload(seed=4, crowds=6), overlap=overlap), change_tables)
    own = [
        record
        for record in records
        if record.forwards == 1 and record.previous_kind == ForwardKind.DECODE and not record.after_idle
    ]
    assert len(own) > 1000
    for record in own:
        assert record.seconds == pytest.approx(H200_8B.decode_seconds(record.steps, record.batch_size))
        assert record.padded_batch_size == H200_8B.padded(record.batch_size)
        assert record.graph == (record.batch_size <= 64)
        assert (record.launch_gap_seconds < 0) == overlap
    assert {record.graph for record in records} == {True, False}
    after_prefill = [record for record in records if record.previous_kind == ForwardKind.EXTEND]
    assert after_prefill
    assert all(record.forwards > 1 or record.record_seq == 0 for record in after_prefill)
    assert all(record.prefill_tokens >= record.previous_width > 0 for record in after_prefill)
    assert any(record.after_idle is False for record in records)


@LOOPS
def test_context_and_load_are_those_of_the_launch(tmp_path: Path, overlap: bool) -> None:
    workload = Workload((Arrival(0.0, 100, 400),), (Phase(0.0, "all", 0.7),))
    records = serve(make_server(tmp_path, workload, overlap=overlap))
    length = 100 if overlap else 101  # under overlap the prefill's token is not in yet
    for record in records:
        if record.accepted_drafts[0] == MASKED:
            continue
        # Re-read every 16 forward passes; a step adds 4 tokens at most.
        assert length - 16 * 4 - 8 <= record.context_tokens <= length + 1
        assert (record.running, record.queued) == (1, 0)
        length += record.accepted_drafts[0] + 1
    assert length == (499 if overlap else 500)


@LOOPS
def test_the_same_seed_gives_the_same_records(tmp_path: Path, overlap: bool) -> None:
    def records(seed: int) -> list[StepRecord]:
        server = make_server(tmp_path, Clients(20.0, random.Random(seed)), seed, overlap)
        return [msgspec.structs.replace(record, time=0.0) for record in serve(server, change_tables)]

    first = records(7)
    assert len(first) > 1000
    assert first == records(7)
    assert first != records(8)


def test_crowds_are_queued_and_prefilled_together(tmp_path: Path) -> None:
    workload = Workload(tuple(Arrival(0.0, 1000, 30) for _ in range(100)), (Phase(0.0, "all", 0.7),))
    records = serve(make_server(tmp_path, workload))
    assert max(record.batch_size for record in records) == 80
    assert records[0].batch_size == 80
    assert records[0].queued == 20
    assert records[0].step == 11  # 8 prompts of 1,000 tokens fit into a prefill


class Unhurried(WallClock):
    """The host's time but for what the host takes: a busy machine makes as many steps in a second of it."""

    def __init__(self) -> None:
        self._now = super().now()

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._now += seconds


def test_records_and_tables_travel_over_a_real_socket(tmp_path: Path) -> None:
    """The link's thread, a ROUTER, time that passes: a pushed table takes effect and nothing is lost."""
    endpoint = f"ipc://{tmp_path}/router.ipc"
    hellos: list[Hello] = []
    records: list[StepRecord] = []
    states: list[HookState] = []
    ended = threading.Event()

    def controller() -> None:
        decoder = FrameDecoder(FromHook)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(endpoint)
            while router.poll(300) or not ended.is_set():
                if not router.poll(0):
                    continue
                address, frame = router.recv_multipart()
                message = decoder.decode(frame)
                if isinstance(message, Hello):
                    hellos.append(message)
                    if not message.epoch:  # who hears nothing for long says Hello again
                        router.send_multipart([address, encode(batch_table(1, 8, 3, 0))])
                elif isinstance(message, StepBatch):
                    assert message.dropped == 0
                    records.extend(message.records)
                elif isinstance(message, HookState):
                    states.append(message)

    thread = threading.Thread(target=controller, daemon=True)
    thread.start()
    # Ten times as fast as the card, to have thousands of steps in seconds.
    fast = LatencySurface(
        {k: tuple((batch, seconds / 10) for batch, seconds in curve) for k, curve in H200_8B.curves.items()},
        H200_8B.captured_batch_sizes,
        H200_8B.prefill_base_seconds / 10,
        H200_8B.prefill_seconds_per_token / 10,
    )
    clients = Clients(3.0, random.Random(5))
    server = SimServer(
        Settings(endpoint=endpoint, server_id="sim:2", fallback=1),
        clients.workload,
        fast,
        random.Random(5),
        Unhurried(),
        on_end=clients.again,
    )
    server.start()
    for _ in range(50):
        server.turn()
    until(lambda: server.agent._link.newest_epoch == 1)  # type: ignore[union-attr]
    until(lambda: server._elapsed() > 3.0, meanwhile=server.turn)
    while server._in_flight:
        server._settle()
    server.agent.stop()
    ended.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()

    summary = server.summary()
    assert (hellos[0].server_id, hellos[0].candidate_steps, hellos[0].fallback_steps) == (
        "sim:2",
        [0, 1, 3],
        1,
    )
    assert len(records) == summary.steps > 1000
    assert [record.record_seq for record in records] == list(range(len(records)))
    assert summary.tables_applied == 1
    assert summary.dropped_records == 0
    assert states[-1].epoch == 1
    by_table = [record for record in records if record.epoch == 1]
    assert len(by_table) > 0.8 * len(records)
    assert all(record.steps == (3 if record.batch_size <= 8 else 0) for record in by_table)
    assert {record.steps for record in by_table} == {0, 3}
    assert {record.steps for record in records if record.epoch == 0} <= {1}


def test_the_end_of_a_run_flushes_what_is_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time runs ahead of a slow link by thousands of records; all of them arrive after the run."""
    monkeypatch.setattr("specpilot.sglang_hooks.link.DRAIN_SECONDS", 0.5)
    with Peer(tmp_path) as peer:
        settings = Settings(endpoint=peer.endpoint, server_id="sim:4", queue_records=10**9)
        clients = Clients(30.0, random.Random(6))
        server = SimServer(settings, clients.workload, H200_8B, random.Random(6), VirtualClock(), on_end=clients.again)
        server.start()
        peer.hello()
        while not server.drained:
            server.turn()
        server.agent.stop()
        assert len(peer.records(server.summary().steps)) == server.summary().steps > 1500
        assert [record.record_seq for record in peer.received] == list(range(len(peer.received)))


def test_sigterm_ends_a_run_early_with_its_summary(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/router.ipc"
    out = tmp_path / "summary.json"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(endpoint)
        command = [
            sys.executable,
            "-m",
            "specpilot.controller.simulation.server",
            "--seconds",
            "100",
            "--server-id",
            "sim:3",
        ]
        process = subprocess.Popen([*command, "--endpoint", endpoint, "--out", str(out)])
        try:
            assert router.poll(1000 * PATIENCE), "no Hello came"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    summary = json.loads(out.read_text())
    assert set(summary) >= {"steps", "tokens", "seconds", "share_by_k", "switches", "tables_applied"}
    assert summary["seconds"] < 50


def test_a_wrong_option_ends_the_process_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specpilot.controller.simulation.server", "--endpoint", "tcp://0.0.0.0:1"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("specpilot: SPECPILOT_ENDPOINT='tcp://0.0.0.0:1' cannot be used")


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_surface_passes_through_its_figures_and_rises(steps: int) -> None:
    seconds = [H200_8B.decode_seconds(steps, batch) for batch in (*range(1, 65), 100, 128, 256, 400)]
    assert seconds == sorted(seconds)
    if steps:
        assert H200_8B.decode_seconds(steps, 20) > H200_8B.decode_seconds(steps - 1, 20)


def test_the_surface_knows_when_speculation_loses() -> None:
    def tokens_per_second(steps: int, batch: int) -> float:
        return batch * acceptance_length(0.7, steps) / H200_8B.decode_seconds(steps, batch)

    assert tokens_per_second(3, 16) == pytest.approx(3913.0)
    assert tokens_per_second(3, 256) == pytest.approx(8719.0)
    assert tokens_per_second(3, 16) > tokens_per_second(0, 16)
    assert tokens_per_second(3, 64) < tokens_per_second(0, 64)
    with pytest.raises(ValueError, match="no latency is known for 7 steps, only for 0 to 3"):
        H200_8B.decode_seconds(7, 1)


@pytest.mark.parametrize("seed", range(5))
def test_clients_come_and_go(tmp_path: Path, seed: int) -> None:
    """As many are served as are wanted, but for those who came before the level fell and wait for their answer."""

    def by_batch(server: SimServer, turn: int) -> None:
        if turn == 0:
            deliver(server, batch_table(1, 8, 3, 0))

    records = serve(make_server(tmp_path, Clients(30.0, random.Random(seed))), by_batch)
    busy = sum(record.seconds for record in records)
    spent: Counter[int] = Counter()
    for record in records:
        spent[record.batch_size] += record.seconds
    assert max(spent) <= 64 + 8
    assert {size for size, seconds in spent.items() if seconds > 0.05 * busy} >= {2, 8, 24, 64}
    assert 0.2 < sum(seconds for size, seconds in spent.items() if size <= 8) / busy < 0.6
