"""From one client to 250: no speculation, always, up to five requests, or ``goodput``? Needs a GPU.

    python benchmarks/live/operator_sweep.py run --models DIR --raw DIR --server tree-triton --turn FILE
    python benchmarks/live/operator_sweep.py merge --raw DIR --out FILE

The case that Specpilot began with: a DeepSeek-like target with an EAGLE3 draft, as a tree (2 steps, top-k 4,
16 tokens) on triton and as a chain of 3 on FlashInfer. A closed loop of clients asks for 256 tokens after 128. A
server with the plugin and a controller of its own serves all arms in turns of a second or so, between
which nothing restarts (``goodput_arms.py``): always the most drafts, those up to five running requests,
and what ``goodput`` sends. A server without speculation is measured beside it (without overlap scheduling, the
first server's K=0): with ``--turn``, engines start beside each other on one GPU and take turns, one number of
clients each.

Weights are random, so acceptance is simulated: each level of drafts is accepted with one probability. Rates are
tokens by the time passed, prefills included, where a step counts for the tokens that its K gives on average, so that
the draw of acceptance is no noise. The raw files of an earlier call are gone on with: what they hold is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import engines
import goodput_arms
import goodput_load
import models
from goodput_arms import PLAIN, TABLE, THRESHOLD
from skip_parity import turn

if __name__ == "__mp_main__":
    goodput_arms.install()
    engines.lift_refusals()

MODEL = "sweep-moe"
SERVERS = {
    # name: (attention, drafts, probability that a level is accepted)
    "tree-triton": ("triton", "tree", 0.85),
    "chain-flashinfer": ("flashinfer", "chain", 0.7),
    "tree-flashinfer": ("flashinfer", "tree", 0.85),
    "none-triton": ("triton", "", 0.0),
    "none-flashinfer": ("flashinfer", "", 0.0),
}
STEPS = {"tree": 2, "chain": 3, "": 0}
CLIENTS = [1, 2, 4, 8, 16, 32, 64, 128, 250]
BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
MAX_TOKENS = 110_000
"""KV slots: 250 requests of 384 tokens, and what speculation reserves."""
BLOCK_SECONDS, COLD_SECONDS, SETTLE_SECONDS = 1.2, 3.0, 0.8
REPETITIONS = 2


class Sweep(goodput_load.Run):
    """One engine; with the plugin, a controller too."""

    def __init__(self, args: argparse.Namespace) -> None:
        attention, self.drafts, self.acceptance = SERVERS[args.server]
        overlap = "" if args.overlap else "-no-overlap"
        self.file: Path = args.raw / f"{args.server}{overlap}.json"
        args.attention, args.out = attention, self.file
        args.raw = args.raw / f"{args.server}{overlap}"
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        super().__init__(args)
        self.widest = STEPS[self.drafts]
        self.arms = [self.widest, THRESHOLD, TABLE, *([] if args.overlap else [0])] if self.drafts else [PLAIN]
        self.measured["clients"] = before.get("clients", {})

    def start_controller(self) -> None:
        if self.drafts:
            super().start_controller()

    def environment(self) -> dict[str, str]:
        own = {goodput_arms.FOLDER: str(self.raw)}
        if self.drafts:
            own |= {
                "SPECPILOT_ENDPOINT": self.endpoint, "SPECPILOT_SERVER_ID": f"{self.file.stem}:1",
                "SPECPILOT_FALLBACK": str(self.widest), "SGLANG_SIMULATE_ACC_LEN": "1.0",
                "SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
            }  # fmt: skip
        if self.args.no_refusals:
            own[engines.NO_REFUSALS] = "1"
        return own

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            **engines.target(self.args.models, self.args.attention, MODEL),
            **engines.captured(BATCH_SIZES),
            "context_length": 4096,
            "mem_fraction_static": 0.9,
            "max_total_tokens": MAX_TOKENS,
            "port": self.args.port,
            "disable_overlap_schedule": not self.args.overlap,
            **json.loads(self.args.extra),
        }
        draft = f"{self.args.models}/{models.DRAFTS[MODEL]}"
        if self.drafts == "tree":
            return options | engines.tree(draft)
        return options | engines.adaptive(draft, [0, self.widest], self.folder) if self.drafts else options

    def common(self) -> dict[str, Any]:
        return super().common() | {
            "server": self.args.server, "overlap": self.args.overlap, "drafts": self.drafts, "model": MODEL,
            "acceptance": self.acceptance, "candidates": [0, self.widest],
        }  # fmt: skip

    def write(self) -> dict[str, Any]:
        goodput_load.replace(self.file, json.dumps(self.measured))
        return {}

    # -- what is measured --

    async def quiet(self) -> None:
        """End all requests, so that another engine can have the GPU."""
        self.load.target = 0
        for client in self.load.clients.values():
            client.cancel()
        self.engine.tokenizer_manager.abort_request(abort_all=True)
        await asyncio.gather(*self.load.clients.values(), return_exceptions=True)
        self.load.clients = {}
        await asyncio.sleep(0.3)

    async def warm(self) -> None:
        self.set(self.widest, self.acceptance)
        for clients in (20, 250):
            await self.load.settle(clients, 0.5)
            for arm in self.arms:
                await self.block(arm, self.acceptance, clients, 0.2)
        await self.quiet()

    async def at(self, clients: int) -> None:
        self.set(self.widest, self.acceptance)
        await self.load.settle(clients, SETTLE_SECONDS, SETTLE_SECONDS)
        blocks = []
        if TABLE in self.arms:
            blocks.append(await self.block(TABLE, self.acceptance, clients, COLD_SECONDS, kind="cold"))
        for repetition, order in enumerate(goodput_load.orders(self.arms, REPETITIONS)):
            for arm in order:
                block = await self.block(
                    arm, self.acceptance, clients, BLOCK_SECONDS, kind="turn", repetition=repetition
                )
                blocks.append(block)
        await self.over()
        await self.quiet()
        rows = goodput_load.read_rows(self.raw / "steps.jsonl")
        found = [
            {"arm": arm_name(block["arm"], self.widest), "kind": block["kind"], **figure}
            for block in blocks
            if (figure := goodput_load.figure(block, rows.get(block["block"], []))) is not None
        ]
        self.measured["clients"][str(clients)] = found
        rates = {}
        for one in found:
            rates.setdefault(f"{one['arm']}{' cold' if one['kind'] == 'cold' else ''}", []).append(
                round(one["wall_tokens_per_second"])
            )
        shares = [one["share_by_steps"] for one in found if one["arm"] == "goodput"]
        self.say(f"{self.file.stem} {clients} clients: {rates}, goodput's K {shares[-1:]}")
        self.write()

    async def every(self) -> None:
        with turn(self.args.turn):
            await self.warm()
        self.say(f"{self.file.stem} warm")
        for clients in self.args.clients:
            if str(clients) in self.measured["clients"]:
                continue
            with turn(self.args.turn):
                if self.left() < 20:
                    self.say(f"{self.file.stem}: out of time before {clients} clients")
                    return
                try:
                    await self.at(clients)
                except Exception:
                    self.say(traceback.format_exc()[-1500:])
                    self.measured["failed"].append({"clients": clients, "error": traceback.format_exc()[-1500:]})
                    await self.quiet()


def arm_name(arm: int, widest: int) -> str:
    names = {TABLE: "goodput", THRESHOLD: "threshold 5", PLAIN: "none", widest: "always", 0: "K=0"}
    return names.get(arm, f"K={arm}")


# -- figures --


def merge(args: argparse.Namespace) -> int:
    """One object for each server and number of clients: rates of the arms, and their shares of the better fixed one."""
    raws = {path.stem: json.loads(path.read_text()) for path in sorted(args.raw.glob("*.json"))}
    found = []
    for name, raw in raws.items():
        common = raw["common"]
        if not common.get("drafts"):
            continue
        suffix = "" if common["overlap"] else "-no-overlap"
        none = raws.get(f"none-{common['attention']}{suffix}", {}).get("clients", {})
        for clients, rows in sorted(raw["clients"].items(), key=lambda item: int(item[0])):
            rates: dict[str, list[float]] = {}
            for row in [*rows, *none.get(clients, [])]:
                if row["kind"] == "turn":
                    rates.setdefault(row["arm"], []).append(row["wall_tokens_per_second"])
            entry: dict[str, Any] = {
                "server": name, "clients": int(clients),
                "tokens_per_second": {arm: round(statistics.mean(values), 1) for arm, values in rates.items()},
                "each": {arm: [round(value, 1) for value in values] for arm, values in rates.items()},
            }  # fmt: skip
            means = entry["tokens_per_second"]
            # Without overlap there may be no server without speculation beside it: then its own K=0 is compared.
            plain = "none" if "none" in means else "K=0"
            better = max(means.get(plain, 0.0), means.get("always", 0.0))
            entry["plain"] = plain
            entry["of_better"] = {
                a: round(means[a] / better, 4) for a in ("threshold 5", "goodput", "K=0") if a in means
            }
            cold = next((row for row in rows if row["kind"] == "cold"), None)
            if cold is not None:
                entry["cold_of_better"] = round(cold["wall_tokens_per_second"] / better, 4)
            last = [row for row in rows if row["arm"] == "goodput" and row["kind"] == "turn"]
            entry["goodput_share_by_steps"] = goodput_load.mean_shares(last) if last else {}
            found.append(entry | {key: common[key] for key in common if key not in entry})
    args.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
    for row in found:
        print(f"{row['server']} {row['clients']}: {row['tokens_per_second']}, of the better of {row['plain']} and "
              f"always {row['of_better']}, cold {row.get('cold_of_better')}")  # fmt: skip
    return 0


def run(args: argparse.Namespace) -> int:
    this = Sweep(args)
    try:
        this.start()
        this.engine.loop.run_until_complete(this.every())
    except BaseException:
        this.say(traceback.format_exc()[-1500:])
        this.say((this.raw / "engine.log").read_text(errors="replace")[-2000:])
        raise
    finally:
        if this.controller is not None:
            this.controller.terminate()
    this.measured["said"] = this.grep("engine.log", "specpilot:", "Error", "Traceback")[:40]
    this.write()
    this.engine.shutdown()
    return 1 if this.measured["failed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--models", type=Path, required=True)
    running.add_argument("--server", choices=SERVERS, required=True)
    running.add_argument("--no-overlap", dest="overlap", action="store_false")
    running.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    running.add_argument("--turn", type=Path, help="file shared by the engines on one GPU, which measure in turn")
    running.add_argument("--port", type=int, default=30000)
    running.add_argument("--no-refusals", action="store_true", help="skip by decode even where the plugin would not")
    running.add_argument("--extra", default="{}", help="JSON of further engine options")
    running.add_argument(
        "--seconds", type=float, default=1e9, help="begin no further number of clients after this time"
    )
    merged = commands.add_parser("merge")
    merged.add_argument("--out", type=Path, required=True)
    for command in (running, merged):
        command.add_argument("--raw", type=Path, required=True, help="folder of the raw files")
    args = parser.parse_args()
    if args.command == "merge":
        return merge(args)
    args.limit = args.seconds
    return run(args)


if __name__ == "__main__":
    raise SystemExit(main())
