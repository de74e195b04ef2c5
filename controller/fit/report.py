"""What ``specpilot fit`` says of a fit: for scripts as JSON, for a person as tables."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specpilot.controller.fit.acceptance_fit import BandQuality
from specpilot.controller.fit.cost_fit import CellQuality, SwitchQuality
from specpilot.controller.fit.prior import FittedPrior
from specpilot.controller.fit.statistics import TraceStatistics
from specpilot.controller.statistics import weighted_median
from specpilot.controller.trace.sources import TraceSource

LISTED_CELLS = 40
"""Cells that the table for a person shows, those with most records."""
DOUBTFUL = 0.1
"""Relative error from which on a cell is shown in yellow: choices between two K hang on less."""


class FitReport(msgspec.Struct, frozen=True):
    """One prior, what it was fitted to, and how well it holds for what it was not fitted to."""

    fingerprint: str
    prior: str
    """File that the prior was written to."""
    model: str
    draft_model: str
    gpu: str
    sglang_version: str
    servers: dict[str, int]
    """Number of segments by server."""
    records: int
    excluded: int
    """Records that cannot be true, and were left out."""
    findings_by_kind: dict[str, int]
    findings: list[str]
    """Lines about the first findings of each kind."""
    used: int
    """Records whose seconds are a step's own."""
    not_used: dict[str, int]
    """Records whose seconds are not a step's own, by the reason."""
    held_out_error: float | None
    """Median over the records of |predicted - true| / true step seconds, each cell by its number of records."""
    prior_error: float | None
    """Median over the cells, each by its records, of |predicted - true| / true at a start from the prior."""
    coverage: float | None
    """Share of held-out records within the 95 % interval."""
    cells: list[CellQuality]
    switches: list[SwitchQuality]
    acceptance: list[BandQuality]
    acceptance_samples: list[float]
    """Trials that the prior's acceptance counts as, by position: few where it varied during the trace."""


class FitReports(msgspec.Struct, frozen=True):
    """All priors of one call."""

    fits: list[FitReport]
    unread: list[str]
    """Files that are no part of any fit, and why."""


def report_of(path: str, sources: Sequence[TraceSource], statistics: TraceStatistics, fitted: FittedPrior) -> FitReport:
    """Put together what is reported of one prior."""
    hello = sources[-1].hello
    held_out = [cell for cell in fitted.cells if cell.held_out_error is not None]
    weights = [cell.records for cell in held_out]
    return FitReport(
        fingerprint=sources[0].fingerprint,
        prior=path,
        model=hello.model,
        draft_model=hello.draft_model,
        gpu=hello.gpu,
        sglang_version=hello.sglang_version,
        servers={source.server: len(source.segments) for source in sources},
        records=statistics.findings.rows,
        excluded=statistics.findings.excluded,
        findings_by_kind=dict(sorted(statistics.findings.counts.items())),
        findings=statistics.findings.lines(),
        used=statistics.used,
        not_used=dict(sorted((reason, count) for reason, count in statistics.reasons.items() if count)),
        held_out_error=weighted_median([cell.held_out_error or 0.0 for cell in held_out], weights)
        if held_out
        else None,
        prior_error=weighted_median([cell.prior_error or 0.0 for cell in held_out], weights) if held_out else None,
        coverage=float(np.average([cell.coverage or 0.0 for cell in held_out], weights=weights)) if held_out else None,
        cells=fitted.cells,
        switches=fitted.switches,
        acceptance=fitted.bands,
        acceptance_samples=fitted.prior["acceptance"]["trials"],
    )


def print_report(report: FitReport, console: Console) -> None:
    """Write the report of one prior for a person."""
    servers = ", ".join(f"{server} ({count:,} segments)" for server, count in report.servers.items())
    grid = Table(title=escape(f"prior {report.prior}"), title_justify="left", box=None, show_header=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("of", escape(f"{report.model}, {report.draft_model} on {report.gpu}, SGLang {report.sglang_version}"))
    grid.add_row("servers", escape(servers))
    used = f"{report.used:,} tell a step's own time, {report.excluded:,} excluded"
    grid.add_row("records", f"{report.records:,}; {used}")
    for reason, count in report.not_used.items():
        grid.add_row("", f"{count:,} not for cost: {reason}")
    held_out = f"{_percent(report.held_out_error)} per record, {_percent(report.prior_error)} at a start from the prior"
    grid.add_row("held-out error", f"{held_out}; {_percent(report.coverage)} within the 95 % interval")
    samples = report.acceptance_samples[0]
    grid.add_row("acceptance", f"its prior counts as {samples:.1f} samples of a first draft: fewer, the more it varied")
    console.print(grid)
    console.print(_cells(report.cells))
    if len(report.cells) > LISTED_CELLS:
        console.print(f"and {len(report.cells) - LISTED_CELLS:,} more cells, with fewer records (--json has them all)")
    if report.switches:
        console.print(_switches(report.switches))
    if report.acceptance:
        console.print(_acceptance(report.acceptance))
    print_lines(report.findings, console)


def print_lines(lines: Sequence[str], console: Console) -> None:
    """Write findings, a line each."""
    for line in lines:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _cells(cells: Sequence[CellQuality]) -> Table:
    table = Table(title="step seconds by K and batch size", title_justify="left")
    heads = ("K", "size", "records", "seconds", "at context", "per 1,000 tokens", "noise")
    for head in (*heads, "held-out error", "bias", "in 95 %", "start from prior"):
        table.add_column(head, justify="right")
    shown = sorted(cells, key=lambda cell: -cell.records)[:LISTED_CELLS]
    for cell in sorted(shown, key=lambda cell: (cell.steps, cell.size)):
        worst = max(cell.held_out_error or 0.0, cell.prior_error or 0.0)
        table.add_row(
            str(cell.steps),
            f"{cell.size:g}" if cell.size == round(cell.size) else f"{cell.size:.1f}",
            f"{cell.records:,}",
            f"{cell.seconds:.5f}",
            f"{cell.mean_context:,.0f}",
            f"{100.0 * cell.slope_per_1000_tokens:+.2f} %",
            _percent(cell.spread),
            _percent(cell.held_out_error),
            _percent(cell.held_out_bias),
            _percent(cell.coverage),
            _percent(cell.prior_error),
            style="yellow" if worst > DOUBTFUL else None,
        )
    return table


def _switches(switches: Sequence[SwitchQuality]) -> Table:
    table = Table(title="what switching costs", title_justify="left")
    for head in ("kind", "switches", "seconds", "deviation"):
        table.add_column(head, justify="right")
    for switch in switches:
        table.add_row(switch.kind, f"{switch.switches:,}", f"{switch.seconds:.5f}", f"{switch.deviation:.5f}")
    return table


def _acceptance(bands: Sequence[BandQuality]) -> Table:
    table = Table(title="acceptance by batch size and tokens per request", title_justify="left")
    for head in (
        "batch size",
        "context",
        "requests",
        "by position",
        "tokens per step",
        "held-out error",
        "of the pool",
    ):
        table.add_column(head, justify="right")
    for band in bands:
        table.add_row(
            band.batch_sizes,
            band.mean_contexts,
            f"{band.requests:,}",
            " ".join(f"{hazard:.2f}" for hazard in band.hazards),
            f"{band.tokens_per_step:.3f}",
            _percent(band.held_out_error),
            _percent(band.pooled_error),
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.2f} %"
