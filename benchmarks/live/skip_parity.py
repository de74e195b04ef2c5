"""Is a skipped step as fast as a step of a server without speculation? Needs a GPU and SGLang.

    python benchmarks/live/skip_parity.py run --models DIR --attention triton --arm none --raw DIR
    python benchmarks/live/skip_parity.py run --models DIR --attention triton --arm rotate --raw DIR
    python benchmarks/live/skip_parity.py merge --raw DIR --out FILE

``rotate`` is one engine with the plugin that only ever skips: it goes through the kinds of K=0
(``skip_probe.py``) in blocks of 32 steps, forwards and backwards, over the same running requests.
``none`` is an engine without speculation, run before and after it on the same GPU; its steps are
compared with those of the rotation block by block, where both have the same contexts. Prompts are
128 tokens shorter than the context named, so that a cell's mean context is that. Then some cells
run from prompt to end with one arm, prefill included. Step seconds are host times between results.

Engines that are given one file with ``--turn`` can share a GPU: they start beside each other, and
measure one cell at a time, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import engines
import models
import skip_probe

if __name__ == "__mp_main__":
    skip_probe.install()
    engines.lift_refusals()

BATCH_SIZES = [1, 4, 16, 64, 128, 256]
CONTEXTS = [256, 4096]
MAX_TOKENS = 500_000
ARMS = ["skip", "k0_warm", "k0_cold", "k0_cold_event"]
BLOCK = 32
SETTLE = 5
"""Steps left out at the beginning of each block."""
END_TO_END = [(1, 256), (16, 256), (64, 256), (256, 256), (16, 4096), (64, 4096)]
END_TO_END_TOKENS = 256
PROFILE_CELLS = [(1, 256), (64, 256), (256, 256), (64, 4096)]
CANDIDATES = [0, 3]


def cells(args: argparse.Namespace) -> list[tuple[int, int]]:
    return [(batch, context) for context in args.contexts for batch in args.batches if batch * context <= MAX_TOKENS]


def engine_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        **engines.target(args.models, args.attention, args.model),
        **engines.captured(args.batches),
        "mem_fraction_static": 0.75,
        "disable_overlap_schedule": args.no_overlap,
        **json.loads(args.extra),
    }
    if args.turn:  # others need memory too
        most = max(batch * (context + 16) for batch, context in cells(args)) + max(args.batches) * 256
        options |= {"mem_fraction_static": 0.9, "max_total_tokens": most, "port": args.port}
    if args.arm == "rotate":
        draft = f"{args.models}/{models.DRAFTS[args.model]}"
        options |= engines.tree(draft) if args.tree else engines.adaptive(draft, CANDIDATES, folder)
    return options


@contextlib.contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """Wait for and hold a lock on ``file``, shared with the other engines on this GPU."""
    if file is None:
        yield
        return
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


async def requests(engine: Any, batch: int, prompt_tokens: int, tokens: int) -> None:
    async def one() -> None:
        prompt = [random.randrange(1000, 30000) for _ in range(prompt_tokens)]
        await engine.async_generate(
            input_ids=prompt, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        )

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(batch))), 150)


class Run:
    """One engine, and what was measured of it; written to a file after every cell."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begun = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="specpilot-parity-"))
        self.cell = 0
        self.measured: dict[str, Any] = {
            "attention": args.attention, "model": args.model, "arm": args.arm, "overlap": not args.no_overlap,
            "ring_mb": int(os.environ.get("SPECPILOT_SKIP_RING_MB", "512")),
            "cells": [], "end_to_end": [], "profiles": [], "said": [],
        }  # fmt: skip
        self.path: Path = args.raw / f"{args.model}-{args.attention}-{args.label or args.arm}.json"
        self.log = self.path.with_suffix(".log")
        if args.resume and self.path.exists():
            self.measured["cells"] = json.loads(self.path.read_text())["cells"]

    def say(self, text: str) -> None:
        print(f"{self.path.stem} {time.monotonic() - self.begun:.0f} s: {text}", flush=True)

    def write(self) -> None:
        self.path.write_text(json.dumps(self.measured))

    def late(self) -> bool:
        return time.monotonic() - self.begun > self.args.seconds

    def start(self) -> Any:
        self.args.raw.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 2)  # SGLang's processes log to the standard error that they inherit
        os.environ[skip_probe.FOLDER] = str(self.folder)
        if self.args.arm == "rotate":
            os.environ |= {"SPECPILOT_ENDPOINT": f"ipc://{self.folder}/nobody.ipc", "SPECPILOT_FALLBACK": "0"}
        if self.args.no_refusals:
            os.environ[engines.NO_REFUSALS] = "1"
        import sglang
        import torch

        engine = sglang.Engine(**engine_options(self.args, self.folder))
        self.measured |= {"sglang": sglang.__version__, "gpu": torch.cuda.get_device_name(),
                          "started_seconds": round(time.monotonic() - self.begun, 1)}  # fmt: skip
        self.measured["said"] = [line[:400] for line in self.log.read_text(errors="replace").splitlines()
                                 if "specpilot:" in line]  # fmt: skip
        self.say("engine started")
        for line in self.measured["said"]:
            self.say(line)
        self.write()
        return engine

    def one(self, engine: Any, batch: int, prompt: int, tokens: int, **plan: Any) -> float:
        """Run one cell under ``plan``; returns its seconds from the first request to the last token."""
        self.cell += 1
        plan = {"cell": self.cell, "batch": batch, "block": BLOCK, "profile": False, **plan}
        (self.folder / "cell.json").write_text(json.dumps(plan))
        begun = time.perf_counter()
        engine.loop.run_until_complete(requests(engine, batch, prompt, tokens))
        took = time.perf_counter() - begun
        # A prefill makes the probe write down what it has.
        engine.loop.run_until_complete(requests(engine, 1, 8, 1))
        return took

    def rows(self, name: str = "steps.jsonl") -> list[Any]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def steps(self) -> list[list[Any]]:
        """[index, arm, context, seconds] of this cell's steps."""
        return [[i, arm, round(context), round(s, 7)] for cell, i, arm, context, s in self.rows() if cell == self.cell]

    def decode_cell(self, engine: Any, arms: list[str], batch: int, context: int) -> None:
        order = (arms + arms[::-1]) * self.args.rounds
        # As many tokens in every engine, so that contexts are the same.
        tokens = BLOCK * 2 * len(self.args.arms) * self.args.rounds + 8
        took = self.one(engine, batch, context - 128, tokens, arms=order)
        steps = self.steps()
        self.measured["cells"].append({"batch_size": batch, "context": context, "steps": steps})
        by_arm = {arm: [s for i, a, _, s in steps if a == arm and i % BLOCK >= SETTLE] for arm in arms}
        self.say(f"batch {batch} context {context}: {took:.1f} s, "
                 + ", ".join(f"{a} {1e3 * statistics.median(s):.3f} ms" for a, s in by_arm.items() if s))  # fmt: skip

    def end_to_end_cell(self, engine: Any, arm: str, batch: int, context: int) -> None:
        took = self.one(engine, batch, context, END_TO_END_TOKENS, arms=[arm])
        decode = sum(s for *_, s in self.steps())
        self.measured["end_to_end"].append(
            {"batch_size": batch, "context": context, "arm": arm, "seconds": round(took, 4),
             "decode_seconds_of_full_batch": round(decode, 4), "output_tokens": batch * END_TO_END_TOKENS}
        )  # fmt: skip
        self.say(f"end to end, batch {batch} context {context} {arm}: {took:.2f} s, decode {decode:.2f} s")

    def profile_cell(self, engine: Any, arms: list[str], batch: int, context: int) -> None:
        self.one(engine, batch, context - 128, BLOCK * len(arms) + 8, arms=arms, profile=True)
        found = [row for row in self.rows("profile.jsonl") if row["cell"] == self.cell]
        for row in found:
            self.measured["profiles"].append(
                {"attention": self.args.attention, "batch_size": batch, "context": context, **row}
            )
            self.say(f"profile, batch {batch} context {context} {row['arm']}: busy {row['busy_us']} us, "
                     f"gap {row['gap_us']} us, {row['kernels_per_step']} kernels")  # fmt: skip

    def safely(self, cell: Any, *args: Any) -> None:
        """Run a cell; if it fails, say so and go on."""
        if self.late():
            self.say(f"out of time before {args[1:]}")
            return
        try:
            with turn(self.args.turn):
                cell(*args)
        except Exception:
            self.say(traceback.format_exc())
        self.write()


