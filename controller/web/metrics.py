"""What Prometheus scrapes: one snapshot of the controller as metrics, in base units.

Nothing is counted here. A registry collects from the snapshot it was given, so one scrape is one moment. The
label ``batch_size`` takes powers of two only and ``server`` the servers of a day, so series stay few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from specpilot.controller.serve.snapshot import ServerSnapshot, Snapshot
from specpilot.policies.knowledge import Estimate, Knowledge, Outlook
from specpilot.sglang_hooks.wire import DecisionSource

UP_SECONDS = 3.0
"""Seconds since a server was heard within which it is up: servers speak once a second."""

_CONTROLLER: dict[str, tuple[type[Metric], str, tuple[str, ...]]] = {
    "specpilot_info": (GaugeMetricFamily, "1; what runs.", ("version", "policy")),
    "specpilot_uptime_seconds": (GaugeMetricFamily, "Since the controller started.", ()),
    "specpilot_trace_records": (CounterMetricFamily, "Step records written to the trace.", ()),
    "specpilot_trace_records_lost": (CounterMetricFamily, "Step records that could not be written to the trace.", ()),
    "specpilot_trace_bytes": (GaugeMetricFamily, "Size of all trace segments.", ()),
    "specpilot_trace_failing": (GaugeMetricFamily, "1 while the trace cannot be written.", ()),
    "specpilot_prior_failing": (GaugeMetricFamily, "1 while what was learned cannot be kept on disk.", ()),
    "specpilot_controller_events": (CounterMetricFamily, "Counters that belong to no one server.", ("event",)),
    "specpilot_config_failing": (GaugeMetricFamily, "1 while the configuration file's newest contents are wrong.", ()),
    "specpilot_handshakes_failed": (CounterMetricFamily, "Connections refused for want of the right key.", ()),
    "specpilot_messages_refused": (CounterMetricFamily, "Frames that were no messages of this version.", ()),
}

_SERVER: dict[str, tuple[type[Metric], str, tuple[str, ...]]] = {
    "specpilot_server_info": (
        GaugeMetricFamily,
        "1; what the server said of itself.",
        ("model", "gpu", "sglang_version", "mode"),
    ),
    "specpilot_server_up": (GaugeMetricFamily, "1 if the server was heard within 3 seconds.", ()),
    "specpilot_server_silent_seconds": (GaugeMetricFamily, "Since anything was heard of the server.", ()),
    "specpilot_decision_source": (GaugeMetricFamily, "1 for who decides the server's steps now.", ("source",)),
    "specpilot_steps": (GaugeMetricFamily, "K of the newest step.", ()),
    "specpilot_decode_steps": (
        CounterMetricFamily,
        "Decode steps by K, as applied, and by who decided.",
        ("steps", "source"),
    ),
    "specpilot_switches": (CounterMetricFamily, "Decode steps of another K than the step before.", ()),
    "specpilot_tokens": (CounterMetricFamily, "Tokens given to clients by decode steps.", ()),
    "specpilot_decode_seconds": (CounterMetricFamily, "Time of decode steps without a prefill or idle time.", ()),
    "specpilot_tokens_per_second": (GaugeMetricFamily, "Of decoding, over the newest 512 decode steps.", ()),
    "specpilot_records": (CounterMetricFamily, "Step records received.", ()),
    "specpilot_records_lost": (CounterMetricFamily, "Gaps in the numbers of the step records.", ()),
    "specpilot_table_age_seconds": (GaugeMetricFamily, "Since the table in force was sent.", ()),
    "specpilot_table_pending": (GaugeMetricFamily, "1 while a newer table was sent and is not in force.", ()),
    "specpilot_ranks": (GaugeMetricFamily, "Tensor-parallel ranks.", ()),
    "specpilot_ranks_confirmed": (
        GaugeMetricFamily,
        "Ranks seen to hold the table in force; 0: not compared yet.",
        (),
    ),
    "specpilot_events": (CounterMetricFamily, "The counters of hooks and controller.", ("event",)),
    "specpilot_policy_failed": (GaugeMetricFamily, "1 if the policy failed: it decides no more.", ()),
    "specpilot_drafter_broken": (GaugeMetricFamily, "1 if next to no drafts are accepted.", ()),
    "specpilot_acceptance_ratio": (
        GaugeMetricFamily,
        "Drafts accepted at a position, given those before it.",
        ("position",),
    ),
    "specpilot_acceptance_low_ratio": (GaugeMetricFamily, "Lower end of its 95 % interval.", ("position",)),
    "specpilot_acceptance_high_ratio": (GaugeMetricFamily, "Upper end of its 95 % interval.", ("position",)),
    "specpilot_learned_step_seconds": (GaugeMetricFamily, "Learned cost of a decode step.", ("steps", "batch_size")),
    "specpilot_learned_step_low_seconds": (
        GaugeMetricFamily,
        "Lower end of its 95 % interval.",
        ("steps", "batch_size"),
    ),
    "specpilot_learned_step_high_seconds": (
        GaugeMetricFamily,
        "Upper end of its 95 % interval.",
        ("steps", "batch_size"),
    ),
    "specpilot_expected_gain_ratio": (
        GaugeMetricFamily,
        "What the newest 256 steps gained over K=0, as estimated; below 0 speculation costs.",
        (),
    ),
    "specpilot_expected_gain_low_ratio": (GaugeMetricFamily, "Lower end of its 95 % interval.", ()),
    "specpilot_expected_gain_high_ratio": (GaugeMetricFamily, "Upper end of its 95 % interval.", ()),
    "specpilot_explored_steps": (CounterMetricFamily, "Decode steps that ran another K than the choice, to learn.", ()),
    "specpilot_exploration_lost_seconds": (CounterMetricFamily, "Time lost by them, as estimated.", ()),
    "specpilot_switchback_gain_ratio": (
        GaugeMetricFamily,
        "Gain over the server's fallback, measured by the switchback.",
        (),
    ),
    "specpilot_switchback_gain_low_ratio": (GaugeMetricFamily, "Lower end of its 95 % interval.", ()),
    "specpilot_switchback_gain_high_ratio": (GaugeMetricFamily, "Upper end of its 95 % interval.", ()),
    "specpilot_switchback_pairs": (GaugeMetricFamily, "Pairs of blocks that count.", ()),
    "specpilot_policy_out_of_force": (
        GaugeMetricFamily,
        "1 while a policy that was losing is suspended, fallback active.",
        (),
    ),
}

Sample = tuple[str, tuple[str, ...], float]
"""A metric's name, the values of its labels but ``server``, and its value."""


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for described, first in ((_CONTROLLER, ()), (_SERVER, ("server",))):
            for name, (kind, text, labels) in described.items():
                families[name] = kind(name, text, labels=(*first, *labels))  # type: ignore[call-arg]
        for name, values, value in _controller_samples(self._snapshot):
            families[name].add_metric(values, value)  # type: ignore[attr-defined]
        for key, server in self._snapshot.servers.items():
            for name, values, value in _server_samples(server):
                families[name].add_metric((key, *values), value)  # type: ignore[attr-defined]
        yield from families.values()


