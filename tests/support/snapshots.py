"""A controller's snapshot of servers that have learned, without any process."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import msgspec

from specpilot.controller.serve.history import History
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.controller.serve.snapshot import ServerSnapshot, Snapshot
from specpilot.controller.serve.switchback import Measured, SwitchbackStatus
from specpilot.controller.simulation.surface import H200_8B
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Policy
from specpilot.policies.knowledge import Knowledge
from specpilot.sglang_hooks.wire import DecisionSource, Hello
from tests.support.messages import hello, record

CAPTURED = [size for size in H200_8B.captured_batch_sizes if size <= 64]
SERVER = hello(captured_batch_sizes=CAPTURED, candidate_steps=[0, 1, 3])


def learned(
    steps: int = 4000,
    acceptance: float = 0.7,
    server: Hello = SERVER,
    policy: Policy | None = None,
    batches: Sequence[int] = (8, 64),
) -> tuple[Policy, History]:
    """Return a policy that has seen the demo's card serve ``batches``, one after the other, and what it saw."""
    rng = random.Random(1)
    policy = policy or Goodput()
    history = History()
    plan = policy.decide(server, 0.0)
    for seq in range(steps):
        batch = batches[seq * len(batches) // steps]
        if seq % 50 == 0:
            plan = policy.decide(server, seq * 0.01)
        cell = plan.grid.cell(batch, 500.0)
        k = plan.choice[cell]
        if (
            seq % (steps // len(batches)) < steps // len(batches) // 4
        ):  # blocks of 8 at first: a step after a switch tells no cost
            k = server.candidate_steps[seq // 8 % len(server.candidate_steps)]
        accepted = [next((j for j in range(k) if rng.random() > acceptance), k) for _ in range(batch)]
        seconds = H200_8B.decode_seconds(k, batch) * rng.gauss(1.0, 0.01)
        one = record(
            record_seq=seq, batch_size=batch, padded_batch_size=batch, context_tokens=500 * batch, steps=k,
            proposed_steps=k, draft_tokens=k + 1, accepted_drafts=accepted, seconds=seconds, cell=cell,
            source=DecisionSource.TABLE,
        )  # fmt: skip
        policy.learn(one)
        history.add(one, k, sum(accepted) + batch, seconds, seq * 0.01)
    policy.decide(server, steps * 0.01)
    return policy, history


def status(knowledge: Knowledge | None = None, **changes: object) -> ServerStatus:
    plain = ServerStatus(
        server="node:30000/0", model="target-8b", gpu="H200", sglang_version="0.5.23", mode="control",
        candidate_steps=[0, 1, 3], silent_seconds=0.1, source="TABLE", steps=3, table=None, reason="r",
        table_age_seconds=2.0, pending_epoch=0, confirmed_ranks=1, tp_size=1, records=4000, records_lost=0,
        tokens_per_second=2400.0, share_by_steps={"0": 0.5, "3": 0.5},
        counters={"tables_received": 3, "records_dropped": 0}, note="",
        switchback=SwitchbackStatus("policy", 3, Measured(0.12, 0.08, 0.17), 24, 10, 1, 0.0),
        expected_gain=knowledge.gain() if knowledge is not None else None,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def snapshot(servers: int = 1, **changes: object) -> Snapshot:
    """Return one of ``servers`` servers that know the same."""
    policy, history = learned()
    knowledge = policy.describe()
    assert knowledge is not None
    plan = policy.decide(SERVER, 41.0)
    found = {}
    for number in range(servers):
        name = f"node:{30000 + number}/0"
        told = status(knowledge, server=name, table=plan.table(7, 5.0, "goodput"), reason=plan.reason)
        told = msgspec.structs.replace(told, **changes)
        found[name] = ServerSnapshot(told, knowledge, history.totals(), history.hour(), policy_failed=False)
    controller = ControllerStatus(
        version="0.1.0", pid=1, endpoint="ipc:///run/c.ipc", policy="goodput", uptime_seconds=41.0,
        trace_directory="/t", trace_written=4000, trace_lost=0, trace_bytes=1 << 20, trace_error="",
        refused_messages=0, handshakes_failed=0, config_error="",
        changes=[], prior_error="", counters={"messages_unclaimed": 0},
        servers=[one.status for one in found.values()],
    )  # fmt: skip
    return Snapshot(41.0, controller, found)


def changed(before: Snapshot, **changes: object) -> Snapshot:
    """Return ``before`` with other fields of the controller's status."""
    return dataclasses.replace(before, status=msgspec.structs.replace(before.status, **changes))
