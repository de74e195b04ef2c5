"""The records of a segment as numpy arrays: record batches of a useful size, by column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from specpilot.controller.trace.reader import Segment

CHUNK_ROWS, CHUNK_BYTES = 16384, 4 << 20
"""Largest size to which record batches of a segment are put together: a live trace has one batch a second."""


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
        """The ``pyarrow.RecordBatch``, with the columns of ``format.SCHEMA``."""
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

    @property
    def drafts(self) -> NDArray[np.int64]:
        """Draft tokens of each row's step, without the bonus token: 0 for a skip; shape (rows,)."""
        return np.maximum(self["draft_tokens"].astype(np.int64) - 1, 0)

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


def coalesced(segment: Segment) -> Iterator[Any]:
    """Yield a segment's record batches put together, as far as CHUNK_ROWS and CHUNK_BYTES allow."""
    waiting: list[Any] = []
    rows = size = 0
    for batch in segment:
        if waiting and (rows + batch.num_rows > CHUNK_ROWS or size + batch.nbytes > CHUNK_BYTES):
            yield _combined(waiting)
            waiting, rows, size = [], 0, 0
        if batch.num_rows:
            waiting.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
    if waiting:
        yield _combined(waiting)


def _combined(batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
