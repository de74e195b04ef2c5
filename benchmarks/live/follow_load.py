"""A live server under a stepping load: does K follow it? Needs a GPU and SGLang.

    python benchmarks/live/follow_load.py --models DIR --out DIR [--attention triton] [--tp 1]

Starts ``specpilot controller`` with the threshold policy, an SGLang engine with the plugin,
and a closed loop of 1, then 64, then 1 concurrent requests. From the trace it reads how many
decode steps passed from each change of the load to the first step at the K that the policy
wants there. Writes ``summary-ATTENTION-tpN.json``; exits with 1 if a change was
not followed within 50 steps. Acceptance is simulated (random weights accept nothing), so the
figures show control, not speed-ups.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import engines

CANDIDATES = [0, 1, 3]
PHASES = ((1, 5.0), (64, 8.0), (1, 5.0))
"""(concurrency, seconds)."""
THRESHOLD, BAND = 16, 4
WITHIN_STEPS = 50


def engine_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        **engines.target(args.models, args.attention),
        **engines.adaptive(f"{args.models}/eagle3-8b", CANDIDATES, folder),
        "cuda_graph_max_bs_decode": 64,
        "max_running_requests": 64,
        "mem_fraction_static": 0.7,
        "tp_size": args.tp,
        "disable_overlap_schedule": args.no_overlap,
        **json.loads(args.extra),
    }


async def closed_loop(engine: Any, concurrency: int, until: float) -> int:
    """Keep ``concurrency`` requests running until a monotonic time; return the tokens made."""

    async def client() -> int:
        tokens = 0
        while time.monotonic() < until:
            prompt = [random.randrange(1000, 30000) for _ in range(128)]
            sampling = {"max_new_tokens": 160, "temperature": 0, "ignore_eos": True}
            result = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
            tokens += len(result["output_ids"])
        return tokens

    return sum(await asyncio.gather(*(client() for _ in range(concurrency))))


def drive(args: argparse.Namespace, folder: Path, at_end: Callable[[], None]) -> list[dict[str, Any]]:
    """Run the load; ``at_end`` is called while the server still runs: its shutdown kills all our children."""
    import sglang

    engine = sglang.Engine(**engine_options(args, folder))
    engine.loop.run_until_complete(closed_loop(engine, 64, time.monotonic() + 2.0))  # warm-up
    engine.loop.run_until_complete(closed_loop(engine, 1, time.monotonic() + 2.0))
    phases = []
    for concurrency, seconds in PHASES:
        start = time.time()
        tokens = engine.loop.run_until_complete(closed_loop(engine, concurrency, time.monotonic() + seconds))
        phases.append(
            {
                "concurrency": concurrency,
                "start": start,
                "tokens_per_second": round(tokens / (time.time() - start), 1),
            }
        )
    at_end()
    engine.shutdown()
    return phases


def followed(steps: list[dict[str, Any]], phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each phase: decode steps from the change of load to the batch, and to K, that it leads to."""
    found = []
    for number, phase in enumerate(phases):
        end = phases[number + 1]["start"] if number + 1 < len(phases) else float("inf")
        inside = [s for s in steps if phase["start"] <= s["time"] < end]
        high = phase["concurrency"] > THRESHOLD
        wanted = 0 if high else max(CANDIDATES)
        batch = next((i for i, s in enumerate(inside) if (s["batch_size"] > THRESHOLD + BAND) == high), None)
        k = next((i for i, s in enumerate(inside) if s["draft_tokens"] - 1 == wanted), None)
        settled = inside[k:] if k is not None else []
        share = sum(s["draft_tokens"] - 1 == wanted for s in settled) / len(settled) if settled else 0.0
        found.append({"concurrency": phase["concurrency"], "tokens_per_second": phase["tokens_per_second"],
                      "wanted_steps": wanted, "decode_steps": len(inside), "batch_after_steps": batch,
                      "k_after_steps": k, "share_at_wanted_after": round(share, 4)})  # fmt: skip
    return found


