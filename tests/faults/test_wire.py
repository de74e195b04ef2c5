"""What may happen on the way between a server and its controller, and what either may send."""

from __future__ import annotations

import random

import pytest

from specpilot.sglang_hooks.link import BATCH_RECORDS
from specpilot.sglang_hooks.wire import (
    MAX_MESSAGE_BYTES,
    MAX_TABLE_BYTES,
    WIRE_VERSION,
    FrameDecoder,
    Lease,
    StepBatch,
    ToHook,
    encode,
)
from tests.faults.conftest import Scene
from tests.faults.proxy import Direction
from tests.support.messages import hello, record, table
from tests.support.waiting import until

pytestmark = pytest.mark.sglang

BODIES = [
    b"",
    bytes((WIRE_VERSION,)),
    b"\xff",
    random.Random(1).randbytes(300),
    bytes((WIRE_VERSION + 1,)) + encode(Lease(1, 5.0))[1:],
    bytes((WIRE_VERSION,)) + b"\x93" * 5000,
    encode(table())[:-3],
    encode(hello())[:-3],
    encode(Lease(1, 5.0))[:-1],
]


def test_garbage_in_both_directions_is_counted_and_changes_nothing(scene: Scene) -> None:
    refused = scene.proxied.stats()["counters"]["messages_refused"]
    refused_there = scene.controller.status().refused_messages
    epoch = scene.proxied.stats()["epoch"]
    assert scene.proxy.inject("to_hook", *BODIES)
    assert scene.proxy.inject("to_controller", *BODIES)
    scene.proxied.until(lambda s: s["counters"]["messages_refused"] == refused + len(BODIES), "a count of refusals")
    until(lambda: scene.controller.status().refused_messages == refused_there + len(BODIES), what="a count of refusals")
    scene.recovered()
    assert scene.proxied.fresh()["epoch"] == epoch


def test_truncated_messages_of_every_kind(scene: Scene) -> None:
    for direction in ("to_hook", "to_controller"):
        scene.proxy.tamper(direction, *[lambda body: [body[: len(body) // 2]]] * 8)  # type: ignore[arg-type]
    until(lambda: not any(scene.proxy.waiting()), what="messages to truncate")
    assert scene.proxied.stats()["counters"]["messages_refused"] > 0
    scene.recovered()


@pytest.mark.parametrize("direction", ["to_hook", "to_controller"])
@pytest.mark.parametrize("kind", ["no-zmtp", "oversized", "cut"])
def test_a_connection_that_breaks_is_made_anew(kind: str, direction: Direction, scene: Scene) -> None:
    limit = MAX_TABLE_BYTES if direction == "to_hook" else MAX_MESSAGE_BYTES
    connections = scene.proxy.connections
    if kind == "cut":
        scene.proxy.cut()
    elif kind == "oversized":
        scene.proxy.inject(direction, bytes(limit + 1))
    else:
        scene.proxy.inject_bytes(direction, b"\xff" * 64)
    until(lambda: scene.proxy.connections > connections, what="another connection")
    scene.recovered()


def test_replayed_and_reordered_tables(scene: Scene) -> None:
    """They are refused and counted; one that was never sent, but is valid, rules until the controller knows of it."""
    stats = scene.proxied.stats()
    epoch, replayed = stats["epoch"], stats["counters"]["tables_replayed"]
    scene.proxy.inject("to_hook", encode(table(epoch + 2, lease_seconds=0.5)), encode(table(epoch + 1)))
    scene.proxy.inject("to_hook", *[encode(table(old)) for old in (epoch, epoch - 1, 1)])
    scene.proxied.until(lambda s: s["counters"]["tables_replayed"] >= replayed + 4, "a count of refusals")
    scene.proxied.until(lambda s: s["epoch"] > epoch + 2, "a newer table")
    scene.recovered()
    scene.proxy.inject("to_hook", *scene.proxy.seen["to_hook"])
    scene.recovered()


@pytest.mark.parametrize(
    "changes",
    [
        {"choice": [2]},
        {"choice": [5], "keep": [[0, 7]]},
        {"explore": {0: [(9, 0.1)]}},
        {"batch_edges": [4, 2]},
        {"batch_edges": list(range(600)), "choice": [1] * 601, "keep": [[]] * 601},
        {"lease_seconds": float("nan")},
        {"lease_seconds": float("inf")},
        {"explore": {0: [(1, float("nan"))]}},
        {"leap": 1 << 52},
        {"leap": (1 << 63) - 100_000},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_table_for_another_server_or_a_lie_is_refused(changes: dict[str, object], scene: Scene) -> None:
    stats = scene.proxied.stats()
    epoch, refused = stats["epoch"], stats["counters"]["tables_refused"] + stats["counters"]["messages_refused"]
    changed = dict(changes)
    leap = changed.pop("leap", 1)
    scene.proxy.inject("to_hook", encode(table(epoch + leap, **changed)))  # type: ignore[operator]
    scene.proxied.until(
        lambda s: s["counters"]["tables_refused"] + s["counters"]["messages_refused"] > refused, "a refusal"
    )
    scene.recovered()
    assert scene.proxied.stats()["epoch"] == epoch


def test_a_flood_of_tables(scene: Scene) -> None:
    epoch = scene.proxied.stats()["epoch"]
    for number in range(1, 2000):
        scene.proxy.inject("to_hook", encode(table(epoch + number, steps=number % 2, lease_seconds=0.5)))
    scene.proxied.until(lambda s: s["epoch"] > epoch + 1000, "the flood's tables")
    scene.recovered()


def test_a_controller_that_does_not_read(scene: Scene) -> None:
    """The queue fills, and what does not fit is dropped and counted by the server."""
    scene.proxied.command("flood", 200)
    scene.proxy.hold("to_controller")
    dropped = scene.proxied.until(lambda s: s["counters"]["records_dropped"] > 0, "records dropped")
    assert dropped["queued"] <= 8192 + BATCH_RECORDS  # one batch may come back from the socket
    scene.proxied.command("flood", 0)
    scene.proxy.release()
    scene.recovered()
    scene.proxied.until(lambda s: s["queued"] < 1000, "an empty queue")


def test_a_server_that_does_not_read(scene: Scene) -> None:
    scene.proxy.hold("to_hook")
    scene.proxied.source_is("FALLBACK")
    scene.proxy.release()
    scene.recovered()


def test_records_that_no_learner_should_see(scene: Scene) -> None:
    """Insane values, as from a version that was never tested: refused as a whole, or written and no more."""
    for changes in ({"seconds": float("nan")}, {"batch_size": 1 << 52}, {"accepted_drafts": []}, {"draft_tokens": 0}):
        scene.proxy.inject("to_controller", encode(StepBatch([record(record_seq=1, **changes)], 0)))
    scene.recovered()


def test_what_was_seen_on_the_wire_were_messages_of_this_version(scene: Scene) -> None:
    """The proxy reads ZMTP itself: were it wrong about frames, the tests above would test nothing."""
    decoder = FrameDecoder(ToHook)
    until(lambda: len(scene.proxy.seen["to_hook"]) >= 2, what="messages")
    scene.controller.end()
    scene.controller.start()
    scene.recovered()
    kinds = {type(decoder.decode(body)).__name__ for body in list(scene.proxy.seen["to_hook"])[-2:]}
    assert kinds <= {"DecisionTable", "Lease", "HelloRequest"}
