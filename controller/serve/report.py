"""What the controller tells of itself: structs that travel as JSON, and the words that status, page and demo share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from specpilot.controller.serve.switchback import SwitchbackStatus
from specpilot.policies.knowledge import Estimate
from specpilot.sglang_hooks.wire import DecisionSource, DecisionTable, WireError


class ServerStatus(msgspec.Struct, frozen=True):
    """One server (one data-parallel replica of it)."""

    server: str
    """Name of the server, ``NAME/RANK``."""
    model: str
    gpu: str
    sglang_version: str
    mode: str
    candidate_steps: list[int]
    silent_seconds: float
    """Seconds since anything was heard of the server."""
    source: str
    """Who decides the server's steps now: FALLBACK, TABLE, STALE or HALTED."""
    steps: int
    """K of the server's newest step."""
    table: DecisionTable | None
    """Table in force on the server, as it reports; None while it runs on its fallback."""
    reason: str
    """What the policy decided the table in force from."""
    table_age_seconds: float
    """Seconds since that table was sent."""
    pending_epoch: int
    """Epoch of a newer table that is not in force yet (0: none)."""
    confirmed_ranks: int
    """Ranks that were seen to hold the table in force (0: not compared yet)."""
    tp_size: int
    """Tensor-parallel ranks of the server."""
    records: int
    """Step records received."""
    records_lost: int
    """Step records missing by their numbers: dropped at the server or on the way."""
    tokens_per_second: float
    """Tokens per second of decoding alone, over the newest 512 decode steps: no prefill, no idle time."""
    share_by_steps: dict[str, float]
    """Share of the newest 512 decode steps by K."""
    counters: dict[str, int]
    """Counters of the hooks, and those that the controller keeps of this server, see docs/status.md."""
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
    """Seconds since the controller started."""
    trace_directory: str
    """Absolute path of the trace; empty if none is written."""
    trace_written: int
    """Step records written to the trace."""
    trace_lost: int
    """Step records that could not be written to the trace."""
    trace_bytes: int
    """Size of all trace segments, in bytes."""
    trace_error: str
    """Why the trace cannot be written; empty while it can."""
    refused_messages: int
    """Messages that could not be read, or came from a server that is not served."""
    handshakes_failed: int
    """Connections that failed before a message: without the right key, or not of specpilot's protocol."""
    config_error: str
    """Why the newest contents of the configuration file are not in force; empty if they are."""
    changes: list[str]
    """What ``specpilot set`` has put above the file, for whom, and how long it still holds."""
    prior_error: str
    """Why what was learned could not be kept on disk; empty while it can."""
    servers: list[ServerStatus]
    counters: dict[str, int] = {}
    """Counters of the controller, whatever server they concern, see docs/status.md."""
    page: str = ""
    """Address of the web page, or why there is none; empty if none is asked for."""


def read_report(report: bytes) -> ControllerStatus:
    """Return what a StatusReport holds; raise WireError if it is none of this version."""
    try:
        return msgspec.json.decode(report, type=ControllerStatus)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed report: {error}") from error


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


def describe_source(server: ServerStatus) -> str:
    """Return who decides the server's steps, in words."""
    return {
        DecisionSource.TABLE.name: "the table in force",
        DecisionSource.STALE.name: "the last table, its lease has run out",
        DecisionSource.FALLBACK.name: "the server's own fallback",
        DecisionSource.HALTED.name: "nothing: switching was halted",
    }[server.source]


def describe_time(seconds: float) -> str:
    """Return a time span in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
