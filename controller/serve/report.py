"""What the controller knows, as structs that travel as JSON and as text for an operator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import zmq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specpilot.controller.config import CommandError
from specpilot.controller.serve.switchback import SwitchbackStatus
from specpilot.policies.knowledge import Estimate, describe_gain
from specpilot.sglang_hooks.connection import (
    EndpointError,
    KeyFiles,
    Watch,
    check_endpoint,
    connect,
    is_tcp,
    socket_path,
)
from specpilot.sglang_hooks.wire import (
    MAX_REPORT_BYTES,
    DecisionSource,
    DecisionTable,
    FrameDecoder,
    SetReply,
    SetRequest,
    StatusReport,
    StatusRequest,
    WireError,
    encode,
)

NO_KEYS = KeyFiles()
Reply = TypeVar("Reply", StatusReport, SetReply)


class StatusError(CommandError, RuntimeError):
    """No controller answered; the text says where it was looked for and what to do."""


class ServerStatus(msgspec.Struct, frozen=True):
    """One server (one data-parallel replica of it)."""

    server: str
    model: str
    gpu: str
    sglang_version: str
    mode: str
    candidate_steps: list[int]
    silent_seconds: float
    """Since anything was heard of it."""
    source: str
    """Who decides its steps now: FALLBACK, TABLE, STALE or HALTED."""
    steps: int
    """K of its newest step."""
    table: DecisionTable | None
    """In force there, as it reports; None while it runs on its fallback."""
    reason: str
    """What the policy decided that table from."""
    table_age_seconds: float
    pending_epoch: int
    """Of a newer table that is not in force yet (0: none)."""
    confirmed_ranks: int
    """Ranks that were seen to hold the table in force (0: not compared yet)."""
    tp_size: int
    records: int
    records_lost: int
    """Gaps in the record numbers: dropped at the server or on the way."""
    tokens_per_second: float
    """Of decoding alone, over the newest 512 decode steps: no prefill, no idle time."""
    share_by_steps: dict[str, float]
    """Of the newest 512 decode steps."""
    counters: dict[str, int]
    """The hooks' own and those the controller keeps of this server, see docs/operations.md."""
    note: str
    """What an operator should look at; empty if nothing."""
    switchback: SwitchbackStatus | None = None
    """What the policy gains, measured; None without a switchback."""
    expected_gain: Estimate | None = None
    """What the newest 256 steps gained over K=0, as the policy estimates, as a share; None if it cannot tell."""


class ControllerStatus(msgspec.Struct, frozen=True):
    """The controller and all its servers."""

    version: str
    pid: int
    endpoint: str
    policy: str
    uptime_seconds: float
    trace_directory: str
    trace_written: int
    trace_lost: int
    trace_bytes: int
    trace_error: str
    refused_messages: int
    handshakes_failed: int
    """Connections refused for want of the right key, or that were none of specpilot's."""
    config_error: str
    """Why the newest contents of the configuration file are not in force; empty if they are."""
    changes: list[str]
    """What ``specpilot set`` has put above the file, for whom, and how long it still holds."""
    prior_error: str
    """Why what was learned could not be kept on disk; empty while it can."""
    servers: list[ServerStatus]
    counters: dict[str, int] = {}
    """Of the controller, whatever server they concern, see docs/operations.md."""
    page: str = ""
    """Address of the web page, or why there is none; empty if none is asked for."""


def read_report(report: bytes) -> ControllerStatus:
    """Return what a StatusReport holds; raise WireError if it is none of this version."""
    try:
        return msgspec.json.decode(report, type=ControllerStatus)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed report: {error}") from error


def fetch_status(endpoint: str, timeout: float = 2.0, keys: KeyFiles = NO_KEYS) -> ControllerStatus:
    """Return the report of the controller at ``endpoint``; raise StatusError if none answers in time."""
    reply = ask(endpoint, StatusRequest(), StatusReport, timeout, keys)
    try:
        return read_report(reply.report)
    except WireError as error:
        raise StatusError(f"the controller at {endpoint} speaks another language: {error}") from error


