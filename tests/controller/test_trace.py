"""The trace on real files: exact round trips, bounds, torn tails, killed writers and full disks."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from specpilot.controller.config import TraceConfig
from specpilot.controller.errors import ConfigError
from specpilot.controller.trace import format as trace_format
from specpilot.controller.trace import writer as trace
from specpilot.controller.trace.format import FORMAT_VERSION, SCHEMA, folder_name, to_batch
from specpilot.controller.trace.info import LISTED_FAULTS, ServerTrace, print_trace_info, trace_info
from specpilot.controller.trace.reader import Segment, TraceError, segments
from specpilot.controller.trace.writer import TraceWriter, check_directory
from specpilot.sglang_hooks.wire import DecisionSource, StepBatch, StepRecord, encode
from tests.support.messages import hello, record

KEY = "node:30000/0"
CONFIG = TraceConfig(segment_bytes=1 << 20, total_bytes=1 << 24, flush_seconds=1.0)
SMALL = TraceConfig(segment_bytes=1 << 16, total_bytes=1 << 18, flush_seconds=1.0)


def numbered(start: int, count: int, **changes: Any) -> list[StepRecord]:
    return [record(record_seq=n, step=n, time=1_700_000_000.0 + n, **changes) for n in range(start, start + count)]


def read(paths: Sequence[Path]) -> list[StepRecord]:
    return [r for path in segments(paths) for batch in Segment(path) for r in trace_format.records(batch)]


def write(directory: Path, *batches: Sequence[StepRecord], key: str = KEY, **of_hello: Any) -> Path:
    """Each of ``batches`` as one record batch of one new segment; returns its path."""
    writer = TraceWriter(directory, key, hello(**of_hello), CONFIG)
    for now, batch in enumerate(batches):
        writer.append(batch)
        writer.tick(float(now))
    writer.close()
    assert not writer.last_error
    return segments([directory / folder_name(key)])[-1]


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.arrows"))


# -- what is written is what is read --


def test_schema_has_a_column_for_every_field_in_order() -> None:
    fields = msgspec.structs.fields(StepRecord)
    assert SCHEMA.names == [field.name for field in fields]
    kinds = {float: pa.types.is_float64, bool: pa.types.is_boolean, int: pa.types.is_signed_integer}
    for field, column in zip(fields, SCHEMA, strict=True):
        optional = field.type == bool | None
        assert column.nullable == optional, field.name
        plain = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        expected = bool if optional else int if plain is DecisionSource else plain
        assert kinds.get(expected, pa.types.is_list)(column.type), field.name


def test_no_column_type_is_left_of_a_field_that_is_gone() -> None:
    assert set(trace_format._TYPE_OF) == set(StepRecord.__struct_fields__)


def _values_of(kind: Any) -> st.SearchStrategy[Any]:
    if pa.types.is_list(kind):
        return st.lists(_values_of(kind.value_type), max_size=20)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_floating(kind):
        return st.floats()
    bits = kind.bit_width - 1
    return st.integers(-(1 << bits), (1 << bits) - 1)


RECORDS = st.builds(
    StepRecord,
    **{
        column.name: st.none() | _values_of(column.type) if column.nullable else _values_of(column.type)
        for column in SCHEMA
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(RECORDS, min_size=1, max_size=6), min_size=1, max_size=3))
def test_round_trip_is_exact(batches: list[list[StepRecord]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), *batches)
        back = read([Path(directory)])
    # Encoded, so that NaN equals itself, -0.0 is not 0.0 and True is not 1.
    assert encode(StepBatch(back, 0)) == encode(StepBatch([r for batch in batches for r in batch], 0))


@given(st.lists(RECORDS, min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_a_slice_of_a_batch_converts_to_its_own_records(records: list[StepRecord], start: int, count: int) -> None:
    part = trace_format.records(to_batch(records).slice(min(start, len(records)), count))
    assert encode(StepBatch(part, 0)) == encode(StepBatch(records[start : start + count], 0))


def test_a_segment_is_a_plain_arrow_stream_with_the_hello(tmp_path: Path) -> None:
    path = write(tmp_path, numbered(0, 5), numbered(5, 2), model="[m] ü", epoch=7)
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    assert table["record_seq"].to_pylist() == list(range(7))
    assert table["accepted_drafts"].to_pylist()[0] == [2, 3]
    assert msgspec.json.decode(table.schema.metadata[b"specpilot.hello"])["model"] == "[m] ü"
    segment = Segment(path)
    assert segment.hello == hello(model="[m] ü", epoch=7)
    assert [batch.num_rows for batch in segment] == [5, 2]
    assert not segment.torn
    assert segment.offset == segment.size == path.stat().st_size


def test_a_segment_that_grows_is_read_on_from_where_the_last_reading_ended(tmp_path: Path) -> None:
    path = write(tmp_path, numbered(0, 2), numbered(2, 1), numbered(3, 4))
    whole = path.read_bytes()
    found: list[StepRecord] = []
    offset = 0
    for size in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:size])
        segment = Segment(path, offset)
        for batch in segment:
            found += trace_format.records(batch)
        assert offset <= segment.offset <= size
        assert segment.bytes_lost == size - segment.offset
        offset = segment.offset
    path.write_bytes(whole)
    for _ in range(2):
        segment = Segment(path, offset)
        found += [r for batch in segment for r in trace_format.records(batch)]
        assert (segment.hello, segment.torn, segment.offset) == (hello(), False, len(whole))
        offset = segment.offset
    assert found == numbered(0, 7)


@given(st.text(min_size=1).filter(lambda key: key.isprintable()))
def test_folder_names_are_safe_and_reversible(key: str) -> None:
    name = folder_name(key)
    assert unquote(name) == key
    assert "/" not in name
    assert not name.startswith(".")


# -- when it is written, and where --


def test_records_wait_for_their_time_or_their_number(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, KEY, hello(), CONFIG)
    writer.tick(0.0)
    writer.append(numbered(0, 10))
    writer.tick(0.5)
    assert writer.written_records == 0
    writer.tick(1.0)
    assert writer.written_records == 10
    writer.append(numbered(10, trace.BATCH_RECORDS + 1))
    writer.tick(1.1)
    assert writer.written_records == 10 + trace.BATCH_RECORDS + 1
    [path] = segments([tmp_path])
    assert [batch.num_rows for batch in Segment(path)] == [10, trace.BATCH_RECORDS, 1]
    writer.append(numbered(10 + trace.BATCH_RECORDS + 1, 3))
    writer.close()
    writer.close()
    assert [r.record_seq for r in read([tmp_path])] == list(range(14 + trace.BATCH_RECORDS))
    assert writer.bytes_on_disk == size_of(tmp_path)


def test_without_records_nothing_is_created(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "none", KEY, hello(), CONFIG)
    writer.tick(100.0)
    writer.update_hello(hello(instance="i2"))
    writer.close()
    assert not (tmp_path / "none").exists()


def test_a_writer_never_appends_to_what_it_finds(tmp_path: Path) -> None:
    first = write(tmp_path, numbered(0, 3))
    before = first.read_bytes()
    (first.parent / "000041.arrows").write_bytes(b"")
    (first.parent / "notes.txt").write_text("not a segment")
    last = write(tmp_path, numbered(3, 3))
    assert first.read_bytes() == before
    assert [path.name for path in segments([tmp_path])] == ["000001.arrows", "000041.arrows", "000042.arrows"]
    assert last.name == "000042.arrows"
    assert [r.record_seq for r in read([tmp_path])] == list(range(6))


def test_a_new_hello_begins_a_segment_a_new_epoch_does_not(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, KEY, hello(), CONFIG)
    writer.append(numbered(0, 2))
    writer.update_hello(hello(epoch=9))
    writer.append(numbered(2, 2))
    writer.update_hello(hello(instance="i2"))
    writer.append(numbered(0, 2))
    writer.close()
    one, two = map(Segment, segments([tmp_path]))
    assert (one.hello, two.hello) == (hello(), hello(instance="i2"))
    assert ([b.num_rows for b in one], [b.num_rows for b in two]) == ([4], [2])


def test_segments_keep_their_size_and_all_servers_the_total(tmp_path: Path) -> None:
    gone = write(tmp_path, numbered(0, 200), key="gone/0")
    writers = [TraceWriter(tmp_path, f"node:{port}/0", hello(), SMALL) for port in (1, 2)]
    rounds = 300
    for n in range(rounds):
        for writer in writers:
            writer.append(numbered(40 * n, 40))
            writer.tick(float(n))
            assert size_of(tmp_path) <= SMALL.total_bytes
    assert size_of(tmp_path) > 0.4 * SMALL.total_bytes  # a deleted segment is a quarter of it
    assert all(path.stat().st_size <= SMALL.segment_bytes for path in segments([tmp_path]))
    assert not gone.parent.exists()  # a server that is no more does not keep its share
    for writer in writers:
        assert (writer.written_records, writer.lost_records, writer.last_error) == (40 * rounds, 0, "")
        assert writer.bytes_on_disk <= SMALL.total_bytes
        writer.close()
        seqs = [r.record_seq for r in read([tmp_path / writer._folder.name])]
        assert seqs == list(range(seqs[0], 40 * rounds))


def test_the_segment_being_written_is_not_deleted_until_it_is_closed(tmp_path: Path) -> None:
    idle = TraceWriter(tmp_path, "idle/0", hello(), SMALL)
    idle.append(numbered(0, 5))
    idle.tick(0.0)
    [kept] = segments([tmp_path])
    os.utime(kept, (1, 1))
    busy = TraceWriter(tmp_path, "busy/0", hello(), SMALL)
    for now in range(100):
        busy.append(numbered(100 * now, 100))
        busy.tick(float(now))
        assert kept.exists()
    idle.close()
    for now in range(100, 200):
        busy.append(numbered(100 * now, 100))
        busy.tick(float(now))
    assert not kept.exists()
    busy.close()


def test_a_batch_larger_than_a_segment_is_split(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, KEY, hello(), SMALL)
    writer.append(numbered(0, 3000))
    writer.tick(0.0)
    assert writer.written_records == 3000
    paths = segments([tmp_path])
    assert len(paths) > 1
    assert all(path.stat().st_size <= SMALL.segment_bytes for path in paths)
    assert size_of(tmp_path) <= SMALL.total_bytes
    assert read([tmp_path])[-1].record_seq == 2999


def test_segments_of_a_directory_a_folder_a_file(tmp_path: Path) -> None:
    a = [write(tmp_path, numbered(0, 1), key="a/0") for _ in range(2)]
    b = write(tmp_path, numbered(0, 1), key="b/0")
    a.append(a[0].parent / "1000000.arrows")
    shutil.copy(a[0], a[2])
    assert segments([tmp_path]) == [*a, b]
    assert segments([a[0].parent]) == a
    assert segments([b, a[1], a[0], b]) == [b, a[0], a[1]]
    assert segments([]) == []
    with pytest.raises(TraceError, match="No such file"):
        segments([tmp_path / "nowhere"])


# -- damage --


@pytest.mark.slow
def test_a_file_cut_anywhere_gives_every_whole_batch_and_says_what_it_ignored(tmp_path: Path) -> None:
    batches = [numbered(0, 3), numbered(3, 1, after_idle=None, accepted_drafts=[]), numbered(4, 2)]
    path = write(tmp_path, *batches)
    whole = path.read_bytes()
    segment = Segment(path)
    ends = [segment.offset, *(segment.offset for _ in segment)]
    assert ends[-1] == len(whole)
    with path.open("r+b") as file:
        for cut in range(len(whole), -1, -1):
            file.truncate(cut)
            segment = Segment(path)
            found = [trace_format.records(batch) for batch in segment]
            count = sum(end <= cut for end in ends) - 1
            assert found == batches[: max(count, 0)], cut
            last = ends[count] if count >= 0 else 0
            assert (segment.offset, segment.bytes_lost) == (last, cut - last), cut
            assert segment.torn == (cut not in ends), cut
            assert (segment.hello is None) == (count < 0), cut


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    """As a machine leaves it that lost power before the data reached the disk."""
    path = write(tmp_path, numbered(0, 3))
    size = path.stat().st_size
    os.truncate(path, size + 5000)
    segment = Segment(path)
    assert sum(batch.num_rows for batch in segment) == 3
    assert (segment.torn, segment.offset, segment.bytes_lost) == (True, size, 5000)


def test_lists_that_point_outside_their_values_end_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path, numbered(0, 2), numbered(2, 3, accepted_drafts=[1, 2, 3]))
    content = path.read_bytes()
    offsets = struct.pack("<4i", 0, 3, 6, 9)
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<4i", 0, 3, 6, 1 << 30)))
    segment = Segment(path)
    assert [batch.num_rows for batch in segment] == [2]
    assert segment.torn


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bytes_never_do_worse_than_wrong_values(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), numbered(0, 3), numbered(3, 3))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with contextlib.suppress(TraceError):
            for batch in Segment(path):
                trace_format.records(batch)


def _stream(path: Path, schema: Any) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema):
        pass


def test_what_is_no_trace_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.arrows"
    path.write_text("time,seconds\n")
    with pytest.raises(TraceError, match=r"x\.arrows is not a specpilot trace"):
        Segment(path)
    path.write_bytes(b"\xff\xff\xff\xff\x08\0\0\0" + bytes(8))
    with pytest.raises(TraceError, match="cannot be read"):
        Segment(path)
    with pytest.raises(TraceError, match="cannot be read"):
        Segment(tmp_path)
    _stream(path, pa.schema([("a", pa.int8())]))
    with pytest.raises(TraceError, match="an Arrow file, but not a specpilot trace"):
        Segment(path)
    _stream(path, SCHEMA.with_metadata({"specpilot.trace": "999"}))
    with pytest.raises(TraceError, match=f"trace format 999, this one reads {FORMAT_VERSION}"):
        Segment(path)
    _stream(path, pa.schema(list(SCHEMA)[1:], metadata={"specpilot.trace": str(FORMAT_VERSION)}))
    with pytest.raises(TraceError, match="another version"):
        Segment(path)
    for text in ("{}", "[]", "no json"):
        _stream(path, SCHEMA.with_metadata({"specpilot.trace": str(FORMAT_VERSION), "specpilot.hello": text}))
        with pytest.raises(TraceError, match="describes its server"):
            Segment(path)


_ENDLESS = """
import sys
from pathlib import Path
from specpilot.controller.config import TraceConfig
from specpilot.controller.trace.writer import TraceWriter
from tests.support.messages import hello, record
writer = TraceWriter(Path(sys.argv[1]), "node:30000/0", hello(), TraceConfig(segment_bytes=1 << 20))
now = 0
while True:
    writer.append([record(record_seq=300 * now + n) for n in range(300)])
    writer.tick(float(now))
    print(writer.written_records, flush=True)
    now += 1
