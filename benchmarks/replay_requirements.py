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

What one run can tell is not run again: which fixed K come into question is told by the states of
informed-greedy's run, and only those are run. At constant load a fixed K would pass through the
same states, token by token, so its speed is computed from the policy's own run.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from controller.replay import GENERATED_REQUESTS, Scenario, at_rate, saturation, serve
from controller.replay_judge import Judged
from controller.replay_statistics import mean_and_interval
from controller.surface import NamedSurface, acceptance_length, load_surface
from controller.workload import Arrival, Phase, generated_requests, read_arrivals
from policies.goodput import Goodput
from policies.interface import Plan, Policy
from policies.peers import Truth
from sglang_hooks.wire import Hello, StepRecord

SURFACES = ("h200-sglang", "h200-native-skip", "h200-triton", "moe", "context")
CONCURRENCY = (1, 8, 16, 64, 128, 256)
LOADS = (0.5, 1.0, 2.0)
FIXED_WITHIN = 0.03
"""Fixed K whose share, told from informed-greedy's states, is so near the best one's are run."""
LONGER = {"closed": {1: 0.7, 8: 0.8, 16: 1.0, 64: 1.2, 128: 1.6, 256: 2.0}, "open": {0.5: 0.8, 1.0: 1.6, 2.0: 2.0}}
"""Of --seconds, by concurrency and load: large batches take few steps a second, and 2,000 are left out."""
CONTEXT_TOKENS, OUTPUT_TOKENS, PREFILL_SECONDS = 1000.0, 220.0, 0.034
"""Of a made-up request, on average; for the length of a run in steps."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One call in a worker: ``CASES[case](**arguments)`` returns the figures that are added to ``arguments``."""

    case: str
    arguments: dict[str, Any]


# -- what is run --


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


def judged(policy: str, scenario: Scenario, make: Callable[[Hello, Truth], Policy] | None = None) -> Judged:
    return Judged.of(serve(policy, scenario, make).decodes, scenario.surface.speculating)


def steps_seconds(steps: int, surface: NamedSurface, batch: int) -> float:
    """Virtual seconds in which a closed loop makes so many decode steps, roughly: prefills take their part."""
    decode = surface.speculating.decode_seconds(3, batch, CONTEXT_TOKENS)
    return steps * (decode + batch * acceptance_length(0.6, 3) / OUTPUT_TOKENS * PREFILL_SECONDS)


def moving(surface: str, cell: float, path: str, seed: int, seconds: float, policy: str) -> Row:
    """Acceptance drawn anew each minute, in a closed loop or at a load."""
    named = load_surface(surface)
    seconds *= LONGER["open" if path else "closed"][cell]
    if path:
        requests = begun_at(trace(path), 0.618 * seed % 1.0)
        rate = cell * saturation_of(surface, path)
        scenario = Scenario(named, at_rate(requests, rate, seconds), seconds, seed, load=cell)
    else:
        scenario = Scenario(named, made_up(seed), seconds, seed, concurrency=int(cell))
    run = serve(policy, scenario)
    whole = Judged.of(run.decodes, named.speculating)
    settled = whole.settled()
    best = settled.best.sum()
    return {
        "share": whole.reference_share(),
        "tokens_per_second": run.tokens / run.seconds,
        "steps": len(whole.steps),
        "explored": float(settled.explored.mean()),
        "exploration_loss": settled.exploration_loss(),
        "fixed": {str(k): float((settled.seconds * own).sum() / best) for k, own in settled.goodput.items()},
    }


