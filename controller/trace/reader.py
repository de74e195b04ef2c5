"""Reading the trace back: which segments there are, and the record batches in each.

A segment is read as a stream, one batch in memory at a time; its writer may still append to
it. Damage behind its header, such as a crash leaves, ends the reading early and is reported,
not raised. The columns of a batch are ``format.SCHEMA``; ``format.records`` makes StepRecords.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from specpilot.controller.errors import CommandError
from specpilot.controller.trace.format import FORMAT_VERSION, SCHEMA, Configuration, segments_in
from specpilot.sglang_hooks.wire import Hello

_MESSAGE_MARK = b"\xff\xff\xff\xff"


class TraceError(CommandError, ValueError):
    """A path that holds no trace this version can read; the text says which and why."""


def segments(paths: Iterable[Path]) -> list[Path]:
    """Return the segments that ``paths`` are or that lie below them, each server's in order.

    A path may be a trace directory, a server's folder or a segment; TraceError if it cannot be listed.
    """
    by_folder: defaultdict[Path, set[Path]] = defaultdict(set)
    for path in paths:
        try:
            if path.is_dir():
                for folder in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
                    by_folder[folder].update(segments_in(folder))
            else:
                path.stat()
                by_folder[path.parent].add(path)
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from error
    return [
        path for group in by_folder.values() for path in sorted(group, key=lambda path: (len(path.name), path.name))
    ]


class Segment:
    """One segment as a stream: iterate, once, for its record batches, then ask whether it was ``torn``.

    ``hello`` is None if the file ends within its header. ``offset`` is where the last whole
    batch read so far ends; once the iteration is over, ``bytes_lost`` of a torn segment lie
    beyond it. What is appended after the opening may or may not be seen: to follow a segment
    that grows, open it again at the ``offset`` that was reached.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        """Read the header; raise TraceError unless it is a segment's, whole or cut short."""
        self.path = path
        self.hello: Hello | None = None
        self.configuration: Configuration | None = None
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
                self.configuration = _read_configuration(path, self._schema)
                self.offset = max(8 + length, offset)
                self._file.seek(self.offset)
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


def _read_configuration(path: Path, schema: Any) -> Configuration | None:
    text = (schema.metadata or {}).get(b"specpilot.config")
    try:
        return None if text is None else msgspec.json.decode(text, type=Configuration)
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(f"{path} tells its configuration in a way this specpilot cannot read: {error}") from error


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
