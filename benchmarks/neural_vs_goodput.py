"""The policy ``neural`` against ``goodput``, in replay on seeds and a surface that neither was fitted to.

    python benchmarks/neural_vs_goodput.py --json benchmarks/neural_vs_goodput.json

Traces are recorded on one surface, under three loads, by a policy that tries every K in blocks of 8 steps. From
them come the net and goodput's stored prior. Then both, and goodput from nothing, are run on other
seeds (other requests, other text), on the same surface and on another one: figures are shares of the best K in each
state, step by step, and the difference to goodput of the same seed and load, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specpilot.controller.config import TraceConfig
from specpilot.controller.fit.neural import fit
from specpilot.controller.neural_file import load_model, save_model
from specpilot.controller.replay.run import saturation, serve
from specpilot.controller.replay.scenario import Scenario, at_rate
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import generated_requests
from specpilot.controller.statistics import mean_and_interval
from specpilot.controller.trace.format import records
from specpilot.controller.trace.reader import Segment, segments
from specpilot.controller.trace.writer import TraceWriter
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Grid, Plan, Policy
from specpilot.policies.neural import Neural
from specpilot.sglang_hooks.wire import Hello, StepRecord

LOADS = (0.4, 0.8, 1.2)
FITTED, HELD_OUT = "h200-sglang", "h200-triton"


class Trying(Policy):
    """Every K in blocks of 8 steps, each as often, and a trace of it."""

    name = "trying"

    def __init__(self, folder: Path, server: Hello) -> None:
        self.writer = TraceWriter(folder, "sim/0", server, TraceConfig())

    def learn(self, step: StepRecord) -> None:
        self.writer.append([step])
        self.writer.tick(step.time)

    def decide(self, server: Hello, now: float) -> Plan:  # noqa: ARG002
        share = 1.0 / len(server.candidate_steps)
        explore = {0: tuple((k, share) for k in server.candidate_steps[1:])}
        return Plan(Grid(), (server.candidate_steps[0],), (frozenset(),), "tried", 0, explore, block_steps=8)


def scenario(surface: str, load: float, seed: int, seconds: float) -> Scenario:
    named = load_surface(surface)
    requests = generated_requests(4000, seed)
    rate = load * saturation(named, requests)
    return Scenario(named, at_rate(requests, rate, seconds), seconds, seed, load=load)


def record(folder: Path, load: float, seed: int, seconds: float) -> None:
    made: list[Trying] = []

    def make(server: Hello, _truth: object) -> Policy:
        made.append(Trying(folder, server))
        return made[-1]

    serve("trying", scenario(FITTED, load, seed, seconds), make)
    made[0].writer.close()


def learned_prior(folder: Path) -> dict[str, Any]:
    """What goodput knows after all of the traces."""
    policy = Goodput()
    for path in segments([folder]):
        segment = Segment(path)
        assert segment.hello is not None
        policy.decide(segment.hello, 0.0)
        for batch in segment:
            for step in records(batch):
                policy.learn(step)
    prior = policy.to_prior()
    assert prior is not None
    return prior


def judged(name: str, surface: str, load: float, seed: int, seconds: float, model: str, prior: Any) -> dict[str, Any]:
    make: dict[str, Callable[[Hello, object], Policy]] = {
        "neural": lambda _server, _truth: Neural(load_model(Path(model))),
        "goodput": lambda _server, _truth: Goodput(),
        "goodput, stored prior": lambda _server, _truth: Goodput(prior),
    }
    own = scenario(surface, load, seed, seconds)
    run = serve(name, own, make[name])
    found = own.judge(run.decodes)
    return {
        "policy": name,
        "surface": surface,
        "load": load,
        "seed": seed,
        # All steps: what a start costs is part of the comparison.
        "share_of_best": float(found.expected.sum() / found.best.sum()),
        "tokens_per_second": run.tokens / run.seconds,
        "exploration_loss": found.exploration_loss(),
        "switches_per_100_steps": found.switches_per_100_steps()[0],
    }


def summary(runs: Sequence[dict[str, Any]], surface: str, load: float | None, policy: str) -> dict[str, Any]:
    def shares(name: str) -> dict[tuple[float, int], float]:
        return {
            (run["load"], run["seed"]): run["share_of_best"]
            for run in runs
            if run["surface"] == surface and run["policy"] == name and load in (None, run["load"])
        }

    own = shares(policy)
    row: dict[str, Any] = {"policy": policy, "surface": surface, "load": load, "runs": len(own)}
    row["share_of_best"] = float(np.mean(list(own.values())))
    for other in ("goodput", "goodput, stored prior"):
        if other != policy:
            mean, half = mean_and_interval([own[key] - share for key, share in shares(other).items()])
            row[f"minus {other}"] = {"points": 100 * mean, "half_width": 100 * half}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--seeds", type=int, default=6, help="held out, each under each load")
    parser.add_argument("--fit-seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool,
    ):
        folder, model = Path(name) / "trace", Path(name) / "model.npz"
        fitting = list(itertools.product(LOADS, range(1, options.fit_seeds + 1)))
        for load, seed in fitting:
            record(folder, load, seed, options.seconds)
        begun = time.perf_counter()
        net, report = fit([folder])
        fit_seconds = time.perf_counter() - begun
        save_model(net, model)
        prior = learned_prior(folder)
        jobs = [
            pool.submit(judged, policy, surface, load, seed, options.seconds, str(model), prior)
            for surface, load, seed in itertools.product((FITTED, HELD_OUT), LOADS, range(101, 101 + options.seeds))
            for policy in ("goodput", "goodput, stored prior", "neural")
        ]
        runs = [job.result() for job in jobs]
        size = model.stat().st_size
    rows = [
        summary(runs, surface, load, policy)
        for surface in (FITTED, HELD_OUT)
        for load in (None, *LOADS)
        for policy in ("goodput", "goodput, stored prior", "neural")
    ]
    for row in rows:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    if options.json is not None:
        figures = {
            "date": datetime.now(UTC).date().isoformat(),
            "fitted_to": FITTED,
            "held_out_surface": HELD_OUT,
            "fit_seconds": fit_seconds,
            "model_bytes": size,
            # Less its findings: of the seams between the runs, by file.
            "fit": {key: value for key, value in msgspec.to_builtins(report).items() if key != "findings"},
            "summary": rows,
            "runs": runs,
        }
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
