"""Is ``goodput`` as good as the best fixed K on a live server, and ahead when the load changes?

    python benchmarks/live/goodput_load.py run --models DIR --raw DIR --out FILE [--attention triton]
    python benchmarks/live/goodput_load.py figures --raw DIR --out FILE

Needs a GPU and SGLang. One engine with the plugin, and ``specpilot controller`` with the learned policy beside it. All
arms run on this one engine, in blocks of a few seconds between which nothing restarts and requests go
on (``goodput_arms.py``): every candidate as a fixed K, the table that the controller sends, and SGLang's
own adaptive rule. Weights are random, so acceptance is simulated: each draft of each request with
one probability.

Constant load: a closed loop of requests (128 tokens in, 256 out). In each cell, ``goodput`` first meets
the batch size cold; then all arms take turns, in an order that rotates and reverses. Rates are of back-to-back
decode steps: live requests times the tokens that their K gives on average, by the seconds of the steps; so
the draw of acceptance is no noise. ``counted_`` are tokens as they came, ``wall_`` those of all steps by the time
passed, prefills included. ``best_fixed`` is the fixed K that turned out best afterwards.

Changing load: one pass an arm through phases of concurrency and acceptance; what counts is the tokens of a pass.

Steps, logs and the controller's trace go to the raw folder; the figures are written anew after each cell and pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import engines
import goodput_arms
from goodput_arms import SGLANG, TABLE

if __name__ == "__mp_main__":
    goodput_arms.install()

CANDIDATES = [0, 1, 2, 3, 5]
FALLBACK = 3
BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 256
ACCEPTANCE = 0.7
CONCURRENCIES = [1, 16, 64, 128]
FURTHER_CONCURRENCIES = [4, 256]
"""After the changing load, if there is time."""
REPETITIONS = 3
BLOCK_SECONDS, COLD_SECONDS = 2.0, 5.0
WASHOUT_SECONDS = 0.25
"""Of each block left out: what was in flight, and the switch that the benchmark itself caused."""
PHASES = [(1, 0.8), (64, 0.8), (4, 0.8), (16, 0.4), (128, 0.4), (4, 0.4), (16, 0.8)]
"""(concurrency, acceptance)."""
PHASE_SECONDS = 8.0
PASSES = [TABLE, 0, 3, SGLANG]
"""Arms of the changing load, the most important first."""
SETTLE_WINDOW, SETTLED_SHARE, EQUAL = 64, 0.9, 0.99
"""Settled: from there on, this share of so many steps is at a K whose fixed rate is this share of the best."""


def arm_name(arm: int) -> str:
    return {TABLE: "goodput", SGLANG: "sglang"}.get(arm, f"K={arm}")


def orders(arms: Sequence[int], repetitions: int) -> list[list[int]]:
    """Return an order for each repetition: rotated by about a third each time, every second one reversed.

    >>> orders([0, 1, 3, -1], 3)
    [[0, 1, 3, -1], [0, -1, 3, 1], [3, -1, 0, 1]]
    """
    shift = max(len(arms) // 3, 1)
    turned = [[*arms[i * shift % len(arms) :], *arms[: i * shift % len(arms)]] for i in range(repetitions)]
    return [order[::-1] if i % 2 else order for i, order in enumerate(turned)]


# -- from the steps to the figures --


def tokens_of(steps: float, acceptance: float) -> float:
    """Mean tokens of a step with K drafts, each accepted with probability ``acceptance`` if those before it were.

    >>> tokens_of(2, 0.5)
    1.75
    """
    return sum(acceptance**i for i in range(int(steps) + 1))


def figure(block: dict[str, Any], rows: list[list[float]]) -> dict[str, Any] | None:
    """Rates of a block's steps after the washout (rows as in ``goodput_arms.COLUMNS``); None without any."""
    begin, end, acceptance = block["start"] + block["washout"], block["end"], block["acceptance"]
    kept = [row for row in rows if begin < row[0] <= end]
    adjacent = [row for row in kept if row[3] > 0]
    seconds = sum(row[3] for row in adjacent)
    if not seconds:
        return None
    steps = sorted({int(row[2]) for row in kept})
    return {
        "tokens_per_second": sum(row[1] * tokens_of(row[2], acceptance) for row in adjacent) / seconds,
        "counted_tokens_per_second": sum(row[4] for row in adjacent) / seconds,
        "wall_tokens_per_second": sum(row[1] * tokens_of(row[2], acceptance) for row in kept) / (end - begin),
        "counted_wall_tokens_per_second": sum(row[4] for row in kept) / (end - begin),
        "steps": len(kept),
        "adjacent_share": len(adjacent) / len(kept),
        "mean_batch": statistics.mean(row[1] for row in kept),
        "share_by_steps": {str(k): sum(row[2] == k for row in kept) / len(kept) for k in steps},
        "explored_share": sum(row[5] for row in kept) / len(kept),
    }


