"""A snapshot as what the page shows: labels, sentences and numbers, so that the page only has to draw.

Cells are in the order of the table, batch-major. Arrays stand for structs where there is one for every cell
and K, which the page takes apart by position.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from specpilot.controller.serve.history import SPAN_SECONDS
from specpilot.controller.serve.report import (
    ControllerStatus,
    ServerStatus,
    describe_source,
    describe_time,
    range_names,
)
from specpilot.controller.serve.snapshot import ServerSnapshot, Snapshot
from specpilot.policies.knowledge import Candidate, Estimate, Knowledge, Outlook
from specpilot.sglang_hooks.wire import DecisionSource, DecisionTable

SILENT_SECONDS = 3.0


class Problem(msgspec.Struct, frozen=True):
    """Something that an operator should look at."""

    severity: str
    """``bad``: serving or deciding is not as it should be; ``warn``: look at it; ``info``: good to know."""
    text: str


class KView(msgspec.Struct, frozen=True, array_like=True):
    """One K in one cell; every three are value, low and high of an estimate."""

    steps: int
    tokens: tuple[float, float, float]
    """Tokens per request and step, bonus token included."""
    seconds: tuple[float, float, float]
    """Seconds of a step."""
    tokens_per_second: float
    against_choice: tuple[float, float, float]
    """Tokens per second over those of the cell's choice, minus 1: -0.1 is a tenth less."""
    gain: tuple[float, float, float] | None
    """Gain in tokens per second over K=0, as a share; None where K=0 is no candidate."""
    tried: bool
    """Steps of this K ran at this batch size; else it is predicted from others."""
    allowed: bool
    """The K is within ``policy.time_per_output_token``."""


class CellView(msgspec.Struct, frozen=True):
    """One cell of the heat map."""

    steps: int
    keep: list[int]
    visits: int
    """Steps of the newest 256 that were in this cell."""
    why: str
    """Why K is what it is, in sentences."""
    options: tuple[KView, ...]
    """Every K as the policy sees it; empty where the policy does not tell."""


class PositionView(msgspec.Struct, frozen=True):
    """Acceptance at one position."""

    acceptance: tuple[float, float, float]
    samples: float


class ServerEntry(msgspec.Struct, frozen=True):
    """One server in the list of all."""

    name: str
    model: str
    severity: str
    """Severity of the server's worst problem; empty if there is none to look at."""
    steps: int
    tokens_per_second: float
    gain: tuple[float, float, float] | None


class ServerView(msgspec.Struct, frozen=True):
    """The server that is looked at."""

    name: str
    model: str
    gpu: str
    sglang_version: str
    decides: str
    policy: str
    steps: int
    candidate_steps: list[int]
    share_by_steps: dict[str, float]
    tokens_per_second: float
    batch_size: float
    """Mean batch size of the newest ten seconds with steps in them."""
    gain: tuple[float, float, float] | None
    measured: str
    reason: str
    table: str
    """Epoch, age and ranks of the table in force, in words."""
    problems: list[Problem]
    batches: list[str]
    batch_sizes: list[int]
    """Batch size that stands for each region, on the axis of the charts."""
    contexts: list[str]
    cells: list[CellView]
    busiest: int
    """Index of the cell that most of the newest steps were in; -1 before any."""
    positions: list[PositionView]


class PageView(msgspec.Struct, frozen=True):
    """Everything but the last hour."""

    version: str
    policy: str
    endpoint: str
    uptime: str
    trace: str
    problems: list[Problem]
    servers: list[ServerEntry]
    server: ServerView | None


class HourView(msgspec.Struct, frozen=True):
    """The last hour, oldest first."""

    span_seconds: float
    ages: list[float]
    """Seconds since the span began."""
    steps: list[dict[int, int]]
    """Decode steps by K, of each span."""
    batch_sizes: list[float]
    """Mean batch size of each span."""
    tokens_per_second: list[float]
    """Tokens per second given to clients, idle time included."""


def page_view(snapshot: Snapshot, name: str) -> PageView:
    """Return what the page shows, with the server ``name`` in full; "" for none."""
    status = snapshot.status
    return PageView(
        version=status.version,
        policy=status.policy,
        endpoint=status.endpoint,
        uptime=describe_time(status.uptime_seconds),
        trace=f"{status.trace_written:,} records in {status.trace_directory}" if status.trace_directory else "none",
        problems=controller_problems(status),
        servers=[_entry(server) for server in snapshot.servers.values()],
        server=_server_view(snapshot.servers[name]) if name in snapshot.servers else None,
    )


