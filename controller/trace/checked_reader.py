"""Traces for learning: read in columns, and nothing that cannot be true is passed on.

    paths ──► sources: whose they are ──► read_source: chunks of rows that passed, Findings of what did not

A trace is what a machine left behind, perhaps after a crash, a full disk, two servers of one name or a copy of a
copy. Whatever reads it to learn from reads it here; what a record must pass is in ``checks``. No row of a chunk
``follows`` one that is not the record made just before it. Memory is that of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specpilot.controller.trace.checks import RecordChecks, RecordPosition
from specpilot.controller.trace.columns import Columns, coalesced
from specpilot.controller.trace.findings import EXCLUDED, Finding, Findings
from specpilot.controller.trace.format import server_key
from specpilot.controller.trace.reader import TraceError
from specpilot.controller.trace.sources import TraceSource, open_segment, single_source, why_empty
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import Hello


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one segment that passed every check."""

    path: Path
    server: str
    """The server's name, NAME/RANK."""
    hello: Hello
    fingerprint: str
    rows: NDArray[np.int64]
    """Positions in the segment, from 0; shape (rows,), rising."""
    follows: NDArray[np.bool_]
    """Whether a row is the record made just after the one before it, in this chunk or the chunk before."""
    columns: Columns


def read_checked(
    paths: Iterable[Path], *, server: str | None = None, findings: Findings | None = None
) -> Iterator[Chunk]:
    """Return the rows of one server and fingerprint that passed every check, in order.

    ``server``: which, by name or fingerprint; not needed where there is one only. ``findings``
    collects what did not pass. Raises TraceError, before anything is read, where there are several,
    and at the end where there was no row at all.
    """
    findings = Findings() if findings is None else findings
    return read_source(single_source(paths, server, findings), findings)


def read_source(source: TraceSource, findings: Findings) -> Iterator[Chunk]:
    """Yield the rows of ``source`` that pass, segment by segment; rows follow one another across segments too.

    Raises TraceError at the end if there was none.
    """
    ends: dict[str, RecordPosition] = {}
    previous: tuple[Path, float] | None = None
    empty = True
    for path in source.segments:
        reader = SegmentReader(path, findings)
        if reader.hello is None:
            continue
        instance = reader.hello.instance
        after = ends.get(instance)
        restarted = after is None and previous is not None and previous[0].parent == path.parent
        for chunk in reader.chunks(after, previous[1] if restarted and previous is not None else float("-inf")):
            empty = False
            yield chunk
        if reader.last is not None:
            ends[instance] = reader.last
            previous = path, reader.last.time
    if empty:
        raise TraceError(why_empty(source, findings))


class SegmentReader:
    """The rows of one segment that pass, in chunks; what does not pass goes to ``findings``."""

    def __init__(self, path: Path, findings: Findings) -> None:
        """Read the header; a file that is no segment is a finding, and ``hello`` is None then."""
        self.path = path
        self._findings = findings
        self._segment = open_segment(path, findings)
        self.hello: Hello | None = None if self._segment is None else self._segment.hello
        self._checks: RecordChecks | None = None

    @property
    def first(self) -> RecordPosition | None:
        """The first record read in order, None if there was none yet."""
        return None if self._checks is None else self._checks.first

    @property
    def last(self) -> RecordPosition | None:
        """The newest record in order so far; at first the one that ``chunks`` was told to go on after."""
        return None if self._checks is None else self._checks.last

    def chunks(self, after: RecordPosition | None = None, not_before: float = float("-inf")) -> Iterator[Chunk]:
        """Yield the rows.

        ``after``: the last record of this process that was read before, if any. ``not_before``: what the clock
        showed when the server's previous process was last heard, in seconds since the Unix epoch.
        """
        if self._segment is None or self.hello is None:
            return
        self._checks = RecordChecks(self.path, self.hello, self._findings, after, not_before)
        key, server = fingerprint(self.hello), server_key(self.hello)
        row = 0
        for batch in coalesced(self._segment):
            columns = Columns(batch)
            rows = np.arange(row, row + len(columns))
            row += len(columns)
            passed, follows = self._checks.judge(columns, rows)
            if not passed.all():
                columns = Columns(batch.filter(pa.array(passed)))
                rows, follows = rows[passed], follows[passed]
            if len(rows):
                yield Chunk(self.path, server, self.hello, key, rows, follows, columns)
        if self._segment.torn:
            text = f"a torn tail: {self._segment.bytes_lost:,} bytes after the last whole batch are not read"
            self._findings.add(Finding(str(self.path), "torn tail", EXCLUDED, text, row=row))