RATES = ["tokens_per_second", "counted_tokens_per_second", "wall_tokens_per_second", "counted_wall_tokens_per_second"]


def settled_after(rows: list[list[float]], good: set[int]) -> int | None:
    """Return how many steps passed until the K in ``good`` were in force for a window; None if never.

    >>> settled_after([[0.0, 1, 5, 0.01, 1, 0]] * 30 + [[0.0, 1, 3, 0.01, 1, 0]] * 70, {3})
    24
    """
    hits = [int(row[2]) in good for row in rows]
    for begin in range(len(hits) - SETTLE_WINDOW + 1):
        if sum(hits[begin : begin + SETTLE_WINDOW]) >= SETTLED_SHARE * SETTLE_WINDOW:
            return begin
    return None


def summary(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and extremes."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": round(quartiles[1], 4), "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
            "range": [round(min(values), 4), round(max(values), 4)]}  # fmt: skip


def mean_shares(figures: list[dict[str, Any]]) -> dict[str, float]:
    steps = sorted({k for f in figures for k in f["share_by_steps"]}, key=int)
    return {k: round(statistics.mean(f["share_by_steps"].get(k, 0.0) for f in figures), 4) for k in steps}


def cell_figures(blocks: list[dict[str, Any]], rows: dict[int, list[list[float]]]) -> list[dict[str, Any]]:
    """Return one object for each arm of one cell; ``rows`` by number of the block."""
    by_arm: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for block in blocks:
        found = figure(block, rows.get(block["block"], []))
        if block["kind"] == "turn" and found is not None:
            by_arm.setdefault(block["arm"], []).append((block["repetition"], found))
    fixed = {arm: statistics.median(f["tokens_per_second"] for _, f in fs) for arm, fs in by_arm.items() if arm >= 0}
    if not fixed:
        return []
    best = max(fixed, key=lambda arm: fixed[arm])
    of_best = dict(by_arm[best])
    cells = []
    for arm, figures in by_arm.items():
        alone = [f for _, f in figures]
        cell: dict[str, Any] = {
            "concurrency": blocks[0]["concurrency"],
            "acceptance": blocks[0]["acceptance"],
            "arm": arm_name(arm),
            "repetitions": len(figures),
        }
        of_best_fixed = {}
        for name in RATES:
            values = summary([f[name] for f in alone])
            cell[name] = round(values["median"], 1)
            if name == "tokens_per_second":
                cell["quartiles"] = [round(x, 1) for x in values["quartiles"]]
            pairs = [f[name] / of_best[n][name] for n, f in figures if n in of_best and of_best[n][name]]
            if pairs:
                of_best_fixed[name] = summary(pairs) | {"by_repetition": [round(pair, 4) for pair in pairs]}
        cell |= {
            "best_fixed": arm_name(best),
            "of_best_fixed": of_best_fixed,
            "mean_batch": round(statistics.mean(f["mean_batch"] for f in alone), 1),
            "steps": sum(f["steps"] for f in alone),
            "adjacent_share": round(statistics.mean(f["adjacent_share"] for f in alone), 3),
            "share_by_steps": mean_shares(alone),
            "explored_share": round(statistics.mean(f["explored_share"] for f in alone), 4),
        }
        cold = next((b for b in blocks if b["kind"] == "cold"), None)
        if arm == TABLE and cold is not None and (first := figure(cold, rows.get(cold["block"], []))) is not None:
            good = {k for k in fixed if fixed[k] >= EQUAL * fixed[best]}
            cell["cold"] = {
                "tokens_per_second": round(first["tokens_per_second"], 1),
                "of_best_fixed": round(first["tokens_per_second"] / fixed[best], 4),
                "steps": first["steps"],
                "settled_after_steps": settled_after(rows[cold["block"]], good),
                "share_by_steps": mean_shares([first]),
                "explored_share": round(first["explored_share"], 4),
            }
        cells.append(cell)
    return cells


