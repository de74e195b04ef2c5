"""The trace: every StepRecord as it arrived, appended to Arrow IPC stream files.

    <trace.directory>/<server, percent-encoded>/000001.arrows, 000002.arrows, ...

A *segment* is a schema message with the server's Hello in its metadata, then record batches,
each handed to the operating system in full before it counts as written. There is no end
marker (Arrow's stream format does not need one): a process killed in the middle leaves at
most one incomplete batch behind, a *torn tail*, which readers report and ignore. Any Arrow
implementation reads the files, e.g. ``pyarrow.ipc.open_stream(path).read_pandas()``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from controller.config import ConfigError, TraceConfig
from sglang_hooks.wire import WIRE_VERSION, Hello, StepRecord

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of the segments; raise it with every change of SCHEMA or of the metadata."""
BATCH_RECORDS = 4096
"""Largest record batch: it bounds what a reader holds at once (about 0.7 MB at batch size 16)."""
RETRY_SECONDS = 10.0
MIN_SEGMENT_BYTES = 1 << 16
"""Smaller ones would be mostly header (2 kB); with total_bytes below 64 kB per server the bound gives way."""
LISTED_FAULTS = 100
"""Gaps and damage that ``trace_info`` describes one by one, per server; all are counted."""

_MESSAGE_MARK = b"\xff\xff\xff\xff"
_SEGMENT_NAME = re.compile(r"\d{6,}\.arrows")
_COLUMN_TYPES = {
    pa.bool_(): "after_idle graph overlap grammar",
    pa.int8(): "source previous_kind",
    pa.int16(): "steps proposed_steps draft_tokens",
    pa.int32(): "batch_size padded_batch_size running queued cell previous_width",
    pa.int64(): "record_seq step context_tokens kv_used_tokens epoch block forwards prefill_tokens",
    pa.float64(): "time seconds probability launch_gap_seconds",
    pa.list_(pa.int16()): "accepted_drafts truncated",
}
_TYPE_OF = {name: kind for kind, names in _COLUMN_TYPES.items() for name in names.split()}
SCHEMA = pa.schema(
    [pa.field(name, _TYPE_OF[name], nullable=name == "after_idle") for name in StepRecord.__struct_fields__]
)
"""One column per StepRecord field, in its order; units are the record's own."""


class TraceError(ValueError):
    """A path that holds no trace this version can read; the text says which and why."""


