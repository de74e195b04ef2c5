"""The cases of ``replay_requirements.py``: one function each, which runs it once and returns its figures."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from specpilot.controller.config import ControllerConfig
from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.replay.run import saturation, serve
from specpilot.controller.replay.scenario import GENERATED_REQUESTS, Scenario, at_rate
from specpilot.controller.simulation.named_surfaces import NamedSurface, load_surface
from specpilot.controller.simulation.surface import acceptance_length
from specpilot.controller.simulation.workload import Arrival, Phase, generated_requests, read_arrivals
from specpilot.policies.baselines import Truth
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Plan, Policy
from specpilot.sglang_hooks.wire import Hello, StepRecord

SURFACES = ("h200-sglang", "h200-native-skip", "h200-triton", "h200-triton-skip", "moe", "context")
CONCURRENCY = (1, 8, 16, 64, 128, 256)
LOADS = (0.5, 1.0, 2.0)
FIXED_WITHIN = 0.03
"""Fixed K whose share, told from informed-greedy's states, is so near the best one's are run."""
LONGER: dict[str, dict[float, float]] = {
    "closed": {1: 0.7, 8: 0.7, 16: 0.8, 64: 1.0, 128: 1.0, 256: 1.5},
    "open": {0.5: 0.8, 1.0: 1.2, 2.0: 1.5},
}
"""Of --seconds, by concurrency and load: large batches take few steps a second, and 2,000 are left out."""
LEAST_STEPS = 4500
"""Of a moving case, about: a slow server is given the time for them."""
CONTEXT_TOKENS, OUTPUT_TOKENS, PREFILL_SECONDS = 1000.0, 220.0, 0.034
"""Of a made-up request, on average; for the length of a run in steps."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One call in a worker: ``CASES[case](**arguments)`` returns the figures that are added to ``arguments``."""

    case: str
    arguments: dict[str, Any]


@lru_cache(maxsize=4)
def trace(path: str) -> list[Arrival]:
    return read_arrivals(Path(path))


@lru_cache(maxsize=16)
def saturation_of(surface: str, path: str) -> float:
    return saturation(load_surface(surface), trace(path))


@lru_cache(maxsize=16)
def made_up(seed: int) -> list[Arrival]:
    return generated_requests(GENERATED_REQUESTS, seed)


def begun_at(requests: list[Arrival], share: float) -> list[Arrival]:
    """Return the trace from another moment on, its beginning behind its end."""
    cut = int(share * len(requests)) % (len(requests) - 1)
    begin = requests[cut].at
    lap = requests[-1].at * len(requests) / (len(requests) - 1)
    return [replace(request, at=(request.at - begin) % lap) for request in requests[cut:] + requests[:cut]]


def judged(policy: str, scenario: Scenario, make: Callable[[Hello, Truth], Policy] | None = None) -> JudgedSteps:
    return JudgedSteps.of(serve(policy, scenario, make).decodes, scenario.surface.speculating)


def steps_seconds(steps: int, surface: NamedSurface, batch: int) -> float:
    """Virtual seconds in which a closed loop makes so many decode steps, roughly: prefills take their part."""
    decode = surface.speculating.decode_seconds(3, batch, CONTEXT_TOKENS)
    return steps * (decode + batch * acceptance_length(0.6, 3) / OUTPUT_TOKENS * PREFILL_SECONDS)


def moving(surface: str, cell: float, path: str, seed: int, seconds: float, policy: str) -> Row:
    """Acceptance drawn anew each minute, in a closed loop or at a load."""
    named = load_surface(surface)
    seconds *= LONGER["open" if path else "closed"][cell]
    batch = int(cell) if not path else 256 if cell >= 1.0 else 32
    seconds = max(seconds, steps_seconds(LEAST_STEPS, named, batch))
    if path:
        requests = begun_at(trace(path), 0.618 * seed % 1.0)
        rate = cell * saturation_of(surface, path)
        scenario = Scenario(named, at_rate(requests, rate, seconds), seconds, seed, load=cell)
    else:
        scenario = Scenario(named, made_up(seed), seconds, seed, concurrency=int(cell))
    run = serve(policy, scenario)
    whole = JudgedSteps.of(run.decodes, named.speculating)
    settled = whole.settled()
    best = settled.best.sum()
    plain = settled.batch / named.plain.decode_seconds_of(0, settled.batch, settled.context)
    goodput = {str(k): own for k, own in settled.goodput.items()} | {"none": plain}
    return {
        "share": whole.reference_share(),
        "tokens_per_second": run.tokens / run.seconds,
        "steps": len(whole.steps),
        "explored": float(settled.explored.mean()),
        "exploration_loss": settled.exploration_loss(),
        # What each would have had in this run's states, by time.
        "fixed": {k: float((settled.seconds * own).sum() / best) for k, own in goodput.items()},
    }


