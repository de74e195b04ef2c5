"""Traces for learning: read in columns, and nothing that cannot be true is passed on.

    paths ──► survey: whose they are ──► read_source: chunks of rows that passed, Findings of what did not

A trace is what a machine left behind, perhaps after a crash, a full disk, two servers of one name
or a copy of a copy. Whatever reads it to learn from reads it here. What is wrong is a *finding*:
the file, the row in it, the kind, and what was done about it. A row may be *excluded*, a trace may
be *refused*, and where records are missing the rows on both sides are *not joined*: no row of a
chunk ``follows`` one that is not the record made just before it. Memory is that of one chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from specpilot.controller.trace.reader import Segment, TraceError, segments
from specpilot.controller.trace.writer import SCHEMA
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import MASKED, DecisionSource, ForwardKind, Hello

CHUNK_ROWS, CHUNK_BYTES = 16384, 4 << 20
"""Record batches of a segment are put together up to so many: a live trace has one a second."""
CLOCK_BACK_SECONDS, CLOCK_FORWARD_SECONDS = 0.1, 10.0
"""``time`` may pass by so much less than ``seconds`` says, or more: a step whose record failed lies between."""
CONTEXT_SLACK = 2.0
"""Context may be so much more than every request at the model's limit: the host's lengths are estimates."""
LISTED_PER_KIND = 20
"""Findings of a kind that are listed one by one, per segment and in the end; all are counted."""

EXCLUDED, REFUSED, NOT_JOINED = "excluded", "refused", "not joined"
"""What was done about a finding."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a trace, where, and what was done about it."""

    path: str
    kind: str
    action: str
    text: str
    row: int | None = None
    """Within the segment, from 0."""
    record_seq: int | None = None
    """As the row has it, right or wrong."""
    records: int = 0
    """Records concerned: excluded, or missing."""

    def __str__(self) -> str:
        """Return one line for an operator.

        >>> str(Finding("t/000001.arrows", "probability", EXCLUDED, "probability is 0", row=7, record_seq=9))
        't/000001.arrows, row 7 (record 9): probability is 0: excluded'
        """
        place = "" if self.row is None else f", row {self.row:,}"
        number = "" if self.record_seq is None else f" (record {self.record_seq:,})"
        return f"{self.path}{place}{number}: {self.text}: {self.action}"


