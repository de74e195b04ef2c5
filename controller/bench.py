"""``specpilot bench hook``: what Specpilot costs, measured on its real parts.

The hooks of ``sglang_hooks/step_hooks.py`` run as SGLang would call them (launch N, then settle
N-1), around stand-ins for SGLang's own work that take no time, with the real link thread and
a real controller process on the other end. What is timed is therefore what Specpilot adds.
Between steps the thread does what SGLang's does while it waits for the GPU: it keeps its core
busy without holding the GIL (CUDA's event wait spins), here by hashing, which turns the caches over too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from rich.console import Console
from rich.table import Table

from specpilot.controller.processes import end, specpilot_command
from specpilot.controller.simulation.batch import ForwardMode, SimBatch, SimResult
from specpilot.controller.simulation.surface import H200_8B
from specpilot.sglang_hooks import step_hooks
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.installed import active_agent, installed
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import DecisionTable, FrameDecoder, FromHook, Hello, StepRecord, encode

_WAIT = bytes(400_000)
BATCH_SIZES = (64, 256)
CANDIDATES = (0, 1, 3)
TABLES = 300
FEED_STEPS_PER_SECOND = 2000
FEED_SECONDS = 10.0


class BenchRequest:
    """A request that never ends, as costly to look at as SGLang's.

    That one has some 120 attributes: too many for CPython's fast layout, so reading one is a
    dictionary look-up in memory of its own.
    """

    def __init__(self, prompt_tokens: int) -> None:
        for number in range(120):
            setattr(self, f"attribute_{number}", None)
        self.origin_input_ids = [0] * prompt_tokens
        self.output_ids = [0]
        self.finished_reason = None
        self.finished_len = None
        self.is_retracted = False

    @property
    def seqlen(self) -> int:
        """Tokens of prompt and output, as in SGLang."""
        return len(self.origin_input_ids) + len(self.output_ids)


class HookDriver:
    """The hooks of one scheduler process, driven step by step."""

    def __init__(self, endpoint: str, server_id: str) -> None:
        settings = Settings(endpoint=endpoint, min_table_interval_seconds=0.0)
        self.agent = Agent(settings, TablePolicy(settings, CANDIDATES, max(CANDIDATES)))
        self.agent.start(
            ServerFacts(server_id, captured_batch_sizes=H200_8B.captured_batch_sizes, overlap=True),
            load=lambda: (0, 0, 0),
        )
        installed.agent = self.agent
        self._forward_iter = 0
        self._in_flight: tuple[SimBatch, SimResult] | None = None
        self._reqs: list[BenchRequest] = []

    def batch_of(self, size: int) -> None:
        """Run ``size`` requests from now on, 300 to 1300 tokens long, that never end."""
        self._in_flight = None
        self._reqs = [BenchRequest(300 + 1000 * i // size) for i in range(size)]

    def step(self) -> float:
        """Run one pass of the loop and return the seconds that hooks and lookups took in it."""
        self._forward_iter += 1
        batch = SimBatch(self._reqs, ForwardMode.DECODE, self._forward_iter, time.monotonic())  # type: ignore[arg-type]
        received: list[Any] = []
        begun = time.perf_counter()
        step_hooks.after_pull_raw_reqs(received, None)
        spent = time.perf_counter() - begun
        for update in received:
            self.agent.apply(update)
        begun = time.perf_counter()
        steps = step_hooks.around_forward(_ask_for_steps, None, batch)
        spent += time.perf_counter() - begun
        if self._in_flight is not None:
            settled, result = self._in_flight
            begun = time.perf_counter()
            step_hooks.around_decode_result(_verify, None, settled, result)
            spent += time.perf_counter() - begun
        accepted = [min(1, steps)] * len(self._reqs)
        result = SimResult(0.0, accepted, steps + 1, can_run_cuda_graph=True, num_correct_drafts_per_req_cpu=accepted)
        self._in_flight = batch.copy(), result
        return spent

    def stop(self) -> None:
        """End the link."""
        self.agent.stop()
        installed.agent = None


def wait_for_gpu() -> None:
    """Some 0.3 ms of work outside the GIL."""
    hashlib.blake2b(_WAIT).digest()


def _ask_for_steps(worker: None, batch: SimBatch) -> int:  # noqa: ARG001
    """Stands in for SGLang's ``forward_batch_generation``, as far as the hooks notice."""
    return active_agent().policy.get_steps_for_batch(len(batch.reqs))