"""


def test_a_killed_writer_loses_nothing_it_had_written(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    with child:
        reported = [int(child.stdout.readline()) for _ in range(40)]
        child.send_signal(signal.SIGKILL)
        reported.extend(int(line) for line in child.stdout if line.endswith("\n"))
    assert child.returncode == -signal.SIGKILL
    seqs = [r.record_seq for r in read([tmp_path])]
    assert seqs == list(range(len(seqs)))
    assert len(seqs) >= reported[-1] >= 300 * 40
    # The dead writer's lock is gone with it: a new one goes on, and may delete what it left.
    write(tmp_path, numbered(len(seqs), 2))
    assert [r.record_seq for r in read([tmp_path])] == list(range(len(seqs) + 2))


# -- errors of the disk --


@contextlib.contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """No file of this process grows beyond ``limit`` bytes: a short write, then EFBIG, as on a full disk."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # CPython's doing
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_is_undone_counted_and_tried_again(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "specpilot.controller.trace.writer")
    writer = TraceWriter(tmp_path, KEY, hello(), CONFIG)
    writer.append(numbered(0, 100))
    writer.tick(0.0)
    [path] = segments([tmp_path])
    good = path.stat().st_size
    with file_size_limit(good + 100):
        writer.append(numbered(100, 100))
        writer.tick(1.0)
        assert path.stat().st_size == good == writer.bytes_on_disk
        assert (writer.written_records, writer.lost_records) == (100, 100)
        assert str(path) in writer.last_error
        assert "File too large" in writer.last_error
        assert "set another trace.directory" in writer.last_error
        writer.append(numbered(200, 7))
        writer.tick(5.0)
        assert writer.lost_records == 107
    with file_size_limit(100):  # not even the header fits: nothing is left behind
        for now in (11.0, 22.0, 33.0):
            writer.tick(now)
            writer.append(numbered(207, 10))
            writer.tick(now + 1)
            assert segments([tmp_path]) == [path]
        assert writer.lost_records == 137
    writer.tick(44.0)
    writer.append(numbered(237, 10))
    writer.tick(45.0)
    assert (writer.written_records, writer.lost_records, writer.last_error) == (110, 137, "")
    writer.close()
    assert [r.record_seq for r in read([tmp_path])] == [*range(100), *range(237, 247)]
    info = trace_info([tmp_path])[KEY]
    assert (info.gaps, info.dropped, info.torn) == (1, 137, 0)
    levels = [line.levelname for line in caplog.records]
    assert levels == ["ERROR", "WARNING"]  # once for the cause, once for its end


