"""Every decoder against input that nobody meant: a typed error or a valid value, never anything else.

About a minute, and the same every time. ``make fuzz`` looks for new cases, FUZZ_EXAMPLES of each.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from specpilot.controller.client.status import print_status
from specpilot.controller.config import (
    Config,
    ControllerConfig,
    GoodputPolicy,
    PriorConfig,
    SwitchbackConfig,
    TraceConfig,
    load_config,
)
from specpilot.controller.errors import ConfigError
from specpilot.controller.neural_file import load_model, save_model
from specpilot.controller.serve.keys import make_keys
from specpilot.controller.serve.priors import PriorStore
from specpilot.controller.serve.report import read_report
from specpilot.controller.serve.service import Service
from specpilot.controller.serve.switchback import Stored, Switchback
from specpilot.controller.simulation.workload import ArrivalsError, read_arrivals
from specpilot.controller.trace.format import records
from specpilot.controller.trace.info import trace_info
from specpilot.controller.trace.reader import Segment, TraceError
from specpilot.controller.trace.writer import TraceWriter
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import PolicyError
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.policies.neural import Model, Net, Neural
from specpilot.sglang_hooks.connection import EndpointError, KeyFiles, check_endpoint, read_key_pair
from specpilot.sglang_hooks.link import Link, Mailbox, RecordQueue
from specpilot.sglang_hooks.settings import OPTIONS, Settings, SettingsError
from specpilot.sglang_hooks.table_policy import CompiledTable, TableError, TablePolicy
from specpilot.sglang_hooks.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    DecisionSource,
    DecisionTable,
    FrameDecoder,
    FromHook,
    HelloRequest,
    HookState,
    Lease,
    StatusReport,
    StatusRequest,
    StepBatch,
    ToHook,
    WireError,
    encode,
)
from tests.support.messages import hello, record, table

LONGER = "FUZZ_EXAMPLES" in os.environ
fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    derandomize=not LONGER,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

STATE = HookState("i1", DecisionSource.TABLE, 1, 1, 1, 3, 100, {"tables_received": 1}, "")
EXPLORING = table(
    batch_edges=[4, 8], context_edges=[1000], choice=[3, 3, 1, 1, 0, 0], keep=[[], [1], [], [0], [], [1, 3]],
    explore={0: [(0, 0.01), (1, 0.02)]}, block_steps=4, min_dwell_steps=2,
)  # fmt: skip
MESSAGES = [
    hello(), StepBatch([record(), record(record_seq=1)], 0), STATE, StatusRequest(),
    HelloRequest(), EXPLORING, Lease(1, 5.0), StatusReport(b"{}"),
]  # fmt: skip

# -- inputs --

NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, -1, 64, 4096, 4097, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e308, 1e9]),
)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=12) | st.binary(max_size=12)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@st.composite
def mutated(draw: st.DrawFn, whole: bytes) -> bytes:
    """``whole`` with bytes replaced, taken out, put in, doubled, or its end cut off."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = at + draw(st.integers(1, 16))
        match draw(st.integers(0, 5)):
            case 0:
                data[at:end] = draw(st.binary(min_size=1, max_size=16))
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case 3:
                data[at:at] = data[at:end]
            case 4:
                data[at:end] = draw(st.sampled_from([b"\xff", b"\x00", b"\x7f", b"\x80"])) * (end - at)
            case 5:
                del data[at:]
    return bytes(data)


def edited(value: Any) -> st.SearchStrategy[Any]:
    """A tree of lists and dicts of which one or two places hold something else."""

    @st.composite
    def strategy(draw: st.DrawFn) -> Any:
        tree = msgspec.msgpack.decode(msgspec.msgpack.encode(value), strict=False)
        for _ in range(draw(st.integers(1, 2))):
            node, key = tree, None
            while isinstance(node, list | dict) and node:
                parent = node
                key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
                node = parent[key]
                if draw(st.integers(0, 3)) == 0:
                    break
            if key is None:
                continue
            parent[key] = draw(ANYTHING | st.lists(NUMBERS, max_size=300) | st.just([[]] * 5000))
        return tree

    return strategy()


def framed(tree: Any) -> bytes:
    return bytes((WIRE_VERSION,)) + msgspec.msgpack.encode(tree)


