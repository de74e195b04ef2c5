"""``specpilot replay``: every policy with every seed on all cores, as a table, as JSON, as a page.

What is asked of the server comes from a file of requests, is made up, or is inferred from a trace
(``inference/``). Each run is ``run.py``'s; ``report.py`` draws what ``--report`` asks for.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specpilot.controller.files import write_json
from specpilot.controller.replay.inference.infer import Inferred, infer
from specpilot.controller.replay.judge import Course, Regret
from specpilot.controller.replay.parallel import run_all, workers
from specpilot.controller.replay.policies import ReplayError, parse_policy, split_policies
from specpilot.controller.replay.result import Examined, ReplayResult, TraceOutcome, load_in_words
from specpilot.controller.replay.run import examine, saturation
from specpilot.controller.replay.scenario import GENERATED_REQUESTS, Scenario, at_rate
from specpilot.controller.simulation.named_surfaces import NamedSurface, load_surface
from specpilot.controller.simulation.workload import Arrival, ArrivalsError, generated_requests, read_arrivals

FAILED = 1
SURFACE = "h200-sglang"
"""The surface where none is named."""
SECONDS = 300.0
"""Virtual time of a run where none is given."""


@dataclass(frozen=True)
class ReplayRequest:
    """What is to be replayed, as the command line asks for it."""

    surface: str | None
    """Name of a surface; None: ``SURFACE``, or the one fitted to the traces."""
    policies: Sequence[str]
    """Names of policies, each or several separated by commas."""
    traces: Sequence[Path] = ()
    """Traces whose own load is replayed; no arrivals, load or concurrency then."""
    server: str | None = None
    """The server whose part of the traces is replayed, where they are of several."""
    arrivals: Path | None = None
    """File of requests; None: they are made up, other ones for each seed."""
    load: float | None = None
    """Arrival rate in saturations of the server without speculation; None: 1, where no concurrency is given."""
    concurrency: int | None = None
    """Requests at a time of a closed loop, instead of a load."""
    seeds: int = 1
    """Runs of each policy."""
    seconds: float | None = None
    """Virtual time of each run; None: ``SECONDS``, or the whole trace."""
    workers: int | None = None
    """Processes; None: one a core."""
    json: Path | None = None
    """File for the figures of every run."""
    report: Path | None = None
    """Folder for ``replay.html``."""


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
        _print_inferred(inferred, console)
    assert named is not None
    try:
        write_report = _report_writer() if request.report is not None else None
    except ImportError as error:
        sys.stderr.write(
            f"specpilot: --report draws with matplotlib and Jinja2 ({error}): "
            "pip install '.[demo]' in Specpilot's checkout\n"
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
        calls = [(policy, scenario) for scenario in scenarios for policy in policies]
        examined = run_all(_examine, calls, pool, progress, "runs")
    results = [run.result for run in examined]
    if request.json is not None:
        written = results if inferred is None else _trace_outcome(inferred, named, results)
        write_json(request.json, written)
    console.print(summary_table(results, policies))
    if write_report is not None and request.report is not None:
        console.print(f"report: {write_report(examined, named, request.report)}")
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


def _print_inferred(inferred: Inferred, console: Console) -> None:
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


def _trace_outcome(inferred: Inferred, surface: NamedSurface, results: Sequence[ReplayResult]) -> TraceOutcome:
    return TraceOutcome(
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
    """Return ``report.write_report``; ImportError without what it draws with, which only ``--report`` needs."""
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


# -- the table --


def summary_table(results: Sequence[ReplayResult], policies: Sequence[str]) -> Table:
    """Return the means over the seeds, one row a policy."""
    first = results[0]
    seeds = len({result.seed for result in results})
    table = Table(title=f"{first.surface}, {load_in_words(first)}, mean of {seeds} seeds")
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
            f"{_mean([result.tokens_per_second for result in own]):,.0f}",
            _or_dash([result.time_per_output_token.mean for result in own], 1e3, ".2f"),
            _or_dash([result.time_per_output_token.p99 for result in own], 1e3, ".2f"),
            f"{100 * _mean([result.reference_share for result in own]):.2f} %",
            f"{_mean([result.switches_per_100_steps for result in own]):.2f}",
            f"{_mean([result.probe_switches_per_100_steps for result in own]):.2f}",
            f"{100 * _mean([result.exploration_loss for result in own]):.3f} %",
            _or_dash([result.steps_to_95 for result in own], 1.0, ",.0f"),
            f"{_mean([float(result.steps) for result in own]):,.0f}",
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
