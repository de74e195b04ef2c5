"""Where a record is refused: what no server can have recorded, and records out of order or out of time.

A row that fails a check is *excluded*, and is a ``Finding``; where records are missing, the rows on both sides are
*not joined*. Values are checked by themselves, then the order of ``record_seq`` and ``step``, then the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from specpilot.controller.trace.columns import Columns
from specpilot.controller.trace.findings import EXCLUDED, LISTED_PER_KIND, NOT_JOINED, Finding, Findings
from specpilot.controller.trace.format import SCHEMA
from specpilot.sglang_hooks.wire import MASKED, DecisionSource, ForwardKind, Hello

CLOCK_BACK_SECONDS, CLOCK_FORWARD_SECONDS = 0.1, 10.0
"""Seconds that ``time`` may pass less than ``seconds`` says, or more: a step whose record failed lies between."""
CONTEXT_SLACK = 2.0
"""Context may be this many times every request at the model's limit: the host's lengths are estimates."""


# -- values --

_PLACE = ("record_seq", "step", "time", "seconds")
"""Columns that tell where a record belongs in its trace."""
_LISTS = ("accepted_drafts", "truncated")
_BOUNDS: dict[str, tuple[int, int]] = {
    "record_seq": (0, (1 << 53) - 1),
    "step": (0, (1 << 53) - 1),
    "batch_size": (1, 1 << 20),
    "padded_batch_size": (1, 1 << 20),
    "context_tokens": (0, (1 << 53) - 1),
    "steps": (0, 4096),
    "proposed_steps": (0, 4096),
    "held_steps": (0, 4096),
    "draft_tokens": (0, 4096),
    "running": (0, 1 << 20),
    "queued": (0, 1 << 30),
    "kv_used_tokens": (0, (1 << 53) - 1),
    "retracted": (0, 1 << 20),
    "source": (min(DecisionSource), max(DecisionSource)),
    "epoch": (0, (1 << 53) - 1),
    "cell": (-1, 1 << 30),
    "block": (-1, (1 << 62) - 1),
    "previous_kind": (min(ForwardKind), max(ForwardKind)),
    "previous_width": (0, 1 << 30),
    "forwards": (0, (1 << 53) - 1),
    "prefill_tokens": (0, (1 << 53) - 1),
}
"""Least and most of what a server can have recorded in whole numbers; those of the wire's types where it has them."""
_SPANS: dict[str, tuple[float, float]] = {
    "time": (0.0, 2.0**33),
    "seconds": (0.0, 1e9),
    "launch_gap_seconds": (-1e9, 1e9),
}
"""Least and most of the columns in seconds; ``time`` is before the year 2242."""


