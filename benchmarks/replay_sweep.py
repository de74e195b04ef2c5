"""Policies against each other in virtual time: surfaces x closed-loop concurrency x seeds, on all cores.

    python benchmarks/replay_sweep.py --seeds 3 --seconds 300 --out benchmarks/replay_sweep.json

Writes every run's figures (as ``specpilot replay --json``) and prints the mean share of the best K
in each state. Acceptance moves between 0.3 and 0.9 every minute, alike for all policies of a seed.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from controller.replay import GENERATED_REQUESTS, Scenario, simulate
from controller.replay_judge import Result
from controller.surface import load_surface
from controller.workload import generated_requests

SURFACES = ["h200-sglang", "h200-native-skip", "h200-triton", "moe", "context"]
CONCURRENCY = [1, 8, 16, 64, 128, 256]
POLICIES = ["none", "static:0", "static:1", "static:3", "static:5", "sglang", "goodput", "informed-greedy"]


def run(surface: str, concurrency: int, seed: int, seconds: float) -> list[Result]:
    requests = generated_requests(GENERATED_REQUESTS, seed)
    scenario = Scenario(load_surface(surface), requests, seconds, seed, concurrency=concurrency)
    return [simulate(policy, scenario) for policy in POLICIES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cases = [(s, c, seed, args.seconds) for s in SURFACES for c in CONCURRENCY for seed in range(1, args.seeds + 1)]
    with ProcessPoolExecutor() as pool:
        results = [result for found in pool.map(run, *zip(*cases, strict=True)) for result in found]
    args.out.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(result) for result in results) + b"\n]\n")
    print("| Surface | At a time | " + " | ".join(POLICIES) + " |\n|" + "---|" * (len(POLICIES) + 2))
    for surface in SURFACES:
        for concurrency in CONCURRENCY:
            shares = []
            for policy in POLICIES:
                found = [r.reference_share for r in results
                         if (r.surface, r.concurrency, r.policy) == (surface, concurrency, policy)]  # fmt: skip
                shares.append(f"{100 * statistics.mean(found):.1f}")
            print(f"| {surface} | {concurrency} | " + " | ".join(shares) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
