"""The format of a trace: columns and metadata of its segments, and how folders and files are named.

    <trace.directory>/<server, percent-encoded>/000001.arrows, 000002.arrows, ...

A *segment* is an Arrow IPC stream: a schema message with the server's Hello in its metadata, then record batches,
each handed to the operating system in full before it counts as written. There is no end marker (Arrow's stream
format does not need one): a process killed in the middle leaves at most one incomplete batch behind, a *torn tail*,
which readers report and ignore. Any Arrow implementation reads the files, e.g.
``pyarrow.ipc.open_stream(path).read_pandas()``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa

from specpilot.sglang_hooks.wire import Hello, StepRecord

FORMAT_VERSION = 2
"""Format of the segments; raise it with every change of SCHEMA or of the metadata."""

_SEGMENT_NAME = re.compile(r"\d{6,}\.arrows")
_COLUMN_TYPES = {
    pa.bool_(): "after_idle graph overlap grammar",
    pa.int8(): "source previous_kind",
    pa.int16(): "steps proposed_steps held_steps draft_tokens",
    pa.int32(): "batch_size padded_batch_size running queued retracted cell previous_width",
    pa.int64(): "record_seq step context_tokens kv_used_tokens epoch block forwards prefill_tokens",
    pa.float64(): "time seconds probability launch_gap_seconds",
    pa.list_(pa.int16()): "accepted_drafts truncated",
}
_TYPE_OF = {name: kind for kind, names in _COLUMN_TYPES.items() for name in names.split()}
SCHEMA = pa.schema(
    [pa.field(name, _TYPE_OF[name], nullable=name == "after_idle") for name in StepRecord.__struct_fields__]
)
"""Columns of a segment: one per StepRecord field, in its order and with its unit."""


class Configuration(msgspec.Struct, frozen=True):
    """Which configuration a segment's tables are made by, and since when."""

    config: dict[str, Any]
    """``mode``, ``policy`` and what else may differ between servers, as it was then: readers take other keys, too."""
    epoch: int
    """Epoch of its first table: records of the segment with a lower one are of the configuration before."""
    time: float
    """When it came in force, in seconds since the Unix epoch."""
    before: str
    """Name of the policy before; empty at the start of the controller."""

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return str(self.config["policy"]["name"])


def to_batch(records: Sequence[StepRecord]) -> Any:
    """Return a ``pyarrow.RecordBatch`` of SCHEMA; ``records`` may not be empty.

    Raises ArrowInvalid or OverflowError for a value that is too large for its column.
    """
    columns = zip(*map(msgspec.structs.astuple, records), strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA)


def records(batch: Any) -> list[StepRecord]:
    """Return what ``to_batch`` was given."""
    return [StepRecord(*row) for row in zip(*map(_values, batch.columns), strict=True)]


def _values(column: Any) -> list[Any]:
    if pa.types.is_list(column.type):
        values = column.values.to_numpy().tolist()
        return [values[start:end] for start, end in pairwise(column.offsets.to_numpy().tolist())]
    return list(column.to_numpy(zero_copy_only=False).tolist())


def server_key(hello: Hello) -> str:
    """Return the name under which the controller knows a server: NAME/RANK."""
    return f"{hello.server_id}/{hello.dp_rank}"


def folder_name(server_key: str) -> str:
    """Return the name of a server's folder; ``unquote`` gives the key back.

    >>> folder_name("node:30000/0"), folder_name("..")
    ('node%3A30000%2F0', '%2E.')
    """
    name = quote(server_key, safe="")
    return "%2E" + name[1:] if name.startswith(".") else name


def segments_in(folder: Path) -> list[Path]:
    """Return the segments of one server's folder, in no order."""
    return [path for path in folder.iterdir() if _SEGMENT_NAME.fullmatch(path.name)]