def pass_figures(passes: list[list[dict[str, Any]]], rows: dict[int, list[list[float]]]) -> list[dict[str, Any]]:
    """Return one object for each pass through the changing load; ratios are to the best fixed arm's passes."""
    found = []
    for blocks in passes:
        phases = []
        for block in blocks:
            measured = figure(block, rows.get(block["block"], []))
            if measured is not None:
                phases.append(
                    {"concurrency": block["concurrency"], "acceptance": block["acceptance"],
                     "seconds": round(block["end"] - block["start"], 3),
                     "tokens": sum(row[4] for row in rows[block["block"]]),
                     "tokens_per_second": round(measured["tokens_per_second"], 1),
                     "share_by_steps": mean_shares([measured]), "mean_batch": round(measured["mean_batch"], 1),
                     "explored_share": round(measured["explored_share"], 4)}
                )  # fmt: skip
        if phases:
            found.append({"arm": arm_name(blocks[0]["arm"]), "tokens": sum(p["tokens"] for p in phases),
                          "seconds": round(sum(p["seconds"] for p in phases), 2), "whole": len(phases) == len(PHASES),
                          "phases": phases})  # fmt: skip
    rate: dict[str, list[float]] = {}
    for one in found:
        if one["whole"]:
            rate.setdefault(one["arm"], []).append(one["tokens"] / one["seconds"])
    fixed = {arm: statistics.mean(rates) for arm, rates in rate.items() if arm.startswith("K=")}
    for one in found:
        one["tokens_per_second"] = round(one["tokens"] / one["seconds"], 1)
        one["of_each_fixed"] = {arm: round(one["tokens"] / one["seconds"] / value, 4) for arm, value in fixed.items()}
    return found


