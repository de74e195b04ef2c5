"""What a run of the demo came to, in words: totals, a table by K, and why K is what it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specpilot.controller.demo.colours import colour
from specpilot.controller.demo.run import TOLD_BATCHES, DemoRun, crossing, idle_seconds, tokens_of
from specpilot.sglang_hooks.wire import MASKED, StepRecord


def print_summary(run: DemoRun, console: Console) -> None:
    """Write the totals, a table by K, and what happened."""
    table = Table(title="by K", box=None, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("K", "steps", "share", "mean batch", "tokens per request and step", "tokens/s while at it"):
        table.add_column(name, justify="right")
    for k, steps in _by_k(run.steps).items():
        tokens = sum(map(tokens_of, steps))
        rows = _live_rows(steps)
        busy = sum(step.seconds - idle_seconds(step) for step in steps)
        table.add_row(
            Text(str(k), style=f"bold {colour(k)}"),
            f"{len(steps):,}",
            f"{100 * len(steps) / len(run.steps):.0f} %",
            f"{sum(step.batch_size for step in steps) / len(steps):.1f}",
            f"{tokens / rows:.2f}" if rows else "-",
            f"{tokens / busy:,.0f}" if busy else "-",
        )
    summary = run.summary
    totals = Table(box=None, show_header=False, pad_edge=False)
    totals.add_column(style="dim")
    totals.add_column()
    totals.add_row("steps", f"{summary.steps:,} in {summary.seconds:.1f} s, {summary.tokens_per_second:,.0f} tokens/s")
    totals.add_row("policy", f"{run.policy}, {summary.tables_applied} table(s) applied")
    totals.add_row("switches of K", f"{summary.switches}")
    totals.add_row("records", f"{len(run.steps):,} in the trace, {run.lost:,} lost")
    for part in (totals, "", table, "", explain(run)):
        console.print(part, highlight=False)


def _by_k(steps: Sequence[StepRecord]) -> dict[int, list[StepRecord]]:
    ordered = sorted(steps, key=lambda step: step.steps)
    return {k: list(group) for k, group in groupby(ordered, key=lambda step: step.steps)}


def _live_rows(steps: Sequence[StepRecord]) -> int:
    return sum(len(step.accepted_drafts) - step.accepted_drafts.count(MASKED) for step in steps)


def explain(run: DemoRun) -> str:
    """Return what happened and why, in a few sentences."""
    lost = f"{run.lost:,} step records were lost" if run.lost else "not one step record was lost"
    switches = f"K changed {run.summary.switches:,} time{'s' * (run.summary.switches != 1)}, and {lost}."
    learned = run.learned
    if not learned:
        return f"Nothing was learned in so short a time. {switches}"
    told = [at.explain() for at in learned if at.batch_size in TOLD_BATCHES]
    where = crossing(learned)
    if where is not None:
        told.append(f"In between, at about {where:.0f}, the two are even.")
    source = f"Nobody told it: all of this the controller learned from {len(run.steps):,} steps."
    return " ".join([*told, source, switches])