def hour_view(now: float, server: ServerSnapshot) -> HourView:
    """Return the last hour of one server; ``now`` on the controller's clock."""
    spans = [span for span in server.hour if now - span.number * SPAN_SECONDS <= 3600.0 + SPAN_SECONDS]
    # The newest has not lasted as long as the others.
    lasted = [min(max(now - span.number * SPAN_SECONDS, 1.0), SPAN_SECONDS) for span in spans]
    return HourView(
        span_seconds=SPAN_SECONDS,
        ages=[_short(now - span.number * SPAN_SECONDS) for span in spans],
        steps=[span.steps for span in spans],
        batch_sizes=[_short(span.requests / sum(span.steps.values())) for span in spans],
        tokens_per_second=[_short(span.tokens / seconds) for span, seconds in zip(spans, lasted, strict=True)],
    )


def controller_problems(status: ControllerStatus) -> list[Problem]:
    """Return what is wrong with the controller itself."""
    problems = [Problem("bad", text) for text in (status.config_error, status.trace_error, status.prior_error) if text]
    if status.handshakes_failed:
        problems.append(Problem("warn", f"{status.handshakes_failed:,} connections had no key that is allowed"))
    problems += [Problem("info", change) for change in status.changes]
    if status.trace_lost:
        problems.append(Problem("warn", f"{status.trace_lost:,} records could not be written to the trace"))
    if status.refused_messages:
        problems.append(
            Problem(
                "warn", f"{status.refused_messages:,} messages were refused: see the controller's log for the first"
            )
        )
    if not status.servers:
        problems.append(
            Problem(
                "info", f"No server has connected yet: set SPECPILOT_ENDPOINT={status.endpoint} in its environment."
            )
        )
    return problems


def server_problems(status: ServerStatus) -> list[Problem]:
    """Return what is wrong with one server, the worst first."""
    problems = []
    if status.source == DecisionSource.HALTED.name:
        problems.append(Problem("bad", "Halted: it stays at one K until it is restarted, and serves on."))
    elif status.source != DecisionSource.TABLE.name:
        problems.append(Problem("warn", f"It is run by {describe_source(status)}."))
    if status.silent_seconds > SILENT_SECONDS:
        silent = describe_time(status.silent_seconds)
        problems.append(Problem("bad", f"Silent for {silent}: it has ended, hangs, or has lost its link."))
    if status.note:
        problems.append(Problem("bad", status.note))
    if status.pending_epoch:
        problems.append(Problem("info", f"Table {status.pending_epoch} was sent and is not in force yet."))
    if 0 < status.confirmed_ranks < status.tp_size:
        problems.append(Problem("bad", f"Only {status.confirmed_ranks} of {status.tp_size} ranks hold the table."))
    if status.mode == "shadow":
        problems.append(Problem("info", "Shadow mode: decisions are recorded, the fallback is applied."))
    if status.records_lost:
        problems.append(Problem("warn", f"{status.records_lost:,} step records were lost on the way."))
    problems += [
        Problem("warn", f"{name} {count:,}")
        for name, count in status.counters.items()
        if count and name != "tables_received"
    ]
    return sorted(problems, key=lambda problem: _SEVERITIES.index(problem.severity))


_SEVERITIES = ("bad", "warn", "info")


def _entry(server: ServerSnapshot) -> ServerEntry:
    status = server.status
    problems = server_problems(status)
    return ServerEntry(
        name=status.server,
        model=status.model,
        severity=problems[0].severity if problems and problems[0].severity != "info" else "",
        steps=status.steps,
        tokens_per_second=_short(status.tokens_per_second),
        gain=_ends(status.expected_gain) if status.expected_gain is not None else None,
    )


def _server_view(server: ServerSnapshot) -> ServerView:
    status, knowledge = server.status, server.knowledge
    table = status.table
    newest = server.hour[-1] if server.hour else None
    batch_edges, context_edges = _edges(knowledge, table)
    return ServerView(
        name=status.server,
        model=status.model,
        gpu=status.gpu,
        sglang_version=status.sglang_version,
        decides=describe_source(status),
        policy=table.policy if table is not None else "",
        steps=status.steps,
        candidate_steps=sorted(status.candidate_steps),
        share_by_steps=status.share_by_steps,
        tokens_per_second=_short(status.tokens_per_second),
        batch_size=_short(newest.requests / sum(newest.steps.values())) if newest is not None else 0.0,
        gain=_ends(status.expected_gain) if status.expected_gain is not None else None,
        measured=status.switchback.text if status.switchback is not None else "",
        reason=status.reason,
        table=_table_text(status),
        problems=server_problems(status),
        batches=range_names(batch_edges, first=1),
        batch_sizes=_batch_sizes(knowledge, batch_edges),
        contexts=range_names(context_edges, first=0),
        cells=_cells(server),
        busiest=knowledge.busiest() if knowledge is not None and knowledge.recent else -1,
        positions=[
            PositionView(_ends(position.acceptance), _short(position.samples))
            for position in (knowledge.positions if knowledge is not None else ())
        ],
    )


