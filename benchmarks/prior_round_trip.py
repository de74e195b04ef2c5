"""What storing a prior loses, and what a start from it gives against a start from nothing.

    python benchmarks/prior_round_trip.py --surfaces h200-sglang --seeds 2

``goodput`` learns from traces of three loads, in which every K is tried equally often. What it knows is stored
and read again: how far are step seconds, of 2,000 of the traces' steps, off the surface's, before and
after, and off each other? Then it runs on other seeds from that prior, and from nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from neural_vs_goodput import LOADS, scenario

from specpilot.controller.replay.run import serve
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Grid, Plan, Policy
from specpilot.policies.models.cost import CostModel
from specpilot.sglang_hooks.wire import Hello, StepRecord

PLACES, FIRST = 2000, 1000
"""Steps at which seconds are compared, and those that are the start of a run."""


class Trying(Policy):
    """Every K in blocks of 8 steps, each as often; ``pupil`` learns from it."""

    name = "trying"

    def __init__(self, pupil: Goodput, server: Hello, seen: list[StepRecord]) -> None:
        self.pupil, self.seen = pupil, seen
        pupil.decide(server, 0.0)

    def learn(self, step: StepRecord) -> None:
        self.pupil.learn(step)
        if step.batch_size:
            self.seen.append(step)

    def decide(self, server: Hello, now: float) -> Plan:  # noqa: ARG002
        share = 1.0 / len(server.candidate_steps)
        explore = {0: tuple((k, share) for k in server.candidate_steps[1:])}
        return Plan(Grid(), (server.candidate_steps[0],), (frozenset(),), "tried", 0, explore, block_steps=8)


def round_trip(surface: str, fit_seeds: int, seconds: float) -> tuple[dict[str, Any], str]:
    """Return the prior, and a line on what storing it lost."""
    pupil, seen, servers = Goodput(), list[StepRecord](), list[Hello]()
    for load in LOADS:
        for seed in range(1, fit_seeds + 1):

            def make(server: Hello, _truth: object) -> Policy:
                servers.append(server)
                return Trying(pupil, server, seen)

            serve("trying", scenario(surface, load, seed, seconds), make)
    prior = json.loads(json.dumps(pupil.to_prior()))
    stored, truth = CostModel(servers[0], prior["cost"]), load_surface(surface).speculating
    rows = []
    for step in random.Random(0).sample(seen, PLACES):
        place = step.draft_tokens - 1, step.batch_size, step.context_tokens / step.batch_size
        rows.append((truth.decode_seconds(*place), pupil.cost.predict(*place)[0], stored.predict(*place)[0]))
    true, before, after = np.array(rows).T
    errors = {"before": before / true, "after": after / true, "added": after / before}
    parts = (f"{name} {100 * np.quantile(np.abs(ratio - 1.0), 0.95):.2f} %" for name, ratio in errors.items())
    return prior, f"p95 of the error of seconds, {stored.cells} cells: {', '.join(parts)}"


def shares(surface: str, seeds: int, seconds: float, prior: dict[str, Any] | None) -> str:
    """Return the shares of the best K, of the start and of the rest of runs under the three loads."""
    found = []
    for load in LOADS:
        for seed in range(101, 101 + seeds):
            own = scenario(surface, load, seed, seconds)
            run = own.judge(serve("goodput", own, lambda _server, _truth: Goodput(prior)).decodes)
            parts = (slice(FIRST), slice(FIRST, None), slice(None))
            found.append([run.expected[part].sum() / run.best[part].sum() for part in parts])
    first, rest, whole = 100 * np.mean(found, axis=0)
    return (
        f"{first:.2f} % of the first {FIRST} steps, {rest:.2f} % of the rest, {whole:.2f} % of all ({len(found)} runs)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surfaces", nargs="+", default=["h200-sglang", "h200-native-skip", "moe", "context"])
    parser.add_argument("--seeds", type=int, default=4, help="of the runs, each under each load")
    parser.add_argument("--fit-seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args(arguments)
    for surface in options.surfaces:
        prior, lost = round_trip(surface, options.fit_seeds, options.seconds)
        print(f"{surface}: {lost}")
        for name, known in (("stored prior", prior), ("from nothing", None)):
            print(f"  {name}: {shares(surface, options.seeds, options.seconds, known)}", flush=True)


if __name__ == "__main__":
    main()