def exposition(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the body of a scrape and its content type, in the format that ``accept`` asks for."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot))
    ProcessCollector(registry=registry)
    return encode(registry), content_type


def names() -> list[str]:
    """Return every metric of Specpilot by the name that it is queried with."""
    described = {**_CONTROLLER, **_SERVER}.items()
    return [name + ("_total" if kind is CounterMetricFamily else "") for name, (kind, _, _) in described]


def labels() -> dict[str, tuple[str, ...]]:
    """Return the labels of every metric by the name that it is queried with."""
    own = [labels for _, _, labels in _CONTROLLER.values()]
    own += [("server", *labels) for _, _, labels in _SERVER.values()]
    return dict(zip(names(), own, strict=True))


def _controller_samples(snapshot: Snapshot) -> Iterator[Sample]:
    status = snapshot.status
    yield "specpilot_info", (status.version, status.policy), 1.0
    yield "specpilot_uptime_seconds", (), status.uptime_seconds
    yield "specpilot_trace_records", (), status.trace_written
    yield "specpilot_trace_records_lost", (), status.trace_lost
    yield "specpilot_trace_bytes", (), status.trace_bytes
    yield "specpilot_trace_failing", (), bool(status.trace_error)
    yield "specpilot_prior_failing", (), bool(status.prior_error)
    for event, count in status.counters.items():
        yield "specpilot_controller_events", (event,), count
    yield "specpilot_config_failing", (), bool(status.config_error)
    yield "specpilot_handshakes_failed", (), status.handshakes_failed
    yield "specpilot_messages_refused", (), status.refused_messages


def _server_samples(server: ServerSnapshot) -> Iterator[Sample]:
    status, totals = server.status, server.totals
    yield "specpilot_server_info", (status.model, status.gpu, status.sglang_version, status.mode), 1.0
    yield "specpilot_server_up", (), status.silent_seconds <= UP_SECONDS
    yield "specpilot_server_silent_seconds", (), status.silent_seconds
    for source in DecisionSource:
        yield "specpilot_decision_source", (source.name,), status.source == source.name
    yield "specpilot_steps", (), status.steps
    for (steps, source), count in totals.steps.items():
        yield "specpilot_decode_steps", (str(steps), source.name), count
    yield "specpilot_switches", (), totals.switches
    yield "specpilot_tokens", (), totals.tokens
    yield "specpilot_decode_seconds", (), totals.seconds
    yield "specpilot_tokens_per_second", (), status.tokens_per_second
    yield "specpilot_records", (), status.records
    yield "specpilot_records_lost", (), status.records_lost
    if status.table is not None:
        yield "specpilot_table_age_seconds", (), status.table_age_seconds
    yield "specpilot_table_pending", (), bool(status.pending_epoch)
    yield "specpilot_ranks", (), status.tp_size
    yield "specpilot_ranks_confirmed", (), status.confirmed_ranks
    for event, count in status.counters.items():
        yield "specpilot_events", (event,), count
    yield "specpilot_policy_failed", (), server.policy_failed
    if server.knowledge is not None:
        yield from _knowledge_samples(server.knowledge)
    yield from _estimate("specpilot_expected_gain", "ratio", (), status.expected_gain)
    if status.switchback is not None:
        measured = status.switchback.measured
        gain = Estimate(measured.gain, measured.low, measured.high) if measured is not None else None
        yield from _estimate("specpilot_switchback_gain", "ratio", (), gain)
        yield "specpilot_switchback_pairs", (), status.switchback.pairs
        yield "specpilot_policy_out_of_force", (), status.switchback.off_seconds > 0.0


def _knowledge_samples(knowledge: Knowledge) -> Iterator[Sample]:
    yield "specpilot_drafter_broken", (), knowledge.drafter_broken
    for place, position in enumerate(knowledge.positions, start=1):
        yield from _estimate("specpilot_acceptance", "ratio", (str(place),), position.acceptance)
    for outlook in _powers_of_two(knowledge):
        for arm, steps in enumerate(outlook.steps):
            labels = (str(steps), str(outlook.batch_size))
            yield from _estimate("specpilot_learned_step", "seconds", labels, outlook.step_seconds(arm))
    yield "specpilot_explored_steps", (), knowledge.explored_steps
    yield "specpilot_exploration_lost_seconds", (), knowledge.explored_seconds


def _powers_of_two(knowledge: Knowledge) -> Iterable[Outlook]:
    """Return the cells of those batch sizes, in the context region that most of the newest steps were in."""
    columns = len(knowledge.context_edges) + 1
    column = knowledge.busiest() % columns
    cells = knowledge.cells[column::columns]
    return [cell for cell in cells if cell is not None and not cell.batch_size & (cell.batch_size - 1)]


def _estimate(name: str, unit: str, labels: tuple[str, ...], estimate: Estimate | None) -> Iterator[Sample]:
    if estimate is not None:
        yield f"{name}_{unit}", labels, estimate.value
        yield f"{name}_low_{unit}", labels, estimate.low
        yield f"{name}_high_{unit}", labels, estimate.high