def _table_text(status: ServerStatus) -> str:
    if status.table is None:
        return "no table in force"
    ranks = f"{status.confirmed_ranks} of {status.tp_size} ranks" if status.confirmed_ranks else "not compared yet"
    return f"table {status.table.epoch}, {describe_time(status.table_age_seconds)} old, confirmed by {ranks}"


def _edges(knowledge: Knowledge | None, table: DecisionTable | None) -> tuple[list[int], list[int]]:
    """Return the grid to show: that of the policy, whose cells it can explain, else that of the table."""
    if knowledge is not None:
        return list(knowledge.batch_edges), list(knowledge.context_edges)
    return (table.batch_edges, table.context_edges) if table is not None else ([], [])


def _batch_sizes(knowledge: Knowledge | None, edges: list[int]) -> list[int]:
    """Return the batch size that stands for each region: what the policy took, else its largest."""
    largest = [*edges, edges[-1] + 1] if edges else [1]
    if knowledge is None:
        return largest
    cells = knowledge.cells[:: len(knowledge.context_edges) + 1]
    return [size if cell is None else cell.batch_size for size, cell in zip(largest, cells, strict=True)]


def _cells(server: ServerSnapshot) -> list[CellView]:
    status, knowledge, table = server.status, server.knowledge, server.status.table
    if knowledge is None:
        if table is None:
            return [CellView(status.steps, [], 0, "No table is in force: the server runs its fallback.", ())]
        why = f"Policy {table.policy}: {status.reason}."
        return [CellView(k, kept, 0, why, ()) for k, kept in zip(table.choice, table.keep, strict=True)]
    in_force = table if table is not None and _edges(knowledge, None) == _edges(None, table) else None
    visits = knowledge.visits()
    return [
        _cell(index, outlook, in_force, visits.get(index, 0), status) for index, outlook in enumerate(knowledge.cells)
    ]


def _cell(
    index: int, outlook: Outlook | None, table: DecisionTable | None, visits: int, status: ServerStatus
) -> CellView:
    if outlook is None:
        steps = table.choice[index] if table is not None else status.steps
        return CellView(steps, [], visits, "Not decided yet: the fallback holds.", ())
    why, options = _told(outlook)
    steps, keep = outlook.choice, list(outlook.keep)
    if table is not None:
        steps, keep = table.choice[index], table.keep[index]
        if steps != outlook.choice:
            why += f" But the table has K={steps}: {status.reason}."
        tried = ", ".join(f"K={k} in {100 * probability:.2g} %" for k, probability in table.explore.get(index, []))
        if tried:
            why += f" To learn, it tries {tried} of the blocks."
    if keep:
        why += f" If {_either(keep)} is in force already it may stay: about as good, or not worth the switch."
    return CellView(steps, keep, visits, why, options)


@lru_cache(maxsize=4096)
def _told(outlook: Outlook) -> tuple[str, tuple[KView, ...]]:
    """Return sentence and options of a cell; most cells are as they were half a second ago."""
    return outlook.explain(), tuple(_k_view(outlook, option) for option in outlook.candidates())


def _either(steps: list[int]) -> str:
    return " or ".join(f"K={k}" for k in steps)


def _k_view(outlook: Outlook, option: Candidate) -> KView:
    gain = outlook.gain(option.steps)
    return KView(
        option.steps,
        _ends(option.tokens),
        _ends(option.seconds),
        _short(option.tokens_per_second),
        _ends(option.against_choice),
        _ends(gain) if gain is not None else None,
        option.tried,
        option.allowed,
    )


def _ends(estimate: Estimate) -> tuple[float, float, float]:
    return _short(estimate.value), _short(estimate.low), _short(estimate.high)


def _short(value: float) -> float:
    """Return four digits: what a page can show, and no more to send."""
    return float(f"{value:.4g}")
