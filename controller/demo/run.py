"""A run of the demo: its steps, what was learned in it, and the figures for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specpilot.controller.simulation.server import MAX_RUNNING_REQUESTS
from specpilot.controller.simulation.totals import SimSummary
from specpilot.controller.simulation.workload import Phase
from specpilot.controller.web.view import KView, ServerView
from specpilot.sglang_hooks.wire import MASKED, StepRecord

TOLD_BATCHES = (8, 64)
"""Batch sizes at which the demo says why K is what it is."""
MEAN_SECONDS = 1.0
"""Seconds over which the throughput is averaged, live and in the picture."""
IDLE_GAP_SECONDS = 0.25
"""In a longer gap between two decode steps with one prefill at most the server was idle."""


class DemoError(RuntimeError):
    """The demo cannot go on; the text says which part failed and how."""


@dataclass(frozen=True)
class Learned:
    """What the policy expects at one batch size."""

    batch_size: int
    choice: int
    """The K that is chosen."""
    options: dict[int, KView]
    """What is expected of each K, by rising K."""

    @property
    def drafting(self) -> KView:
        """The K above 0 that is expected to make the most tokens a second."""
        return max((option for k, option in self.options.items() if k), key=lambda option: option.tokens_per_second)

    @property
    def gain(self) -> float:
        """Tokens a second of ``drafting`` over those of K=0, less 1."""
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
class DemoRun:
    """A finished run of the demo, as the trace, the page and the server tell it."""

    seconds: float
    """Length that was asked for."""
    summary: SimSummary
    """The server's totals."""
    steps: list[StepRecord]
    """The steps that the trace holds."""
    phases: tuple[Phase, ...]
    """The kinds of text that the clients asked for, by time."""
    page: ServerView
    """The server as the page shows it at the end."""
    policy: str
    """Name of the policy of the newest table."""

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
    """Return the seconds before ``step`` in which nothing ran, as far as a record can tell."""
    gap = step.launch_gap_seconds
    return gap if gap > IDLE_GAP_SECONDS and step.forwards <= 2 else 0.0
