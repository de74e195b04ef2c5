"""What a trace holds and what it lost, for ``specpilot trace info``: read, counted, printed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specpilot.controller.files import json_text
from specpilot.controller.trace.format import Configuration
from specpilot.controller.trace.reader import Segment, TraceError, segments

LISTED_FAULTS = 100
"""Gaps and damage that ``trace_info`` describes one by one, per server; all are counted."""
LISTED_CONFIGURATIONS = 20
"""Configurations that ``print_trace_info`` shows of a server, the newest ones."""


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
    """Lower median of the records' batch sizes."""
    batch_size_max: int = 0
    configurations: list[Configuration] = []
    """Configurations that came in force, in order; the first is the one at the oldest segment."""
    dropped: int = 0
    """Records missing in gaps; what precedes the first record of the oldest segment is not known."""
    gaps: int = 0
    torn: int = 0
    unreadable: int = 0
    """Files that are no segments of this version."""
    faults: list[str] = []
    """A line for each gap, torn segment and unreadable file, the first LISTED_FAULTS of them."""

    def fault(self, text: str) -> None:
        """List one more fault."""
        if len(self.faults) < LISTED_FAULTS:
            self.faults.append(text)


Take = Callable[[str, Segment, Any], None]
"""Called with each server's name, segment and batch (columns of ``format.SCHEMA``, not empty)."""


def trace_info(paths: Iterable[Path], take: Take | None = None) -> dict[str, ServerTrace]:
    """Read all segments of ``paths`` once, one batch in memory at a time; ``take`` sees each.

    Keys are the servers' names, or their folders where two directories hold the same name.
    """
    groups = {folder: list(group) for folder, group in groupby(segments(paths), key=lambda path: path.parent)}
    names = Counter(folder.name for folder in groups)
    servers = {}
    for folder, group in groups.items():
        name = unquote(folder.name) if names[folder.name] == 1 else str(folder)
        servers[name] = _server_info(name, group, take)
    return servers


def _server_info(name: str, paths: Sequence[Path], take: Take | None) -> ServerTrace:
    info = ServerTrace(segments=len(paths))
    by_steps: Counter[int] = Counter()
    by_size: Counter[int] = Counter()
    instance = ""
    last_seq: int | None = None
    for path in paths:
        try:
            segment = Segment(path)
            info.bytes_on_disk += segment.size
            if segment.configuration is not None and segment.configuration not in info.configurations[-1:]:
                info.configurations.append(segment.configuration)
            if segment.hello is not None and segment.hello.instance != instance:
                last_seq = -1 if instance else None
                instance = segment.hello.instance
                info.instances += 1
            for batch in segment:
                if not batch.num_rows:
                    continue
                if take is not None:
                    take(name, segment, batch)
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
        for since in server.configurations[-LISTED_CONFIGURATIONS:]:
            config = msgspec.json.encode(since.config).decode()
            grid.add_row("configured", escape(f"since {_when(since.time)}, epoch {since.epoch:,}: {config}"))
        console.print(grid)
        unlisted = server.gaps + server.torn + server.unreadable - len(server.faults)
        for text in (*server.faults, *([f"and {unlisted:,} more such lines"] if unlisted else [])):
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot trace info``."""
    command.add_argument("paths", nargs="+", type=Path, help="trace folders or segments")
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Read the traces and print what they hold; return 0."""
    info = trace_info(options.paths)
    if options.json:
        sys.stdout.write(json_text(info).decode())
    else:
        print_trace_info(info, console)
    return 0
