"""Segments read each by itself, and joined afterwards: what the records at their borders tell is not lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specpilot.controller.fit.statistics import TraceStatistics
from specpilot.controller.trace.checked_reader import SegmentReader
from specpilot.controller.trace.checks import CLOCK_BACK_SECONDS, RecordPosition, clock_fits
from specpilot.controller.trace.columns import Columns
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.format import server_key
from specpilot.controller.trace.step_seconds import NOT_FOLLOWING, REASONS
from specpilot.policies.models.cost import CostModel
from specpilot.sglang_hooks.wire import Hello


@dataclass
class SegmentStatistics:
    """The statistics of one segment, read without the others."""

    path: Path
    part: TraceStatistics
    hello: Hello | None = None
    """The server's description; None where the file could not be read."""
    first: RecordPosition | None = None
    last: RecordPosition | None = None
    head: Any = None
    """The first row as a record batch, if it passed."""
    tail: Any = None
    """The last row as a record batch, if it passed."""

    @property
    def process(self) -> tuple[str, str]:
        """The process that made the records, by server and instance; empty where the file could not be read."""
        return ("", "") if self.hello is None else (server_key(self.hello), self.hello.instance)


def read_segment(
    path: Path, after: RecordPosition | None = None, before: Any = None, not_before: float = float("-inf")
) -> SegmentStatistics:
    """Return the statistics of a segment.

    ``after`` and ``before``: the position and, if it passed, the row of the last record of the same
    process, where the segment is to be read as what follows it; ``not_before``: as in ``SegmentReader.chunks``.
    """
    findings = Findings()
    reader = SegmentReader(path, findings)
    hello = reader.hello
    if hello is None:
        return SegmentStatistics(path, TraceStatistics(False, findings=findings))
    part = TraceStatistics(hello.topk > 1, findings=findings)
    read = SegmentStatistics(path, part, hello)
    sizes = CostModel(hello)
    for chunk in reader.chunks(after, not_before):
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
        self.part = TraceStatistics(hello.topk > 1)
        self._sizes = CostModel(hello)
        self._ends: dict[tuple[str, str], tuple[RecordPosition, Any]] = {}
        self._newest: tuple[Path, float] | None = None

    def add(self, read: SegmentStatistics) -> None:
        """Join a segment; where it does not simply go on where its process was left, it is read again for that."""
        end = self._ends.get(read.process)
        if read.first is not None and end is not None:
            after, tail = end
            ahead, steps = read.first.record_seq - after.record_seq, read.first.step - after.step
            head = None if read.head is None else Columns(read.head)
            if ahead != 1 or steps < 1 or head is None or not self._in_time(head, after):
                read = read_segment(read.path, after, tail)
            elif tail is not None and read.hello is not None:
                read.part.reasons[REASONS[NOT_FOLLOWING]] -= 1
                self.part.take_costs(head, np.ones(1, bool), tail, read.hello, self._sizes)
        elif read.first is not None and self._newest is not None:
            path, time = self._newest
            if path.parent == read.path.parent and read.first.time < time - CLOCK_BACK_SECONDS:
                read = read_segment(read.path, not_before=time)
        self.part.join(read.part)
        if read.last is not None:
            self._ends[read.process] = read.last, read.tail
            self._newest = read.path, read.last.time

    @staticmethod
    def _in_time(head: Columns, after: RecordPosition) -> bool:
        return bool(clock_fits(head["time"][0] - after.time, head["seconds"][0], np.True_))
