"""``specpilot status``: ask a running controller, and print its report for an operator."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, TypeVar

import msgspec
import zmq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specpilot.controller.client.arguments import add_controller, endpoint_and_keys
from specpilot.controller.errors import CommandError
from specpilot.controller.serve.report import (
    ControllerStatus,
    ServerStatus,
    describe_source,
    describe_table,
    describe_time,
    read_report,
)
from specpilot.policies.knowledge import describe_gain
from specpilot.sglang_hooks.connection import (
    EndpointError,
    HandshakeMonitor,
    KeyFiles,
    check_endpoint,
    connect,
    is_tcp,
    socket_path,
)
from specpilot.sglang_hooks.wire import (
    MAX_REPORT_BYTES,
    DecisionSource,
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


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot status``."""
    add_controller(command)
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fetch the report and print it; return 0."""
    endpoint, keys = endpoint_and_keys(options)
    status = fetch_status(endpoint, keys=keys)
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(status)).decode() + "\n")
    else:
        print_status(status, console)
    return 0


def fetch_status(endpoint: str, timeout: float = 2.0, keys: KeyFiles = NO_KEYS) -> ControllerStatus:
    """Return the report of the controller at ``endpoint``; raise StatusError if none answers in time."""
    reply = ask(endpoint, StatusRequest(), StatusReport, timeout, keys)
    try:
        return read_report(reply.report)
    except WireError as error:
        raise StatusError(f"the controller at {endpoint} gave an answer that cannot be read: {error}") from error


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
        with context.socket(zmq.DEALER) as socket, HandshakeMonitor(socket) as watch:
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
        raise StatusError(f"the controller at {endpoint} gave an answer that cannot be read: {error}") from error
    finally:
        context.destroy(linger=0)
    raise StatusError(f"the controller at {endpoint} did not answer within {timeout:g} s: is it stopped or overloaded?")


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