def ask(
    endpoint: str,
    request: StatusRequest | SetRequest,
    expected: type[Reply],
    timeout: float = 2.0,
    keys: KeyFiles = NO_KEYS,
) -> Reply:
    """Send a request to the controller and return its answer; StatusError if none comes within ``timeout`` seconds."""
    context = zmq.Context()
    try:
        check_endpoint(endpoint)
        if not is_tcp(endpoint) and not socket_path(endpoint).exists():
            raise StatusError(f"no controller at {endpoint}: start `specpilot controller`, or name its --endpoint")
        with context.socket(zmq.DEALER) as socket, Watch(socket) as watch:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
            connect(socket, endpoint, keys)
            socket.send(encode(request))
            deadline = time.monotonic() + timeout
            while (left := deadline - time.monotonic()) > 0:
                if socket.poll(int(1000 * min(left, 0.1))):
                    message = FrameDecoder(expected, MAX_REPORT_BYTES).decode(socket.recv())
                    assert isinstance(message, expected)
                    return message
                for failure in watch.failures():
                    raise StatusError(f"no answer from {endpoint}: {failure.seen_by_client(endpoint)}")
    except (EndpointError, OSError) as error:
        raise StatusError(f"{endpoint} cannot be asked: {error}") from error
    except WireError as error:
        raise StatusError(f"the controller at {endpoint} speaks another language: {error}") from error
    finally:
        context.destroy(linger=0)
    raise StatusError(f"the controller at {endpoint} did not answer within {timeout:g} s: is it stopped or overloaded?")


def describe_table(table: DecisionTable) -> str:
    """Return one line for a table without context regions, one per context region otherwise.

    >>> describe_table(DecisionTable(3, 5.0, "threshold", [4, 5, 6], [], [3, 3, 0, 0], [[], [0], [3], []]))
    'batch 1-4: K=3 | 5: K=3 (keeps 0) | 6: K=0 (keeps 3) | 7+: K=0'
    >>> print(describe_table(DecisionTable(3, 5.0, "goodput", [1, 2, 4], [512], [3, 3, 3, 0, 0, 0, 0, 0], [[]] * 8)))
    context 0-512: batch 1-2: K=3 | 3+: K=0
    context 513+: batch 1: K=3 | 2+: K=0
    """
    lines = []
    columns = len(table.context_edges) + 1
    for column, context in enumerate(range_names(table.context_edges, first=0)):
        row = list(zip(table.choice[column::columns], table.keep[column::columns], strict=True))
        # Neighbours that are alike are one.
        last = [index for index in range(len(row)) if row[index : index + 1] != row[index + 1 : index + 2]]
        batches = range_names([table.batch_edges[index] for index in last[:-1]], first=1)
        parts = []
        for batch, index in zip(batches, last, strict=True):
            choice, keep = row[index]
            parts.append(f"{batch}: K={choice}" + (f" (keeps {', '.join(map(str, keep))})" if keep else ""))
        lines.append(("" if columns == 1 else f"context {context}: ") + "batch " + " | ".join(parts))
    return "\n".join(lines)


def range_names(edges: Sequence[int], first: int) -> list[str]:
    """Return the regions of an axis in words.

    >>> range_names([1, 4], first=1), range_names([], first=0)
    (['1', '2-4', '5+'], ['any'])
    """
    names = []
    low = first
    for edge in edges:
        names.append(str(edge) if low == edge else f"{low}-{edge}")
        low = edge + 1
    return [*names, f"{low}+" if edges else "any"]