@dataclass
class Findings:
    """What was found: all of it counted, the first of each kind listed."""

    listed: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Findings by kind."""
    records: Counter[str] = field(default_factory=Counter)
    """Records concerned, by kind."""
    rows: int = 0
    """Rows read, good or bad."""
    excluded: int = 0
    """Rows left out; one may be wrong in several ways."""
    _listed_by: Counter[str] = field(default_factory=Counter)

    def add(self, finding: Finding) -> None:
        """Count a finding, and list it while there is room."""
        self.note(finding.kind, 1, finding.records)
        self.show(finding)

    def note(self, kind: str, findings: int, records: int) -> None:
        """Count findings without listing them."""
        self.counts[kind] += findings
        self.records[kind] += records

    def show(self, finding: Finding) -> None:
        """List a finding that was counted, while there is room."""
        if self._listed_by[finding.kind] < LISTED_PER_KIND:
            self._listed_by[finding.kind] += 1
            self.listed.append(finding)

    def merge(self, other: Findings) -> None:
        """Take in what was found in a later part."""
        self.counts.update(other.counts)
        self.records.update(other.records)
        self.rows += other.rows
        self.excluded += other.excluded
        for finding in other.listed:
            self.show(finding)

    def lines(self) -> list[str]:
        """Return a line per finding listed, and one for those that are not."""
        lines = [str(finding) for finding in self.listed]
        more = {kind: count - self._listed_by[kind] for kind, count in sorted(self.counts.items())}
        unlisted = ", ".join(f"{count:,} of {kind}" for kind, count in more.items() if count > 0)
        return [*lines, f"and {unlisted} more"] if unlisted else lines


@dataclass(frozen=True)
class Source:
    """The segments of one server with one fingerprint, in order."""

    server: str
    """NAME/RANK."""
    fingerprint: str
    hello: Hello
    """Of the newest segment."""
    segments: tuple[Path, ...]


@dataclass(frozen=True)
class Position:
    """The newest record in order, for what comes after it."""

    record_seq: int
    step: int
    time: float
    passed: bool = True
    """Whether the newest row then was this one, and passed."""


@dataclass(frozen=True)
class Ragged:
    """A column of lists: row i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: NDArray[np.int16]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Entries by row."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> NDArray[np.int32]:
        """The row of each value."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), self.lengths)


class Columns:
    """A record batch as numpy arrays: ``columns["seconds"]``; ``None`` in ``after_idle`` reads as False."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        """The ``pyarrow.RecordBatch``, of ``trace.SCHEMA``."""
        self._arrays: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            column = self.batch.column(name)
            if column.null_count:
                column = pc.fill_null(column, False if pa.types.is_boolean(column.type) else 0)
            array = self._arrays[name] = column.to_numpy(zero_copy_only=False)
        return array

    def ragged(self, name: str) -> Ragged:
        """Return ``accepted_drafts`` or ``truncated``."""
        column = self.batch.column(name)
        if column.null_count:
            column = pc.if_else(pc.is_null(column), pa.scalar([], column.type), column)
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
        if values.null_count:
            values = pc.fill_null(values, -2)
        return Ragged(values.to_numpy(), offsets - offsets[0])


@dataclass(frozen=True)
class Chunk:
    """Rows in a row of one segment that passed every check."""

    path: Path
    server: str
    hello: Hello
    fingerprint: str
    rows: NDArray[np.int64]
    """Where they stand in the segment, from 0; shape (rows,), rising."""
    follows: NDArray[np.bool_]
    """Is it the record made just after the one before it in this trace, in this chunk or the one before?"""
    columns: Columns


# -- whose traces these are --


def survey(paths: Iterable[Path], findings: Findings) -> list[Source]:
    """Return what ``paths`` hold, by server and fingerprint, in order of both; only headers are read.

    Raises TraceError where a path cannot be listed, or nothing is there that is a trace.
    """
    found: dict[tuple[str, str], list[tuple[Path, Hello]]] = {}
    paths = list(paths)
    before: Path | None = None
    for path in segments(paths):
        if before is not None and path.parent == before.parent:
            _check_numbers(before, path, findings)
        before = path
        try:
            hello = Segment(path).hello
        except TraceError as error:
            findings.add(Finding(str(path), "unreadable file", EXCLUDED, str(error).removeprefix(f"{path} ")))
            continue
        if hello is None:
            findings.add(Finding(str(path), "torn tail", EXCLUDED, "it ends within its header"))
            continue
        found.setdefault((server_key(hello), fingerprint(hello)), []).append((path, hello))
    if not found:
        where = ", ".join(map(str, paths)) or "no path"
        reasons = "".join(f"\n  {line}" for line in findings.lines())
        raise TraceError(f"{where}: no trace is there: name a trace folder, a server's folder or a segment{reasons}")
    return [
        Source(server, key, parts[-1][1], tuple(path for path, _ in parts))
        for (server, key), parts in sorted(found.items())
    ]


def server_key(hello: Hello) -> str:
    """Return the name under which the controller knows a server: NAME/RANK."""
    return f"{hello.server_id}/{hello.dp_rank}"


def chosen(sources: list[Source], server: str | None) -> list[Source]:
    """Return the sources whose server or fingerprint is ``server``, all for None; TraceError if there is none."""
    picked = [source for source in sources if server in (None, source.server, source.fingerprint)]
    if not picked:
        raise TraceError(f"no server or fingerprint {server!r} in these traces; they hold {described(sources)}")
    return picked


def described(sources: Iterable[Source]) -> str:
    """Return which servers there are, for an operator."""
    return ", ".join(
        f"{source.server} (fingerprint {source.fingerprint}, {len(source.segments)} segments, {source.segments[0]} …)"
        for source in sources
    )


def only(sources: list[Source]) -> Source:
    """Return the one source there is; TraceError, naming them, where there are several."""
    if len(sources) > 1:
        raise TraceError(
            f"these traces are of several servers or fingerprints, which are not mixed: {described(sources)}. "
            "Choose one with --server, by its name or its fingerprint, or give its segments alone"
        )
    return sources[0]


def _check_numbers(before: Path, path: Path, findings: Findings) -> None:
    if before.stem.isdecimal() and path.stem.isdecimal() and int(path.stem) > int(before.stem) + 1:
        missing = int(path.stem) - int(before.stem) - 1
        text = f"{missing:,} segments are missing between {before.name} and this one"
        findings.add(Finding(str(path), "missing segment", NOT_JOINED, text))


# -- reading --


def read_checked(
    paths: Iterable[Path], *, server: str | None = None, findings: Findings | None = None
) -> Iterator[Chunk]:
    """Return the rows of one server and fingerprint that passed every check, in order.

    ``server``: which, by name or fingerprint; not needed where there is one only. ``findings``
    collects what did not pass. Raises TraceError, before anything is read, where there are several,
    and at the end where there was no row at all.
    """
    findings = Findings() if findings is None else findings
    return _not_empty(only(chosen(survey(paths, findings), server)), findings)


def _not_empty(source: Source, findings: Findings) -> Iterator[Chunk]:
    rows = 0
    for chunk in read_source(source, findings):
        rows += len(chunk.rows)
        yield chunk
    if not rows:
        raise TraceError(empty(source, findings))


def empty(source: Source, findings: Findings) -> str:
    """Return why nothing can be taken from a source that gave no row."""
    where = ", ".join(map(str, source.segments[:3])) + (", …" if len(source.segments) > 3 else "")
    if not findings.rows:
        return f"the trace of {source.server} is empty: no whole record batch in {where}"
    reasons = "".join(f"\n  {line}" for line in findings.lines())
    return f"no record of {source.server} in {where} passes the checks:{reasons}"


def read_source(source: Source, findings: Findings) -> Iterator[Chunk]:
    """Yield the rows of ``source`` that pass, segment by segment; rows follow one another across segments too."""
    ends: dict[str, Position] = {}
    previous: tuple[Path, float] | None = None
    for path in source.segments:
        reader = SegmentReader(path, findings)
        if reader.hello is None:
            continue
        instance = reader.hello.instance
        after = ends.get(instance)
        if after is None and previous is not None and previous[0].parent == path.parent:
            reader.not_before = previous[1]
        yield from reader.chunks(after)
        if reader.last is not None:
            ends[instance] = reader.last
            previous = path, reader.last.time


class SegmentReader:
    """The rows of one segment that pass, in chunks; what does not goes to ``findings``."""

    def __init__(self, path: Path, findings: Findings) -> None:
        """Read the header; a file that is no segment is a finding, and ``hello`` is None then."""
        self.path = path
        self.hello: Hello | None = None
        self.first: Position | None = None
        """Of the first row whose number could be right; None before, or if there was none."""
        self.last: Position | None = None
        """Of the last such row so far."""
        self.not_before = float("-inf")
        """The clock showed this much when the server's previous process was last heard."""
        self._findings = findings
        try:
            self._segment = Segment(path)
            self.hello = self._segment.hello
        except TraceError as error:
            findings.add(Finding(str(path), "unreadable file", EXCLUDED, str(error).removeprefix(f"{path} ")))

    def chunks(self, after: Position | None = None) -> Iterator[Chunk]:
        """Yield the rows; ``after``: the last record of this process that was read before, if any."""
        if self.hello is None:
            return
        key, server = fingerprint(self.hello), server_key(self.hello)
        self.last = after
        self._joined = after is not None and after.passed  # the row before the next one passed
        row = 0
        for batch in _coalesced(self._segment):
            columns = Columns(batch)
            rows = np.arange(row, row + len(columns))
            row += len(columns)
            good, follows = self._judged(columns, rows)
            self._findings.rows += len(columns)
            if not good.all():
                self._findings.excluded += int(len(good) - good.sum())
                columns = Columns(batch.filter(pa.array(good)))
                rows, follows = rows[good], follows[good]
            if len(rows):
                yield Chunk(self.path, server, self.hello, key, rows, follows, columns)
        if self._segment.torn:
            text = f"a torn tail: {self._segment.bytes_lost:,} bytes after the last whole batch are not read"
            self._findings.add(Finding(str(self.path), "torn tail", EXCLUDED, text, row=row))

    def _judged(self, columns: Columns, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows pass, and which of these follow the row before them."""
        assert self.hello is not None
        good = np.ones(len(columns), bool)
        sane = np.ones(len(columns), bool)
        for name, rule, bad in _impossible(columns, self.hello):
            if bad.any():
                good &= ~bad
                if name in _PLACE:
                    sane &= ~bad
                kind = "probability" if name == "probability" else "value out of range"
                self._report(kind, bad, columns, rows, partial(_told, columns, name, rule))
        ordered, missing = self._ordered(columns, rows, sane)
        good &= ordered & self._clock(columns, rows, ordered)
        follows = np.zeros(len(columns), bool)
        follows[1:] = good[1:] & good[:-1] & ~missing[1:]
        follows[0] = good[0] and self._joined and not missing[0]
        self._joined = bool(good[-1])
        if ordered.any():
            newest = int(np.flatnonzero(ordered)[-1])
            self.first = self.first or _position(columns, int(ordered.argmax()), True)
            self.last = _position(columns, newest, self._joined)
        elif self.last is not None:
            self.last = replace(self.last, passed=False)
        return good, follows

    def _ordered(
        self, columns: Columns, rows: NDArray[np.int64], sane: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows are numbered after those before them, and before which of these some are missing.

        Every record is a forward pass, so ``step`` rises by at least as much as ``record_seq``: a
        number that breaks this is wrong, whereas a true gap does not.
        """
        seqs, steps = columns["record_seq"], columns["step"]
        before = None if self.last is None else (self.last.record_seq, self.last.step)
        ahead_seq, ahead_step = np.diff(seqs), np.diff(steps)
        begins = before is None or (seqs[0] > before[0] and steps[0] - before[1] >= seqs[0] - before[0])
        if sane.all() and begins and (ahead_seq > 0).all() and (ahead_step >= ahead_seq).all():
            ordered = sane
            lost = np.concatenate(([0 if before is None else seqs[0] - before[0] - 1], ahead_seq - 1))
        else:
            ordered, lost = _ordered_one_by_one(seqs.tolist(), steps.tolist(), sane.tolist(), before)
            wrong = sane & ~ordered
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
        fine = np.ones(len(columns), bool)
        places = np.flatnonzero(ordered)
        if not len(places):
            return fine
        times, seconds, seqs = (columns[name][places] for name in ("time", "seconds", "record_seq"))
        passed, expected, adjacent = np.diff(times), seconds[1:], np.diff(seqs) == 1
        if self.last is not None:
            passed = np.concatenate(([times[0] - self.last.time], passed))
            expected, adjacent = seconds, np.concatenate(([seqs[0] == self.last.record_seq + 1], adjacent))
        else:
            # Another process: how long the server was away is not known.
            passed = np.concatenate(([max(times[0] - self.not_before, -1e12)], passed))
            expected, adjacent = np.concatenate(([0.0], expected)), np.concatenate(([False], adjacent))
        jumps = ~clock_fits(passed, expected, adjacent)
        if jumps.any():
            fine[places[jumps]] = False
            by_row = np.zeros(len(columns))
            by_row[places] = passed
            self._report(
                "clock jump", ~fine, columns, rows, lambda i: f"the clock moved by {by_row[i]:.3f} s since the record "
                f"before, seconds is {columns['seconds'][i]:.3f}"
            )  # fmt: skip
        return fine

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
            self._findings.show(Finding(str(self.path), kind, action, text(i), int(rows[i]), seq, count))


def _told(columns: Columns, name: str, rule: str, row: int) -> str:
    return f"{name} {rule}" if name in _LISTS else f"{name} {columns[name][row]} {rule}"


def _position(columns: Columns, row: int, passed: bool) -> Position:
    seq, step, time = (columns[name][row].item() for name in ("record_seq", "step", "time"))
    return Position(seq, step, time, passed)


def _ordered_one_by_one(
    seqs: list[int], steps: list[int], sane: list[bool], before: tuple[int, int] | None
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
    for i, (seq, step, usable) in enumerate(zip(seqs, steps, sane, strict=True)):
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


def clock_fits(passed: Any, expected: Any, adjacent: Any) -> Any:
    """Return whether ``passed`` seconds can lie between two records; ``expected`` is what the later one says.

    All may be arrays. ``adjacent``: no record is missing between the two.
    """
    back = passed < expected - CLOCK_BACK_SECONDS
    return ~(back | (adjacent & (passed > expected + CLOCK_FORWARD_SECONDS)))


_PLACE = ("record_seq", "step", "time", "seconds")
"""What tells where a record belongs."""
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
"""Least and most of what a server can have recorded; of the wire's types where these say so."""
_SPANS: dict[str, tuple[float, float]] = {
    "time": (0.0, 2.0**33),
    "seconds": (0.0, 1e9),
    "launch_gap_seconds": (-1e9, 1e9),
}
"""The same in seconds, before the year 2242."""


def _impossible(columns: Columns, hello: Hello) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Yield (column, rule, rows that break it) of what no server can have recorded."""
    for field_ in SCHEMA:
        column = columns.batch.column(field_.name)
        if column.null_count and not field_.nullable:
            yield field_.name, "is missing", pc.is_null(column).to_numpy(zero_copy_only=False)
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
    batch, drafts = columns["batch_size"], np.maximum(columns["draft_tokens"].astype(np.int64) - 1, 0)
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


def _coalesced(segment: Segment) -> Iterator[Any]:
    """Yield a segment's record batches put together, as far as CHUNK_ROWS and CHUNK_BYTES allow."""
    waiting: list[Any] = []
    rows = size = 0
    for batch in segment:
        if waiting and (rows + batch.num_rows > CHUNK_ROWS or size + batch.nbytes > CHUNK_BYTES):
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
        if batch.num_rows:
            waiting.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