def run(args: argparse.Namespace) -> int:
    this = Run(args)
    try:
        engine = this.start()
    except BaseException:
        this.say(traceback.format_exc())
        this.say(this.log.read_text(errors="replace")[-3000:])
        raise
    with turn(args.turn):
        this.one(engine, 4, 64, 40, arms=["none"] if args.arm == "none" else ["skip"])  # warm-up
    arms = ["none"]
    if args.arm == "rotate":
        decode = (this.folder / "skip.txt").read_text() == "decode"
        arms = [arm for arm in args.arms if decode or arm != "skip"]
        this.say(f"arms {arms}")
    if not args.profile:
        done = {(cell["batch_size"], cell["context"]) for cell in this.measured["cells"]}
        for batch, context in (cell for cell in cells(args) if cell not in done):
            this.safely(this.decode_cell, engine, arms, batch, context)
        for batch, context in END_TO_END if args.end_to_end else ():
            this.safely(this.end_to_end_cell, engine, arms[0], batch, context)
    else:
        for batch, context in PROFILE_CELLS:
            this.safely(this.profile_cell, engine, arms, batch, context)
    this.write()
    engine.shutdown()
    return 0


# -- from the steps to the figures --


def blocks(steps: Iterable[list[Any]], arm: str | None = None) -> dict[int, float]:
    """Median seconds by block number, over the steps after each block's first few."""
    found: dict[int, list[float]] = {}
    for index, label, _, seconds in steps:
        if index % BLOCK >= SETTLE and arm in (None, label):
            found.setdefault(index // BLOCK, []).append(seconds)
    return {block: statistics.median(values) for block, values in found.items() if len(values) >= 8}


def figure(steps: list[list[Any]], arm: str | None, batch: int) -> dict[str, Any] | None:
    kept = [row for row in steps if row[0] % BLOCK >= SETTLE and arm in (None, row[1])]
    medians = blocks(steps, arm)
    if not medians:
        return None
    seconds = [row[3] for row in kept]
    quartiles = statistics.quantiles(seconds, n=4)
    step = statistics.median(medians.values())
    return {
        "mean_context": round(statistics.mean(row[2] for row in kept)),
        "tokens_per_second": round(batch / step, 1),
        "step_seconds": round(step, 7),
        "quartiles": [round(quartiles[0], 7), round(quartiles[2], 7)],
        "repetitions": len(seconds),
    }


def machine_name(gpu: str) -> str:
    return f"{gpu}, {os.cpu_count()} CPU cores"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One object a line; in one move, since runs on two GPUs may both be at it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    temporary.replace(path)


def merge(args: argparse.Namespace) -> int:
    raws = [json.loads(path.read_text()) for path in sorted(args.raw.glob("*.json"))]
    found: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []

    def by(r: dict[str, Any]) -> tuple[str, str, bool]:
        return r["model"], r["attention"], r["overlap"]

    for (model, attention, _), group in itertools.groupby(sorted(raws, key=by), by):
        runs = list(group)
        gpu = next((r["gpu"] for r in runs if "gpu" in r), "unknown")
        common = {
            "model": model, "attention": attention, "machine": machine_name(gpu),
            "sglang_version": next((r["sglang"] for r in runs if "sglang" in r), "unknown"),
            "overlap": runs[0]["overlap"], "ring_mb": runs[0]["ring_mb"],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }  # fmt: skip
        plain: dict[tuple[int, int], list[list[list[Any]]]] = {}
        for r in runs:
            profiles += r["profiles"]
            if r["arm"] == "none":
                for cell in r["cells"]:
                    plain.setdefault((cell["batch_size"], cell["context"]), []).append(cell["steps"])
        for (batch, context), lists in plain.items():
            if measured := figure([row for steps in lists for row in steps], None, batch):
                found.append({"batch_size": batch, "context": context, "arm": "none", "runs": len(lists),
                              **measured, **common})  # fmt: skip
        for r in (r for r in runs if r["arm"] == "rotate"):
            for cell in r["cells"]:
                key = cell["batch_size"], cell["context"]
                references = [blocks(steps) for steps in plain.get(key, [])]
                for arm in dict.fromkeys(row[1] for row in cell["steps"]):
                    measured = figure(cell["steps"], arm, key[0])
                    if measured is None:
                        continue
                    ratios = [reference[block] / seconds for block, seconds in blocks(cell["steps"], arm).items()
                              for reference in references if block in reference]  # fmt: skip
                    if ratios:
                        measured["of_none"] = round(statistics.median(ratios), 4)
                    found.append({"batch_size": key[0], "context": key[1], "arm": arm, **measured, **common})
        end_to_end: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
        for r in runs:
            for row in r["end_to_end"]:
                end_to_end.setdefault((row["batch_size"], row["context"], row["arm"]), []).append(row)
        for (batch, context, arm), rows in end_to_end.items():
            seconds = statistics.median(row["seconds"] for row in rows)
            decode = statistics.median(row["decode_seconds_of_full_batch"] for row in rows)
            entry = {"batch_size": batch, "context": context, "arm": arm, "end_to_end": True,
                     "tokens_per_second": round(rows[0]["output_tokens"] / seconds, 1), "seconds": seconds,
                     "seconds_before_and_after_full_batch": round(seconds - decode, 4),
                     "repetitions": len(rows), **common}  # fmt: skip
            if other := end_to_end.get((batch, context, "none")):
                entry["of_none"] = round(statistics.median(row["seconds"] for row in other) / seconds, 4)
            found.append(entry)
        found += [{"said_at_start": r["said"], "arm": r["arm"], **common} for r in runs if r["said"]]
    write_rows(args.out, found)
    if profiles:
        write_rows(args.out.with_name("skip_profile.json"), profiles)
    for row in found:
        if row["arm"] != "none" and "of_none" in row:
            kind = "end to end" if row.get("end_to_end") else "decode"
            print(f"{row['model']} {row['attention']} batch {row['batch_size']} context {row['context']} {kind} "
                  f"{row['arm']}: {row['of_none']:.3f} of none", flush=True)  # fmt: skip
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run")
    measure.add_argument("--models", required=True)
    measure.add_argument("--attention", default="triton")
    measure.add_argument("--arm", choices=["none", "rotate"], required=True)
    measure.add_argument("--label", default="", help="name of the raw file beside the attention, default the arm")
    measure.add_argument("--raw", type=Path, required=True, help="folder of the raw files")
    measure.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="of the rotation; alike in every run")
    measure.add_argument("--model", choices=models.DRAFTS, default="target-8b")
    measure.add_argument("--tree", action="store_true", help="a tree of drafts, for --arms skip")
    measure.add_argument("--batches", type=int, nargs="+", default=BATCH_SIZES)
    measure.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    measure.add_argument("--rounds", type=int, default=1, help="times that the rotation goes forwards and backwards")
    measure.add_argument("--no-end-to-end", dest="end_to_end", action="store_false")
    measure.add_argument("--turn", type=Path, help="file shared by the engines on one GPU, which measure in turn")
    measure.add_argument("--resume", action="store_true", help="leave out the cells that the raw file has")
    measure.add_argument("--port", type=int, default=30000)
    measure.add_argument("--extra", default="{}", help="JSON of further engine options")
    measure.add_argument("--no-refusals", action="store_true", help="skip by decode even where the plugin would not")
    measure.add_argument("--no-overlap", action="store_true")
    measure.add_argument("--profile", action="store_true", help="profile some cells instead of timing all")
    measure.add_argument("--seconds", type=float, default=1e9, help="begin no further cell after this time")
    merged = commands.add_parser("merge")
    merged.add_argument("--raw", type=Path, required=True)
    merged.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "merge":
        return merge(args)
    return run(args)


if __name__ == "__main__":
    raise SystemExit(main())
