"""Measures decode step seconds of a real SGLang server by (K, batch size, context). Needs a GPU.

    python benchmarks/live/surface.py --models DIR --out FILE --attention triton --arm adaptive
    python benchmarks/live/surface.py --models DIR --out FILE --attention triton --arm none

``adaptive`` is one engine with all candidate K. For each batch size and context it prefills once,
then rotates K in blocks by tables pushed through Specpilot's own hooks, forwards and backwards,
so that every K sees the same contexts; the records of its trace are the measurement. Accepted
drafts are simulated as none: a step's cost does not depend on them, and all requests stay equally
long. ``none`` is an engine without speculation; its step times are read from SGLang's own decode
log lines (ten steps each). Both write one JSON object per cell: medians and quartiles, seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(0, str(Path(__file__).parent))
import engines

CANDIDATES = [0, 1, 2, 3, 5, 7]
BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONTEXTS = [256, 2048, 8192]
MAX_TOKENS = 500_000
BLOCK_STEPS = 22
SETTLE_STEPS = 3
"""Steps left out after each change of K."""
LOG_STEPS = 10


def cells() -> list[tuple[int, int]]:
    return [(batch, context) for context in CONTEXTS for batch in BATCH_SIZES if batch * context <= MAX_TOKENS]


def engine_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        **engines.target(args.models, args.attention),
        **engines.captured(BATCH_SIZES),
        "mem_fraction_static": 0.75,
        "decode_log_interval": LOG_STEPS,
    }
    if args.arm == "adaptive":
        options |= engines.adaptive(f"{args.models}/eagle3-8b", CANDIDATES, folder)
    return options


class Rotator(threading.Thread):
    """Plays the controller: collects records, and changes K after each block of a full batch."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.batch = 0
        self.records: list[Any] = []
        self.turn = 0

    def run(self) -> None:
        from specpilot.sglang_hooks.wire import DecisionTable, FrameDecoder, FromHook, Hello, Lease, StepBatch, encode

        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(self.endpoint)
        decoder = FrameDecoder(FromHook)
        order = CANDIDATES + CANDIDATES[::-1]
        epoch, seen, next_lease = 0, 0, 0.0
        address = b""

        def push() -> None:
            nonlocal epoch, seen
            epoch, seen = epoch + 1, 0
            k = order[self.turn % len(order)]
            self.turn += 1
            socket.send_multipart([address, encode(DecisionTable(epoch, 60.0, "rotate", [], [], [k], [[]]))])

        while True:
            if address and time.monotonic() > next_lease:
                next_lease = time.monotonic() + 5.0
                socket.send_multipart([address, encode(Lease(epoch, 60.0))])
            if not socket.poll(100):
                continue
            address, frame = socket.recv_multipart()
            message = decoder.decode(frame)
            if isinstance(message, Hello):
                push()
            elif isinstance(message, StepBatch):
                for record in message.records:
                    self.records.append(record)
                    seen += record.epoch == epoch and record.batch_size == self.batch
                if seen >= BLOCK_STEPS:
                    push()


async def one_cell(engine: Any, batch: int, context: int, tokens: int) -> None:
    async def request() -> None:
        prompt = [random.randrange(1000, 30000) for _ in range(context)]
        await engine.async_generate(
            input_ids=prompt, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        )

    await asyncio.gather(*(request() for _ in range(batch)))


def summary(seconds: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(seconds, n=4)
    return {
        "seconds": round(statistics.median(seconds), 6),
        "quartiles": [round(quartiles[0], 6), round(quartiles[2], 6)],
        "steps": len(seconds),
    }


def adaptive_cell(records: list[Any], batch: int) -> list[dict[str, Any]]:
    by_k: dict[int, list[float]] = {}
    contexts = [r.context_tokens / r.batch_size for r in records if r.batch_size == batch]
    since = 0
    for before, record in itertools.pairwise(records):
        since = since + 1 if record.draft_tokens == before.draft_tokens and record.batch_size == batch else 0
        if since >= SETTLE_STEPS and record.forwards == 1:
            by_k.setdefault(record.draft_tokens - 1, []).append(record.seconds)
    return [
        {"arm": f"K={k}", "batch_size": batch, "mean_context": round(statistics.mean(contexts)), **summary(seconds)}
        for k, seconds in sorted(by_k.items())
        if len(seconds) >= 5
    ]


LINE = re.compile(r"Decode batch.*?#running-req: (\d+), #token: (\d+).*?gen throughput \(token/s\): ([\d.]+)")


def plain_cell(log: str, batch: int) -> list[dict[str, Any]]:
    found = [(int(tokens) / batch, batch / float(rate)) for running, tokens, rate in LINE.findall(log)
             if int(running) == batch and float(rate) > 0][1:]  # fmt: skip
    if len(found) < 3:
        return []
    context = round(statistics.mean(context for context, _ in found))
    return [{"arm": "none", "batch_size": batch, "mean_context": context, **summary([s for _, s in found])}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--arm", choices=["adaptive", "none"], required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further cell after this time")
    args = parser.parse_args()
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="specpilot-surface-"))
    log = folder / "log"
    # SGLang's processes log to the standard error that they inherit.
    descriptor = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    rotator = Rotator(f"ipc://{folder}/c.ipc")
    if args.arm == "adaptive":
        os.environ |= {"SPECPILOT_ENDPOINT": rotator.endpoint, "SPECPILOT_MIN_TABLE_INTERVAL_SECONDS": "0"}
        os.environ |= {"SGLANG_SIMULATE_ACC_LEN": "1.0", "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
                       "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}  # fmt: skip
        rotator.start()
    import sglang

    found: list[dict[str, Any]] = []

    def write() -> None:
        args.out.write_text(json.dumps({"attention": args.attention, "sglang": sglang.__version__, "cells": found}))

    try:
        engine = sglang.Engine(**engine_options(args, folder))
        print(f"{args.attention} {args.arm}: started after {time.monotonic() - begun:.0f} s", flush=True)
        loop = engine.loop
        tokens = 2 * len(CANDIDATES) * (BLOCK_STEPS + 4) if args.arm == "adaptive" else 8 * LOG_STEPS
        rotator.batch = 4
        loop.run_until_complete(one_cell(engine, 4, 64, 100))  # warm-up
        for batch, context in cells():
            if time.monotonic() - begun > args.seconds:
                print(f"{args.attention} {args.arm}: out of time before batch {batch}, context {context}", flush=True)
                break
            rotator.batch, rotator.records, rotator.turn = batch, [], 0
            offset = log.stat().st_size
            cell_begun = time.monotonic()
            loop.run_until_complete(one_cell(engine, batch, context, tokens))
            if args.arm == "adaptive":
                time.sleep(0.1)
                measured = adaptive_cell(rotator.records, batch)
            else:
                measured = plain_cell(log.read_text()[offset:], batch)
            found += [{"context": context, **cell} for cell in measured]
            took = time.monotonic() - cell_begun
            print(f"{args.attention} {args.arm} batch {batch} context {context}: {took:.1f} s, "
                  + ", ".join(f"{c['arm']} {1e3 * c['seconds']:.2f} ms" for c in measured), flush=True)  # fmt: skip
            write()
    except BaseException:
        print(log.read_text()[-3000:], flush=True)
        raise
    write()
    engine.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