FRAMES = st.one_of(
    st.binary(max_size=200),
    *(mutated(encode(message)) for message in MESSAGES),
    *(edited(message).map(framed) for message in MESSAGES),
    ANYTHING.map(framed),
    st.sampled_from([message.__struct_config__.tag for message in MESSAGES]).flatmap(
        lambda tag: st.lists(ANYTHING, max_size=30).map(lambda values: framed([tag, *values]))
    ),
)


# -- the wire --


@fuzz
@given(FRAMES)
@example(bytes((WIRE_VERSION,)) + b"\x91" * 100_000)
@example(b"\x01\xdd\xff\xff\xff\xff")
@example(framed(["steps", [[]] * 100_000, 0]))
@example(framed(["\x1b[2J" * 1000]))
@example(framed(["state", "\nERROR forged", 0, 0, 0, 0, 0, 0, {}, ""]))
def test_frames(frame: bytes) -> None:
    for expected in (FromHook, ToHook, StatusReport):
        try:
            message = FrameDecoder(expected).decode(frame)
        except WireError as error:
            assert len(str(error)) < 300
            assert str(error).isprintable()
            continue
        again = encode(message)  # type: ignore[arg-type]
        assert encode(FrameDecoder(expected).decode(again)) == again  # type: ignore[arg-type]


@fuzz
@given(edited(EXPLORING), st.integers(1, 300), st.floats(0, 1e6), st.integers(0, 10**6))
def test_tables(tree: Any, batch_size: int, mean_context: float, forward_iter: int) -> None:
    """A lying controller is fenced in: undeclared steps and steps above the operator's bounds are never applied."""
    candidates = [0, 1, 3]
    try:
        decoded = FrameDecoder(ToHook).decode(framed(tree))
        assert isinstance(decoded, DecisionTable)
        compiled = CompiledTable.compile(decoded, candidates)
    except (WireError, TableError):
        return
    policy = TablePolicy(Settings(max_steps_by_batch=((4, 1), (64, 0))), candidates, 3)
    policy.adopt(compiled)
    policy.forward_iter, policy.mean_context = forward_iter, mean_context
    for size in (1, batch_size, 10**6):
        steps = policy.get_steps_for_batch(size)
        assert steps in candidates
        assert steps <= (3 if size < 4 else 1 if size < 64 else 0)
        launch = policy.take_launch(forward_iter)
        assert launch is not None
        assert 0.0 <= launch.probability <= 1.0 + 1e-9
    assert policy.source == DecisionSource.TABLE  # no lookup failed


@fuzz
@given(st.lists(FRAMES, max_size=5))
def test_the_link_takes_anything(frames: list[bytes]) -> None:
    mailbox = Mailbox()
    link = Link("ipc:///none", KeyFiles(), hello, lambda: STATE, RecordQueue(1), mailbox, [0, 1, 3])
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://fuzz")
        receiver.connect("inproc://fuzz")
        for frame in frames:
            sender.send(frame)
            sender.send_multipart([frame, frame])
        link._receive(receiver)
    assert sum(link.counters.values()) >= len(frames)
    assert math.isfinite(mailbox.lease[1])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(
        Config(
            controller=ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc"),
            policy=GoodputPolicy(exploration_floor=0.01),
            trace=TraceConfig(directory=str(tmp_path / "trace")),
            prior=PriorConfig(directory=str(tmp_path / "prior")),
            switchback=SwitchbackConfig(share=0.5, block_seconds=0.02, washout_seconds=0.001),
        )
    )
    yield made
    made.stop()
    made.run()


FROM_HOOK = st.one_of(
    FRAMES,
    *(edited(message).map(framed) for message in (hello(), StepBatch([record()] * 3, 0), STATE)),
    st.sampled_from([encode(hello()), encode(StepBatch([record()] * 40, 0)), encode(STATE)]),
)


@fuzz
@given(messages=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), FROM_HOOK), max_size=12))
@example(messages=[(b"a", encode(hello(server_id="[/x] [red]", model="[/bold]", gpu="[link=x]")))])
@example(
    messages=[
        (b"a", encode(hello(server_id="m"))),
        (b"a", encode(msgspec.structs.replace(STATE, halt_reason="[/y]", counters={"[/z]": 1}))),
    ]
)
def test_the_controller_takes_anything(messages: list[tuple[bytes, bytes]], service: Service) -> None:
    """Nor does a policy fail, from what the wire takes for sane; and the report of it can be read and shown."""
    for address, frame in messages:
        service._receive([address, frame])
    service._tend()
    report = read_report(msgspec.json.encode(service.status()))
    print_status(report, Console(file=io.StringIO()))
    assert [session.key for session in service._sessions.values() if session.failed] == []


