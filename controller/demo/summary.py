"""What a run of the demo was and came to: its steps, the figures for scripts, a table, a sentence.

Here is also what every part of the demo shares: what was learned by batch size, errors, the colours of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specpilot.controller.simulation.server import MAX_RUNNING_REQUESTS
from specpilot.controller.simulation.totals import SimSummary
from specpilot.controller.simulation.workload import Phase
from specpilot.controller.web.view import KView, ServerView
from specpilot.sglang_hooks.wire import MASKED, StepRecord

TOLD_BATCHES = (8, 64)
"""Batch sizes at which the demo says why K is what it is."""
MEAN_SECONDS = 1.0
"""Window of the throughput, live and in the picture."""
IDLE_GAP_SECONDS = 0.25
"""A longer gap between two decode steps with one prefill at most was an idle server."""

COLOURS = {0: "#d9772b", 1: "#7fb8da", 3: "#1f6fb2"}
"""Of K in the terminal, readable on light and on dark."""
OTHER_COLOUR = "#6a51a3"


def colour(steps: int | None) -> str:
    """Return the colour of a K; None is no step at all."""
    return COLOURS.get(steps, OTHER_COLOUR) if steps is not None else "default"


class DemoError(RuntimeError):
    """The demo cannot go on; the text says which part failed and how."""


@dataclass(frozen=True)
class Learned:
    """What the policy expects at one batch size."""

    batch_size: int
    choice: int
    options: dict[int, KView]
    """By K, ascending."""

    @property
    def drafting(self) -> KView:
        """The K above 0 that is expected to make the most tokens a second."""
        return max((o for k, o in self.options.items() if k), key=lambda option: option.tokens_per_second)

    @property
    def gain(self) -> float:
        """What that makes of tokens a second over K=0, as a share."""
        return self.drafting.tokens_per_second / self.options[0].tokens_per_second - 1.0

    def explain(self) -> str:
        """Return why its K is chosen, in a sentence."""
        drafting, none = self.drafting, self.options[0]
        longer, more = drafting.seconds[0] / none.seconds[0], drafting.tokens[0] / none.tokens[0]
        drafts = f"{drafting.steps} draft{'s' * (drafting.steps > 1)}"
        word = "more" if self.gain > 0 else "fewer"
        predicted = "" if drafting.tried and none.tried else " (predicted in part: not both ran there yet)"
        return (
            f"At {self.batch_size} requests a step with {drafts} takes {longer:.1f} times as long as one "
            f"without ({1e3 * drafting.seconds[0]:.1f} instead of {1e3 * none.seconds[0]:.1f} ms) and makes "
            f"{more:.1f} times the tokens: {100 * abs(self.gain):.0f} % {word} a second{predicted}, so K={self.choice}."
        )


def crossing(learned: Sequence[Learned]) -> float | None:
    """Return the batch size above which K=0 is expected to make the most, or None if that is nowhere between two."""
    for left, right in reversed(list(pairwise(learned))):
        if left.gain > 0.0 >= right.gain:
            return left.batch_size + (right.batch_size - left.batch_size) * left.gain / (left.gain - right.gain)
    return None


@dataclass(frozen=True)
class Run:
    """A finished run: the server's totals, the steps as the trace holds them, and what the page knows at the end."""

    seconds: float
    summary: SimSummary
    steps: list[StepRecord]
    phases: tuple[Phase, ...]
    page: ServerView
    policy: str

    @property
    def learned(self) -> list[Learned]:
        """What the policy expects by batch size, at the contexts that the demo has; empty before it knows anything."""
        cells = self.page.cells[:: max(len(self.page.contexts), 1)]
        pairs = zip(self.page.batch_sizes, cells, strict=True)
        return [
            Learned(batch, cell.steps, {option.steps: option for option in cell.options})
            for batch, cell in pairs
            if cell.options and batch <= MAX_RUNNING_REQUESTS
        ]

    @property
    def lost(self) -> int:
        """Steps that never reached the trace, wherever they were dropped."""
        return max(self.summary.steps - len(self.steps), self.summary.dropped_records)

    def report(self) -> dict[str, Any]:
        """Return the summary for scripts."""
        return {
            "steps": self.summary.steps,
            "tokens_per_second": self.summary.tokens_per_second,
            "share_by_k": self.summary.share_by_k,
            "switches": self.summary.switches,
            "tables_applied": self.summary.tables_applied,
            "dropped_records": self.lost,
            "policy": self.policy,
            "learned": {
                str(at.batch_size): {
                    "choice": at.choice,
                    "tokens_per_second": {str(k): option.tokens_per_second for k, option in at.options.items()},
                }
                for at in self.learned
            },
        }


def tokens_of(step: StepRecord) -> int:
    """Return the tokens that a step gave its clients: accepted drafts and bonus tokens."""
    return sum([accepted + 1 for accepted in step.accepted_drafts if accepted != MASKED])


def idle_seconds(step: StepRecord) -> float:
    """Seconds before ``step`` in which nothing ran, as far as a record can tell."""
    gap = step.launch_gap_seconds
    return gap if gap > IDLE_GAP_SECONDS and step.forwards <= 2 else 0.0


def print_summary(run: Run, console: Console) -> None:
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


def explain(run: Run) -> str:
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