def impossible_values(columns: Columns, hello: Hello) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Yield (column, rule, rows that break it) of what no server can have recorded."""
    for field in SCHEMA:
        column = columns.batch.column(field.name)
        if column.null_count and not field.nullable:
            yield field.name, "is missing", pc.is_null(column).to_numpy(zero_copy_only=False)
    for name, (least, most) in _BOUNDS.items():
        values = columns[name]
        if values.min() < least or values.max() > most:
            yield name, f"is not within {least:,} and {most:,}", (values < least) | (values > most)
    for name, (shortest, longest) in _SPANS.items():
        values = columns[name]
        yield name, f"is not within {shortest:g} and {longest:g}", ~((values >= shortest) & (values <= longest))
    probability = columns["probability"]
    yield "probability", "is not above 0 and at most 1", ~((probability > 0.0) & (probability <= 1.0))
    unexplored = (columns["block"] < 0) & (columns["held_steps"] != columns["proposed_steps"])
    yield "held_steps", "is not what was proposed, though nothing was explored", unexplored
    yield "record_seq", "is more than the forward passes there were", columns["record_seq"] > columns["step"]
    batch, drafts = columns["batch_size"], columns.drafts
    yield "padded_batch_size", "is less than batch_size", columns["padded_batch_size"] < batch
    if hello.context_length:
        most_context = CONTEXT_SLACK * hello.context_length * np.maximum(batch, 0)
        yield "context_tokens", "is more than these requests can have", columns["context_tokens"] > most_context
    for name, least_value, limit, what in (
        ("accepted_drafts", MASKED, drafts, "more than were drafted"),
        ("truncated", 0, batch.astype(np.int64) - 1, "no row of the batch"),
    ):
        ragged = columns.ragged(name)
        lengths = ragged.lengths
        wrong = lengths != batch if name == "accepted_drafts" else lengths > batch
        yield name, "has not a value for each request" if name == "accepted_drafts" else "has too many rows", wrong
        if len(ragged.values):
            owners = ragged.owners
            beyond = (ragged.values < least_value) | (ragged.values > limit[owners])
            if beyond.any():
                rows = np.zeros(len(batch), bool)
                rows[owners[beyond]] = True
                yield name, f"has a value that is {what}, or below {least_value}", rows


# -- order and time --


@dataclass(frozen=True)
class RecordPosition:
    """Where a record stands in its process, for what comes after it."""

    record_seq: int
    step: int
    time: float
    """Seconds since the Unix epoch."""
    passed: bool = True
    """Whether the newest row then was this one, and passed."""


class RecordChecks:
    """The checks of one segment's records, chunk by chunk in order: which pass, and which follow the one before."""

    def __init__(
        self, path: Path, hello: Hello, findings: Findings, after: RecordPosition | None, not_before: float
    ) -> None:
        """``after`` and ``not_before``: as in ``SegmentReader.chunks``."""
        self.first: RecordPosition | None = None
        """The first row in order; None before, or if there was none."""
        self.last = after
        """The newest row in order so far."""
        self._path = path
        self._hello = hello
        self._findings = findings
        self._not_before = not_before
        self._joined = after is not None and after.passed  # the row before the next one passed

    def judge(self, columns: Columns, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows pass, and which of these follow the row before them.

        ``rows``: their positions in the segment; all arrays have shape (rows,).
        """
        passed = np.ones(len(columns), bool)
        placed = np.ones(len(columns), bool)
        for name, rule, bad in impossible_values(columns, self._hello):
            if bad.any():
                passed &= ~bad
                if name in _PLACE:
                    placed &= ~bad
                kind = "probability" if name == "probability" else "value out of range"
                self._report(kind, bad, columns, rows, partial(_told, columns, name, rule))
        ordered, gaps = self._ordered(columns, rows, placed)
        passed &= ordered & self._clock(columns, rows, ordered)
        follows = np.zeros(len(columns), bool)
        follows[1:] = passed[1:] & passed[:-1] & ~gaps[1:]
        follows[0] = passed[0] and self._joined and not gaps[0]
        self._joined = bool(passed[-1])
        if ordered.any():
            newest = int(np.flatnonzero(ordered)[-1])
            self.first = self.first or _position(columns, int(ordered.argmax()), True)
            self.last = _position(columns, newest, self._joined)
        elif self.last is not None:
            self.last = replace(self.last, passed=False)
        self._findings.rows += len(columns)
        self._findings.excluded += int(len(passed) - passed.sum())
        return passed, follows

    def _ordered(
        self, columns: Columns, rows: NDArray[np.int64], placed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows are numbered after those before them, and before which of these some are missing.

        Every record is a forward pass, so ``step`` rises by at least as much as ``record_seq``: a
        number that breaks this is wrong, whereas a true gap does not.
        """
        seqs, steps = columns["record_seq"], columns["step"]
        before = None if self.last is None else (self.last.record_seq, self.last.step)
        ahead_seq, ahead_step = np.diff(seqs), np.diff(steps)
        begins = before is None or (seqs[0] > before[0] and steps[0] - before[1] >= seqs[0] - before[0])
        if placed.all() and begins and (ahead_seq > 0).all() and (ahead_step >= ahead_seq).all():
            ordered = placed
            lost = np.concatenate(([0 if before is None else seqs[0] - before[0] - 1], ahead_seq - 1))
        else:
            ordered, lost = _ordered_one_by_one(seqs.tolist(), steps.tolist(), placed.tolist(), before)
            wrong = placed & ~ordered
            self._report(
                "out of order", wrong, columns, rows, lambda i: f"record_seq {seqs[i]} at step {steps[i]} comes again, "
                "goes back or runs ahead of the forward passes"
            )  # fmt: skip
        gaps = lost > 0
        self._report("missing records", gaps, columns, rows, lambda i: f"{lost[i]:,} records are missing before it",
                     NOT_JOINED, lost)  # fmt: skip
        return ordered, gaps

    def _clock(self, columns: Columns, rows: NDArray[np.int64], ordered: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return False for rows whose ``time`` has not passed as it must have since the ordered row before."""
        consistent = np.ones(len(columns), bool)
        places = np.flatnonzero(ordered)
        if not len(places):
            return consistent
        times, seconds, seqs = (columns[name][places] for name in ("time", "seconds", "record_seq"))
        elapsed, expected, adjacent = np.diff(times), seconds[1:], np.diff(seqs) == 1
        if self.last is not None:
            elapsed = np.concatenate(([times[0] - self.last.time], elapsed))
            expected, adjacent = seconds, np.concatenate(([seqs[0] == self.last.record_seq + 1], adjacent))
        else:
            # Another process: how long the server was away is not known.
            elapsed = np.concatenate(([max(times[0] - self._not_before, -1e12)], elapsed))
            expected, adjacent = np.concatenate(([0.0], expected)), np.concatenate(([False], adjacent))
        jumps = ~clock_fits(elapsed, expected, adjacent)
        if jumps.any():
            consistent[places[jumps]] = False
            by_row = np.zeros(len(columns))
            by_row[places] = elapsed
            self._report(
                "clock jump", ~consistent, columns, rows, lambda i: f"the clock moved by {by_row[i]:.3f} s since the "
                f"record before, seconds is {columns['seconds'][i]:.3f}"
            )  # fmt: skip
        return consistent

    def _report(
        self,
        kind: str,
        bad: NDArray[np.bool_],
        columns: Columns,
        rows: NDArray[np.int64],
        text: Callable[[int], str],
        action: str = EXCLUDED,
        records: NDArray[np.int64] | None = None,
    ) -> None:
        places = np.flatnonzero(bad)
        if not len(places):
            return
        self._findings.note(kind, len(places), len(places) if records is None else int(records[places].sum()))
        for i in places[:LISTED_PER_KIND].tolist():
            seq = int(columns["record_seq"][i])
            count = 1 if records is None else int(records[i])
            self._findings.show(Finding(str(self._path), kind, action, text(i), int(rows[i]), seq, count))


def _told(columns: Columns, name: str, rule: str, row: int) -> str:
    return f"{name} {rule}" if name in _LISTS else f"{name} {columns[name][row]} {rule}"


def _position(columns: Columns, row: int, passed: bool) -> RecordPosition:
    seq, step, time = (columns[name][row].item() for name in ("record_seq", "step", "time"))
    return RecordPosition(seq, step, time, passed)


def _ordered_one_by_one(
    seqs: list[int], steps: list[int], placed: list[bool], before: tuple[int, int] | None
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which rows are in order and how many records are missing before each, where some rows are wrong.

    What is out of order is held against the newest row in order. If that was the wrong one, the
    rows after it agree with each other: the second of them is taken.

    >>> ordered, lost = _ordered_one_by_one([4, 5, 900, 7, 9], [4, 5, 6, 7, 9], [True] * 5, (1, 1))
    >>> ordered.tolist(), lost.tolist()
    ([True, True, False, True, True], [2, 0, 0, 0, 1])
    """
    ordered, lost = np.zeros(len(seqs), bool), np.zeros(len(seqs), np.int64)
    skipped = 0
    wrong: tuple[int, int] | None = None
    for i, (seq, step, usable) in enumerate(zip(seqs, steps, placed, strict=True)):
        if not usable:
            skipped, wrong = skipped + 1, None
            continue
        fits = before is None or (seq > before[0] and step - before[1] >= seq - before[0])
        resumes = (
            before is not None and seq > before[0] and wrong is not None and seq == wrong[0] + 1 and step > wrong[1]
        )
        if not fits and not resumes:
            skipped, wrong = skipped + 1, (seq, step)
            continue
        ordered[i] = True
        lost[i] = max(seq - before[0] - 1 - skipped, 0) if before is not None else 0
        before, skipped, wrong = (seq, step), 0, None
    return ordered, lost


def clock_fits(elapsed: Any, expected: Any, adjacent: Any) -> Any:
    """Return whether ``elapsed`` seconds can lie between two records; ``expected`` is what the later one says.

    All may be arrays. ``adjacent``: no record is missing between the two.
    """
    back = elapsed < expected - CLOCK_BACK_SECONDS
    return ~(back | (adjacent & (elapsed > expected + CLOCK_FORWARD_SECONDS)))