def check_directory(directory: Path) -> None:
    """Create ``directory`` and write and remove a file there; raise ConfigError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".specpilot-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"the trace cannot be written to {directory.absolute()}: {error.strerror or error}. "
            'Make that folder writable, or set trace.directory to another one, or to "" for no trace'
        ) from error


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


def folder_name(server_key: str) -> str:
    """Return the name of a server's folder; ``unquote`` gives the key back.

    >>> folder_name("node:30000/0"), folder_name("..")
    ('node%3A30000%2F0', '%2E.')
    """
    name = quote(server_key, safe="")
    return "%2E" + name[1:] if name.startswith(".") else name


class TraceWriter:
    """Appends one server's records; one thread, which also writes every other server's.

    Nothing here raises for what the disk or the records do. Every record appended ends in
    ``written_records`` or ``lost_records``; ``last_error`` is empty while writing works.
    """

    def __init__(self, directory: Path, server_key: str, hello: Hello, config: TraceConfig) -> None:
        self._directory = directory.absolute()
        self._folder = self._directory / folder_name(server_key)
        self._hello = hello
        self._config = config
        self.written_records = 0
        self.lost_records = 0
        self.last_error = ""
        self._pending: list[StepRecord] = []
        self._now = self._flushed_at = self._retry_at = float("-inf")
        self._logged = ""
        self._misfits_logged = False
        # The segment being written. Until a batch is whole, ``_size`` does not count it.
        self._fd: int | None = None
        self._path = self._folder
        self._number = 0
        self._size = 0
        self._batches = 0
        self._limit = config.segment_bytes
        self._closed_bytes = 0

    @property
    def bytes_on_disk(self) -> int:
        """Size of all servers' segments; what others wrote is as old as this writer's newest segment."""
        return self._closed_bytes + self._size

    def append(self, records: Sequence[StepRecord]) -> None:
        """Take in records; they are written by ``tick``."""
        if self._now < self._retry_at:
            self.lost_records += len(records)
        else:
            self._pending.extend(records)

    def tick(self, now: float) -> None:
        """Write what is due at ``now``, in seconds of any clock that never goes back."""
        self._now = now
        if len(self._pending) >= BATCH_RECORDS or now - self._flushed_at >= self._config.flush_seconds:
            self._flushed_at = now
            self._flush()

    def update_hello(self, hello: Hello) -> None:
        """Begin a new segment if ``hello`` is news; its epoch is not, every reconnect may change that."""
        if msgspec.structs.replace(hello, epoch=self._hello.epoch) != self._hello:
            self.close()
            self._hello = hello

    def close(self) -> None:
        """Write what is left and end the segment; a later ``append`` begins another."""
        self._flush()
        try:
            self._close_segment()
        except OSError as error:
            self._fail(error)

    def _flush(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        unaccounted = len(pending) + self.written_records + self.lost_records
        misfit = ""
        try:
            for start in range(0, len(pending), BATCH_RECORDS):
                chunk = pending[start : start + BATCH_RECORDS]
                try:
                    batch = to_batch(chunk)
                except (pa.ArrowInvalid, OverflowError) as error:
                    misfit = f"{self._folder}: records with values out of range are not written: {error}"
                    fitting = [record for record in chunk if _fits(record)]
                    self.lost_records += len(chunk) - len(fitting)
                    if not fitting:
                        continue
                    batch = to_batch(fitting)
                self._write(batch)
        except OSError as error:
            self.lost_records = unaccounted - self.written_records
            self._fail(error)
            return
        if misfit and not self._misfits_logged:
            self._misfits_logged = True
            logger.error("trace %s", misfit)
        if self._logged:
            logger.warning("trace %s is written again; %d records were lost so far", self._folder, self.lost_records)
        self._logged = ""
        self.last_error = misfit

    def _write(self, batch: Any) -> None:
        data = batch.serialize()
        if self._fd is not None:
            full = self._batches and self._size + data.size > self._limit
            # A segment that somebody deleted would swallow everything without an error.
            if full or not os.fstat(self._fd).st_nlink:
                self._close_segment()
        if self._fd is None:
            self._open_segment()
        if self._size + data.size > self._limit and batch.num_rows > 1:
            half = batch.num_rows // 2
            self._write(batch.slice(0, half))
            self._write(batch.slice(half))
            return
        self._put(data)
        self._batches += 1
        self.written_records += batch.num_rows

    def _put(self, data: Any) -> None:
        assert self._fd is not None
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._size += data.size

    def _open_segment(self) -> None:
        self._path = self._folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make_room()
        self._number = max([self._number, *(int(path.stem) for path in _segments_in(self._folder))]) + 1
        self._path = self._folder / f"{self._number:06d}.arrows"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        # Tells whoever makes room that this one is in use. Where locks are not to be had, a
        # segment may be deleted too early, and ``_write`` notices.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        metadata = {
            "specpilot.trace": str(FORMAT_VERSION),
            "specpilot.wire": str(WIRE_VERSION),
            "specpilot.hello": msgspec.json.encode(msgspec.structs.asdict(self._hello)),
        }
        self._put(SCHEMA.with_metadata(metadata).serialize())

    def _make_room(self) -> None:
        """Delete the oldest closed segments until a full one per server fits below ``total_bytes``.

        Raises OSError if one cannot be deleted: not to write keeps the bound, to go on does not.
        """
        folders = [path for path in self._directory.iterdir() if path.is_dir()]
        # Half of the total for the segments being written, however many servers there are.
        share = max(self._config.total_bytes // (2 * len(folders)), MIN_SEGMENT_BYTES)
        self._limit = min(self._config.segment_bytes, share)
        aged = []
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):  # another controller may be making room, too
                for path in _segments_in(folder):
                    status = path.stat()
                    aged.append((status.st_mtime_ns, path, status.st_size))
        aged.sort()
        self._closed_bytes = sum(size for _, _, size in aged)
        for _, path, size in aged:
            if self._closed_bytes + len(folders) * self._limit <= self._config.total_bytes:
                break
            if not _in_use(path):
                path.unlink(missing_ok=True)
                self._closed_bytes -= size
                if path.parent != self._folder:
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()

    def _close_segment(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._closed_bytes += self._size
            self._size = self._batches = 0
            os.close(fd)

    def _fail(self, error: OSError) -> None:
        """Leave the segment as it was after its last whole batch, and say what is wrong."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                if self._batches:
                    os.ftruncate(self._fd, self._size)
                else:
                    self._path.unlink()
                    self._size = 0
            with contextlib.suppress(OSError):
                self._close_segment()
        self._retry_at = self._now + RETRY_SECONDS
        cause = error.strerror or str(error)
        self.last_error = (
            f"{error.filename or self._path}: {cause}: {_remedy(error.errno)}; "
            f"steps are not logged, tried again every {RETRY_SECONDS:g} s"
        )
        if self._logged != cause:
            self._logged = cause
            logger.error("trace %s", self.last_error)