def _verify(processor: None, batch: SimBatch, result: SimResult) -> None:  # noqa: ARG001
    """Stands in for SGLang's ``process_batch_result_decode``, as far as the hooks notice."""
    active_agent().policy.on_verify_complete(result.accepted, len(batch.reqs))


def bench_hook(json_path: Path | None, steps: int, memory_steps: int, console: Console) -> int:
    """Measure, print, and write the figures to ``json_path``; return the exit code."""
    try:
        import psutil
    except ImportError:
        console.print("[red]specpilot bench needs psutil: pip install '.\\[bench]' in Specpilot's checkout[/]")
        return 1
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="specpilot-bench-") as folder, running_controller(Path(folder)) as running:
        endpoint, process = running
        server = HookDriver(endpoint, "bench:1")
        try:
            step_until(lambda: server.agent.state().epoch > 0, server, "the controller sent no table")
            for stopped in (False, True):
                if stopped:
                    process.send_signal(signal.SIGSTOP)
                for size in BATCH_SIZES:
                    console.print(f"hooks at batch {size}, controller {'stopped' if stopped else 'running'} ...")
                    into = figures if size == BATCH_SIZES[0] else figures.setdefault(f"batch_{size}", {})
                    median, p99 = _hook_cost(server, size, steps)
                    prefix = "stopped_" if stopped else ""
                    into[f"{prefix}median_us"], into[f"{prefix}p99_us"] = median, p99
            process.send_signal(signal.SIGCONT)
        finally:
            server.stop()
        console.print("table latency ...")
        figures["table_latency_ms_median"], figures["table_latency_ms_p99"] = _table_latency(Path(folder))
        watched = psutil.Process(process.pid)
        console.print(f"controller at {FEED_STEPS_PER_SECOND} steps/s ...")
        figures["controller_core_share"] = _core_share(endpoint, watched)
        if memory_steps:
            console.print(f"controller's memory over {memory_steps:,} steps ...")
            figures |= _memory(endpoint, watched, memory_steps)
    figures |= {
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    _print(figures, console)
    return 0


def _print(figures: dict[str, Any], console: Console) -> None:
    table = Table("figure", "value", box=None)
    for name, value in figures.items():
        table.add_row(name, json.dumps(value) if isinstance(value, dict) else str(value))
    console.print(table)


@contextmanager
def running_controller(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a real controller, trace included, and give its endpoint and its process."""
    endpoint = f"ipc://{folder}/controller.ipc"
    config = folder / "controller.toml"
    config.write_text(
        f'[controller]\nendpoint = "{endpoint}"\n[policy]\nname = "threshold"\nthreshold = 100\n'
        f'[trace]\ndirectory = "{folder}/trace"\ntotal_bytes = {256 << 20}\n'
    )
    command = specpilot_command("--log-level", "warning", "controller", "--config", str(config))
    process = subprocess.Popen(command)  # noqa: S603
    try:
        yield endpoint, process
    finally:
        process.send_signal(signal.SIGCONT)
        end(process, 10.0)


def step_until(done: Callable[[], object], server: HookDriver, failure: str) -> None:
    """Run steps of one request until ``done``; RuntimeError with ``failure`` after 20 seconds."""
    server.batch_of(1)
    deadline = time.monotonic() + 20
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(failure)
        server.step()
        time.sleep(0.01)


def _hook_cost(server: HookDriver, batch_size: int, steps: int) -> tuple[float, float]:
    """Median and 99th percentile of the microseconds added per step."""
    server.batch_of(batch_size)
    spent = []
    for _ in range(steps):
        spent.append(server.step())
        wait_for_gpu()
    micros = 1e6 * np.array(spent[steps // 20 :])
    return round(float(np.median(micros)), 2), round(float(np.percentile(micros, 99)), 2)


def _table_latency(folder: Path) -> tuple[float, float]:
    """Median and 99th percentile of milliseconds from a table's send to its arrival in the mailbox.

    The sender is another process; CLOCK_MONOTONIC is the same for both. Meanwhile the
    scheduler thread runs its steps, so the link thread has to get the GIL from it.
    """
    endpoint = f"ipc://{folder}/latency.ipc"
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    sender = context.Process(target=_send_tables, args=(endpoint, theirs), daemon=True)
    sender.start()
    server = HookDriver(endpoint, "bench:latency")
    server.batch_of(64)
    arrived: dict[int, float] = {}
    assert server.agent._source is not None
    mailbox = server.agent._source._mailbox
    while len(arrived) < TABLES and sender.is_alive():
        if mailbox.tables:
            delivery = mailbox.tables[0]
            arrived[delivery.table.epoch] = delivery.received_at
        server.step()
        wait_for_gpu()
    sent: dict[int, float] = ours.recv()
    server.stop()
    sender.join(5)
    millis = [1e3 * (arrived[epoch] - at) for epoch, at in sent.items() if epoch in arrived]
    return round(float(np.median(millis)), 3), round(float(np.percentile(millis, 99)), 3)


def _send_tables(endpoint: str, report: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.bind(endpoint)
        decoder = FrameDecoder(FromHook)
        while True:
            address, frame = socket.recv_multipart()
            if isinstance(decoder.decode(frame), Hello):
                break
        sent = {}
        for epoch in range(1, TABLES + 1):
            time.sleep(0.01 + 0.0001 * (epoch % 37))
            table = encode(
                DecisionTable(epoch, 5.0, "bench", list(range(1, 64)), [], [epoch % 2] * 64, [[] for _ in range(64)])
            )
            sent[epoch] = time.monotonic()
            socket.send_multipart([address, table])
        time.sleep(0.5)
        report.send(sent)


def _records(server: HookDriver, count: int) -> list[StepRecord]:
    """Real records of ``count`` steps at batch 64, taken from the queue before the link drains it."""
    server.batch_of(64)
    made: list[StepRecord] = []
    queue = server.agent._queue
    vars(queue)["put"] = made.append
    while len(made) < count:
        server.step()
    del vars(queue)["put"]
    return made


def _core_share(endpoint: str, controller: Any) -> float:
    """Share of one core that the controller uses while a server sends FEED_STEPS_PER_SECOND records."""
    server = HookDriver(endpoint, "bench:feed")
    sample = _records(server, 512)
    burst = FEED_STEPS_PER_SECOND // 100
    sequence = len(sample)
    begun, used = 0.0, 0.0
    next_at = time.monotonic()
    for turn in range(int(FEED_SECONDS * 100)):
        if turn == 200:  # connected, segment open
            begun, used = time.monotonic(), sum(controller.cpu_times()[:2])
        for _ in range(burst):
            sequence += 1
            server.agent._queue.put(msgspec.structs.replace(sample[sequence % 512], record_seq=sequence))
        next_at += 0.01
        time.sleep(max(0.0, next_at - time.monotonic()))
    share = float(sum(controller.cpu_times()[:2]) - used) / (time.monotonic() - begun)
    server.stop()
    return round(share, 4)


def _memory(endpoint: str, controller: Any, steps: int) -> dict[str, float]:
    """Resident memory of the controller after a tenth of ``steps`` and after all, as fast as it takes them."""
    server = HookDriver(endpoint, "bench:memory")
    sample = _records(server, 512)
    queue = server.agent._queue
    begun = time.monotonic()
    early = 0.0
    for sequence in range(steps):
        if sequence == steps // 10:
            early = controller.memory_info().rss
        if sequence % 256 == 0:
            while queue.waiting() > 4096:
                time.sleep(0.001)
        queue.put(msgspec.structs.replace(sample[sequence % 512], record_seq=sequence))
    while queue.waiting():
        time.sleep(0.001)
    rate = steps / (time.monotonic() - begun)
    server.stop()
    time.sleep(1.5)
    return {
        "memory_steps": steps,
        "controller_rss_mb_at_tenth": round(early / 1e6, 1),
        "controller_rss_mb_at_end": round(controller.memory_info().rss / 1e6, 1),
        "controller_steps_per_second_at_most": round(rate),
    }


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot bench hook``."""
    command.add_argument("--json", type=Path, help="write the figures")
    command.add_argument("--steps", type=int, default=20_000, help="per batch size and controller state")
    command.add_argument(
        "--memory-steps", type=int, default=1_000_000, help="steps for the controller's memory (0: skip)"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure, print and write; return the exit code."""
    return bench_hook(options.json, options.steps, options.memory_steps, console)