def test_a_failure_between_two_batches_of_one_flush_loses_only_what_was_not_written(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, KEY, hello(), TraceConfig())
    with file_size_limit(900_000):
        writer.append(numbered(0, 4 * trace.BATCH_RECORDS))
        writer.tick(0.0)
    assert writer.last_error
    assert writer.written_records == trace.BATCH_RECORDS
    assert writer.written_records + writer.lost_records == 4 * trace.BATCH_RECORDS
    assert [r.record_seq for r in read([tmp_path])] == list(range(writer.written_records))
    assert not trace_info([tmp_path])[KEY].torn


def test_a_blocked_folder_is_reported_and_used_once_it_is_free(tmp_path: Path) -> None:
    blocker = tmp_path / "trace"
    blocker.write_text("a file where the folder should be")
    writer = TraceWriter(blocker, KEY, hello(), CONFIG)
    writer.append(numbered(0, 3))
    writer.tick(0.0)
    assert (writer.written_records, writer.lost_records) == (0, 3)
    assert str(blocker) in writer.last_error
    blocker.unlink()
    writer.append(numbered(3, 3))
    writer.tick(9.9)
    assert writer.lost_records == 6
    writer.tick(10.0)
    writer.append(numbered(6, 3))
    writer.tick(11.0)
    assert (writer.written_records, writer.lost_records, writer.last_error) == (3, 6, "")
    writer.close()


