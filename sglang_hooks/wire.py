"""Messages between a server's hooks and the controller: msgspec structs as MessagePack.

    hook  -> controller   Hello, StepBatch, HookState
    controller -> hook    HelloRequest, DecisionTable, Lease
    operator <-> controller   StatusRequest, StatusReport; SetRequest, SetReply

One message is one ZMQ frame: a version byte, then a MessagePack array that begins with the
message's tag. Readers check size and version before anything is decoded, and nothing
received is ever unpickled. Seconds everywhere; *steps* is ``speculative_num_steps`` (K),
*draft tokens* is what the target verifies per request (K+1 for a chain), *accepted drafts*
does not count the bonus token.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

WIRE_VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20
"""A StepBatch of 32 records at batch size 4096 is about 0.4 MB."""
MAX_TABLE_BYTES = 256 << 10
"""Largest frame to a server, which decodes it under its interpreter's lock: about 6 ms at worst. The largest
table, 512 x 8 cells with three alternatives each, is below 200 kB, a usual one a few kB."""
MAX_REPORT_BYTES = 16 << 20
"""Largest StatusReport, which only an operator's client reads: some 10 kB a server."""

MASKED = -1
"""In ``StepRecord.accepted_drafts``: a row whose request had already finished or was retracted, or whose draft
had holes in its context after a long skip."""


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Steps = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
Name = Annotated[str, msgspec.Meta(max_length=1024, pattern=_PRINTABLE)]
"""What a reader takes for sane: a message with anything else in it is refused as a whole.

Names are shown to operators, so they hold no control characters. Lists are bounded too: an
empty one takes one byte in a frame and sixty in memory."""

MAX_RECORDS = 256
MAX_ROWS = 4096
"""Requests in a batch."""
MAX_EDGES = 511
MAX_CELLS = 4096
"""512 x 8 cells decode in under a millisecond; SGLang captures about 50 batch sizes."""
Rows = Annotated[list[Count], msgspec.Meta(max_length=MAX_ROWS)]
Edges = Annotated[list[int], msgspec.Meta(max_length=MAX_EDGES)]


class WireError(ValueError):
    """A frame that is not a message of this version; the text says what is wrong with it."""


class ForwardKind(enum.IntEnum):
    """What a forward pass of the server did."""

    NONE = 0
    DECODE = 1
    EXTEND = 2
    MIXED = 3
    OTHER = 4


class DecisionSource(enum.IntEnum):
    """Who decided a step."""

    FALLBACK = 0
    """No table yet, or the last one is older than its lease plus ``stale_seconds``."""
    TABLE = 1
    STALE = 2
    """The lease ran out: the last table without its exploration."""
    HALTED = 3
    """The ranks disagreed or a lookup failed; nothing switches until a restart."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """What a server is and can do; sent at connect, and again until the controller answers."""

    server_id: Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=_PRINTABLE)]
    instance: Name
    """Changes with every process: two live servers with one id are told apart by it."""
    model: Name
    draft_model: Name
    algorithm: Name
    topk: Steps
    candidate_steps: Annotated[list[Steps], msgspec.Meta(min_length=1, max_length=64)]
    fallback_steps: Steps
    skip: Name
    """Kind of K=0 step: "decode" (the target's ordinary decode step), "verify" (SGLang's width-1 verify)
    or "none" (K=0 is no candidate)."""
    captured_batch_sizes: Rows
    max_running_requests: Count
    kv_tokens: Count
    overlap: bool
    tp_size: Count
    dp_size: Count
    dp_rank: Count
    gpu: Name
    sglang_version: Name
    context_length: Count
    mode: Name
    epoch: Count
    """Epoch of the newest table this server has seen, so that a new controller continues above it."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decode step as it was applied and observed, with the raw facts to judge it by.

    Whether ``seconds`` is this step's own time is the learner's judgement: it is, when
    ``forwards == 1``, ``previous_kind`` is DECODE and ``launch_gap_seconds`` is small.
    """

    record_seq: Count
    """Counts every record made, sent or dropped: gaps are losses."""
    step: Count
    """SGLang's ``forward_iter``; prefills count too."""
    time: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    """Host time of completion, seconds since the Unix epoch."""
    seconds: Seconds
    """Seconds since the completion of the previous decode step; 0 for the first."""
    batch_size: Count
    padded_batch_size: Count
    """Captured CUDA-graph size the batch was padded to; ``batch_size`` when it ran eagerly."""
    context_tokens: Count
    """Sum of sequence lengths at launch as the host knows them: without what is in flight."""
    steps: Steps
    """K asked for at launch."""
    proposed_steps: Steps
    """K the table asked for; differs from ``steps`` only in shadow mode."""
    held_steps: Steps
    """K the table held: what is proposed unless exploration draws something else."""
    draft_tokens: Steps
    """Tokens verified per request, from the step's own result (K+1 for a chain)."""
    accepted_drafts: Annotated[list[Annotated[int, msgspec.Meta(ge=-1, le=4096)]], msgspec.Meta(max_length=MAX_ROWS)]
    """Per request, without the bonus token; MASKED for rows that were no longer live or are quarantined."""
    truncated: Rows
    """Rows whose request ended within this step: their count stops there, it is not a rejection."""
    running: Count
    queued: Count
    kv_used_tokens: int
    retracted: Count
    """Requests that lost their place for want of KV cache since the previous record."""
    source: DecisionSource
    epoch: Count
    cell: int
    """``batch_region * (len(context_edges) + 1) + context_region``; -1 without a table."""
    probability: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Probability of having chosen ``proposed_steps`` in this cell."""
    block: int
    """Exploration block this step belongs to; -1 where the cell explores nothing."""
    previous_kind: int
    previous_width: int
    """Tokens of the forward launched just before."""
    forwards: int
    """Forward passes since the previous decode step (1 = back to back)."""
    prefill_tokens: int
    """Prompt tokens launched since the previous decode step."""
    launch_gap_seconds: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    """Seconds from the previous decode completion to this launch; negative when overlap hid the launch."""
    after_idle: bool | None
    """The server had been idle; None where SGLang does not say (0.5.17)."""
    graph: bool
    overlap: bool
    grammar: bool


class StepBatch(msgspec.Struct, frozen=True, array_like=True, tag="steps"):
    """Records in order, and how many were dropped since the process began."""

    records: Annotated[list[StepRecord], msgspec.Meta(max_length=MAX_RECORDS)]
    dropped: int


class HookState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """What the hooks are doing now; sent once a second and at every change."""

    instance: Name
    source: DecisionSource
    epoch: Count
    """Epoch of the table in force (0: none)."""
    confirmed_epoch: int
    """Newest epoch that every rank was seen to hold."""
    confirmed_ranks: int
    steps: int
    """K of the newest launch."""
    forward_iter: int
    counters: Annotated[dict[Name, int], msgspec.Meta(max_length=256)]
    halt_reason: Name


class HelloRequest(msgspec.Struct, frozen=True, array_like=True, tag="hello?"):
    """Asks a server to introduce itself: the controller is new or has forgotten it."""


class DecisionTable(msgspec.Struct, frozen=True, array_like=True, tag="table"):
    """What to choose in every cell, for as long as the lease is renewed.

    Region i of an axis holds values in (edges[i-1], edges[i]]; one more region lies above
    the last edge. A cell's index is ``batch_region * (len(context_edges) + 1) + context_region``;
    ``choice``, ``keep`` and ``explore`` are indexed by it. Context is tokens per request.
    """

    epoch: int
    lease_seconds: float
    policy: Name
    batch_edges: Edges
    context_edges: Edges
    choice: Annotated[list[int], msgspec.Meta(max_length=MAX_CELLS)]
    keep: Annotated[list[Annotated[list[int], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=MAX_CELLS)]
    """Steps that may stay in force though ``choice`` differs: hysteresis lives here."""
    min_dwell_steps: int = 0
    """Decode steps for which a switch is not followed by another."""
    explore: Annotated[
        dict[int, Annotated[list[tuple[int, float]], msgspec.Meta(max_length=64)]],
        msgspec.Meta(max_length=MAX_CELLS),
    ] = {}
    """Alternatives (steps, probability) by cell; the rest of the mass is the ordinary choice."""
    block_steps: int = 1
    """Length of an exploration block in forward passes: one draw holds for all of it."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    """Where the sequence of draws begins: random per server, the same in all its tables."""
    shadow: bool = False
    """Look up and record what it says, but apply the fallback."""


class Lease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """The controller is alive, and table ``epoch`` (0: it has none for this server) stays in force.

    ``lease_seconds`` count from the arrival.
    """

    epoch: int
    lease_seconds: float


class StatusRequest(msgspec.Struct, frozen=True, array_like=True, tag="status?"):
    """An operator's client asks for a StatusReport."""