def constant(surface: str, acceptance: float, concurrency: int, seed: int, steps: int) -> Row:
    """Constant acceptance and concurrency, after 2,000 steps."""
    named = load_surface(surface)
    scenario = Scenario(
        named, made_up(seed), math.inf, seed, concurrency=concurrency, acceptance=acceptance, steps=2000 + steps
    )
    settled = judged("goodput", scenario).settled()
    plain = settled.batch / named.plain.decode_seconds_of(0, settled.batch, settled.context)
    time = settled.seconds.sum()
    # Token by token: a fixed K passes through the same states, at its own speed in each.
    fixed = {k: float((settled.expected / own).sum() / time) for k, own in settled.goodput.items()}
    best = min(fixed, key=lambda k: fixed[k])
    switches, probes = settled.switches_per_100_steps()
    return {
        "ratio": fixed[best],
        "best": best,
        "best_share": float((settled.expected * settled.seconds / settled.best).sum() / time) / fixed[best],
        "against_none": float((settled.expected / plain).sum() / time),
        "explored": float(settled.explored.mean()),
        "exploration_loss": settled.exploration_loss(),
        "switches": switches - probes,
        "steps": len(settled.steps),
    }


PRIORS = ("none", "own", "wrong")
WRONG_SURFACE = {
    "h200-sglang": "h200-triton",
    "h200-native-skip": "h200-triton",
    "h200-triton": "h200-native-skip",
    "h200-triton-skip": "h200-native-skip",
    "moe": "context",
    "context": "moe",
}
PRIOR_SECONDS = 120.0


@lru_cache(maxsize=32)
def learned(surface: str, concurrency: int) -> dict[str, Any]:
    """What the policy knows after two minutes of moving acceptance."""
    made: list[Goodput] = []

    def make(_hello: Hello, _truth: Truth) -> Policy:
        made.append(Goodput())
        return made[0]

    serve("goodput", Scenario(load_surface(surface), made_up(1000), PRIOR_SECONDS, 1000, concurrency=concurrency), make)
    prior = made[0].to_prior()
    assert prior is not None
    return prior


def cold(surface: str, acceptance: float, concurrency: int, seed: int, factor: float, prior: str) -> Row:
    """Steps from the start until the share of the best K is 0.95 to stay."""
    named = load_surface(surface).scaled(factor)
    # What is asked for, and then as long as an answer must last.
    steps = {"own": 50, "wrong": 600}.get(prior, 300 if factor == 1.0 else 1500) + 500
    scenario = Scenario(
        named, made_up(seed), math.inf, seed, concurrency=concurrency, acceptance=acceptance, steps=steps
    )
    known = None
    if prior != "none":
        known = learned(surface if prior == "own" else WRONG_SURFACE[surface], concurrency)
    run = judged("goodput", scenario, lambda _hello, _truth: Goodput(prior=known))
    return {"steps": run.steps_to_95(), "lost_steps": float(run.regret_seconds()[-1] / np.median(run.seconds))}


CHANGES = 3
CHANGE_STEPS = 1500


def change(surface: str, concurrency: int, seed: int) -> Row:
    """Steps from each change of acceptance, 0.9 to 0.3 and back, until the table's choice is right.

    Only changes after which what was best before is more than 5 % below the best count.
    """
    named = load_surface(surface)
    length = steps_seconds(CHANGE_STEPS, named, concurrency)
    # It comes settled to the first change, and its decisions have no fixed place beside the changes.
    begin = 1.5 * length + 0.05 * seed
    high_first = seed % 2 == 0
    levels = [0.9 if index % 2 == (not high_first) else 0.3 for index in range(2 * CHANGES + 1)]
    starts = [0.0, *(begin + index * length for index in range(2 * CHANGES))]
    phases = [Phase(start, f"{level}", level) for start, level in zip(starts, levels, strict=True)]
    scenario = Scenario(
        named, made_up(seed), starts[-1] + length, seed, concurrency=concurrency, acceptance=phases
    )  # fmt: skip
    run = judged("goodput", scenario)
    places = [int(np.searchsorted(run.at, start)) for start in starts] + [len(run.at)]
    found: dict[str, list[int | None]] = {"down": [], "up": []}
    for index in range(1, len(phases)):
        at, end = places[index], places[index + 1]
        before = max(run.goodput, key=lambda k: run.goodput[k][at - 1])
        after = max(run.goodput, key=lambda k: run.goodput[k][at])
        if run.goodput[before][at] < 0.95 * run.goodput[after][at]:
            found["down" if levels[index] < levels[index - 1] else "up"].append(run.steps_to_choose(at, end))
    return found


