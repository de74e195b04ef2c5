"""``specpilot fit``: from traces to the stored prior that a controller starts from.

    paths ──► sources by fingerprint ──► segments ──► engine: a Part each ──► joined in order ──► prior, report

An *engine* reads segments: one after the other, in processes, or on a Ray cluster. Each segment is
read alone and its statistics come back; they are joined here, in the order of the trace. Statistics
and models are in ``fit_statistics.py`` and ``fit_models.py``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from specpilot.controller.errors import ConfigError
from specpilot.controller.fit.models import fit
from specpilot.controller.fit.report import FitReport, Report, print_report, print_unread, report_of
from specpilot.controller.fit.statistics import Joined, Part, SegmentPart, read_segment
from specpilot.controller.trace.checks import Findings, Source, chosen, described, empty, survey
from specpilot.controller.trace.reader import TraceError

ENGINES = ("serial", "processes", "ray")

Engine = Callable[[Sequence[Path]], Iterator[SegmentPart]]
"""Reads segments, and gives what they say in their order."""


@dataclass(frozen=True)
class FitRequest:
    """One call of the command."""

    traces: Sequence[Path]
    output: Path
    """A file for one prior, or a folder for one per fingerprint."""
    engine: str = "serial"
    workers: int | None = None
    json: Path | None = None
    server: str | None = None


def fit_command(request: FitRequest, console: Console) -> int:
    """Fit, write and report; TraceError or ConfigError says what is in the way."""
    if request.workers is not None and request.workers < 1:
        raise ConfigError(f"--workers {request.workers}: at least one is needed")
    findings = Findings()
    sources = chosen(survey(request.traces, findings), request.server)
    fleets = [list(fleet) for _, fleet in groupby(sorted(sources, key=_order), key=lambda source: source.fingerprint)]
    outputs = _outputs(request.output, fleets)
    reports: list[FitReport] = []
    for fleet, output in zip(fleets, outputs, strict=True):
        part = read_fleet(fleet, request.engine, request.workers, Console(stderr=True))
        hello = fleet[-1].hello
        fitted = fit(part, hello)
        _write(output, fitted.prior)
        reports.append(report_of(str(output), fleet, part, fitted))
        print_report(reports[-1], console)
    print_unread(findings, console)
    if request.json is not None:
        _write(request.json, Report(reports, findings.lines()))
    return 0


def _order(source: Source) -> tuple[str, str]:
    return source.fingerprint, source.server


def _outputs(output: Path, fleets: Sequence[Sequence[Source]]) -> list[Path]:
    """Return the files for the priors; ConfigError, before anything is read, where they cannot be."""
    if output.is_dir():
        return [output / f"{fleet[0].fingerprint}.json" for fleet in fleets]
    if len(fleets) > 1:
        raise TraceError(
            "these traces are of several fingerprints, which have no prior in common: "
            f"{described([source for fleet in fleets for source in fleet])}. Choose one with --server, by the "
            f"server's name or the fingerprint, or let -o be a folder, for a prior of each"
        )
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}: make it first")
    return [output]


def _write(path: Path, content: object) -> None:
    """Replace ``path`` in one step; ConfigError if that fails, and then nothing has changed."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".specpilot-", delete=False) as file:
            temporary = file.name
            file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


# -- reading --


def read_fleet(sources: Sequence[Source], engine: str, workers: int | None, console: Console) -> Part:
    """Return the statistics of servers that share a fingerprint; TraceError if no record of them passes."""
    joined = Joined(sources[-1].hello)
    paths = [path for source in sources for path in source.segments]
    with (
        _engine(engine, workers, len(paths)) as read,
        Progress(console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("reading", total=len(paths))
        for part in read(paths):
            joined.add(part)
            bar.advance(task)
    findings = joined.part.findings
    if findings.rows == findings.excluded:
        raise TraceError(empty(sources[0], findings))
    return joined.part


@contextmanager
def _engine(name: str, workers: int | None, segments: int) -> Iterator[Engine]:
    """Give an engine and end what it started."""
    if name == "serial":
        yield lambda paths: map(read_segment, paths)
    elif name == "processes":
        count = min(workers or os.cpu_count() or 1, segments)
        # Not forked: Arrow has threads, and a fork would copy their locks as they are.
        pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
        try:
            yield lambda paths: _ahead(paths, 2 * count, lambda path: pool.submit(read_segment, path).result)
        except BrokenProcessPool as error:
            raise ConfigError(
                f"a process that reads traces was killed, for want of memory perhaps: give fewer --workers than {count}"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        ray = _ray()
        started = not ray.is_initialized()
        if started:
            # A cluster named by RAY_ADDRESS, or a local one for as long as this takes.
            try:
                ray.init(logging_level="warning", log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = os.environ.get("RAY_ADDRESS", "") or "of this machine"
                raise ConfigError(f"the Ray cluster {where} cannot be used: {error}") from error
        try:
            remote = ray.remote(read_segment)
            count = max(int(ray.cluster_resources().get("CPU", 1)), 1) if workers is None else workers
            yield lambda paths: _ahead(paths, 2 * count, lambda path: _getter(ray, remote.remote(path.absolute())))
        finally:
            if started:
                ray.shutdown()


def _getter(ray: Any, reference: Any) -> Callable[[], SegmentPart]:
    def get() -> SegmentPart:
        try:
            part: SegmentPart = ray.get(reference)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)
            raise TraceError(
                f"a worker of the Ray cluster failed: {cause}. Every node needs this version of specpilot, and the "
                "traces under the same path"
            ) from error
        return part

    return get


def _ahead(
    paths: Sequence[Path], most: int, submit: Callable[[Path], Callable[[], SegmentPart]]
) -> Iterator[SegmentPart]:
    """Yield the results in order, with at most ``most`` of them under way: memory does not grow with the trace."""
    under_way: deque[Callable[[], SegmentPart]] = deque()
    for path in paths:
        under_way.append(submit(path))
        if len(under_way) >= most:
            yield under_way.popleft()()
    while under_way:
        yield under_way.popleft()()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--engine ray needs Ray: pip install 'specpilot[ray]' ({error})") from error
    return ray


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot fit``."""
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="trace folders or segments")
    command.add_argument(
        "-o",
        dest="output",
        type=Path,
        required=True,
        metavar="FILE",
        help="output file; for a directory, one prior per fingerprint",
    )
    command.add_argument("--engine", choices=ENGINES, default="serial", help="what reads them")
    command.add_argument("--workers", type=int, help="that read at a time (default: one a core)")
    command.add_argument("--json", type=Path, help="write the report")
    command.add_argument("--server", help="whose part of the traces, by name or fingerprint (default: all)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fit, write and report; return the exit code."""
    request = FitRequest(
        traces=options.traces,
        output=options.output,
        engine=options.engine,
        workers=options.workers,
        json=options.json,
        server=options.server,
    )
    return fit_command(request, console)