def _fits(record: StepRecord) -> bool:
    try:
        to_batch([record])
    except (pa.ArrowInvalid, OverflowError):
        return False
    return True


def _in_use(path: Path) -> bool:
    """Whether any process has ``path`` open for writing; not known (False) where locks are unsupported."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _remedy(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, or lower trace.total_bytes and restart"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make it writable for user {os.getuid()}, or set another trace.directory and restart"
    return "put the folder right, or set another trace.directory and restart"


def _segments_in(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if _SEGMENT_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem))


def segments(paths: Iterable[Path]) -> list[Path]:
    """Return the segments that ``paths`` are or that lie below them, each server's in order.

    A path may be a trace directory, a server's folder or a segment; TraceError if it cannot be listed.
    """
    found: dict[Path, None] = {}
    for path in paths:
        try:
            if not path.is_dir():
                path.stat()
                found[path] = None
                continue
            for folder in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
                found.update(dict.fromkeys(_segments_in(folder)))
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from error
    by_server: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in found:
        by_server[path.parent].append(path)
    return [
        path for group in by_server.values() for path in sorted(group, key=lambda path: (len(path.name), path.name))
    ]


class Segment:
    """One segment as a stream: iterate, once, for its record batches, then ask whether it was ``torn``.

    ``hello`` is None if the file ends within its header. ``offset`` is where the last whole
    batch read so far ends; once the iteration is over, ``bytes_lost`` of a torn segment lie
    beyond it. What is appended after the opening may or may not be seen.
    """

    def __init__(self, path: Path) -> None:
        """Read the header; raise TraceError unless it is a segment's, whole or cut short."""
        self.path = path
        self.hello: Hello | None = None
        self.torn = False
        self.bytes_lost = 0
        self.offset = 0
        try:
            # Kept open, so that a segment that is deleted to make room can be read to its end.
            self._file = pa.OSFile(str(path))
            self.size: int = self._file.size()
            prefix = self._file.read(8)
            length = int.from_bytes(prefix[4:], "little")
            if prefix[:4] != _MESSAGE_MARK[: len(prefix)]:
                raise TraceError(f"{path} is not a specpilot trace")
            if len(prefix) == 8 and 8 + length <= self.size:
                self._schema = pa.ipc.read_schema(pa.py_buffer(prefix + self._file.read(length)))
                self.hello = _read_hello(path, self._schema)
                self.offset = 8 + length
        except (OSError, pa.ArrowException) as error:
            raise TraceError(f"{path} cannot be read as a specpilot trace: {error}") from error

    def __iter__(self) -> Iterator[Any]:
        with self._file:
            while self.hello is not None and (batch := self._next_batch()) is not None:
                self.offset = self._file.tell()
                yield batch
        self.bytes_lost = max(self.size - self.offset, 0)
        self.torn = self.bytes_lost > 0 or self.hello is None

    def _next_batch(self) -> Any:
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(self._file), self._schema)
            batch.validate(full=True)
        except (EOFError, pa.ArrowException):
            return None
        except OSError as error:
            if error.errno:
                raise TraceError(f"{self.path} cannot be read: {error}") from error
            return None  # pyarrow's way to say that a body is cut short
        return batch


def read_segment(path: Path) -> Segment:
    """Open a segment for reading; raise TraceError if it is none that this version can read."""
    return Segment(path)


def _read_hello(path: Path, schema: Any) -> Hello:
    metadata = schema.metadata or {}
    version = metadata.get(b"specpilot.trace", b"").decode(errors="replace")
    if not version:
        raise TraceError(f"{path} is an Arrow file, but not a specpilot trace")
    if version != str(FORMAT_VERSION) or not schema.equals(SCHEMA):
        raise TraceError(
            f"{path} was written by another version of specpilot (trace format {version}, "
            f"this one reads {FORMAT_VERSION}): read it with that version"
        )
    try:
        fields = msgspec.json.decode(metadata[b"specpilot.hello"], type=dict[str, Any])
        return msgspec.convert(["hello", *(fields[name] for name in Hello.__struct_fields__)], Hello)
    except (KeyError, msgspec.DecodeError) as error:
        raise TraceError(f"{path} describes its server in a way this specpilot cannot read: {error!r}") from error