class StatusReport(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """The controller's view of itself and of every server, as JSON (``controller/serve/report.py``)."""

    report: bytes


class SetRequest(msgspec.Struct, frozen=True, array_like=True, tag="set?"):
    """An operator's client asks for a change of the configuration in force; all of it is made, or nothing."""

    values: dict[Name, Name]
    """TOML values by dotted key; an empty one takes the key back."""
    server: Name = ""
    """Server that the change is for; empty: for all servers."""
    seconds: Seconds = 0.0
    """Seconds until the change is undone; 0: it holds until the controller restarts."""
    reset: bool = False
    """First take back what was set before for this server (without one: for all), with ``seconds`` only what was
    set for a time."""


class SetReply(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """What came of it: ``error`` is empty, or says why nothing was changed."""

    error: str
    report: bytes
    """What is in force now, as JSON (``controller/serve/live_config.py``)."""


FromHook = Hello | StepBatch | HookState | StatusRequest | SetRequest
ToHook = HelloRequest | DecisionTable | Lease
Message = FromHook | ToHook | StatusReport | SetReply

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the frame for one message."""
    return bytes((WIRE_VERSION,)) + _encoder.encode(message)


class FrameDecoder:
    """Decodes the frames of one direction, and refuses everything else.

    >>> FrameDecoder(ToHook).decode(encode(Lease(epoch=3, lease_seconds=5.0)))
    Lease(epoch=3, lease_seconds=5.0)
    >>> FrameDecoder(ToHook).decode(b"x")
    Traceback (most recent call last):
    specpilot.sglang_hooks.wire.WireError: wire version 120, this side speaks 2: run the same specpilot on both
    """

    def __init__(self, expected: object, limit: int = MAX_MESSAGE_BYTES) -> None:
        """``limit`` in bytes of a frame."""
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(expected)
        self._limit = limit

    def decode(self, frame: bytes | memoryview) -> object:
        """Return the message in ``frame``; raise WireError for anything else."""
        if len(frame) > self._limit:
            raise WireError(f"message of {len(frame)} bytes, the limit is {self._limit}")
        if len(frame) < 2:
            raise WireError("empty message" if not frame else _version_text(frame[0]) or "truncated message")
        if frame[0] != WIRE_VERSION:
            raise WireError(_version_text(frame[0]))
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # The text quotes what was received, and ends in a log.
            text = "".join(c if c.isprintable() else "?" for c in str(error)[:200])
            raise WireError(f"malformed message: {text}") from error


def _version_text(version: int) -> str:
    if version == WIRE_VERSION:
        return ""
    return f"wire version {version}, this side speaks {WIRE_VERSION}: run the same specpilot on both"