HOVERS = ("0.5 s", "1 s", "5 s", "2 s sine")
HOVER_SECONDS = 90.0


def boundaries(surface: NamedSurface, acceptance: float) -> list[tuple[int, int, int, int]]:
    """Return (batch size, next captured size, best K, the next size's) wherever the best K changes."""
    sizes = [size for size in surface.speculating.captured_batch_sizes if 2 <= size <= 192]

    def best(batch: int) -> int:
        return max(
            surface.speculating.steps,
            key=lambda k: (
                acceptance_length(acceptance, k) / surface.speculating.decode_seconds(k, batch, CONTEXT_TOKENS)
            ),
        )

    pairs = [(low, high, best(low), best(high)) for low, high in pairwise(sizes)]
    return [pair for pair in pairs if pair[2] != pair[3]]


def limits(low: int, high: int, course: str) -> list[tuple[float, int]]:
    """Return batch sizes by time: a square wave of a period, or a sine in 16 parts."""
    period = float(course.split()[0])
    if "sine" not in course:
        return [(index * period / 2, (low, high)[index % 2]) for index in range(round(2 * HOVER_SECONDS / period))]
    middle, half = (low + high) / 2, (high - low) / 2
    part = period / 16
    return [
        (index * part, round(middle + half * math.sin(2 * math.pi * (index + 0.5) / 16)))
        for index in range(round(HOVER_SECONDS / part))
    ]


def hover(surface: str, acceptance: float, low: int, high: int, course: str, resume: bool, seed: int) -> Row:
    """Expected tokens a second of decoding, over those of the better fixed K in the same states by time."""
    named = load_surface(surface)
    resume_seconds = named.speculating.decode_seconds(0, low, CONTEXT_TOKENS) if resume else 0.0
    scenario = Scenario(
        named, made_up(seed), HOVER_SECONDS, seed, concurrency=high, acceptance=acceptance,
        resume_seconds=resume_seconds, decode_limits=limits(low, high, course),
    )  # fmt: skip
    settled = judged("goodput", scenario).settled()
    fixed = {k: float((settled.seconds * own).sum()) for k, own in settled.goodput.items()}
    best = max(fixed, key=lambda k: fixed[k])
    made = float(settled.expected.sum())
    switches, probes = settled.switches_per_100_steps()
    return {
        "ratio": made / fixed[best],
        "best": best,
        "adapting": float(settled.best.sum()) / fixed[best],
        "switches": switches - probes,
    }


SPEED_STEPS = 5000


class Timed(Policy):
    """Goodput, and the seconds that it took."""

    name = "goodput"

    def __init__(self) -> None:
        self._policy = Goodput()
        self.learning = 0.0
        self.deciding: list[float] = []
        self.records = 0

    @property
    def urgent(self) -> bool:  # type: ignore[override]
        return self._policy.urgent

    def learn(self, step: StepRecord) -> None:
        begin = perf_counter()
        self._policy.learn(step)
        self.learning += perf_counter() - begin
        self.records += 1

    def decide(self, server: Hello, now: float) -> Plan:
        begin = perf_counter()
        plan = self._policy.decide(server, now)
        self.deciding.append(perf_counter() - begin)
        return plan