def median_step_seconds(steps: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians by K and padded batch size over at least 20 back-to-back steps at one K."""
    groups: dict[tuple[int, int], list[float]] = {}
    for before, step in itertools.pairwise(steps):
        if step["forwards"] == 1 and before["draft_tokens"] == step["draft_tokens"]:
            groups.setdefault((step["draft_tokens"] - 1, step["padded_batch_size"]), []).append(step["seconds"])
    found: dict[str, dict[str, float]] = {}
    for (k, batch), seconds in sorted(groups.items()):
        if len(seconds) >= 20:
            found.setdefault(f"K={k}", {})[str(batch)] = round(statistics.median(seconds), 6)
    return found


def read_trace(folder: Path) -> list[dict[str, Any]]:
    from specpilot.controller.trace.reader import Segment, segments

    rows: list[dict[str, Any]] = []
    for path in segments([folder]):
        for batch in Segment(path):
            rows.extend(batch.to_pylist())
    return sorted(rows, key=lambda row: row["record_seq"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--extra", default="{}", help="JSON of further engine options")
    args = parser.parse_args()
    name = f"{args.attention}-tp{args.tp}{'-no-overlap' if args.no_overlap else ''}"
    folder = Path(tempfile.mkdtemp(prefix="specpilot-live-"))
    endpoint = f"ipc://{folder}/controller.ipc"
    config = folder / "controller.toml"
    config.write_text(
        f'[controller]\nendpoint = "{endpoint}"\n[policy]\nname = "threshold"\nthreshold = {THRESHOLD}\n'
        f'band = {BAND}\nsteps = {max(CANDIDATES)}\n[trace]\ndirectory = "{folder}/trace"\n'
    )
    os.environ.update(SPECPILOT_ENDPOINT=endpoint, SPECPILOT_SERVER_ID="rig:1", SPECPILOT_CHECK_STEPS="256")
    os.environ.setdefault("SGLANG_SIMULATE_ACC_LEN", "2.0")
    os.environ.setdefault("SGLANG_SIMULATE_ACC_METHOD", "match-expected")
    os.environ.setdefault("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    specpilot = [sys.executable, "-m", "specpilot.controller.cli"]
    controller = subprocess.Popen([*specpilot, "controller", "--config", str(config)])
    report: dict[str, Any] = {}

    def ask_and_stop_the_controller() -> None:
        time.sleep(1.5)  # the hooks report once a second
        asked = [*specpilot, "status", "--endpoint", endpoint]
        report.update(json.loads(subprocess.run([*asked, "--json"], capture_output=True, text=True).stdout))
        print(subprocess.run(asked, capture_output=True, text=True).stdout)
        controller.terminate()
        controller.wait(10)

    try:
        phases = drive(args, folder, ask_and_stop_the_controller)
    finally:
        controller.kill()
    steps = read_trace(folder / "trace")
    server = report["servers"][0]
    summary = {
        "attention": args.attention,
        "tp": args.tp,
        "overlap": not args.no_overlap,
        "threshold": THRESHOLD,
        "band": BAND,
        "phases": followed(steps, phases),
        "records": len(steps),
        "record_seq_gapless": [s["record_seq"] for s in steps] == list(range(len(steps))),
        "steps_as_asked": all(s["draft_tokens"] == s["steps"] + 1 for s in steps),
        "median_step_seconds": median_step_seconds(steps),
        "confirmed_ranks": server["confirmed_ranks"],
        "tp_size": server["tp_size"],
        "counters": server["counters"],
        "note": server["note"],
        "gpu": server["gpu"],
        "sglang": server["sglang_version"],
        "torch": importlib.metadata.version("torch"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"summary-{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    good = all(p["k_after_steps"] is not None and p["k_after_steps"] <= WITHIN_STEPS
               for p in summary["phases"])  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