def test_a_removed_folder_is_made_anew(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", KEY, hello(), CONFIG)
    writer.append(numbered(0, 3))
    writer.tick(0.0)
    shutil.rmtree(tmp_path / "trace")
    writer.append(numbered(3, 3))
    writer.tick(1.0)
    assert (writer.written_records, writer.lost_records, writer.last_error) == (6, 0, "")
    assert [r.record_seq for r in read([tmp_path / "trace"])] == [3, 4, 5]
    assert [path.name for path in segments([tmp_path / "trace"])] == ["000002.arrows"]  # no name twice
    writer.close()


def test_records_that_fit_no_column_are_left_out_alone(tmp_path: Path, caplog: Any) -> None:
    writer = TraceWriter(tmp_path, KEY, hello(), CONFIG)
    writer.append([*numbered(0, 2), record(steps=40_000), record(record_seq=1 << 63), *numbered(2, 1)])
    writer.tick(0.0)
    assert (writer.written_records, writer.lost_records) == (3, 2)
    assert "out of range" in writer.last_error
    writer.append([record(accepted_drafts=[70_000])])
    writer.tick(1.0)
    assert (writer.written_records, writer.lost_records) == (3, 3)
    writer.append(numbered(3, 1))
    writer.tick(2.0)
    assert not writer.last_error
    writer.close()
    assert [r.record_seq for r in read([tmp_path])] == [0, 1, 2, 3]
    assert len(caplog.records) == 1


def test_check_directory_creates_it_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    check_directory(tmp_path / "a" / "b")
    check_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_check_directory_names_path_reason_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "trace", Path("/proc/specpilot-trace"), Path("/proc")):
        with pytest.raises(ConfigError, match=r'trace\.directory .*""') as caught:
            check_directory(path)
        assert str(path) in str(caught.value)
    with file_size_limit(100), pytest.raises(ConfigError, match="File too large"):
        check_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- what a trace holds --