def read_rows(path: Path) -> dict[int, list[list[float]]]:
    """Rows by number of the block; what was in flight at its end was written with the next."""
    rows: dict[int, list[list[float]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        found = json.loads(line)
        rows.setdefault(found["block"], []).extend(found["rows"])
    return rows


def replace(path: Path, text: str) -> None:
    """Write in one move: whoever reads it meanwhile, or after the machine has gone, finds it whole."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def write_figures(raw: Path, out: Path) -> dict[str, Any]:
    """Make the file of figures of what ``raw`` holds; return them."""
    measured = json.loads((raw / "blocks.json").read_text())
    rows = read_rows(raw / "steps.jsonl")
    common = measured["common"]
    result: dict[str, Any] = {
        "cells": [{**cell, **common} for blocks in measured["cells"] for cell in cell_figures(blocks, rows)],
        "changing": [{**one, **common} for one in pass_figures(measured["passes"], rows)],
        **{key: measured[key] for key in ("status", "reasons", "failed", "said", "controller_said") if key in measured},
    }
    replace(out, json.dumps(result, indent=1) + "\n")
    return result


# -- the load --


class Load:
    """A closed loop of requests; ``target`` may change at any time."""

    def __init__(self, engine: Any, seed: int = 1) -> None:
        self.engine = engine
        self.target = 0
        self.clients: dict[int, asyncio.Task[None]] = {}
        self.dice = random.Random(seed)

    def run_at(self, concurrency: int) -> None:
        self.target = concurrency
        for number in range(concurrency):
            if number not in self.clients or self.clients[number].done():
                self.clients[number] = asyncio.ensure_future(self.client(number))

    async def client(self, number: int) -> None:
        # The first request is short at random: otherwise those that began together would end together.
        tokens = self.dice.randrange(1, OUTPUT_TOKENS + 1)
        while number < self.target:
            prompt = [self.dice.randrange(1000, 30000) for _ in range(PROMPT_TOKENS)]
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            await self.engine.async_generate(input_ids=prompt, sampling_params=sampling)
            tokens = OUTPUT_TOKENS

    async def settle(self, concurrency: int, seconds: float, limit: float = 10.0) -> None:
        """Change to ``concurrency`` and wait until no more requests run than that, for ``seconds`` at least."""
        begun = time.monotonic()
        self.run_at(concurrency)
        await asyncio.sleep(seconds)
        while time.monotonic() - begun < limit and sum(not c.done() for c in self.clients.values()) > concurrency:
            await asyncio.sleep(0.05)
        self.failures()

    def failures(self) -> None:
        """Raise what ended a client."""
        for task in self.clients.values():
            if task.done():
                task.result()


class Run:
    """One engine and one controller, and what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begun = time.monotonic()
        self.raw: Path = args.raw.resolve()
        self.raw.mkdir(parents=True, exist_ok=True)
        for stale in ("steps.jsonl", "blocks.json"):
            (self.raw / stale).unlink(missing_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="specpilot-goodput-"))
        self.folder.chmod(0o700)
        self.endpoint = f"ipc://{self.folder}/controller.ipc"
        self.board = goodput_arms.Board(self.raw)
        self.number = 0
        self.set(0, 0.0)
        self.arms = [*CANDIDATES, TABLE, *([SGLANG] if getattr(args, "sglang", False) else [])]
        self.measured: dict[str, Any] = {"common": {}, "cells": [], "passes": [], "reasons": [], "failed": []}
        self.deadline = float("inf")
        self.controller: subprocess.Popen[bytes] | None = None

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begun:.0f} s: {text}", flush=True)

    # -- start and end --

    def start_controller(self) -> None:
        config = self.folder / "controller.toml"
        # Nothing was learned before: the first visit is cold.
        config.write_text(
            f'[controller]\nendpoint = "{self.endpoint}"\n[policy]\nname = "goodput"\n'
            f'[trace]\ndirectory = "{self.raw}/trace"\n[prior]\ndirectory = ""\n'
        )
        log = (self.raw / "controller.log").open("w")
        command = [sys.executable, "-m", "specpilot.controller.cli", "controller", "--config", str(config)]
        self.controller = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)

    def start(self) -> None:
        log = os.open(self.raw / "engine.log", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 2)  # SGLang's processes log to the standard error that they inherit
        os.environ |= self.environment()
        self.start_controller()
        import sglang

        self.engine = sglang.Engine(**self.options())
        self.deadline = min(time.monotonic() + self.args.seconds, self.begun + self.args.limit)
        self.load = Load(self.engine)
        self.measured["common"] = self.common()
        self.measured["said"] = self.grep("engine.log", "specpilot:")
        self.say("engine started")
        for line in self.measured["said"]:
            self.say(line)

    def environment(self) -> dict[str, str]:
        return {
            goodput_arms.FOLDER: str(self.raw), "SPECPILOT_ENDPOINT": self.endpoint, "SPECPILOT_SERVER_ID": "rig:1",
            "SPECPILOT_FALLBACK": str(FALLBACK), "SGLANG_SIMULATE_ACC_LEN": "1.0",
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }  # fmt: skip

    def options(self) -> dict[str, Any]:
        return engine_options(self.args, self.folder)

    def common(self) -> dict[str, Any]:
        """What every figure carries."""
        import sglang
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        return {
            "attention": self.args.attention, "candidates": CANDIDATES, "fallback": FALLBACK,
            "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "block_seconds": BLOCK_SECONDS,
            "machine": f"{gpu}, {os.cpu_count()} CPU cores", "sglang_version": sglang.__version__,
            "torch_version": torch.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }  # fmt: skip

    def grep(self, name: str, *words: str) -> list[str]:
        lines = (self.raw / name).read_text(errors="replace").splitlines()
        return [line[:300] for line in lines if any(word in line for word in words)]

    def ask(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "specpilot.controller.cli", "status", "--endpoint", self.endpoint, "--json"]
        asked = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=20)
        return dict(json.loads(asked.stdout)) if asked.returncode == 0 else {"error": asked.stderr[-500:]}

    def finish(self) -> None:
        """Ask the controller while the server still runs: its shutdown kills all our children."""
        time.sleep(1.2)  # the hooks report once a second
        self.measured["status"] = self.ask()
        self.measured["said"] = self.grep("engine.log", "specpilot:", "Error", "Traceback")[:40]
        self.measured["controller_said"] = self.grep("controller.log", "")[:40]
        self.write()

    def write(self) -> dict[str, Any]:
        replace(self.raw / "blocks.json", json.dumps(self.measured))
        return write_figures(self.raw, self.args.out)

    # -- blocks --

    def set(self, arm: int, acceptance: float) -> None:
        """Begin a block that does not count."""
        self.number += 1
        self.board.write(self.number, arm, acceptance)

    async def block(self, arm: int, acceptance: float, concurrency: int, seconds: float, **more: Any) -> dict[str, Any]:
        self.set(arm, acceptance)
        block = {"block": self.number, "arm": arm, "acceptance": acceptance, "concurrency": concurrency,
                 "washout": WASHOUT_SECONDS, **more, "start": time.monotonic()}  # fmt: skip
        await asyncio.sleep(seconds)
        self.load.failures()
        return block | {"end": time.monotonic()}

    async def warm_up(self) -> None:
        """Every K at a small batch, twice, so that all kernels are there; none of it is recorded."""
        self.set(0, ACCEPTANCE)
        await self.load.settle(4, 1.0, 60.0)
        for arm in [*CANDIDATES, *CANDIDATES[::-1], SGLANG]:
            await self.block(arm, ACCEPTANCE, 4, 0.4)
        self.load.run_at(0)
        await self.load.settle(0, 0.1)

    async def cell(self, concurrency: int) -> None:
        self.set(FALLBACK, ACCEPTANCE)
        await self.load.settle(concurrency, 1.0)
        for arm in CANDIDATES:
            await self.block(arm, ACCEPTANCE, concurrency, 0.3)
        blocks = [await self.block(TABLE, ACCEPTANCE, concurrency, COLD_SECONDS, kind="cold")]
        for repetition, order in enumerate(orders(self.arms, REPETITIONS)):
            if self.left() < len(order) * BLOCK_SECONDS:
                break
            for arm in order:
                block = await self.block(
                    arm, ACCEPTANCE, concurrency, BLOCK_SECONDS, kind="turn", repetition=repetition
                )
                blocks.append(block)
        await self.over()
        self.measured["cells"].append(blocks)
        await self.note(f"concurrency {concurrency}")
        for cell in self.write()["cells"]:
            if cell["concurrency"] == concurrency:
                self.say_cell(cell)

    async def one_pass(self, arm: int) -> None:
        concurrency, acceptance = PHASES[0]
        self.set(arm, acceptance)
        await self.load.settle(concurrency, 1.0)
        blocks = []
        for number, (concurrency, acceptance) in enumerate(PHASES):
            self.load.run_at(concurrency)
            blocks.append(await self.block(arm, acceptance, concurrency, PHASE_SECONDS, phase=number, washout=0.0))
        await self.over()
        self.measured["passes"].append(blocks)
        await self.note(f"pass {arm_name(arm)}")
        one = self.write()["changing"][-1]
        rates = " ".join(f"{p['concurrency']}@{p['acceptance']}:{p['tokens_per_second']:.0f}" for p in one["phases"])
        self.say(f"changing, {one['arm']}: {one['tokens']:.0f} tokens, of each fixed {one['of_each_fixed']}; {rates}")

    async def over(self) -> None:
        """Have the scheduler write down what it has: it does so at its first step of another block, twice for all."""
        for _ in range(2):
            self.set(FALLBACK, ACCEPTANCE)
            await asyncio.sleep(0.2)

    async def note(self, after: str) -> None:
        status = await asyncio.get_running_loop().run_in_executor(None, self.ask)
        server = (status.get("servers") or [{"reason": status.get("error", "no server")}])[0]
        self.measured["reasons"].append({"after": after, **{k: server.get(k) for k in ("reason", "source", "note")}})

    def say_cell(self, cell: dict[str, Any]) -> None:
        ratios = cell["of_best_fixed"].get("tokens_per_second", {}).get("by_repetition")
        text = (f"c={cell['concurrency']} {cell['arm']}: {cell['tokens_per_second']:.0f} tok/s "
                f"(wall {cell['wall_tokens_per_second']:.0f}), of {cell['best_fixed']} {ratios}")  # fmt: skip
        if not cell["arm"].startswith("K="):
            text += f", K {cell['share_by_steps']}, explored {cell['explored_share']:.3f}"
        if cold := cell.get("cold"):
            text += f"; cold {cold['of_best_fixed']:.3f}, settled at {cold['settled_after_steps']} of {cold['steps']}"
        self.say(text)

    # -- the whole --

    def left(self) -> float:
        return self.deadline - time.monotonic()

    async def everything(self) -> None:
        await self.warm_up()
        self.say("warm")
        cell_seconds = len(self.arms) * BLOCK_SECONDS * 2 + COLD_SECONDS + 8  # two repetitions at least
        pass_seconds = len(PHASES) * PHASE_SECONDS + 6
        passes = [arm for arm in PASSES if arm in self.arms]
        work: list[tuple[str, float, Any, int]] = [
            *(("cell", cell_seconds, self.cell, c) for c in self.args.concurrencies),
            *(("pass", pass_seconds, self.one_pass, arm) for arm in passes[:3]),
            *(("cell", cell_seconds, self.cell, c) for c in FURTHER_CONCURRENCIES),
            *(("pass", pass_seconds, self.one_pass, arm) for arm in (*passes[3:], *passes[::-1])),
        ]
        for name, seconds, do, argument in work:
            if self.left() < seconds:
                self.say(f"out of time before {name} {argument}")
                continue
            try:
                await do(argument)
            except Exception:
                self.say(traceback.format_exc()[-1500:])
                self.measured["failed"].append({name: argument, "error": traceback.format_exc()[-1500:]})
        self.load.run_at(0)
        await self.load.settle(0, 0.1)


