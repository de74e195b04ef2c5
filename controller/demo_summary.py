"""What a run of the demo was and came to: its steps, the figures for scripts, a table, a sentence.

Here is also what every part of the demo shares: the policy's setting, errors, the colours of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from controller.simserver import Summary
from controller.surface import H200_8B
from controller.workload import Phase
from sglang_hooks.wire import MASKED, StepRecord

THRESHOLD = 8
STEPS = 3
"""K up to about THRESHOLD running requests; above, the policy skips speculation."""

MEAN_SECONDS = 1.0
"""Window of the throughput, live and in the picture."""
IDLE_GAP_SECONDS = 0.25
"""A longer gap between two decode steps with one prefill at most was an idle server."""

COLOURS = {0: "#d9772b", 1: "#7fb8da", 3: "#1f6fb2"}
"""Of K, in the terminal and in the picture."""
OTHER_COLOUR = "#6a51a3"


def colour(steps: int | None) -> str:
    """Return the colour of a K; None is no step at all."""
    return COLOURS.get(steps, OTHER_COLOUR) if steps is not None else "default"


class DemoError(RuntimeError):
    """The demo cannot go on; the text says which part failed and how."""


@dataclass(frozen=True)
class Run:
    """A finished run: the server's totals, and the steps as the trace holds them."""

    seconds: float
    summary: Summary
    policy: str
    steps: list[StepRecord]
    phases: tuple[Phase, ...]

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
    """Return what happened, in a sentence."""
    by_k = _by_k(run.steps)
    if not by_k.get(0) or not by_k.get(STEPS):
        only = " and ".join(map(str, by_k))
        return f"K was {only} all the time: the load never crossed the line of {THRESHOLD} requests."
    drafting, skipping = by_k[STEPS], by_k[0]
    gain = sum(map(tokens_of, drafting)) / _live_rows(drafting)
    lost = f"{run.lost:,} step records were lost" if run.lost else "not one step record was lost"
    most = max(step.batch_size for step in skipping)
    longer = H200_8B.decode_seconds(STEPS, most) / H200_8B.decode_seconds(0, most)
    switches = f"{run.summary.switches} switch{'es' * (run.summary.switches != 1)}"
    return (
        f"While about {THRESHOLD} requests or fewer ran, the controller let the server draft {STEPS} tokens "
        f"a step, and each request got {gain:.1f} tokens per step instead of 1; when bursts brought up to "
        f"{most} at once, where such a step takes {longer:.1f} times as long as one without drafts, it "
        f"turned speculation off: {switches} in all, and {lost}."
    )