def speed(surface: str, concurrency: int) -> Row:
    """Seconds that learning and deciding take, on this machine.

    ``steps_per_second``: the fastest stream of records that one core keeps up with, a decision every
    ``decide_seconds`` included.
    """
    named = load_surface(surface)
    made: list[Timed] = []

    def make(_hello: Hello, _truth: Truth) -> Policy:
        made.append(Timed())
        return made[0]

    seconds = 2 * steps_seconds(SPEED_STEPS, named, concurrency)
    serve("goodput", Scenario(named, made_up(1), seconds, 1, concurrency=concurrency, steps=SPEED_STEPS), make)
    timed = made[0]
    return {
        "steps_per_second": (1.0 - float(np.mean(timed.deciding)) / ControllerConfig().decide_seconds)
        * timed.records
        / timed.learning,
        "learning_microseconds": 1e6 * timed.learning / timed.records,
        "decision_milliseconds": 1e3 * float(np.median(timed.deciding)),
        "decision_milliseconds_p99": 1e3 * float(np.quantile(timed.deciding, 0.99)),
    }


CASES: dict[str, Callable[..., Row]] = {
    "closed": moving,
    "azure": moving,
    "code": moving,
    "constant": constant,
    "cold": cold,
    "change": change,
    "hover": hover,
    "speed": speed,
}


# -- what there is to run --


def jobs_of(case: str, options: argparse.Namespace) -> Iterator[Job]:
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for surface in options.surfaces:
            for arguments in _arguments(case, surface, options):
                yield Job(case, {"surface": surface, "seed": seed, **arguments})


def _arguments(case: str, surface: str, options: argparse.Namespace) -> Iterator[Row]:
    if case in ("closed", "azure", "code"):
        cells: Sequence[float] = {"closed": CONCURRENCY, "azure": LOADS, "code": LOADS[1:2]}[case]
        path = {"closed": "", "azure": str(options.conv), "code": str(options.code)}[case]
        for cell in cells:
            for policy in ("informed-greedy", "goodput", *options.peers):
                yield {"cell": cell, "path": path, "seconds": options.seconds, "policy": policy}
    elif case == "constant":
        for concurrency in (256, 64, 8, 1):
            for acceptance in (0.3, 0.5, 0.7, 0.9):
                steps = options.constant_steps * 2 // 3 if concurrency == 256 else options.constant_steps
                yield {"acceptance": acceptance, "concurrency": concurrency, "steps": steps}
    elif case == "cold":
        for concurrency in (64, 8, 1):
            for acceptance in (0.4, 0.8):
                for factor in (1.0, 0.2, 8.0):
                    yield {"acceptance": acceptance, "concurrency": concurrency, "factor": factor, "prior": "none"}
                for prior in PRIORS[1:]:
                    yield {"acceptance": acceptance, "concurrency": concurrency, "factor": 1.0, "prior": prior}
    elif case == "change":
        for concurrency in (64, 16, 4, 1):
            yield {"concurrency": concurrency}
    elif case == "hover":
        yield from _hovers(load_surface(surface))


def _hovers(surface: NamedSurface) -> Iterator[Row]:
    """Around a boundary between speculative K, and one of K=0 without and with a penalty; narrowly and widely."""
    levels = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    found = [(acceptance, pair) for acceptance in levels for pair in boundaries(surface, acceptance) if pair[0] >= 4]
    ordinary = [one for one in found if 0 not in one[1][2:]]
    skipping = [one for one in found if 0 in one[1][2:]]
    for kind, resume in ((ordinary, False), (skipping, False), (skipping, True)):
        for acceptance, (low, high, _, _) in kind[len(kind) // 2 :][:1]:
            for width in (0.0, 0.3):
                ends = {"low": round(low * (1 - width)), "high": round(high * (1 + width))}
                for course in HOVERS:
                    yield {"acceptance": acceptance, **ends, "course": course, "resume": resume}


def run_job(job: Job) -> Row:
    return {"case": job.case, **job.arguments, **CASES[job.case](**job.arguments)}


def fixed_jobs(rows: Iterable[Row]) -> list[Job]:
    """The fixed K that come into question in each cell, for every seed."""
    cells = defaultdict(list)
    for row in rows:
        if row["policy"] == "informed-greedy":
            cells[row["case"], row["surface"], row["cell"]].append(row)
    jobs = []
    for own in cells.values():
        shares = {k: float(np.mean([row["fixed"][k] for row in own])) for k in own[0]["fixed"] if k != "none"}
        for k in (k for k, share in shares.items() if share >= max(shares.values()) - FIXED_WITHIN):
            for row in own:
                names = ("surface", "cell", "path", "seed", "seconds")
                jobs.append(Job(row["case"], {**{name: row[name] for name in names}, "policy": f"static:{k}"}))
    return jobs