def engine_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        **engines.target(args.models, args.attention),
        **engines.captured(BATCH_SIZES),
        **engines.adaptive(f"{args.models}/eagle3-8b", CANDIDATES, folder),
        "mem_fraction_static": 0.75,
        **json.loads(args.extra),
    }


def run(args: argparse.Namespace) -> int:
    this = Run(args)
    try:
        this.start()
    except BaseException:
        this.say(traceback.format_exc()[-1500:])
        this.say((this.raw / "engine.log").read_text(errors="replace")[-3000:])
        if this.controller is not None:
            this.controller.kill()
        raise
    try:
        this.engine.loop.run_until_complete(this.everything())
    finally:
        this.finish()
        for one in this.write()["changing"]:
            this.say(
                f"changing, {one['arm']}: {one['tokens_per_second']:.0f} tok/s, of each fixed {one['of_each_fixed']}"
            )
        assert this.controller is not None
        this.controller.terminate()
        this.controller.wait(10)
        this.engine.shutdown()
    return 1 if this.measured["failed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure")
    running.add_argument("--models", required=True)
    running.add_argument("--attention", default="triton")
    running.add_argument("--seconds", type=float, default=420.0, help="after the engine has started")
    running.add_argument("--limit", type=float, default=1e9, help="seconds, the engine's start included")
    running.add_argument("--sglang", action="store_true", help="an arm more: SGLang's own adaptive rule")
    running.add_argument(
        "--concurrencies", type=int, nargs="+", default=CONCURRENCIES, help="of the cells before the changing load"
    )
    running.add_argument("--extra", default="{}", help="JSON of further engine options")
    again = commands.add_parser("figures", help="make the figures anew of what OUT/raw holds")
    for command in (running, again):
        command.add_argument("--raw", type=Path, required=True, help="folder of steps and logs")
        command.add_argument("--out", type=Path, required=True, help="file of figures")
    args = parser.parse_args()
    if args.command == "figures":
        write_figures(args.raw, args.out)
        return 0
    return run(args)


if __name__ == "__main__":
    raise SystemExit(main())