@fuzz
@given(ANYTHING | st.binary(max_size=50))
@example(b"[" * 100_000)
def test_reports(report: Any) -> None:
    content = report if isinstance(report, bytes) else json.dumps(report, default=repr).encode()
    with suppress(WireError):
        read_report(content)


# -- files --


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("trace")
    writer = TraceWriter(folder, "s/0", hello(), TraceConfig(directory=str(folder)))
    for first in (0, 40):
        writer.append([record(record_seq=first + i, accepted_drafts=[i % 4] * (i % 5)) for i in range(40)])
        writer.tick(float(first))
    writer.close()
    (path,) = folder.glob("*/*.arrows")
    return path.read_bytes()


@fuzz
@given(data=st.data())
def test_segments(data: st.DataObject, segment: bytes, tmp_path: Path) -> None:
    path = tmp_path / "000001.arrows"
    path.write_bytes(data.draw(mutated(segment) | st.binary(max_size=200) | mutated(segment[:600])))
    before = pa.total_allocated_bytes()
    try:
        for batch in Segment(path):
            assert pa.total_allocated_bytes() - before < 1 << 24
            assert len(records(batch)) == batch.num_rows
            del batch
    except TraceError as error:
        assert str(path) in str(error)
    trace_info([path])


def write_and(read: Callable[[Path], Any], error: type[Exception], path: Path, content: bytes) -> Any:
    """Return what ``read`` makes of the file; None for its own error, which must name it."""
    path.touch(0o600)
    path.write_bytes(content)
    try:
        return read(path)
    except error as found:
        assert path.name in str(found)
        return None


GOODPUT = Goodput()
GOODPUT.decide(hello(), 0.0)
for _ in range(200):
    GOODPUT.learn(record())
PRIOR = json.loads(json.dumps(GOODPUT.to_prior()))
PRIOR_TEXT = json.dumps(PRIOR).encode()


