"""What a trace says of cost and acceptance, as statistics that merge: the part of ``specpilot fit`` that reads.

    segment ──► Part (counts, samples, its first and last record) ──┐
    segment ──► Part ───────────────────────────────────────────────┴─► join ──► Part of the whole

Everything in a ``Part`` is a count or a *sample*: of each cell the records with the smallest hashes
of their identity (a bottom-k sketch, Cohen & Kaplan 2007), which is a uniform sample and depends on
the set of records alone. So nothing depends on how a trace was cut, on which core read what, or on
the order, to the last bit; and memory does not depend on the trace's length.

Acceptance needs no sample: how often each number of drafts was accepted, by K, band and fold, and
how often a request ended there, holds all trials with their censoring exactly.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from specpilot.controller.trace.checks import (
    CLOCK_BACK_SECONDS,
    Chunk,
    Columns,
    Findings,
    Position,
    SegmentReader,
    clock_fits,
    server_key,
)
from specpilot.policies.models.acceptance import BANDS
from specpilot.policies.models.cost import HOST_GAP, OVERLAP_GAP, CostModel
from specpilot.sglang_hooks.wire import ForwardKind, Hello

SAMPLE, SWITCH_SAMPLE = 512, 128
"""Records kept of a cell and of a pair of K: 3 % of noise leaves 0.15 %."""
FOLDS, BLOCK_RECORDS = 5, 256
"""Held-out parts are every fifth block of so many records: neighbours share requests, so they stay together."""
BLOCKS = 512
"""Blocks that are kept one by one, those of the smallest hashes: how much acceptance varies over time."""
_WIDTHS = 8192
"""More than ``draft_tokens`` can be: a *kind* of step is K as asked times this, plus its draft tokens."""

ROW = np.dtype([("hash", "u8"), ("seconds", "f8"), ("context", "i8"), ("size", "f8"), ("fold", "i8")])
"""A record in a sample; ``context`` is in tokens of all requests."""


@dataclass
class Sample:
    """The ``limit`` records with the smallest hashes of those seen, and how many were seen."""

    limit: int
    seen: int = 0
    rows: NDArray[Any] = field(default_factory=lambda: np.empty(0, ROW))

    def add(self, rows: NDArray[Any], seen: int) -> None:
        """Take in some more of the same kind, of which ``seen`` there were."""
        self.seen += seen
        if len(self.rows) == self.limit:
            rows = rows[rows["hash"] < self.rows["hash"][-1]]
        if len(rows):
            both = np.concatenate((self.rows, rows))
            self.rows = both[np.lexsort((both["seconds"], both["hash"]))[: self.limit]]


@dataclass
class Part:
    """The statistics of some segments of one server, or, joined, of a whole trace or a fleet's."""

    tree: bool
    """Drafts are trees: the K as asked counts beside the draft tokens."""
    used: int = 0
    """Records whose seconds went into a cell."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of the other records, why not."""
    kinds: Counter[int] = field(default_factory=Counter)
    """Records by kind of step."""
    cells: dict[tuple[int, float], Sample] = field(default_factory=dict)
    """By kind of step and size."""
    switches: dict[tuple[int, int], Sample] = field(default_factory=dict)
    """First steps after a switch, by the kinds before and after."""
    accepted: dict[tuple[int, int, int], NDArray[np.int64]] = field(default_factory=dict)
    """By kind, band and fold: requests that accepted so many drafts, shape (drafts + 1, 2); [:, 1] ended there."""
    blocks: dict[int, dict[int, NDArray[np.int64]]] = field(default_factory=dict)
    """The same of single blocks, by the block's hash and kind."""
    findings: Findings = field(default_factory=Findings)

    def take(self, chunk: Chunk, before: Any | None, size_of: CostModel) -> None:
        """Count the rows of a chunk; ``before``: the row before it as a record batch, where it follows that."""
        columns = chunk.columns
        self._take_acceptance(columns, chunk.hello)
        self.take_costs(columns, chunk.follows, before, chunk.hello, size_of)

    def take_costs(
        self, columns: Columns, follows: NDArray[np.bool_], before: Any | None, hello: Hello, size_of: CostModel
    ) -> None:
        """Count the seconds of rows, and what switching took."""
        kinds = self._kinds_of(columns)
        previous = np.concatenate((kinds[:1], kinds[:-1]))
        if before is not None:
            previous[0] = self._kinds_of(Columns(before))[0]
        same = previous % _WIDTHS == kinds % _WIDTHS
        reason = why_not(columns, follows, same)
        for number, count in enumerate(np.bincount(reason, minlength=len(REASONS)).tolist()):
            if count and number:
                self.reasons[REASONS[number]] += count
        rows = np.empty(len(columns), ROW)
        rows["hash"] = identities(hello, columns["record_seq"])
        rows["seconds"] = columns["seconds"]
        rows["context"] = columns["context_tokens"]
        rows["fold"] = folds_of(columns)
        batches, inverse = np.unique(columns["batch_size"], return_inverse=True)
        rows["size"] = np.array([size_of.size(batch) for batch in batches.tolist()])[inverse]
        fit = reason == 0
        self.used += int(fit.sum())
        for (kind, size), group in _groups(kinds[fit], rows[fit]["size"], rows[fit]):
            self.cells.setdefault((int(kind), float(size)), Sample(SAMPLE)).add(group, len(group))
        switched = reason == SWITCHED
        for (old, new), group in _groups(previous[switched], kinds[switched], rows[switched]):
            self.switches.setdefault((int(old), int(new)), Sample(SWITCH_SAMPLE)).add(group, len(group))

    def _take_acceptance(self, columns: Columns, hello: Hello) -> None:
        kinds = self._kinds_of(columns)
        self.kinds.update(dict(zip(*(array.tolist() for array in np.unique(kinds, return_counts=True)), strict=True)))
        accepted, truncated = columns.ragged("accepted_drafts"), columns.ragged("truncated")
        places = np.stack((kinds, bands_of(columns), columns["record_seq"] // BLOCK_RECORDS))
        groups, inverse = np.unique(places, axis=1, return_inverse=True)
        depth = int((groups[0] % _WIDTHS).max(initial=1))
        ended = np.zeros(len(accepted.values), np.int64)
        ended[accepted.offsets[truncated.owners] + truncated.values] = 1
        live = accepted.values >= 0
        values = accepted.values[live].astype(np.int64)
        place = (inverse.reshape(-1)[accepted.owners[live]] * depth + values) * 2 + ended[live]
        table = np.bincount(place, minlength=groups.shape[1] * depth * 2).reshape(-1, depth, 2)
        hashes = identities(hello, groups[2]).tolist()
        for (kind, band, block), hashed, counted in zip(groups.T.tolist(), hashes, table, strict=True):
            width = kind % _WIDTHS
            if width > 1 and counted.any():
                counted = counted[:width].copy()
                _count(self.accepted, (kind, band, block % FOLDS), counted)
                _count(self.blocks.setdefault(hashed, {}), kind, counted)
        self._keep_blocks()

    def _keep_blocks(self) -> None:
        if len(self.blocks) > BLOCKS:
            for hashed in sorted(self.blocks)[BLOCKS:]:
                del self.blocks[hashed]

    def join(self, later: Part) -> None:
        """Take in the statistics of what was read apart from these; findings are kept in the order of joining."""
        self.used += later.used
        self.reasons.update(later.reasons)
        self.kinds.update(later.kinds)
        self.findings.merge(later.findings)
        _merge(self.cells, later.cells)
        _merge(self.switches, later.switches)
        for place, counted in later.accepted.items():
            _count(self.accepted, place, counted)
        for hashed, by_kind in later.blocks.items():
            for kind, counted in by_kind.items():
                _count(self.blocks.setdefault(hashed, {}), kind, counted)
        self._keep_blocks()

    def _kinds_of(self, columns: Columns) -> NDArray[np.int64]:
        asked = columns["steps"].astype(np.int64) if self.tree else 0
        return asked * _WIDTHS + columns["draft_tokens"].astype(np.int64)


def kind_steps(kinds: Counter[int], tree: bool) -> dict[int, int | None]:
    """Return the K of each kind of step, None where it cannot be told; as ``policies/models/applied.py`` tells it.

    >>> kind_steps(Counter({2 * 8192 + 8: 3, 3 * 8192 + 16: 1, 2 * 8192 + 16: 1, 2 * 8192 + 4: 1}), tree=True)
    {16392: 2, 24592: 3, 16400: 3, 16388: None}
    """
    if not tree:
        return {kind: max(kind % _WIDTHS - 1, 0) for kind in kinds}
    usual: dict[int, int] = {}
    for kind, _ in sorted(kinds.items(), key=lambda item: (-item[1], item[0])):
        usual.setdefault(kind // _WIDTHS, kind % _WIDTHS)
    of_width = {width: steps for steps, width in sorted(usual.items(), reverse=True)}
    return {
        kind: kind // _WIDTHS if usual[kind // _WIDTHS] == kind % _WIDTHS else of_width.get(kind % _WIDTHS)
        for kind in kinds
    }


_Key = TypeVar("_Key")


def _count(table: dict[_Key, NDArray[np.int64]], key: _Key, counted: NDArray[np.int64]) -> None:
    known = table.get(key)
    table[key] = counted if known is None else known + counted


def _merge(mine: dict[_Key, Sample], theirs: dict[_Key, Sample]) -> None:
    for key, sample in theirs.items():
        if key in mine:
            mine[key].add(sample.rows, sample.seen)
        else:
            mine[key] = sample


# -- one row at a time --

REASONS = (
    "",
    "the record before it is missing or was excluded",
    "the batch had a grammar",
    "the server had been idle",
    "other forward passes came between",
    "the pass before was no decode",
    "no time is given",
    "the host waited before the launch",
    "K had just changed",
)
"""Why a record's seconds are not taken for a step's own, the first that applies; "": they are."""
NOT_FOLLOWING, SWITCHED = 1, len(REASONS) - 1


def why_not(columns: Columns, follows: NDArray[np.bool_], same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index in REASONS for each row: ``specpilot.policies.models.cost.fit_to_learn`` for columns.

    ``follows``: the row before is the record made just before; ``same``: of as many draft tokens.
    """
    seconds = columns["seconds"]
    waited = columns["launch_gap_seconds"] > np.where(columns["overlap"], OVERLAP_GAP, HOST_GAP) * seconds
    tests = (
        ~follows,
        columns["grammar"],
        columns["after_idle"],
        columns["forwards"] != 1,
        columns["previous_kind"] != ForwardKind.DECODE,
        seconds <= 0.0,
        waited,
        ~same,
    )
    return np.select(tests, range(1, len(REASONS)), 0)


def bands_of(columns: Columns) -> NDArray[np.int64]:
    """Return the band of acceptance that each row is in, as ``BANDS.cell`` does."""
    batch = columns["batch_size"]
    row = np.searchsorted(BANDS.batch_edges, batch)
    column = np.searchsorted(BANDS.context_edges, columns["context_tokens"] / batch)
    bands: NDArray[np.int64] = row * (len(BANDS.context_edges) + 1) + column
    return bands


def folds_of(columns: Columns) -> NDArray[np.int64]:
    """Return in which fold each row is held out."""
    folds: NDArray[np.int64] = columns["record_seq"] // BLOCK_RECORDS % FOLDS
    return folds


def identities(hello: Hello, record_seq: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of which record each row is: of its process and number (SplitMix64, Steele et al. 2014)."""
    process = f"{server_key(hello)} {hello.instance}".encode()
    seed = int.from_bytes(hashlib.blake2b(process, digest_size=8).digest(), "little")
    z = record_seq.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return hashed


def _groups(first: NDArray[Any], second: NDArray[Any], rows: NDArray[Any]) -> Iterator[tuple[Any, NDArray[Any]]]:
    """Yield ((first, second), rows) for each pair of values that occurs."""
    if not len(rows):
        return
    order = np.lexsort((second, first))
    first, second, rows = first[order], second[order], rows[order]
    starts = np.flatnonzero(np.concatenate(([True], (first[1:] != first[:-1]) | (second[1:] != second[:-1]))))
    for start, end in pairwise([*starts.tolist(), len(rows)]):
        yield (first[start].item(), second[start].item()), rows[start:end]


# -- a segment, and what it takes to join it to those before it --


@dataclass
class SegmentPart:
    """What one segment says, read without the others."""

    path: Path
    part: Part
    process: tuple[str, str] = ("", "")
    """Server and instance; empty where the file could not be read."""
    first: Position | None = None
    last: Position | None = None
    head: Any = None
    """The first row as a record batch, if it passed."""
    tail: Any = None
    """The last row, if it passed."""


def read_segment(
    path: Path, after: Position | None = None, before: Any = None, not_before: float = float("-inf")
) -> SegmentPart:
    """Return the statistics of a segment.

    ``after`` and ``before``: the position and, if it passed, the row of the last record of the same
    process, where the segment is to be read as what follows it; ``not_before``: as in ``SegmentReader``.
    """
    findings = Findings()
    reader = SegmentReader(path, findings)
    hello = reader.hello
    if hello is None:
        return SegmentPart(path, Part(False, findings=findings))
    reader.not_before = not_before
    part = Part(hello.topk > 1, findings=findings)
    read = SegmentPart(path, part, (server_key(hello), hello.instance))
    sizes = CostModel(hello)
    for chunk in reader.chunks(after):
        part.take(chunk, before, sizes)
        batch = chunk.columns.batch
        if read.head is None and not chunk.rows[0]:
            read.head = batch.take([0])
        before = batch.take([len(batch) - 1])
    read.first, read.last = reader.first, reader.last
    read.tail = before if reader.last is not None and reader.last.passed else None
    return read


class Joined:
    """Statistics of segments that are joined one after the other, each server's in order."""

    def __init__(self, hello: Hello) -> None:
        """``hello``: of any of the servers; they share a fingerprint."""
        self.part = Part(hello.topk > 1)
        self._hello = hello
        self._sizes = CostModel(hello)
        self._ends: dict[tuple[str, str], tuple[Position, Any]] = {}
        self._newest: tuple[Path, float] | None = None

    def add(self, read: SegmentPart) -> None:
        """Join a segment; where it does not simply go on where its process was left, it is read again for that."""
        end = self._ends.get(read.process)
        if read.first is not None and end is not None:
            after, tail = end
            ahead, steps = read.first.record_seq - after.record_seq, read.first.step - after.step
            head = None if read.head is None else Columns(read.head)
            if ahead != 1 or steps < 1 or head is None or not self._in_time(head, after):
                read = read_segment(read.path, after, tail)
            elif tail is not None:
                hello = msgspec.structs.replace(self._hello, **_named(read.process))
                read.part.reasons[REASONS[NOT_FOLLOWING]] -= 1
                self.part.take_costs(head, np.ones(1, bool), tail, hello, self._sizes)
        elif read.first is not None and self._newest is not None:
            path, time = self._newest
            if path.parent == read.path.parent and read.first.time < time - CLOCK_BACK_SECONDS:
                read = read_segment(read.path, not_before=time)
        self.part.join(read.part)
        if read.last is not None:
            self._ends[read.process] = read.last, read.tail
            self._newest = read.path, read.last.time

    @staticmethod
    def _in_time(head: Columns, after: Position) -> bool:
        return bool(clock_fits(head["time"][0] - after.time, head["seconds"][0], np.True_))


def _named(process: tuple[str, str]) -> dict[str, Any]:
    server, instance = process
    server_id, _, rank = server.rpartition("/")
    return {"server_id": server_id, "dp_rank": int(rank), "instance": instance}
