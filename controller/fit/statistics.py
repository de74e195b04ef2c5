"""What a trace says of cost and acceptance, as statistics that merge: the part of ``specpilot fit`` that reads.

    segment ──► TraceStatistics (counts, samples) ──┐
    segment ──► TraceStatistics ────────────────────┴─► join ──► TraceStatistics of the whole

Everything in a ``TraceStatistics`` is a count or a *sample*: of each cell the records with the smallest hashes
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
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specpilot.controller.trace.checked_reader import Chunk
from specpilot.controller.trace.columns import Columns
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.format import server_key
from specpilot.controller.trace.step_seconds import REASONS, SWITCHED, why_not_own
from specpilot.policies.models.acceptance import BANDS
from specpilot.policies.models.cost import CostModel
from specpilot.sglang_hooks.wire import Hello

SAMPLE, SWITCH_SAMPLE = 512, 128
"""Records kept of a cell and of a pair of K: 3 % of noise leaves 0.15 %."""
FOLDS, BLOCK_RECORDS = 5, 256
"""Held-out parts are every fifth block of so many records: neighbours share requests, so they stay together."""
BLOCKS = 512
"""Blocks that are kept one by one, those of the smallest hashes: how much acceptance varies over time."""
WIDTHS = 8192
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
class TraceStatistics:
    """The statistics of some segments of one server, or, joined, of a whole trace or a fleet's."""

    tree: bool
    """Whether drafts are trees: then the K as asked counts beside the draft tokens."""
    used: int = 0
    """Records whose seconds went into a cell."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Records whose seconds went into no cell, by the reason."""
    kinds: Counter[int] = field(default_factory=Counter)
    """Records by kind of step."""
    cells: dict[tuple[int, float], Sample] = field(default_factory=dict)
    """Samples of the records of a cell, by kind of step and size."""
    switches: dict[tuple[int, int], Sample] = field(default_factory=dict)
    """First steps after a switch, by the kinds before and after."""
    accepted: dict[tuple[int, int, int], NDArray[np.int64]] = field(default_factory=dict)
    """Requests that accepted so many drafts, by kind, band and fold: shape (drafts + 1, 2); [:, 1] ended there."""
    blocks: dict[int, dict[int, NDArray[np.int64]]] = field(default_factory=dict)
    """Requests that accepted so many drafts in single blocks, by the block's hash and kind; as in ``accepted``."""
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
        same = previous % WIDTHS == kinds % WIDTHS
        reason = why_not_own(columns, follows, same)
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
        depth = int((groups[0] % WIDTHS).max(initial=1))
        ended = np.zeros(len(accepted.values), np.int64)
        ended[accepted.offsets[truncated.owners] + truncated.values] = 1
        live = accepted.values >= 0
        values = accepted.values[live].astype(np.int64)
        place = (inverse.reshape(-1)[accepted.owners[live]] * depth + values) * 2 + ended[live]
        table = np.bincount(place, minlength=groups.shape[1] * depth * 2).reshape(-1, depth, 2)
        hashes = identities(hello, groups[2]).tolist()
        for (kind, band, block), hashed, counted in zip(groups.T.tolist(), hashes, table, strict=True):
            width = kind % WIDTHS
            if width > 1 and counted.any():
                counted = counted[:width].copy()
                _count(self.accepted, (kind, band, block % FOLDS), counted)
                _count(self.blocks.setdefault(hashed, {}), kind, counted)
        self._keep_blocks()

    def _keep_blocks(self) -> None:
        if len(self.blocks) > BLOCKS:
            for hashed in sorted(self.blocks)[BLOCKS:]:
                del self.blocks[hashed]

    def join(self, later: TraceStatistics) -> None:
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
        return asked * WIDTHS + columns["draft_tokens"].astype(np.int64)


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
