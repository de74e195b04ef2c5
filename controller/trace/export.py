"""A trace as one Parquet, CSV or JSON-lines file: ``specpilot trace export``.

Every record of every server becomes a row: the server's name, the ``instance`` of its process, then
the columns of ``format.SCHEMA`` with their exact values. Lists stay lists in Parquet and JSON lines, and are
JSON text in CSV. Parquet also carries each process's Hello, as JSON, under ``specpilot.hello`` in its
metadata. At most ``ROWS`` rows are in memory; the file appears whole, under its name, or not at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from rich.console import Console

from specpilot.controller.errors import CommandError, ConfigError
from specpilot.controller.files import replacement
from specpilot.controller.trace.format import SCHEMA
from specpilot.controller.trace.info import ServerTrace, print_trace_info, trace_info
from specpilot.controller.trace.reader import Segment, segments

Format = Literal["parquet", "csv", "jsonl"]
ROWS = 1 << 16
"""Rows of a Parquet row group, and of what is held before it is written."""
HELD_BYTES = 32 << 20
"""Bytes that are held before they are written, if these are reached first: of servers with large batches."""

EXPORTED = pa.schema(
    [
        pa.field("server", pa.string(), False),
        pa.field("instance", pa.string(), False),
        pa.field("policy", pa.string(), False),
        *SCHEMA,
    ]
)


class ExportError(CommandError, ValueError):
    """An export that cannot be made; the text says why and what to do."""


class _Sink(Protocol):
    def write(self, table: Any) -> None:
        """Write rows of EXPORTED."""

    def close(self, hellos: dict[str, dict[str, Any]]) -> None:
        """Finish the file; ``hellos`` by the process's instance."""


class _Parquet:
    def __init__(self, file: Any) -> None:
        self._writer = pa.parquet.ParquetWriter(file, EXPORTED, compression="zstd")

    def write(self, table: Any) -> None:
        self._writer.write_table(table, row_group_size=ROWS)

    def close(self, hellos: dict[str, dict[str, Any]]) -> None:
        self._writer.add_key_value_metadata({"specpilot.hello": msgspec.json.encode(hellos).decode()})
        self._writer.close()


class _Csv:
    def __init__(self, file: Any) -> None:
        columns = [pa.field(column.name, pa.string(), False) if _is_list(column) else column for column in EXPORTED]
        self._writer = pa.csv.CSVWriter(file, pa.schema(columns))

    def write(self, table: Any) -> None:
        for index, field in enumerate(EXPORTED):
            if _is_list(field):
                joined = pc.binary_join(table[field.name].cast(pa.list_(pa.string())), ",")
                text = pc.binary_join_element_wise("[", joined, "]", "")
                table = table.set_column(index, pa.field(field.name, pa.string(), False), text)
        self._writer.write_table(table)

    def close(self, hellos: dict[str, dict[str, Any]]) -> None:  # noqa: ARG002 - a CSV file has no place for it
        self._writer.close()


class _JsonLines:
    def __init__(self, file: Any) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, table: Any) -> None:
        for batch in table.to_batches(max_chunksize=4096):
            self._file.write(self._encoder.encode_lines(batch.to_pylist()))

    def close(self, hellos: dict[str, dict[str, Any]]) -> None:
        """Write nothing: a line is a record."""


def _is_list(field: Any) -> bool:
    return bool(pa.types.is_list(field.type))


_SINKS: dict[Format, Callable[[Any], _Sink]] = {"parquet": _Parquet, "csv": _Csv, "jsonl": _JsonLines}
_ENDINGS: dict[str, Format] = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".jsonl": "jsonl"}


def format_of(output: Path, given: Format | None = None) -> Format:
    """Return what to write; ExportError if neither ``given`` nor the file's ending says.

    >>> format_of(Path("steps.csv")), format_of(Path("steps"), "jsonl")
    ('csv', 'jsonl')
    """
    if given is not None:
        return given
    if by_ending := _ENDINGS.get(output.suffix.lower()):
        return by_ending
    raise ExportError(f"{output}: which format? End it in {', '.join(_ENDINGS)}, or give --format")


class _Collector:
    """Holds batches until they are worth a write."""

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._held: list[Any] = []
        self._rows = self._bytes = 0
        self.hellos: dict[str, dict[str, Any]] = {}

    def take(self, server: str, segment: Segment, batch: Any) -> None:
        assert segment.hello is not None
        instance = segment.hello.instance
        self.hellos.setdefault(instance, msgspec.structs.asdict(segment.hello))
        names = [pa.repeat(text, batch.num_rows) for text in (server, instance)]
        self._held.append(pa.record_batch([*names, _policies(segment, batch), *batch.columns], schema=EXPORTED))
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= ROWS or self._bytes >= HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._held:
            self._sink.write(pa.Table.from_batches(self._held, EXPORTED).combine_chunks())
        self._held.clear()
        self._rows = self._bytes = 0


def _policies(segment: Segment, batch: Any) -> Any:
    """Return the name of the policy that was configured when each record's table was made; empty if unknown."""
    configuration = segment.configuration
    if configuration is None:
        return pa.repeat("", batch.num_rows)
    own = pc.greater_equal(batch["epoch"], configuration.epoch)
    return pc.if_else(own, configuration.policy, configuration.before)


def export_trace(
    paths: Iterable[Path], output: Path, given: Format | None = None, force: bool = False
) -> dict[str, ServerTrace]:
    """Write what is readable below ``paths`` to ``output``, and return what it was, faults included.

    Raises ExportError if nothing can be written, or nothing is there to be; TraceError for a path
    that cannot be listed. Without ``force`` an existing file is left as it is.
    """
    assert given is None or given in get_args(Format)
    kind = format_of(output, given)
    sources = segments(paths)
    if output.exists():
        if any(output.samefile(source) for source in sources):
            raise ExportError(f"{output} is a part of the trace itself: choose another FILE")
        if not force:
            raise ExportError(f"{output} is there already: choose another FILE, or give --force to replace it")
    try:
        with replacement(output, public=True, synced=True, keep=not force) as file:
            sink = _SINKS[kind](file)
            collector = _Collector(sink)
            info = trace_info(sources, collector.take)
            if not any(server.records for server in info.values()):
                faults = [fault for server in info.values() for fault in server.faults]
                raise ExportError("; ".join(["nothing to export: no record can be read", *faults]))
            collector.flush()
            sink.close(collector.hellos)
        return info
    except FileExistsError:
        raise ExportError(f"{output} appeared meanwhile: choose another FILE, or give --force") from None
    except ConfigError as error:
        raise ExportError(str(error)) from error


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot trace export``."""
    command.add_argument("paths", nargs="+", type=Path, help="trace folders or segments")
    command.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="file to write")
    command.add_argument("--format", choices=get_args(Format), help="default: what FILE ends in")
    command.add_argument("--force", action="store_true", help="replace FILE if it is there")


def run(options: argparse.Namespace, console: Console) -> int:
    """Export, and print what was exported; return 0."""
    info = export_trace(options.paths, options.output, options.format, options.force)
    print_trace_info(info, console)
    records = sum(server.records for server in info.values())
    console.print(f"{options.output}: {records:,} records of {len(info)} servers", highlight=False, soft_wrap=True)
    return 0