def test_trace_info_counts_gaps_restarts_and_torn_tails(tmp_path: Path) -> None:
    write(tmp_path, numbered(10, 4, steps=3, batch_size=1), numbered(14, 1, steps=0, batch_size=64))
    torn = write(tmp_path, numbered(15, 2, steps=3, batch_size=8), numbered(20, 2, steps=3), numbered(22, 1))
    os.truncate(torn, torn.stat().st_size - 1)
    write(tmp_path, numbered(1, 3, steps=1, batch_size=9), instance="i2")
    foreign = torn.parent / "000009.arrows"
    foreign.write_text("not a trace")
    write(tmp_path, numbered(0, 1), key="other/0")
    info = trace_info([tmp_path])
    assert list(info) == [KEY, "other/0"]
    server = info[KEY]
    assert (server.segments, server.records, server.instances) == (4, 12, 2)
    assert server.bytes_on_disk == sum(path.stat().st_size for path in torn.parent.iterdir()) - foreign.stat().st_size
    assert (server.first_time, server.last_time) == (1_700_000_010.0, 1_700_000_003.0)
    assert server.share_by_steps == {"0": 1 / 12, "1": 3 / 12, "3": 8 / 12}
    assert (server.batch_size_min, server.batch_size_median, server.batch_size_max) == (1, 2, 64)
    # 17-19 within a segment; number 0 of the second process. What precedes 10 is not known.
    assert (server.gaps, server.dropped, server.torn, server.unreadable) == (2, 4, 1, 1)
    assert "3 records missing from number 17" in server.faults[0]
    assert f"segment {torn}: torn tail, read up to its last whole batch" in server.faults[1]
    assert "1 records missing from number 0" in server.faults[2]
    assert "not a specpilot trace" in server.faults[3]
    assert not info["other/0"].faults
    assert msgspec.json.decode(msgspec.json.encode(info), type=dict[str, ServerTrace]) == info


