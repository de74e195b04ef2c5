"""The trace: every StepRecord as it arrived, appended to the segments of its server (``format``)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from specpilot.controller.config import ServerConfig, TraceConfig
from specpilot.controller.errors import ConfigError
from specpilot.controller.trace.format import FORMAT_VERSION, SCHEMA, Configuration, folder_name, segments_in, to_batch
from specpilot.sglang_hooks.wire import WIRE_VERSION, Hello, StepRecord

logger = logging.getLogger(__name__)

BATCH_RECORDS = 4096
"""Largest record batch: it bounds what a reader holds at once (about 0.7 MB at batch size 16)."""
RETRY_SECONDS = 2.0
MIN_SEGMENT_BYTES = 1 << 16
"""Smaller ones would be mostly header (2 kB); with total_bytes below 64 kB per server the bound gives way."""


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
        self._configuration: Configuration | None = None
        self.written_records = 0
        self.lost_records = 0
        self.failures = 0
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

    def update_config(self, config: ServerConfig, epoch: int, time: float) -> None:
        """Begin a new segment if the configuration is news; ``epoch`` is that of its first table."""
        before, plain = self._configuration, msgspec.to_builtins(config)
        if before is not None and before.config == plain:
            return
        self.close()
        self._configuration = Configuration(plain, epoch, time, before.policy if before is not None else "")

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
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make_room()
        self._number = max([self._number, *(int(path.stem) for path in segments_in(self._folder))]) + 1
        self._path = self._folder / f"{self._number:06d}.arrows"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        # Tells whoever makes room that this one is in use. Where locks are not to be had, a
        # segment may be deleted too early, and ``_write`` notices.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        metadata: dict[str, str | bytes] = {
            "specpilot.trace": str(FORMAT_VERSION),
            "specpilot.wire": str(WIRE_VERSION),
            "specpilot.hello": msgspec.json.encode(msgspec.structs.asdict(self._hello)),
        }
        if self._configuration is not None:
            metadata["specpilot.config"] = msgspec.json.encode(self._configuration)
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
                for path in segments_in(folder):
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
        self.failures += 1
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