def _escaped(value: Any) -> Any:
    """Return builtins whose texts rich prints as they are: a server's name may hold brackets."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list) else value


def print_status(status: ControllerStatus, console: Console) -> None:
    """Write the report for a person."""
    status = msgspec.convert(_escaped(msgspec.to_builtins(status, str_keys=True)), ControllerStatus, strict=False)
    console.print(
        f"[bold]specpilot {status.version}[/] pid {status.pid}, up {describe_time(status.uptime_seconds)}, "
        f"policy [bold]{status.policy}[/], {status.endpoint}"
    )
    trace = f"trace {status.trace_directory}: {status.trace_written:,} records, {status.trace_bytes / 1e6:.1f} MB"
    if status.trace_lost:
        trace += f", [red]{status.trace_lost:,} not written[/]"
    console.print(trace if status.trace_directory else "no trace is written (trace.directory is empty)")
    for change in status.changes:
        console.print(f"[yellow]set:[/] {escape(change)}")
    for error in filter(None, (status.config_error, status.trace_error, status.prior_error)):
        console.print(f"[red]{error}[/]")
    if status.page:
        console.print(f"page {status.page}", highlight=False)
    if status.refused_messages:
        console.print(f"[yellow]{status.refused_messages} messages were refused, see the log[/]")
    if status.handshakes_failed:
        console.print(f"[yellow]{status.handshakes_failed} connections were refused, see the log[/]")
    if counters := _not_zero(status.counters):
        console.print(f"counters {counters}")
    if not status.servers:
        console.print("no server has connected yet: set SPECPILOT_ENDPOINT to the address above in its environment")
    for server in status.servers:
        _print_server(server, console)


def _print_server(server: ServerStatus, console: Console) -> None:
    grid = Table(title=f"{server.server}  ({server.model}, {server.gpu}, SGLang {server.sglang_version})", box=None)
    grid.title_justify = "left"
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.show_header = False
    grid.add_row("decides", _who(server))
    if server.table is not None:
        ranks = f"{server.confirmed_ranks} of {server.tp_size} ranks"
        confirmed = ranks if server.confirmed_ranks else f"not compared yet on {server.tp_size} ranks"
        grid.add_row("table", describe_table(server.table))
        grid.add_row("from", f"policy {server.table.policy}: {server.reason}")
        grid.add_row(
            "epoch", f"{server.table.epoch}, {describe_time(server.table_age_seconds)} old, confirmed by {confirmed}"
        )
    if server.pending_epoch:
        grid.add_row("pending", f"epoch {server.pending_epoch} was sent and is not in force yet")
    share = ", ".join(f"K={k} {100 * part:.0f} %" for k, part in server.share_by_steps.items()) or "no steps yet"
    grid.add_row("steps", f"now K={server.steps} of {server.candidate_steps}; {share}")
    grid.add_row("tokens/s", f"{server.tokens_per_second:,.0f}")
    if server.expected_gain is not None:
        grid.add_row("expected", describe_gain(server.expected_gain) + " over K=0")
    if server.switchback is not None:
        grid.add_row("gain", server.switchback.text)
    lost = f", [red]{server.records_lost:,} lost[/]" if server.records_lost else ""
    grid.add_row("records", f"{server.records:,}{lost}")
    if counters := _not_zero(server.counters):
        grid.add_row("counters", counters)
    if server.note:
        grid.add_row("[red]note[/]", f"[red]{server.note}[/]")
    console.print(grid)


def describe_source(server: ServerStatus) -> str:
    """Return who decides the server's steps, in words."""
    return {
        DecisionSource.TABLE.name: "the table in force",
        DecisionSource.STALE.name: "the last table, its lease has run out",
        DecisionSource.FALLBACK.name: "the server's own fallback",
        DecisionSource.HALTED.name: "nothing: switching was halted",
    }[server.source]


def _not_zero(counters: dict[str, int]) -> str:
    """Return the counters that tell of something, without the one that counts what is usual."""
    return ", ".join(f"{name} {n:,}" for name, n in counters.items() if n and name != "tables_received")


def _who(server: ServerStatus) -> str:
    text = describe_source(server)
    if server.source == DecisionSource.HALTED.name:
        text = f"[red]{text}[/]"
    if server.mode == "shadow":
        text += " (shadow: recorded, not applied)"
    if server.silent_seconds > 3:
        text += f" — [yellow]silent for {describe_time(server.silent_seconds)}[/]"
    return text


def describe_time(seconds: float) -> str:
    """Return a time span in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
