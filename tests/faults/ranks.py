"""Simulated servers for fault tests: tensor-parallel ranks as real processes, with the real hooks in them.

    python -m tests.faults.shifted tests.faults.ranks       then one JSON object a line on standard input, see ``Spec``

The host imports SGLang once and forks the ranks of each server from itself. A rank runs the loop of
``controller/simulation/server.py``; what it receives comes through SGLang's own receiving pass, receive skipper
and request broadcast over gloo, so a ``Command`` reaches every rank in the same pass, as a request would.

Each rank appends every decision to ``rank<N>.decisions`` (``DECISION``), and rank 0 keeps ``stats.json``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec
import torch.distributed as dist
import zmq
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from specpilot.controller.simulation.batch import SimRequest
from specpilot.controller.simulation.server import SimServer
from specpilot.controller.simulation.surface import H200_8B
from specpilot.controller.simulation.workload import Phase, Workload
from specpilot.sglang_hooks import agent as agent_module
from specpilot.sglang_hooks import plugin, step_hooks
from specpilot.sglang_hooks.agent import Agent
from specpilot.sglang_hooks.broadcast import PolicyUpdate
from specpilot.sglang_hooks.installed import installed
from specpilot.sglang_hooks.link import Mailbox
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import DecisionSource
from tests.faults import shifted
from tests.faults.command import DECISION, STATS_BYTES, Command
from tests.support import sglang_rig as rig
from tests.support.rank_process import Group

STATS_SECONDS = 0.02
COUNTED_TURNS = 8
"""Every so many turns the calls of the hooks are counted instead of their time taken."""


class Spec(msgspec.Struct):
    """One server."""

    world: int
    folder: str
    endpoint: str
    settings: dict[str, Any]


class Clock:
    """The host's, in which the simulated GPU takes no time; ``RankServer.pace`` does."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None: ...


