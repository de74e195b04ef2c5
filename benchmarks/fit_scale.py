"""Seconds and memory of ``specpilot fit`` by the length of the trace.

    python benchmarks/fit_scale.py --steps 1000000 3000000 10000000 --out fit_scale.json

A simulated server is run at several concurrencies, under moving acceptance and the learned policy.
Its records are written again and again, renumbered, with noise of their own on every step's time
(3 %, and one in a hundred ten to a thousand times too long), until the trace is as long as asked.
Each fit is a process of its own, on one core; its memory is the largest that it ever held, as the
kernel counts it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from specpilot.controller.config import TraceConfig
from specpilot.controller.replay.run import serve
from specpilot.controller.replay.scenario import GENERATED_REQUESTS, Scenario
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import generated_requests
from specpilot.controller.trace.format import SCHEMA
from specpilot.controller.trace.reader import Segment, segments
from specpilot.controller.trace.writer import BATCH_RECORDS, TraceWriter
from specpilot.policies.baselines import Truth
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Policy
from specpilot.sglang_hooks.wire import Hello, StepRecord

CONCURRENCIES = (1, 4, 16, 48, 128, 256)
OUTLIERS, NOISE = 0.01, 0.03
SEGMENT_BYTES = TraceConfig().segment_bytes


class Recorded(Goodput):
    """The learned policy, which writes down what it learns from."""

    def __init__(self, folder: Path, hello: Hello, prior: dict[str, Any] | None = None) -> None:
        super().__init__(prior)
        self.writer = TraceWriter(folder, f"{hello.server_id}/{hello.dp_rank}", hello, TraceConfig())
        self._now = 0.0

    def learn(self, step: StepRecord) -> None:
        super().learn(step)
        self.writer.append([step])
        self._now += step.seconds
        if step.record_seq % 1024 == 0:
            self.writer.tick(self._now)


def record(folder: Path, surface: str, concurrency: int, steps: int, seed: int) -> Path:
    """Run a server for so many steps; return where its trace lies."""
    made: list[Recorded] = []

    def make(hello: Hello, _truth: Truth) -> Policy:
        made.append(Recorded(folder, hello))
        return made[0]

    requests = generated_requests(GENERATED_REQUESTS, seed)
    serve("goodput", Scenario(load_surface(surface), requests, 1e5, seed, concurrency=concurrency, steps=steps), make)
    made[0].writer.close()
    return folder


def base(steps: int) -> tuple[Any, list[Any]]:
    """Return a header, and record batches of one process that went through all concurrencies."""
    batches, header = [], None
    with tempfile.TemporaryDirectory() as directory:
        for seed, concurrency in enumerate(CONCURRENCIES):
            folder = record(
                Path(directory, str(concurrency)), "h200-native-skip", concurrency, steps // len(CONCURRENCIES), seed
            )
            for path in segments([folder]):
                segment = Segment(path)
                header = header or segment._schema
                batches += list(segment)
    return header, batches


def written(folder: Path, header: Any, batches: list[Any], steps: int) -> int:
    """Write a trace of ``steps`` records; return its bytes."""
    rng = np.random.default_rng(0)
    server = folder / "scale%2F0"
    server.mkdir(parents=True)
    head = header.serialize().to_pybytes()
    size = total = number = 0
    file = None
    for batch in renumbered(batches, steps, rng):
        data = batch.serialize().to_pybytes()
        if file is None or size + len(data) > SEGMENT_BYTES:
            if file is not None:
                file.close()
            number += 1
            file = (server / f"{number:06d}.arrows").open("wb")
            file.write(head)
            size = len(head)
            total += size
        file.write(data)
        size += len(data)
        total += len(data)
    assert file is not None
    file.close()
    return total


def renumbered(batches: list[Any], steps: int, rng: np.random.Generator) -> Iterator[Any]:
    seq = step = 0
    now = 1_700_000_000.0
    while seq < steps:
        for batch in batches:
            batch = batch.slice(0, min(batch.num_rows, steps - seq, BATCH_RECORDS))
            if not batch.num_rows:
                return
            count = batch.num_rows
            passes = np.maximum(batch["forwards"].to_numpy(), 1)
            seconds = batch["seconds"].to_numpy() * np.exp(rng.normal(0.0, NOISE, count))
            late = rng.random(count) < OUTLIERS
            seconds[late] *= 10.0 ** rng.uniform(1.0, 3.0, int(late.sum()))
            steps_of, times = step + np.cumsum(passes), now + np.cumsum(seconds)
            changed = {
                "record_seq": np.arange(seq, seq + count),
                "step": steps_of,
                "time": times,
                "seconds": seconds,
            }
            arrays = [
                pa.array(changed[field.name], field.type) if field.name in changed else batch[field.name]
                for field in SCHEMA
            ]
            seq, step, now = seq + count, int(steps_of[-1]), float(times[-1])
            yield pa.record_batch(arrays, schema=SCHEMA)


def measured(command: list[str]) -> tuple[float, float, float]:
    """Run a command on one core; return its seconds, those of them it had the core, and its most memory, in MB."""
    core = min(os.sched_getaffinity(0))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    begin = time.perf_counter()
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        env=os.environ | threads,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--base-steps", type=int, default=120_000, help="that are simulated")
    parser.add_argument("--folder", type=Path, help="for the traces, which are deleted (default: a temporary one)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    header, batches = base(options.base_steps)
    rows = []
    for steps in options.steps:
        with tempfile.TemporaryDirectory(dir=options.folder) as directory:
            folder = Path(directory)
            size = written(folder / "trace", header, batches, steps)
            report = folder / "report.json"
            prior = folder / "prior.json"
            command = [sys.executable, "-m", "specpilot.controller.cli", "fit", str(folder / "trace")]
            seconds, cpu_seconds, memory = measured([*command, "-o", str(prior), "--json", str(report)])
            (fit,) = json.loads(report.read_text())["fits"]
        rows.append(
            {
                "steps": steps,
                "trace_mb": round(size / 1e6),
                "seconds": round(seconds, 1),
                "cpu_seconds": round(cpu_seconds, 1),
                "memory_mb": round(memory),
                "excluded": fit["excluded"],
                "cells": len(fit["cells"]),
                "held_out_error": round(fit["held_out_error"], 5),
                "prior_error": round(fit["prior_error"], 5),
                "coverage": round(fit["coverage"], 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    found = {
        "machine": f"{platform.machine()}, one core of {os.cpu_count()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "mean_batch": round(sum(float(b["batch_size"].to_numpy().sum()) for b in batches) / options.base_steps, 1),
        "fits": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
