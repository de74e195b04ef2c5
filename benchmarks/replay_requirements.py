"""What the learned policy must reach, and what it reaches in virtual time.

    python benchmarks/replay_requirements.py --conv conv.csv --code code.csv --seeds 10 --out requirements.json

Prints a table "figure | asked | reached | met", and below it what it was taken from, case by case.
All policies of a seed see the same requests, the same acceptance path and, position by position,
the same accepted drafts. Every figure is of expected tokens and true costs, so there is no noise in
it but that of the states a run passes through. ``--conv`` and ``--code`` are CSV files with the
columns of Azure's LLM traces; without them the cases ``azure`` and ``code`` are left out.

    closed, azure, code   acceptance drawn anew each minute: shares of the best K in each state; leads
                          over the best fixed K and over SGLang's rule
    constant              constant acceptance and concurrency: against the best fixed K, exploration,
                          switches
    cold                  steps until it is right: without a prior, at other costs, with a right and a
                          wrong prior
    change                steps until it is right after acceptance jumped
    hover                 a batch size that moves across a boundary
    speed                 steps a second that are learned and decided, milliseconds a table

``--rows`` takes in what earlier runs wrote, so that cases may have as many seeds as there was time for; with
``--only`` and no case after it, the table is of these alone. All seeds of closed, azure and code have to be of one run,
since their states tell which fixed K are run.

What one run can tell is not run again: which fixed K come into question is told by the states of
informed-greedy's run, and only those are run. At constant load a fixed K would pass through the
same states, token by token, so its speed is computed from the policy's own run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec
from replay_cases import CASES, SURFACES, Job, Row, fixed_jobs, jobs_of, moving, run_job
from replay_figures import markdown
from rich.console import Console
from rich.progress import Progress

from specpilot.controller.replay.parallel import run_all, workers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rows", nargs="*", type=Path, default=[], metavar="FILE", help="of --out, of earlier runs")
    parser.add_argument("--surfaces", nargs="+", choices=SURFACES, default=SURFACES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240.0, help="virtual time of the moving cases")
    parser.add_argument("--constant-steps", type=int, default=3000, help="judged, after 2,000; at batch 256 two thirds")
    parser.add_argument("--conv", type=Path, help="arrivals of the case azure")
    parser.add_argument("--code", type=Path, help="arrivals of the case code")
    parser.add_argument("--peers", nargs="*", default=["sglang"], help="further policies of the moving cases")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--out", type=Path, help="every run's figures, as JSON")
    options = parser.parse_args(arguments)
    without = {case for case, file in (("azure", options.conv), ("code", options.code)) if file is None}
    cases = [case for case in (CASES if options.only is None else options.only) if case not in without]
    rows: list[Row] = [row for file in options.rows for row in msgspec.json.decode(file.read_bytes())]
    quiet = not sys.stderr.isatty()
    with (
        Progress(console=Console(stderr=True), disable=quiet) as progress,
        workers(options.workers, sys.maxsize) as pool,
    ):
        for case in cases:
            if case == "speed":
                continue
            begin = perf_counter()
            jobs = [(job,) for job in jobs_of(case, options)]
            found = run_all(run_job, jobs, pool, progress, case)
            if CASES[case] is moving:
                found += run_all(run_job, [(job,) for job in fixed_jobs(found)], pool, progress, f"{case}, fixed K")
            rows += found
            sys.stderr.write(f"{case}: {len(found)} runs in {perf_counter() - begin:,.0f} s\n")
            write(rows, options.out)
    if "speed" in cases:
        # Alone, when the workers have ended: it is the only case that goes by the clock on the wall.
        rows += [run_job(Job("speed", {"surface": "h200-sglang", "concurrency": n})) for n in (1, 64, 256)]
    write(rows, options.out)
    sys.stdout.write(markdown(rows))
    return 0


def write(rows: Sequence[Row], path: Path | None) -> None:
    if path is not None:
        path.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]\n")


if __name__ == "__main__":
    sys.exit(main())
