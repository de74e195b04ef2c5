"""What ``specpilot evaluate`` says: rows for scripts as JSON, for a person as tables, and why something is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

EFFICIENCY, EFFECT = "per-step efficiency", "effect on the server"
"""Kinds of estimate: from the logged steps in their own states, and from a simulation of the whole server."""
HALF_WIDTH = 0.02
"""Share of the estimate that the suggested exploration floor brings the interval down to, to each side."""
LISTED_CELLS = 8
"""Unanswered cells that are listed of a policy; ``--json`` has them all."""


class UnansweredCell(msgspec.Struct, frozen=True):
    """A region of batch size and context, and a K, of which the log tells too little."""

    batch: str
    """Batch sizes, in words."""
    context: str
    """Contexts in tokens per request, in words."""
    steps: int
    """K that the policy would run there."""
    logged_steps: int
    """Decode steps that were logged in the region."""
    effective_blocks: float
    reason: str


class Row(msgspec.Struct, frozen=True):
    """One policy by one estimator, as ``--json`` has it."""

    policy: str
    estimator: str
    kind: str
    """What is estimated: ``EFFICIENCY`` or ``EFFECT``."""
    model_based: bool
    """Whether the estimate comes from a simulation on fitted models."""
    estimate: float | None
    """Tokens per second, of decoding for ``EFFICIENCY``, of the server's time for ``EFFECT``; None if refused."""
    low: float | None
    """Lower end of the estimate's 95 % interval, in tokens per second."""
    high: float | None
    """Upper end of the estimate's 95 % interval, in tokens per second."""
    effective_samples: float
    """Independent draws behind the estimate: blocks of steps, or runs of a simulation."""
    gain: float | None = None
    """Gain in speed over what was logged, as a share, for the same tokens in the same states."""
    gain_low: float | None = None
    """Lower end of the gain's 95 % interval."""
    gain_high: float | None = None
    """Upper end of the gain's 95 % interval."""
    answered: float = 1.0
    """Share of the logged steps that the estimate is about."""
    seconds_per_token: float | None = None
    """Mean time per output token of a replay; None for ``EFFICIENCY``."""
    reason: str = ""
    """Why there is no estimate."""
    unanswered: list[UnansweredCell] = []
    exploration_floor: float | None = None
    """Exploration floor with which a log of as many steps would answer; None: it answers, or no floor would do."""


@dataclass(frozen=True)
class Evaluation:
    """All rows, and what they rest on."""

    server: str
    steps: int
    rows: list[Row]
    notes: list[str]
    findings: list[str]


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Write an evaluation for a person: a table per kind, then what was refused, and why."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for line in evaluation.findings:
        say(line)
    say(f"{evaluation.server}: {evaluation.steps:,} decode steps")
    table = Table(title=f"{EFFICIENCY}: tokens per second of decoding, in the states that were logged")
    for name in ("policy", "estimator"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "95 % interval", "gain, same work", "effective samples", "of the steps"):
        table.add_column(name, justify="right")
    for row in evaluation.rows:
        if row.kind == EFFICIENCY:
            table.add_row(row.policy, row.estimator, *_figures(row))
    console.print(table)
    replayed = [row for row in evaluation.rows if row.kind == EFFECT]
    if replayed:
        table = Table(title=f"{EFFECT}: model-based, requests of the trace on a simulated server")
        for name in ("policy", "estimator"):
            table.add_column(name, no_wrap=True)
        for name in ("tokens/s", "95 % of the seeds", "ms/token"):
            table.add_column(name, justify="right")
        for row in replayed:
            if row.estimate is None:
                table.add_row(row.policy, row.estimator, "refused", "", "")
            else:
                wait = "-" if row.seconds_per_token is None else f"{1e3 * row.seconds_per_token:.2f}"
                table.add_row(
                    row.policy, row.estimator, f"{row.estimate:,.0f}", f"{row.low:,.0f} … {row.high:,.0f}", wait
                )
        console.print(table)
    for line in refusals(evaluation.rows):
        say(line)
    for note in evaluation.notes:
        say(note)


def _figures(row: Row) -> list[str]:
    if row.estimate is None:
        return ["refused", "", "", "", f"{100.0 * row.answered:.1f} %"]
    assert row.gain is not None
    assert row.gain_low is not None
    assert row.gain_high is not None
    return [
        f"{row.estimate:,.1f}",
        f"{row.low:,.1f} … {row.high:,.1f}",
        f"{100.0 * row.gain:+.2f} % ({100.0 * row.gain_low:+.2f} … {100.0 * row.gain_high:+.2f})",
        f"{row.effective_samples:,.0f}",
        f"{100.0 * row.answered:.1f} %",
    ]


def refusals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines that say what the log cannot tell, and what would help."""
    told: set[str] = set()
    for row in rows:
        key = f"{row.policy} {row.kind}"
        if key in told or not (row.reason or row.unanswered):
            continue
        told.add(key)
        if row.kind == EFFECT:
            yield f"{row.policy} cannot be replayed: {row.reason}"
            continue
        yield f"{row.policy}: {row.reason or f'left out, {100.0 * (1.0 - row.answered):.2f} % of the steps'}:"
        for cell in row.unanswered[:LISTED_CELLS]:
            yield f"  batch {cell.batch}, context {cell.context}: {cell.reason} ({cell.logged_steps:,} steps)"
        if len(row.unanswered) > LISTED_CELLS:
            yield f"  and {len(row.unanswered) - LISTED_CELLS} more such cells"
        if row.estimate is not None:
            continue
        if row.exploration_floor is None:
            yield "  no exploration floor makes so short a log answer: record for longer"
        else:
            yield (
                f"  recorded with policy.exploration_floor = {row.exploration_floor:g}, as many steps would answer, "
                f"within ±{100.0 * HALF_WIDTH:g} %; more steps, where a K loses so much that it is drawn more rarely"
            )
