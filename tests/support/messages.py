"""Messages with plain values, for tests that care about a few of their fields."""

from __future__ import annotations

from typing import Any

import msgspec

from specpilot.sglang_hooks.wire import DecisionTable, Hello, StepRecord

_HELLO = Hello(
    server_id="node:30000",
    instance="i1",
    model="target-8b",
    draft_model="eagle3-8b",
    algorithm="EAGLE3",
    topk=1,
    candidate_steps=[0, 1, 3],
    fallback_steps=3,
    skip="verify",
    captured_batch_sizes=[1, 2, 4, 8, 16, 32, 64],
    max_running_requests=64,
    kv_tokens=100_000,
    overlap=True,
    tp_size=1,
    dp_size=1,
    dp_rank=0,
    gpu="H200",
    sglang_version="0.5.23",
    context_length=32768,
    mode="control",
    epoch=0,
)

_RECORD = StepRecord(
    record_seq=0,
    step=1,
    time=1_700_000_000.0,
    seconds=0.01,
    batch_size=2,
    padded_batch_size=2,
    context_tokens=200,
    steps=3,
    proposed_steps=3,
    held_steps=3,
    draft_tokens=4,
    accepted_drafts=[2, 3],
    truncated=[],
    running=2,
    queued=0,
    kv_used_tokens=200,
    retracted=0,
    source=1,
    epoch=1,
    cell=0,
    probability=1.0,
    block=-1,
    previous_kind=1,
    previous_width=8,
    forwards=1,
    prefill_tokens=0,
    launch_gap_seconds=-0.001,
    after_idle=False,
    graph=True,
    overlap=True,
    grammar=False,
)


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(_HELLO, **changes)


def record(**changes: Any) -> StepRecord:
    return msgspec.structs.replace(_RECORD, **changes)


def table(epoch: int = 1, steps: int = 1, **changes: Any) -> DecisionTable:
    """One cell, one K."""
    plain = DecisionTable(
        epoch=epoch,
        lease_seconds=5.0,
        policy="static",
        batch_edges=[],
        context_edges=[],
        choice=[steps],
        keep=[[]],
    )
    return msgspec.structs.replace(plain, **changes)
