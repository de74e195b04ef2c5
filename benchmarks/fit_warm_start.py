"""Cold starts from a prior that was fitted to half a trace, on the other half.

    python benchmarks/fit_warm_start.py --seeds 10 --out fit_warm_start.json [--minutes 12]

On each surface a server runs under the learned policy with moving acceptance at each concurrency in
turn, and its trace is cut in two by its records. To the first half, all concurrencies together, a
prior is fitted. Then the second half of each run is served again, the same requests from where the
first half had come to and the acceptance path as it goes on, by policies that know nothing of it:
without a prior, and with the fitted one. A figure is the number of steps until the share of the
best K, which informed-greedy has by definition, is 0.95 to stay, what is explored counted
(``JudgedSteps.steps_to_95``), and until the table's choice is that good (``JudgedSteps.steps_to_choose``).

``--out`` is written anew after each seed, all surfaces of it; with ``--minutes``, no seed is begun after so long.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from fit_scale import Recorded
from rich.console import Console
from rich.progress import Progress

from specpilot.controller.fit.engines import read_fleet
from specpilot.controller.fit.prior import fit
from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.replay.parallel import run_all, workers
from specpilot.controller.replay.run import serve
from specpilot.controller.replay.scenario import GENERATED_REQUESTS, Scenario
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import Phase, acceptance_path, generated_requests
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.sources import survey
from specpilot.policies.baselines import Truth
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Policy
from specpilot.sglang_hooks.wire import Hello, StepRecord

SURFACES = ("h200-sglang", "h200-native-skip", "h200-triton", "h200-triton-skip", "moe", "context")
CONCURRENCIES = (1, 8, 32, 128)
SECONDS = 240.0
"""Of each run, virtual: four drawings of the acceptance, two in each half."""
JUDGED_STEPS = 700
"""Of a cold start: those asked for, and as long as an answer must last."""


class FirstHalf(Recorded):
    """Writes down what comes before the middle of the run."""

    def learn(self, step: StepRecord) -> None:
        if step.time < SECONDS / 2.0:
            super().learn(step)
        else:
            Goodput.learn(self, step)


def scenario(surface: str, concurrency: int, seed: int) -> Scenario:
    requests = generated_requests(GENERATED_REQUESTS, seed)
    return Scenario(load_surface(surface), requests, SECONDS, seed, concurrency=concurrency)


def second_half(surface: str, concurrency: int, seed: int, served: int) -> Scenario:
    """The same run from its middle on: ``served`` requests have ended, and acceptance goes on as it was drawn."""
    requests = generated_requests(GENERATED_REQUESTS, seed)
    begin = served % len(requests)
    middle = SECONDS / 2.0
    path = acceptance_path(SECONDS, seed)
    current = max((phase for phase in path if phase.start <= middle), key=lambda phase: phase.start)
    later = [Phase(phase.start - middle, phase.name, phase.acceptance) for phase in path if phase.start > middle]
    phases = [Phase(0.0, current.name, current.acceptance), *later]
    return Scenario(
        load_surface(surface),
        [*requests[begin:], *requests[:begin]],
        middle,
        seed,
        concurrency=concurrency,
        acceptance=phases,
        steps=JUDGED_STEPS,
    )


def fitted_prior(surface: str, seed: int) -> tuple[dict[str, Any], dict[int, int], dict[str, Any]]:
    """Return the prior of the first halves, the requests served in each, and how good the fit is."""
    served = {}
    with tempfile.TemporaryDirectory() as directory:
        for concurrency in CONCURRENCIES:
            made: list[FirstHalf] = []
            folder = Path(directory, str(concurrency))

            def make(hello: Hello, _truth: Truth, made: list[FirstHalf] = made, folder: Path = folder) -> Policy:
                made.append(FirstHalf(folder, hello))
                return made[0]

            run = serve("goodput", scenario(surface, concurrency, seed), make)
            made[0].writer.close()
            served[concurrency] = sum(at <= SECONDS / 2.0 for at in run.ended_at)
        findings = Findings()
        sources = survey([Path(directory, str(concurrency)) for concurrency in CONCURRENCIES], findings)
        part = read_fleet(sources, "serial", None, Console(file=sys.stderr))
        fitted = fit(part, sources[0].hello)
    assert not findings.counts
    assert not part.findings.counts, part.findings.lines()
    errors = [cell.prior_error for cell in fitted.cells if cell.prior_error is not None]
    return fitted.prior, served, {"records": part.findings.rows, "prior_error": float(np.median(errors))}


def cases(surface: str, seed: int) -> list[dict[str, Any]]:
    prior, served, quality = fitted_prior(surface, seed)
    rows = []
    for concurrency in CONCURRENCIES:
        again = second_half(surface, concurrency, seed, served[concurrency])
        row = {"surface": surface, "concurrency": concurrency, "seed": seed, **quality}
        for name, known in (("none", None), ("fitted", prior)):
            run = serve("goodput", again, lambda _hello, _truth, known=known: Goodput(prior=known))
            judged = JudgedSteps.of(run.decodes, again.surface.speculating)
            row[name] = judged.steps_to_95()
            row[f"{name}_choice"] = judged.steps_to_choose(0)
            first = judged.between(0, 150)
            row[f"{name}_share_of_first_150"] = float(first.expected.sum() / first.best.sum())
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surfaces", nargs="+", choices=SURFACES, default=SURFACES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args(arguments)
    begin = perf_counter()
    rows: list[dict[str, Any]] = []
    progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    with progress, workers(options.workers, len(options.surfaces)) as pool:
        for seed in range(options.seeds):
            if perf_counter() - begin > 60.0 * options.minutes:
                break
            jobs = [(surface, seed) for surface in options.surfaces]
            rows += [row for found in run_all(cases, jobs, pool, progress, f"seed {seed}") for row in found]
            if options.out is not None:
                options.out.write_text(json.dumps(found_of(rows), indent=1) + "\n")
    for name in ("none", "fitted"):
        print(name, json.dumps(summary_of(rows, name)))
    return 0


def summary_of(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    steps, choice = (
        [JUDGED_STEPS if row[key] is None else row[key] for row in rows] for key in (name, f"{name}_choice")
    )
    return {
        "runs": len(rows),
        "within_150": sum(count <= 150 for count in steps) / len(steps),
        "median": float(np.median(steps)),
        "p95": float(np.quantile(steps, 0.95)),
        "most": max(steps),
        "choice_within_150": sum(count <= 150 for count in choice) / len(choice),
        "choice_most": max(choice),
        "share_of_first_150": float(np.mean([row[f"{name}_share_of_first_150"] for row in rows])),
    }


def found_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "summary": {name: summary_of(rows, name) for name in ("none", "fitted")},
        "runs": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
