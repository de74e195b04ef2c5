"""``specpilot fit``: from traces to the stored prior that a controller starts from.

    paths ──► sources by fingerprint ──► engine: statistics of each segment ──► joined in order ──► prior, report

The segments are read in ``engines``, what is counted of them is in ``statistics``, and what is fitted to it in
``prior`` (``cost_fit``, ``acceptance_fit``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console

from specpilot.controller.errors import ConfigError
from specpilot.controller.files import replace_json
from specpilot.controller.fit.engines import ENGINES, read_fleet
from specpilot.controller.fit.prior import fit
from specpilot.controller.fit.report import FitReport, FitReports, print_lines, print_report, report_of
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.reader import TraceError
from specpilot.controller.trace.sources import TraceSource, describe, select_sources


@dataclass(frozen=True)
class FitRequest:
    """What is to be fitted, as the command line asks for it."""

    traces: Sequence[Path]
    output: Path
    """File for one prior, or folder for one prior per fingerprint."""
    engine: str = "serial"
    workers: int | None = None
    json: Path | None = None
    server: str | None = None


def fit_command(request: FitRequest, console: Console) -> int:
    """Fit, write and report; TraceError or ConfigError says what is in the way."""
    if request.workers is not None and request.workers < 1:
        raise ConfigError(f"--workers {request.workers}: at least one is needed")
    findings = Findings()
    sources = select_sources(request.traces, request.server, findings)
    fleets = [list(fleet) for _, fleet in groupby(sorted(sources, key=_order), key=lambda source: source.fingerprint)]
    outputs = _outputs(request.output, fleets)
    reports: list[FitReport] = []
    for fleet, output in zip(fleets, outputs, strict=True):
        statistics = read_fleet(fleet, request.engine, request.workers, Console(stderr=True))
        fitted = fit(statistics, fleet[-1].hello)
        replace_json(output, fitted.prior)
        reports.append(report_of(str(output), fleet, statistics, fitted))
        print_report(reports[-1], console)
    print_lines(findings.lines(), console)
    if request.json is not None:
        replace_json(request.json, FitReports(reports, findings.lines()))
    return 0


def _order(source: TraceSource) -> tuple[str, str]:
    return source.fingerprint, source.server


def _outputs(output: Path, fleets: Sequence[Sequence[TraceSource]]) -> list[Path]:
    """Return the files for the priors; ConfigError, before anything is read, where they cannot be."""
    if output.is_dir():
        return [output / f"{fleet[0].fingerprint}.json" for fleet in fleets]
    if len(fleets) > 1:
        raise TraceError(
            "these traces are of several fingerprints, which have no prior in common: "
            f"{describe([source for fleet in fleets for source in fleet])}. Choose one with --server, by the "
            f"server's name or the fingerprint, or let -o be a folder, for a prior of each"
        )
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}: make it first")
    return [output]


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
    command.add_argument("--engine", choices=ENGINES, default="serial", help="what reads the segments")
    command.add_argument("--workers", type=int, help="processes or Ray tasks that read at a time (default: one a core)")
    command.add_argument("--json", type=Path, help="write the report")
    command.add_argument("--server", help="server whose records are used, by name or fingerprint (default: all)")


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
