"""``specpilot replay``: every policy with every seed on all cores, as a table, as JSON, as a page.

What is asked of the server comes from a file of requests, is made up, or is inferred from a trace
(``replay_trace.py``).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specpilot.controller.replay.inference import Inferred, Outcome, infer
from specpilot.controller.replay.judge import Course, Regret, Result
from specpilot.controller.replay.policies import ReplayError, parse_policy, split_policies
from specpilot.controller.replay.scenario import GENERATED_REQUESTS, Scenario, at_rate, examine, saturation
from specpilot.controller.simulation.named_surfaces import NamedSurface, load_surface
from specpilot.controller.simulation.workload import Arrival, ArrivalsError, generated_requests, read_arrivals

FAILED = 1
SURFACE = "h200-sglang"
SECONDS = 300.0


@dataclass(frozen=True)
class ReplayRequest:
    """What is to be replayed, as the command line asks for it."""

    surface: str | None
    """None: ``SURFACE``, or the one fitted to the traces."""
    policies: Sequence[str]
    """Separated by commas too."""
    traces: Sequence[Path] = ()
    """Their own load is replayed; no arrivals, load or concurrency then."""
    server: str | None = None
    """Whose part of the traces, where they are of several."""
    arrivals: Path | None = None
    """None: requests are made up, other ones for each seed."""
    load: float | None = None
    """None: 1, where a load is asked for at all."""
    concurrency: int | None = None
    """Instead of a load."""
    seeds: int = 1
    seconds: float | None = None
    """None: ``SECONDS``, or the whole trace."""
    workers: int | None = None
    """Processes; None: one a core."""
    json: Path | None = None
    report: Path | None = None
    """Folder."""


@dataclass(frozen=True)
class Examined:
    """One run: its figures, and what a report draws of it."""

    result: Result
    regret: Regret
    course: Course


def replay(request: ReplayRequest, console: Console) -> int:
    """Run every policy with every seed, write what was asked for, print the means; the exit code."""
    policies = list(dict.fromkeys(split_policies(request.policies)))
    if not policies:
        raise ReplayError("--policies names none")
    for policy in policies:
        parse_policy(policy)
    named, arrivals = _check(request)
    inferred = None
    if request.traces:
        inferred = infer(request.traces, request.server)
        named = _surface_of(inferred, named, policies)
        _say(inferred, console)
    assert named is not None
    try:
        write_report = _report_writer() if request.report is not None else None
    except ImportError as error:
        sys.stderr.write(
            f"specpilot: --report draws with matplotlib and Jinja2 ({error}): pip install 'specpilot[demo]'\n"
        )
        return FAILED
    console.print(f"[bold]{named.name}[/]: {named.label}")
    seeds = range(1, request.seeds + 1)
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        workers(request.workers, request.seeds * len(policies)) as pool,
    ):
        if inferred is not None:
            seconds = min(request.seconds or inferred.seconds, inferred.seconds)
            scenarios = [inferred.scenario(named, seconds, seed) for seed in seeds]
        else:
            scenarios = _scenarios(request, named, arrivals, seeds, pool, progress)
        runs = [(policy, scenario) for scenario in scenarios for policy in policies]
        found = run_all(_examine, runs, pool, progress, "runs")
    results = [one.result for one in found]
    if request.json is not None:
        written = results if inferred is None else _outcome(inferred, named, results)
        request.json.write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
    console.print(summary_table(results, policies))
    if write_report is not None and request.report is not None:
        console.print(f"report: {write_report(found, named, request.report)}")
    return 0


def _surface_of(inferred: Inferred, named: NamedSurface | None, policies: Sequence[str]) -> NamedSurface:
    """Return the surface that was named, else the one fitted to the trace; ReplayError where that is not enough."""
    surface = named or inferred.fitted
    if surface is None:
        raise ReplayError(inferred.unfit)
    if "none" in policies and not surface.plain.steps:
        raise ReplayError(
            f"the trace of {inferred.server} has too few steps without drafts to tell what a server without "
            "speculation would do: leave out the policy 'none', or name a --surface"
        )
    return surface


def _say(inferred: Inferred, console: Console) -> None:
    """Tell what was inferred and what was left out."""
    lines = [
        f"{inferred.server}: {inferred.records:,} records, {inferred.seconds:,.0f} s, recorded "
        f"{inferred.tokens_per_second:,.0f} tokens/s; what follows is model-based, from what was inferred:",
        *(f"  {note}" for note in inferred.notes),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in inferred.findings:
        console.print(f"  {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _outcome(inferred: Inferred, surface: NamedSurface, results: Sequence[Result]) -> Outcome:
    return Outcome(
        model_based=True,
        server=inferred.server,
        surface=surface.label,
        records=inferred.records,
        seconds=inferred.seconds,
        requests=len(inferred.arrivals),
        recorded_tokens_per_second=inferred.tokens_per_second,
        inferred=list(inferred.notes),
        findings=list(inferred.findings),
        runs=list(results),
    )


def _check(request: ReplayRequest) -> tuple[NamedSurface | None, list[Arrival] | None]:
    """Return the surface and the arrivals of a file; ReplayError says what is wrong with the request.

    Without a surface's name, a trace has None.
    """
    others = (request.arrivals, request.load, request.concurrency)
    if request.traces and any(other is not None for other in others):
        raise ReplayError("a trace is replayed under its own load: leave out --arrivals, --load and --concurrency")
    if request.server is not None and not request.traces:
        raise ReplayError("--server says whose part of a trace is replayed: name the trace")
    amounts = (request.load, request.seconds)
    counts = [request.seeds, *(count for count in (request.concurrency, request.workers) if count is not None)]
    finite = all(0.0 < amount < math.inf for amount in amounts if amount is not None)
    if not finite or any(count <= 0 for count in counts):
        raise ReplayError("--load, --seconds, --seeds, --concurrency and --workers must be above 0")
    surface = request.surface or (None if request.traces else SURFACE)
    if request.json is not None and not request.json.parent.is_dir():
        raise ReplayError(f"{request.json}: there is no folder {request.json.parent}")
    try:
        if request.report is not None:
            request.report.mkdir(parents=True, exist_ok=True)
        return (
            load_surface(surface) if surface is not None else None,
            read_arrivals(request.arrivals) if request.arrivals is not None else None,
        )
    except OSError as error:
        raise ReplayError(f"--report {request.report}: {error.strerror or error}") from error
    except (ArrivalsError, ValueError) as error:
        raise ReplayError(str(error)) from error


def _report_writer() -> Callable[[Sequence[Examined], NamedSurface, Path], Path]:
    """Return ``replay_report.write_report``; ImportError without what it draws with."""
    from specpilot.controller.replay.report import write_report

    return write_report


def _scenarios(
    request: ReplayRequest,
    surface: NamedSurface,
    from_file: list[Arrival] | None,
    seeds: Sequence[int],
    pool: Executor | None,
    progress: Progress,
) -> list[Scenario]:
    requests = [from_file or generated_requests(GENERATED_REQUESTS, seed) for seed in seeds]
    seconds, load = request.seconds or SECONDS, request.load or 1.0
    if request.concurrency is not None:
        return [
            Scenario(surface, own, seconds, seed, concurrency=request.concurrency)
            for seed, own in zip(seeds, requests, strict=True)
        ]
    distinct = requests[:1] if from_file else requests
    saturated = run_all(saturation, [(surface, own) for own in distinct], pool, progress, "saturation")
    return [
        Scenario(surface, at_rate(own, load * rate, seconds), seconds, seed, load=load)
        for seed, own, rate in zip(seeds, requests, saturated * (len(requests) // len(distinct)), strict=True)
    ]


def _examine(policy: str, scenario: Scenario) -> Examined:
    result, judged = examine(policy, scenario)
    return Examined(result, Regret.of(judged), Course.of(judged))


# -- on all cores --


@contextmanager
def workers(count: int | None, jobs: int) -> Iterator[Executor | None]:
    """Give a pool of ``count`` processes (None: one a core), not more than ``jobs``; None where one is enough."""
    count = min(count or os.cpu_count() or 1, jobs)
    if count <= 1:
        yield None
        return
    # Not forked: a thread draws the progress, and a fork would copy its lock as it is.
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


Returned = TypeVar("Returned")


def run_all(
    function: Callable[..., Returned],
    calls: Sequence[tuple[object, ...]],
    pool: Executor | None,
    progress: Progress,
    label: str,
) -> list[Returned]:
    """Return ``function(*call)`` of every call, in their order; without a pool, one after the other."""
    task = progress.add_task(label, total=len(calls))
    if pool is None:
        found = []
        for call in calls:
            found.append(function(*call))
            progress.advance(task)
        return found
    futures: list[Future[Returned]] = [pool.submit(function, *call) for call in calls]
    for future in as_completed(futures):
        future.result()
        progress.advance(task)
    return [future.result() for future in futures]


# -- the table --


def where_of(result: Result) -> str:
    """Return a run's load in words.

    >>> from specpilot.controller.replay.judge import TimePerOutputToken
    >>> where_of(Result("none", "moe", None, 8, 1, 1.0, TimePerOutputToken(None, None), 1.0, 0.0, 0.0, 0.0, 0, 1))
    'closed loop, 8 at a time'
    """
    if result.load is not None:
        return f"load {result.load:g}"
    return "the trace's own load" if result.concurrency is None else f"closed loop, {result.concurrency} at a time"


def summary_table(results: Sequence[Result], policies: Sequence[str]) -> Table:
    """Return the means over the seeds, one row a policy."""
    first = results[0]
    seeds = len({result.seed for result in results})
    table = Table(title=f"{first.surface}, {where_of(first)}, mean of {seeds} seeds")
    table.add_column("policy", no_wrap=True)
    for name in (
        "tokens/s",
        "ms/token",
        "p99",
        "of the best K",
        "switches/100",
        "of them probes",
        "exploration loss",
        "steps to 95 %",
        "steps",
    ):
        table.add_column(name, justify="right")
    for policy in policies:
        own = [result for result in results if result.policy == policy]
        table.add_row(
            policy,
            f"{_mean([one.tokens_per_second for one in own]):,.0f}",
            _or_dash([one.time_per_output_token.mean for one in own], 1e3, ".2f"),
            _or_dash([one.time_per_output_token.p99 for one in own], 1e3, ".2f"),
            f"{100 * _mean([one.reference_share for one in own]):.2f} %",
            f"{_mean([one.switches_per_100_steps for one in own]):.2f}",
            f"{_mean([one.probe_switches_per_100_steps for one in own]):.2f}",
            f"{100 * _mean([one.exploration_loss for one in own]):.3f} %",
            _or_dash([one.steps_to_95 for one in own], 1.0, ",.0f"),
            f"{_mean([float(one.steps) for one in own]):,.0f}",
        )
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_dash(values: Sequence[float | None], scale: float, form: str) -> str:
    known = [value for value in values if value is not None]
    return format(scale * _mean(known), form) if len(known) == len(values) else "-"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot replay``."""
    command.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="replay a recorded trace's own load")
    command.add_argument("--server", help="whose part of the traces, by name or fingerprint, if they are of several")
    command.add_argument(
        "--surface", help="what steps cost (default: h200-sglang, or fitted to the trace); a wrong name lists them"
    )
    command.add_argument("--arrivals", default="none", help="CSV file of requests (default: none, they are made up)")
    command.add_argument("--load", type=float, help="1, the default: what saturates the server without speculation")
    command.add_argument("--concurrency", type=int, help="a closed loop of so many requests, instead of a load")
    command.add_argument("--policies", nargs="+", required=True, metavar="POLICY", help="such as none,static:3 sglang")
    command.add_argument("--seeds", type=int, default=1, help="runs of each policy")
    command.add_argument(
        "--seconds", type=float, help="of virtual time, each run (default: 300, or the trace's length)"
    )
    command.add_argument("--workers", type=int, help="processes (default: one a core)")
    command.add_argument("--json", type=Path, help="write the figures of every run")
    command.add_argument("--report", type=Path, metavar="DIR", help="write replay.html there: tables and plots")


def run(options: argparse.Namespace, console: Console) -> int:
    """Replay, write what was asked for, print the means; return the exit code."""
    request = ReplayRequest(
        surface=options.surface,
        policies=options.policies,
        traces=options.traces,
        server=options.server,
        arrivals=None if options.arrivals == "none" else Path(options.arrivals),
        load=options.load,
        concurrency=options.concurrency,
        seeds=options.seeds,
        seconds=options.seconds,
        workers=options.workers,
        json=options.json,
        report=options.report,
    )
    return replay(request, console)