class ServerTrace(msgspec.Struct):
    """What one server's segments hold."""

    segments: int = 0
    bytes_on_disk: int = 0
    records: int = 0
    instances: int = 0
    """Processes of the server that are seen; their records are numbered from 0 each."""
    first_time: float = 0.0
    last_time: float = 0.0
    share_by_steps: dict[str, float] = {}
    batch_size_min: int = 0
    batch_size_median: int = 0
    """The lower one of an even number of records."""
    batch_size_max: int = 0
    dropped: int = 0
    """Records missing in gaps; what precedes the first record of the oldest segment is not known."""
    gaps: int = 0
    torn: int = 0
    unreadable: int = 0
    """Files that are no segments of this version."""
    faults: list[str] = []
    """A line for each of these three, the first LISTED_FAULTS of them."""

    def fault(self, text: str) -> None:
        """List one more fault."""
        if len(self.faults) < LISTED_FAULTS:
            self.faults.append(text)


def trace_info(paths: Iterable[Path]) -> dict[str, ServerTrace]:
    """Read all segments of ``paths`` once, one batch in memory at a time.

    Keys are the servers' names, or their folders where two directories hold the same name.
    """
    groups: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in segments(paths):
        groups[path.parent].append(path)
    names = Counter(folder.name for folder in groups)
    return {
        unquote(folder.name) if names[folder.name] == 1 else str(folder): _server_info(group)
        for folder, group in groups.items()
    }


def _server_info(paths: Sequence[Path]) -> ServerTrace:
    info = ServerTrace(segments=len(paths))
    by_steps: Counter[int] = Counter()
    by_size: Counter[int] = Counter()
    instance = ""
    last_seq: int | None = None
    for path in paths:
        try:
            segment = read_segment(path)
            info.bytes_on_disk += segment.size
            if segment.hello is not None and segment.hello.instance != instance:
                last_seq = -1 if instance else None
                instance = segment.hello.instance
                info.instances += 1
            for batch in segment:
                seqs, times = batch["record_seq"].to_numpy(), batch["time"].to_numpy()
                before = np.concatenate(([seqs[0] - 1 if last_seq is None else last_seq], seqs[:-1]))
                for row in np.flatnonzero(seqs > before + 1).tolist():
                    missing = int(seqs[row] - before[row]) - 1
                    info.gaps += 1
                    info.dropped += missing
                    where = f"number {before[row] + 1:,}, before {_when(times[row])}"
                    info.fault(f"segment {path}: {missing:,} records missing from {where}")
                last_seq = int(seqs[-1])
                if not info.records:
                    info.first_time = float(times[0])
                info.last_time = float(times[-1])
                info.records += len(seqs)
                for counts, column in ((by_steps, "steps"), (by_size, "batch_size")):
                    values, numbers = np.unique(batch[column].to_numpy(), return_counts=True)
                    counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        except TraceError as error:
            info.unreadable += 1
            info.fault(str(error))
            continue
        if segment.torn:
            info.torn += 1
            ignored = f"read up to its last whole batch, {segment.bytes_lost:,} bytes ignored"
            info.fault(f"segment {path}: torn tail, {ignored}")
    if info.records:
        info.share_by_steps = {str(steps): count / info.records for steps, count in sorted(by_steps.items())}
        sizes = sorted(by_size)
        cumulated = np.cumsum([by_size[size] for size in sizes])
        median = sizes[int(np.searchsorted(cumulated, (info.records + 1) // 2))]
        info.batch_size_min, info.batch_size_median, info.batch_size_max = sizes[0], median, sizes[-1]
    return info


def print_trace_info(info: dict[str, ServerTrace], console: Console) -> None:
    """Write ``trace_info``'s answer for a person: a table per server, then a line per fault."""
    if not info:
        console.print("no segments here")
    for name, server in info.items():
        grid = Table(title=escape(name), title_justify="left", box=None, show_header=False)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row("segments", f"{server.segments:,}, {server.bytes_on_disk / 1e6:,.1f} MB")
        grid.add_row("records", f"{server.records:,} of {server.instances} processes, {server.dropped:,} missing")
        if server.records:
            share = ", ".join(f"K={steps} {100 * part:.1f} %" for steps, part in server.share_by_steps.items())
            sizes = f"{server.batch_size_min} / {server.batch_size_median} / {server.batch_size_max}"
            grid.add_row("time", f"{_when(server.first_time)} to {_when(server.last_time)}")
            grid.add_row("steps", share)
            grid.add_row("batch size", f"{sizes} (min / median / max)")
        console.print(grid)
        unlisted = server.gaps + server.torn + server.unreadable - len(server.faults)
        for text in (*server.faults, *([f"and {unlisted:,} more such lines"] if unlisted else [])):
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"