@fuzz
@given(content=mutated(PRIOR_TEXT) | edited(PRIOR).map(lambda tree: json.dumps(tree, default=repr).encode()))
@example(content=b"[" * 100_000)
@example(content=b'{"a":' * 100_000)
def test_priors(content: bytes, tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store.path(hello()).write_bytes(content)
    policy = Goodput(store.load(hello()))
    for _ in range(3):
        plan = policy.decide(hello(), 0.0)
        CompiledTable.compile(plan.table(1, 5.0, "goodput", 0), [0, 1, 3])
        policy.learn(record())


STORED = Stored("x", [0.1] * 12, 3, 1.7e9, False)


@fuzz
@given(
    content=mutated(msgspec.json.encode(STORED))
    | edited(STORED).map(lambda tree: json.dumps(tree, default=repr).encode())
    | st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1, 1), min_size=10, max_size=20).map(
        lambda ratios: json.dumps({**msgspec.to_builtins(STORED), "log_ratios": ratios}).encode()
    )
)  # fmt: skip
def test_what_a_switchback_kept(content: bytes, tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store._switchback_path("s/0").write_bytes(content)
    if (stored := store.load_switchback("s/0")) is not None:
        switchback = Switchback(SwitchbackConfig(share=0.5), hello(), 1, 0.0)
        switchback.resume(stored, 0.0, 1.7e9)
        for now in (0.0, 1.0, 1e6):
            assert math.isfinite(getattr(switchback.status(now).measured, "gain", 0.0))
            switchback.arm(now)


EXAMPLE = b"""
[controller]
endpoint = "tcp://0.0.0.0:5757"
key = "/k"
authorized_keys = "/a"
lease_seconds = 5.0
[policy]
name = "goodput"
max_steps = 5
[trace]
directory = "t"
segment_bytes = 67_108_864
[switchback]
share = 0.1
"""


@fuzz
@given(content=mutated(EXAMPLE) | st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@example(content=b"a=" + b"[" * 100_000)
@example(content=b"[policy]\nname = 'static'\nsteps = " + b"9" * 5000)
@example(content=b'[trace]\ndirectory = "a\\u0000b"')
def test_configurations(content: bytes, tmp_path: Path) -> None:
    write_and(load_config, ConfigError, tmp_path / "controller.toml", content)


@fuzz
@given(st.dictionaries(st.sampled_from([option.name for option in OPTIONS]), st.text(max_size=20), max_size=4))
@example({"SPECPILOT_MAX_STEPS_BY_BATCH": "1:" + "9" * 5000})
@example({"SPECPILOT_QUEUE_RECORDS": "9" * 5000})
def test_environments(environment: dict[str, str]) -> None:
    with suppress(SettingsError):
        Settings.from_environment(environment).decision_hash()


@fuzz
@given(st.text(max_size=30) | st.sampled_from(["ipc:///", "tcp://"]).flatmap(lambda a: st.text().map(a.__add__)))
def test_endpoints(text: str) -> None:
    """What is let through, ZMQ can take: it binds or says why it cannot."""
    try:
        check_endpoint(text)
    except EndpointError:
        return
    assert text.startswith(("ipc:///", "tcp://"))
    assert "\0" not in text


def model() -> Model:
    layers = lambda i, o: tuple(np.zeros(s) for s in ((i, 4), 4, (4, 4), 4, (4, o), o, (i, o)))  # noqa: E731
    nets = [Net(np.zeros(i), np.ones(i), layers(i, o)) for i, o in ((6, 3), (12, 3))]
    return Model((0, 1, 3), 3, (fingerprint(hello()),), *nets)


def npz(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(shape: tuple[int, ...], body: bytes = b"", kind: str = "<f8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + body


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "m.npz"
    save_model(model(), path)
    return path.read_bytes()


def check_model(path: Path) -> None:
    policy = Neural(load_model(path))
    plan = policy.decide(hello(), 0.0)
    CompiledTable.compile(plan.table(1, 5.0, "neural", 0), [0, 1, 3])


@fuzz
@given(data=st.data())
def test_neural_files(data: st.DataObject, model_bytes: bytes, tmp_path: Path) -> None:
    with suppress(PolicyError):  # a model of another server
        content = data.draw(mutated(model_bytes) | st.binary(max_size=100))
        write_and(check_model, ConfigError, tmp_path / "m.npz", content)


@pytest.mark.parametrize(
    "content",
    [
        npz(version=npy((1 << 40,))),
        npz(version=npy((1 << 62, 1 << 62))),
        npz(version=npy((-1,))),
        npz(zipfile.ZIP_DEFLATED, version=npy((1 << 23,), bytes(1 << 26))),
        npz(version=npy((1,), b"x" * 8, "|O")),
        npz(version=b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535),
        npz(version=b"no array"),
        npz(),
    ],
    ids=["terabyte", "overflow", "negative", "bomb", "pickle", "nested", "text", "empty"],
)
def test_neural_files_that_ask_for_memory_or_code(content: bytes, tmp_path: Path) -> None:
    assert write_and(load_model, ConfigError, tmp_path / "m.npz", content) is None


@fuzz
@given(data=st.data())
def test_key_files(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "client.key_secret"
    if not path.exists():
        make_keys(tmp_path / "keys")
        (tmp_path / "whole").write_bytes(path.read_bytes())
    whole = (tmp_path / "whole").read_bytes()
    strategy = mutated(whole) | st.binary(max_size=60) | st.binary(max_size=9).map(whole[:-42].__add__)
    pair = write_and(read_key_pair, EndpointError, path, data.draw(strategy))
    assert pair is None or zmq.curve_public(pair[1]) == pair[0]


ARRIVALS = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"".join(b"%d,100,20\n" % i for i in range(9))


@fuzz
@given(content=mutated(ARRIVALS) | st.binary(max_size=60))
@example(content=ARRIVALS + b"1," + b"9" * 5000 + b",3\n")
@example(content=ARRIVALS + b"0001-01-01T00:00:00+23:59,1,1\n")
@example(content=ARRIVALS + b'"' + b"x" * 200_000 + b'"\n')
def test_arrivals(content: bytes, tmp_path: Path) -> None:
    write_and(read_arrivals, ArrivalsError, tmp_path / "arrivals.csv", content)


def test_the_limit_of_a_frame_is_checked_before_it_is_read() -> None:
    with pytest.raises(WireError, match="the limit is"):
        FrameDecoder(FromHook).decode(b"\x01" * (MAX_MESSAGE_BYTES + 1))