def constant(surface: str, acceptance: float, concurrency: int, seed: int, steps: int) -> Row:
    """Constant acceptance and concurrency, after 2,000 steps."""
    named = load_surface(surface)
    seconds = steps_seconds(2000 + steps, named, concurrency)
    scenario = Scenario(named, made_up(seed), seconds, seed, concurrency=concurrency, acceptance=acceptance)
    decodes = serve("goodput", scenario).decodes
    settled = Judged.of(decodes, named.speculating).settled()
    tail = decodes[-len(settled.steps) :]
    plain = settled.batch / named.plain.decode_seconds_of(
        0, settled.batch, np.array([decode.mean_context for decode in tail])
    )
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
    seconds = steps_seconds(2200 if factor == 1.0 else 3000, named, concurrency)
    scenario = Scenario(named, made_up(seed), seconds, seed, concurrency=concurrency, acceptance=acceptance)
    known = None
    if prior != "none":
        known = learned(surface if prior == "own" else WRONG_SURFACE[surface], concurrency)
    run = judged("goodput", scenario, lambda _hello, _truth: Goodput(prior=known))
    return {"steps": run.steps_to_95(), "lost_seconds": float(run.regret_seconds()[min(1999, len(run.steps) - 1)])}


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
    """Seconds that learning and deciding take, on this machine."""
    named = load_surface(surface)
    made: list[Timed] = []

    def make(_hello: Hello, _truth: Truth) -> Policy:
        made.append(Timed())
        return made[0]

    seconds = steps_seconds(5000, named, concurrency)
    serve("goodput", Scenario(named, made_up(1), seconds, 1, concurrency=concurrency), make)
    timed = made[0]
    return {
        "steps_per_second": timed.records / (timed.learning + sum(timed.deciding)),
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
    for seed in range(1, options.seeds + 1):
        for surface in options.surfaces:
            for arguments in _arguments(case, surface, options):
                yield Job(case, {"surface": surface, "seed": seed, **arguments})


def _arguments(case: str, surface: str, options: argparse.Namespace) -> Iterator[Row]:
    if case in ("closed", "azure", "code"):
        cells: Sequence[float] = CONCURRENCY if case == "closed" else LOADS
        path = {"closed": "", "azure": str(options.conv), "code": str(options.code)}[case]
        policies = ["informed-greedy", "goodput", *options.peers, *(["none"] if case != "closed" else [])]
        for cell in cells:
            for policy in policies:
                yield {"cell": cell, "path": path, "seconds": options.seconds, "policy": policy}
    elif case == "constant":
        for concurrency in (256, 64, 8, 1):
            for acceptance in (0.3, 0.5, 0.7, 0.9):
                yield {"acceptance": acceptance, "concurrency": concurrency, "steps": options.constant_steps}
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


def run_all(jobs: Sequence[Job], pool: ProcessPoolExecutor, progress: Progress, label: str) -> list[Row]:
    task = progress.add_task(label, total=len(jobs))
    futures = [pool.submit(run_job, job) for job in jobs]
    for future in as_completed(futures):
        future.result()
        progress.advance(task)
    return [future.result() for future in futures]


def fixed_jobs(rows: Iterable[Row]) -> list[Job]:
    """The fixed K that come into question in each cell, for every seed."""
    cells = defaultdict(list)
    for row in rows:
        if row["policy"] == "informed-greedy":
            cells[row["case"], row["surface"], row["cell"]].append(row)
    jobs = []
    for own in cells.values():
        shares = {k: float(np.mean([row["fixed"][k] for row in own])) for k in own[0]["fixed"]}
        for k in (k for k, share in shares.items() if share >= max(shares.values()) - FIXED_WITHIN):
            for row in own:
                names = ("surface", "cell", "path", "seed", "seconds")
                jobs.append(Job(row["case"], {**{name: row[name] for name in names}, "policy": f"static:{k}"}))
    return jobs


# -- what came of it --


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    asked: str
    reached: str
    met: bool | None
    """None: reported only."""


def text_of(row: Row, *names: str) -> str:
    return ", ".join(f"{row[name]:g}" if isinstance(row[name], float) else str(row[name]) for name in names)


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def mean_of(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


@dataclass(frozen=True)
class Cell:
    """One surface and load: mean shares by policy over the seeds."""

    where: str
    surface: str
    case: str
    shares: dict[str, float]
    halves: dict[str, float]
    """Of the 95 % interval of the paired difference between goodput's share and the policy's."""

    @property
    def best_fixed(self) -> str:
        return max((name for name in self.shares if name.startswith("static:")), key=lambda name: self.shares[name])

    def lead(self, policy: str, over: str) -> float:
        return self.shares[policy] / self.shares[over] - 1.0


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    found = []
    for (case, surface, cell), own in grouped(rows, "case", "surface", "cell").items():
        by_policy = {
            policy: {row["seed"]: row["share"] for row in runs} for (policy,), runs in grouped(own, "policy").items()
        }
        goodput = by_policy["goodput"]
        halves = {
            policy: mean_and_interval([goodput[seed] - shares[seed] for seed in goodput])[1]
            for policy, shares in by_policy.items()
        }
        shares = {policy: float(np.mean(list(values.values()))) for policy, values in by_policy.items()}
        where = f"{surface}, {'closed' if case == 'closed' else case} {cell:g}"
        found.append(Cell(where, surface, case, shares, halves))
    return found


def worst(found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    return min(found, default=(math.nan, "no such case"))


def share_figures(cells: Sequence[Cell]) -> Iterator[Figure]:
    for surface, asked in {"h200-sglang": 0.99, "moe": 0.97}.items() | {
        (surface, 0.98) for surface in SURFACES if surface not in ("h200-sglang", "moe")
    }:
        own = [
            (cell.shares["goodput"], cell.where) for cell in cells if cell.surface == surface and cell.case != "code"
        ]
        if own:
            least, where = worst(own)
            reached = f"least {percent(least)} ({where}), mean {percent(float(np.mean([share for share, _ in own])))}"
            yield Figure(f"share of the best K, {surface}", f"≥ {percent(asked, 0)}", reached, least >= asked)


def lead_figures(cells: Sequence[Cell]) -> Iterator[Figure]:
    counted = [cell for cell in cells if cell.case != "code"]
    leads = [cell for cell in counted if cell.lead("informed-greedy", cell.best_fixed) >= 0.03]
    kept = [
        (cell.lead("goodput", cell.best_fixed) / cell.lead("informed-greedy", cell.best_fixed), cell.where)
        for cell in leads
    ]
    if kept:
        least, where = worst(kept)
        yield Figure(
            "of informed-greedy's lead over the best fixed K, where that is ≥ 3 %",
            "≥ 85 %", f"least {percent(least, 1)} ({where}), {len(kept)} cells", least >= 0.85,
        )  # fmt: skip
    others = [(1.0 + cell.lead("goodput", cell.best_fixed), cell.where) for cell in counted if cell not in leads]
    if others:
        least, where = worst(others)
        yield Figure("of the best fixed K elsewhere", "≥ 99 %", f"least {percent(least)} ({where})", least >= 0.99)
    ahead = [cell for cell in counted if "sglang" in cell.shares]
    far = [cell for cell in ahead if cell.lead("informed-greedy", "sglang") >= 0.12]
    if far:
        least, where = worst((cell.lead("goodput", "sglang"), cell.where) for cell in far)
        yield Figure(
            "ahead of SGLang's rule, where informed-greedy is by ≥ 12 %",
            "≥ 10 %", f"least {percent(least, 1)} ({where}), {len(far)} cells", least >= 0.10,
        )  # fmt: skip
    near = [cell for cell in ahead if cell not in far]
    if near:
        least, where = worst((cell.lead("goodput", "sglang"), cell.where) for cell in near)
        yield Figure(
            "against SGLang's rule elsewhere", "≥ -1 %", f"least {percent(least, 1)} ({where})", least >= -0.01
        )
    for cell in (cell for cell in cells if cell.case == "code"):
        yield Figure(
            f"prefill-bound: {cell.where}", "reported",
            f"goodput {percent(cell.shares['goodput'])} of the best K, "
            f"best fixed K {percent(cell.shares[cell.best_fixed])}",
            None,
        )  # fmt: skip


def constant_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    least, where = worst((row["ratio"], text_of(row, "surface", "acceptance", "concurrency", "seed")) for row in rows)
    mean = mean_of(rows, "ratio")
    yield Figure(
        "of the best fixed K at constant load, each run after 2,000 steps",
        "≥ 99 %", f"least {percent(least)} ({where}), mean {percent(mean)}", least >= 0.99,
    )  # fmt: skip
    tied = [
        own
        for own in grouped(rows, "surface", "acceptance", "concurrency").values()
        if mean_of(own, "best_share") > 0.9995
    ]
    if tied:
        least, where = worst(
            (mean_of(own, "ratio"), text_of(own[0], "surface", "acceptance", "concurrency")) for own in tied
        )
        yield Figure(
            "of the best fixed K where adapting cannot help, mean over seeds",
            "≥ 99.5 %", f"least {percent(least)} ({where}), {len(tied)} cells", least >= 0.995,
        )  # fmt: skip
    for name, label, asked, form in (
        ("exploration_loss", "time lost by exploring, once settled", 0.005, percent),
        ("explored", "steps explored, once settled", 0.015, percent),
        ("switches", "switches other than probes in 100 steps at constant load", 1.0, "{:.3f}".format),
    ):
        means = [(mean_of(own, name), text_of(own[0], "surface", "acceptance", "concurrency"))
                 for own in grouped(rows, "surface", "acceptance", "concurrency").values()]  # fmt: skip
        most, where = max(means)
        yield Figure(
            label, f"≤ {form(asked)}",
            f"most {form(most)} ({where}), mean {form(float(np.mean([mean for mean, _ in means])))}",
            most <= asked,
        )  # fmt: skip
    least, where = worst((row["against_none"], text_of(row, "surface", "acceptance", "concurrency")) for row in rows)
    yield Figure("beside it: of no speculation", "reported", f"least {percent(least, 1)} ({where})", None)


def quantiles(values: Sequence[int | None]) -> tuple[float, float, int]:
    """Median, 90th percentile, and how many never came."""
    numbers = np.array([math.inf if value is None else value for value in values], float)
    middle, high = np.quantile(numbers, [0.5, 0.9], method="inverted_cdf")
    return float(middle), float(high), int(np.isinf(numbers).sum())


def steps_figure(label: str, values: Sequence[int | None], asked: int, where: str = "") -> Figure:
    middle, high, never = quantiles(values)
    reached = f"median {middle:,.0f}, p90 {high:,.0f} of {len(values)}" + (f", {never} never" if never else "") + where
    return Figure(label, f"≤ {asked:,}", reached, high <= asked)


def worst_cell(rows: Sequence[Row], *names: str) -> str:
    high, where = max((quantiles([row["steps"] for row in own])[1], text_of(own[0], *names))
                      for own in grouped(rows, *names).values())  # fmt: skip
    return f"; worst p90 {high:,.0f} ({where})"


def cold_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    for (prior, factor), own in sorted(grouped(rows, "prior", "factor").items()):
        asked = {"own": 50, "wrong": 600}.get(prior, 300 if factor == 1.0 else 1500)
        label = {"own": "with a stored prior", "wrong": "with a wrong prior"}.get(prior, f"costs x {factor:g}")
        values = [row["steps"] for row in own]
        yield steps_figure(
            f"steps until within 5 %, {label}", values, asked, worst_cell(own, "surface", "acceptance", "concurrency")
        )


def change_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    for label, direction, batches, asked in (
        ("down, 0.9 to 0.3", "down", (1, 4, 16, 64), 60),
        ("up, 0.3 to 0.9, batch ≥ 4", "up", (4, 16, 64), 150),
        ("up, 0.3 to 0.9, batch 1", "up", (1,), 400),
    ):
        own = [row for row in rows if row["concurrency"] in batches]
        flat = [{**row, "steps": value} for row in own for value in row[direction]]
        if flat:
            values = [row["steps"] for row in flat]
            yield steps_figure(
                f"steps after a change {label}", values, asked, worst_cell(flat, "surface", "concurrency")
            )


def hover_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    for (resume,), own in sorted(grouped(rows, "resume").items()):
        names = ("surface", "acceptance", "low", "high", "course")
        means = [(mean_of(group, "ratio"), text_of(group[0], *names)) for group in grouped(own, *names).values()]
        least, where = worst(means)
        asked = 0.97 if resume else 0.98
        label = "hovering over a boundary" + (", with a resume penalty" if resume else "")
        mean = float(np.mean([ratio for ratio, _ in means]))
        yield Figure(
            f"of the better fixed K, {label}", f"≥ {percent(asked, 0)}",
            f"least {percent(least)} ({where}), mean {percent(mean)}", least >= asked,
        )  # fmt: skip


def speed_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    least = min(row["steps_per_second"] for row in rows)
    each = ", ".join(f"{row['steps_per_second']:,.0f} at batch {row['concurrency']}" for row in rows)
    yield Figure("steps/s learned and decided, one core", "≥ 20,000", each, least >= 20_000)
    most = max(row["decision_milliseconds_p99"] for row in rows)
    yield Figure("milliseconds a decision table, p99", "≤ 5", f"{most:.2f}", most <= 5.0)


FIGURES: dict[str, Callable[[Sequence[Row]], Iterator[Figure]]] = {
    "constant": constant_figures,
    "cold": cold_figures,
    "change": change_figures,
    "hover": hover_figures,
    "speed": speed_figures,
}


def figures(rows: Sequence[Row]) -> list[Figure]:
    cells = cells_of(row for row in rows if CASES[row["case"]] is moving)
    found = [*share_figures(cells), *lead_figures(cells)] if cells else []
    for case, made in FIGURES.items():
        if own := [row for row in rows if row["case"] == case]:
            found += made(own)
    return found


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| Figure | Asked | Reached | Met |", "|---|---|---|---|"]
    for figure in figures(rows):
        met = "-" if figure.met is None else ("yes" if figure.met else "**no**")
        lines.append(f"| {figure.name} | {figure.asked} | {figure.reached} | {met} |")
    cells = cells_of(row for row in rows if CASES[row["case"]] is moving)
    if cells:
        lines += ["", "Share of the best K; goodput's difference to the best fixed K with its 95 % interval.", ""]
        lines += [
            "| Case | none | Best fixed K | SGLang's rule | informed-greedy | goodput | Difference |",
            "|" + "---|" * 7,
        ]
    for cell in cells:
        best = cell.best_fixed
        shares = {name: f"{100 * share:.2f}" for name, share in cell.shares.items()}
        lines.append(
            f"| {cell.where} | {shares.get('none', '-')} | {shares[best]} ({best.removeprefix('static:')}) "
            f"| {shares.get('sglang', '-')} | {shares['informed-greedy']} | {shares['goodput']} "
            f"| {100 * (cell.shares['goodput'] - cell.shares[best]):+.2f} ± {100 * cell.halves[best]:.2f} |"
        )
    return "\n".join([*lines, *details(rows)]) + "\n"


def details(rows: Sequence[Row]) -> Iterator[str]:
    if own := [row for row in rows if row["case"] == "constant"]:
        yield from ("", "Constant load: least and mean over the seeds of goodput over the best fixed K.", "")
        yield from ("| Case | Best K | Least | Mean | of none | Explored | Lost | Switches |", "|" + "---|" * 8)
        for runs in grouped(own, "surface", "acceptance", "concurrency").values():
            least = min(row["ratio"] for row in runs)
            yield (
                f"| {text_of(runs[0], 'surface', 'acceptance', 'concurrency')} | {runs[0]['best']} | {percent(least)} "
                f"| {percent(mean_of(runs, 'ratio'))} | {percent(mean_of(runs, 'against_none'), 1)} "
                f"| {percent(mean_of(runs, 'explored'))} | {percent(mean_of(runs, 'exploration_loss'), 3)} "
                f"| {mean_of(runs, 'switches'):.3f} |"
            )
    if own := [row for row in rows if row["case"] == "cold"]:
        yield from ("", "Cold: steps until within 5 %, median / 90th percentile over the seeds.", "")
        kinds = [("none", 1.0), ("none", 0.2), ("none", 8.0), ("own", 1.0), ("wrong", 1.0)]
        yield from ("| Case | Costs x 1 | x 0.2 | x 8 | Stored prior | Wrong prior |", "|" + "---|" * 6)
        for runs in grouped(own, "surface", "acceptance", "concurrency").values():
            by_kind = grouped(runs, "prior", "factor")
            texts = []
            for kind in kinds:
                middle, high, _ = quantiles([row["steps"] for row in by_kind[kind]])
                texts.append(f"{middle:,.0f} / {high:,.0f}")
            yield f"| {text_of(runs[0], 'surface', 'acceptance', 'concurrency')} | {' | '.join(texts)} |"
    if own := [row for row in rows if row["case"] == "change"]:
        yield from ("", "Changes: steps until the table is right, median / 90th percentile (count).", "")
        yield from ("| Case | 0.9 to 0.3 | 0.3 to 0.9 |", "|---|---|---|")
        for runs in grouped(own, "surface", "concurrency").values():
            texts = []
            for direction in ("down", "up"):
                values = [value for row in runs for value in row[direction]]
                middle, high, _ = quantiles(values) if values else (math.nan, math.nan, 0)
                texts.append(f"{middle:,.0f} / {high:,.0f} ({len(values)})" if values else "nothing to change")
            yield f"| {text_of(runs[0], 'surface', 'concurrency')} | {' | '.join(texts)} |"
    if own := [row for row in rows if row["case"] == "hover"]:
        yield from ("", "Hovering: goodput over the better fixed K, mean over the seeds.", "")
        yield from ("| Case | Resume penalty | Better K | Ratio | Best K at every step | Switches |", "|" + "---|" * 6)
        for runs in grouped(own, "surface", "acceptance", "low", "high", "course", "resume").values():
            where = text_of(runs[0], "surface", "acceptance", "low", "high", "course")
            yield (
                f"| {where} | {'yes' if runs[0]['resume'] else 'no'} | {runs[0]['best']} "
                f"| {percent(mean_of(runs, 'ratio'))} | {percent(mean_of(runs, 'adapting'))} "
                f"| {mean_of(runs, 'switches'):.2f} |"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--surfaces", nargs="+", choices=SURFACES, default=SURFACES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual time of the moving cases")
    parser.add_argument("--constant-steps", type=int, default=3000, help="judged, after 2,000")
    parser.add_argument("--conv", type=Path, help="arrivals of the case azure")
    parser.add_argument("--code", type=Path, help="arrivals of the case code")
    parser.add_argument("--peers", nargs="*", default=["sglang"], help="further policies of the moving cases")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="every run's figures, as JSON")
    options = parser.parse_args()
    without = {case for case, file in (("azure", options.conv), ("code", options.code)) if file is None}
    cases = [case for case in options.only or CASES if case not in without]
    jobs = [job for case in cases if case != "speed" for job in jobs_of(case, options)]
    rows: list[Row] = []
    with (
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool,
    ):
        rows += run_all(jobs, pool, progress, "cases")
        rows += run_all(fixed_jobs(row for row in rows if CASES[row["case"]] is moving), pool, progress, "fixed K")
    if "speed" in cases:
        # Alone, when the workers have ended: it is the only case that goes by the clock on the wall.
        rows += [run_job(Job("speed", {"surface": "h200-sglang", "concurrency": n})) for n in (1, 64, 256)]
    if options.out is not None:
        options.out.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]\n")
    sys.stdout.write(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