class Meter:
    """What the hooks do on the scheduler thread, turn by turn.

    ``seconds``: CPU time of this thread in them. ``calls``: functions they called, in Python or C, which no
    load of the machine changes. ``called``: which C functions, and the files of the Python ones.
    """

    def __init__(self, agent: Agent) -> None:
        self.restart()
        self._turn = 0
        self._spent = 0.0
        self._called = 0
        for owner, names in (
            (agent, ("pull", "launching", "launched", "settling", "settled")),
            (agent.policy, ("get_steps_for_batch", "on_verify_complete")),
        ):
            for name in names:
                setattr(owner, name, self._measured(getattr(owner, name)))

    def restart(self) -> None:
        self.seconds: deque[float] = deque(maxlen=4096)
        self.calls: deque[int] = deque(maxlen=4096)
        self.called: set[str] = set()

    def turn(self) -> None:
        if self._counting:
            self.calls.append(self._called)
        else:
            self.seconds.append(self._spent)
        self._turn += 1
        self._spent, self._called = 0.0, 0

    @property
    def _counting(self) -> bool:
        return self._turn % COUNTED_TURNS == 0

    def _measured(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def measured(*args: Any) -> Any:
            if self._counting:
                sys.setprofile(self._count)
                try:
                    return hook(*args)
                finally:
                    sys.setprofile(None)
            begun = time.thread_time()
            try:
                return hook(*args)
            finally:
                self._spent += time.thread_time() - begun

        return measured

    def _count(self, frame: Any, event: str, called: Any) -> None:
        if event == "call":
            self._called += 1
            self.called.add(Path(frame.f_code.co_filename).name)
        elif event == "c_call" and called is not sys.setprofile:
            self._called += 1
            owner = called.__self__
            where = called.__module__ if owner is None or hasattr(owner, "__loader__") else type(owner).__name__
            self.called.add(f"{where}.{called.__name__}")


mailbox_deadlines: dict[int, float] = {}


class WatchedMailbox(Mailbox):
    """Remembers until when each table might be in force, though a newer lease came before a pass saw that one."""

    @property
    def lease(self) -> tuple[int, float]:
        return self._lease

    @lease.setter
    def lease(self, lease: tuple[int, float]) -> None:
        epoch, deadline = lease
        mailbox_deadlines[epoch] = max(mailbox_deadlines.get(epoch, 0.0), deadline)
        if len(mailbox_deadlines) > 256:
            del mailbox_deadlines[next(iter(mailbox_deadlines))]
        self._lease = lease


class RankServer(SimServer):
    """SimServer whose requests and policy updates come through SGLang's receiving pass."""

    def __init__(self, rank: int, spec: Spec, agent: Agent, group: Group) -> None:
        super().__init__(
            agent.settings, Workload((), (Phase(0.0, "even", 0.7),)), H200_8B, random.Random(5), Clock(), agent=agent
        )
        self.rank, self.folder = rank, Path(spec.folder)
        self._facts = replace(self._facts, rank=rank, tp_size=spec.world)
        self._group = group
        self.meter = Meter(agent)
        # As much of a scheduler as its receiving pass needs; a mock would remember every call for ever.
        self._scheduler = SimpleNamespace(
            session_controller=SimpleNamespace(maybe_reap=lambda now: None),
            flush_wrapper=SimpleNamespace(check_pending=lambda: None),
            external_corpus_manager=None,
            scheduler_stage_metrics=None,
            _tokenized_requests=lambda request: (),
            _request_dispatcher=TypeBasedDispatcher([(PolicyUpdate, agent.apply), (Command, self._obey)]),
        )
        context = zmq.Context()
        self._skipper = SchedulerRecvSkipper()
        requests, _ = rig.receiver(context, "none")
        if rank == 0:
            requests.recv_from_tokenizer.bind(f"ipc://{spec.folder}/tokenizer")
        self._receiver = replace(requests, recv_skipper=self._skipper, get_last_batch=self._last_batch)
        self._decisions = (self.folder / f"rank{rank}.decisions").open("wb")
        # Open from the start: a fault may take all other descriptors.
        self._stats_file = os.open(self.folder / "stats.json", os.O_WRONLY | os.O_CREAT)
        self._stats_at = 0.0
        self._prefilling = False
        self._clients = self._open = self._arrived = 0
        self.ending = False
        self.pace_seconds = self.prefill_seconds = 0.0
        self.flood_records = 0
        self.passes = self.decodes = 0
        self._overdue = 0
        self.worst_fallback_passes = 0
        self.expiries = 0

    # -- commands --

    def _obey(self, command: Command) -> None:
        getattr(self, f"do_{command.name}")(command.value)

    def do_clients(self, count: int) -> None:
        """So many requests from now on, each followed by another when it ends; 0: the server falls idle."""
        self._clients = count
        while self._open < count:
            self._arrive()

    def _arrive(self) -> None:
        self._open += 1
        self._arrived += 1
        prompt_tokens, output_tokens = 100 + self._arrived * 53 % 400, 50 + self._arrived * 37 % 200
        self._admission.waiting.append(SimRequest(prompt_tokens, output_tokens, self._arrived))

    def _end(self, req: SimRequest) -> None:
        super()._end(req)
        self._open -= 1
        if self._open < self._clients:
            self._arrive()

    def do_pace(self, seconds: float) -> None:
        self.pace_seconds = seconds

    def do_prefill(self, seconds: float) -> None:
        self.prefill_seconds = seconds

    def do_interval(self, passes: int) -> None:
        self._skipper._threshold = passes

    def do_flood(self, records: int) -> None:
        self.flood_records = records

    def do_stale(self, seconds: float) -> None:
        if self.agent._source is not None:
            self.agent._source._stale_seconds = seconds

    def do_meter(self, _: None) -> None:
        self.meter.restart()

    def do_shift(self, value: tuple[str, float]) -> None:
        shifted.shift(*value)

    def do_end(self, _: None) -> None:
        self.ending = True

    # -- the loop --

    def _last_batch(self) -> Any:
        if self._last is None:
            return None
        mode = ForwardMode.DECODE if self._last.forward_mode.is_decode() else ForwardMode.EXTEND
        return SimpleNamespace(forward_mode=mode)

    def _receive(self) -> None:
        before, passes = time.monotonic(), self.passes
        Scheduler.process_input_requests(self._scheduler, self._receiver.recv_requests())
        self.passes = _pulled.passes
        if self.rank == 0 and self.passes > passes:
            self._watch_lease(before)

    def _watch_lease(self, before: float) -> None:
        """Count the receiving passes from a lease's end to the one that ended the table's time in force."""
        policy = self.policy
        held = policy.table.epoch if policy.table is not None else 0
        until = mailbox_deadlines.get(held, float("inf"))
        if policy.source == DecisionSource.STALE:
            assert self.agent._source is not None
            until += self.agent._source._stale_seconds
        in_force = policy.source in (DecisionSource.TABLE, DecisionSource.STALE)
        if in_force and before > until:
            self._overdue += 1
        else:
            self._overdue = 0
        if policy.lease_expiries:
            self.worst_fallback_passes = max(self.worst_fallback_passes, 1 + self._overdue)

    def turn(self) -> None:
        super().turn()
        self.meter.turn()
        if self._last is None:
            self._decisions.flush()
            time.sleep(0.005)
        elif self.pace_seconds:
            time.sleep(self.pace_seconds)
        if self.rank == 0 and (now := time.perf_counter()) - self._stats_at > STATS_SECONDS:
            self._stats_at = now
            self.write_stats()

    def _prefill(self, batch: Any) -> Any:
        if self.prefill_seconds:
            self._prefilling = True
            if self.rank == 0:
                self.write_stats()
            time.sleep(self.prefill_seconds)
            self._prefilling = False
        return super()._prefill(batch)

    def _decode(self, batch: Any) -> Any:
        result = super()._decode(batch)
        policy = self.policy
        epoch = policy.table.epoch if policy.table is not None else 0
        self._decisions.write(
            DECISION.pack(self.passes, policy.forward_iter, epoch, policy.source, policy.applied_steps)
        )
        self.decodes += 1
        if self.decodes % 64 == 0:
            self._decisions.flush()
        if self.flood_records and self.agent.recorder is not None:
            self._flood()
        return result

    def _flood(self) -> None:
        """Records as of so many times the steps."""
        recorder, queue = self.agent.recorder, self.agent._queue
        assert recorder is not None
        last = _pulled.record
        for _ in range(self.flood_records if last is not None else 0):
            queue.put(msgspec.structs.replace(last, record_seq=recorder._record_seq))
            recorder._record_seq += 1

    def write_stats(self) -> None:
        recorder = self.agent.recorder
        state = self.agent.state()
        meter = self.meter
        stats = {
            "passes": self.passes,
            "decodes": self.decodes,
            "source": state.source.name,
            "epoch": state.epoch,
            "confirmed_ranks": state.confirmed_ranks,
            "halt_reason": state.halt_reason,
            "steps": state.steps,
            "counters": state.counters,
            "records_made": recorder._record_seq if recorder is not None else -1,
            "idle": self._last is None,
            "prefilling": self._prefilling,
            "queued": self.agent._queue.waiting(),
            "worst_fallback_passes": self.worst_fallback_passes,
            "lease_expiries": self.policy.lease_expiries,
            "lease_until": mailbox_deadlines.get(state.epoch, 0.0),
            "calls_max": max(meter.calls, default=0),
            "calls_turns": len(meter.calls),
            "called": sorted(meter.called),
            "hook_us_median": 1e6 * median(meter.seconds) if meter.seconds else 0.0,
            "at": time.perf_counter(),
        }
        os.pwrite(self._stats_file, json.dumps(stats).ljust(STATS_BYTES).encode(), 0)

    def serve(self) -> None:
        self.start()
        while not self.ending:
            self.turn()
        while self._in_flight:
            self._settle()
        self.agent.stop()
        self._decisions.close()
        if self.rank == 0:
            self.write_stats()


class _Pulled:
    """Receiving passes of this process, and the newest record."""

    passes = 0
    record: Any = None


_pulled = _Pulled()


def _after_pull(received: list[Any] | None, receiver: Any) -> None:
    _pulled.passes += 1
    step_hooks.after_pull_raw_reqs(received, receiver)


def serve(rank: int, spec: Spec) -> None:
    """One rank, in a process of its own."""
    world = spec.world
    dist.init_process_group("gloo", init_method=f"file://{spec.folder}/store", rank=rank, world_size=world)
    rig.publish_config(tp_size=world)
    group = Group(rank, world)
    settings = Settings(endpoint=spec.endpoint, **spec.settings)
    agent_module.Mailbox = WatchedMailbox  # type: ignore[misc]
    agent = Agent(settings, TablePolicy(settings, [0, 1, 3], 3))
    installed.agent = agent
    receiver = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
    plugin.install([(f"{receiver}._pull_raw_reqs", _after_pull, "AFTER")])
    put = agent._queue.put

    def remember(record: Any) -> None:
        _pulled.record = record
        put(record)

    agent._queue.put = remember  # type: ignore[method-assign]
    with get_parallel().override(
        pp_rank=0, attn_tp_rank=rank, attn_cp_rank=0, tp_size=world, tp_group=group, attn_dp_enabled=False
    ):
        server = RankServer(rank, spec, agent, group)
        server.start = lambda: agent.start(  # type: ignore[method-assign]
            server._facts, load=server._load, all_gather=group.all_gather_object
        )
        server.serve()


def fork_rank(rank: int, spec: Spec) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        shifted.end_with_parent()
        log = os.open(f"{spec.folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, log)  # for whoever finds a rank that hangs
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
        serve(rank, spec)
        code = 0
    except BaseException:
        with contextlib.suppress(OSError):
            Path(f"{spec.folder}/rank{rank}.died").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ended is seen by the harness
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        spec = msgspec.json.decode(line, type=Spec)
        sys.stdout.write(json.dumps([fork_rank(rank, spec) for rank in range(spec.world)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