def test_a_gap_between_segments_is_one_and_the_list_of_them_is_bounded(tmp_path: Path) -> None:
    write(tmp_path, numbered(0, 1))
    write(tmp_path, [record(record_seq=2 * n) for n in range(1, 151)])
    server = trace_info([tmp_path])[KEY]
    assert (server.gaps, server.dropped, len(server.faults)) == (150, 150, LISTED_FAULTS)
    assert "and 50 more such lines" in printed({KEY: server})


def printed(info: dict[str, ServerTrace]) -> str:
    console = Console(file=io.StringIO(), width=60, color_system=None)
    print_trace_info(info, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_print_trace_info_is_readable(tmp_path: Path) -> None:
    path = write(tmp_path, numbered(0, 3), numbered(5, 1, steps=0), key="[b]:1/0")
    with path.open("ab") as file:
        file.write(b"\xff\xff")
    text = printed(trace_info([tmp_path]))
    assert "[b]:1/0" in text
    assert "4 of 1 processes, 2 missing" in text
    assert "K=0 25.0 %, K=3 75.0 %" in text
    assert f"segment {path}: torn tail, read up to its last whole batch, 2 bytes ignored\n" in text
    assert f"segment {path}: 2 records missing from number 3" in text
    assert printed({}) == "no segments here\n"


def test_servers_of_one_name_in_two_directories_are_kept_apart(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, numbered(0, 2)).parent for name in ("one", "two"))
    assert list(trace_info([tmp_path / "one", tmp_path / "two"])) == [str(one), str(two)]
    assert list(trace_info([tmp_path / "two"])) == [KEY]


def test_times_that_are_no_dates_are_printed_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, [record(time=float("nan")), record(record_seq=5, time=1e300)])
    assert "nan to 1e+300" in printed(trace_info([tmp_path]))
