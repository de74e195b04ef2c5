"""Traces with something wrong in them: it is found, named by file and row, and goes no further."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.controller.config import TraceConfig
from specpilot.controller.trace.checked_reader import Chunk, read_checked
from specpilot.controller.trace.findings import LISTED_PER_KIND, Findings
from specpilot.controller.trace.format import SCHEMA, folder_name, records, to_batch
from specpilot.controller.trace.reader import TraceError, segments
from specpilot.controller.trace.sources import survey
from specpilot.controller.trace.writer import TraceWriter
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import StepRecord
from tests.support.messages import hello, record

KEY = "node:30000/0"
CONFIG = TraceConfig(segment_bytes=1 << 24, total_bytes=1 << 28, flush_seconds=1.0)


def steps(start: int, count: int, **changes: Any) -> list[StepRecord]:
    """Records as a server makes them: numbers, passes and the clock go on together."""
    return [
        record(record_seq=n, step=2 * n, time=1_700_000_000.0 + 0.01 * n, **changes)
        for n in range(start, start + count)
    ]


def write(directory: Path, *batches: Sequence[StepRecord], key: str = KEY, **of_hello: Any) -> Path:
    """Each of ``batches`` as a record batch of one new segment; returns its path."""
    server_id, _, rank = key.rpartition("/")
    writer = TraceWriter(directory, key, hello(server_id=server_id, dp_rank=int(rank), **of_hello), CONFIG)
    for now, batch in enumerate(batches):
        writer.append(batch)
        writer.tick(float(now))
    writer.close()
    assert not writer.last_error
    return segments([directory / folder_name(key)])[-1]


def read(*paths: Path, server: str | None = None) -> tuple[list[StepRecord], list[bool], Findings]:
    findings = Findings()
    chunks = list(read_checked(paths, server=server, findings=findings))
    assert all(a.columns.batch.num_rows == len(a.rows) == len(a.follows) for a in chunks)
    return (
        [r for chunk in chunks for r in records(chunk.columns.batch)],
        [f for chunk in chunks for f in chunk.follows.tolist()],
        findings,
    )


def spoiled(rows: list[StepRecord], at: int, **changes: Any) -> list[StepRecord]:
    return [*rows[:at], msgspec.structs.replace(rows[at], **changes), *rows[at + 1 :]]


def test_a_good_trace_passes_whole_and_joined_across_batches_and_segments(tmp_path: Path) -> None:
    rows = steps(0, 100)
    write(tmp_path, rows[:10], rows[10:11], rows[11:40])
    write(tmp_path, rows[40:])
    passed, follows, findings = read(tmp_path)
    assert passed == rows
    assert follows == [False] + [True] * 99
    assert not findings.counts
    assert findings.rows == 100


def test_columns_are_those_of_the_records(tmp_path: Path) -> None:
    rows = [
        *steps(0, 3, accepted_drafts=[-1, 3, 0], truncated=[1], batch_size=3, padded_batch_size=4),
        *steps(3, 2, accepted_drafts=[2], batch_size=1, after_idle=None),
    ]
    path = write(tmp_path, rows)
    (chunk,) = read_checked([tmp_path])
    assert isinstance(chunk, Chunk)
    assert (chunk.path, chunk.server, chunk.fingerprint) == (path, KEY, fingerprint(hello()))
    accepted, truncated = chunk.columns.ragged("accepted_drafts"), chunk.columns.ragged("truncated")
    assert accepted.values.tolist() == [-1, 3, 0] * 3 + [2, 2]
    assert accepted.offsets.tolist() == [0, 3, 6, 9, 10, 11]
    assert accepted.owners.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4]
    assert truncated.lengths.tolist() == [1, 1, 1, 0, 0]
    assert chunk.columns["after_idle"].tolist() == [False] * 5
    assert chunk.columns["draft_tokens"].tolist() == [4] * 5


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("probability", {"probability": 0.0}, "probability"),
    ("probability", {"probability": -0.1}, "probability"),
    ("probability", {"probability": 1.0000001}, "probability"),
    ("probability", {"probability": math.nan}, "probability"),
    ("clock jump", {"time": 1_699_999_000.0}, "the clock moved by -1000."),
    ("clock jump", {"time": 1_700_009_000.0}, "the clock moved by 8999"),
    ("clock jump", {"seconds": 3.0}, "seconds is 3.000"),
    ("value out of range", {"time": math.nan}, "time nan"),
    ("value out of range", {"seconds": -0.01}, "seconds -0.01"),
    ("value out of range", {"seconds": math.inf}, "seconds inf"),
    ("value out of range", {"launch_gap_seconds": math.nan}, "launch_gap_seconds nan"),
    ("value out of range", {"batch_size": 0, "accepted_drafts": []}, "batch_size 0"),
    ("value out of range", {"batch_size": 1}, "accepted_drafts has not a value for each request"),
    ("value out of range", {"padded_batch_size": 1}, "padded_batch_size 1 is less"),
    ("value out of range", {"context_tokens": 1 << 40}, "context_tokens"),
    ("value out of range", {"context_tokens": -1}, "context_tokens -1"),
    ("value out of range", {"held_steps": 1}, "held_steps 1 is not what was proposed"),
    ("value out of range", {"draft_tokens": -1, "accepted_drafts": [0, 0]}, "draft_tokens -1"),
    ("value out of range", {"accepted_drafts": [4, 0]}, "more than were drafted"),
    ("value out of range", {"accepted_drafts": [-2, 0]}, "below -1"),
    ("value out of range", {"truncated": [2]}, "no row of the batch"),
    ("value out of range", {"truncated": [0, 1, 1]}, "too many rows"),
    ("value out of range", {"source": 9}, "source 9"),
    ("value out of range", {"previous_kind": -3}, "previous_kind -3"),
    ("value out of range", {"record_seq": -7}, "record_seq -7"),
    ("out of order", {"record_seq": 3}, "record_seq 3"),
    ("out of order", {"record_seq": 50}, "runs ahead"),
    ("value out of range", {"record_seq": 1 << 40}, "is more than the forward passes there were"),
    ("out of order", {"step": 40}, "at step 40"),
    ("value out of range", {"step": 5}, "record_seq 30 is more than"),
]


@pytest.mark.parametrize(("kind", "changes", "says"), WRONG, ids=[f"{kind} {changes}" for kind, changes, _ in WRONG])
def test_a_row_that_cannot_be_is_named_and_left_out(
    tmp_path: Path, kind: str, changes: dict[str, Any], says: str
) -> None:
    rows = steps(0, 60)
    path = write(tmp_path, spoiled(rows, 30, **changes)[:45], rows[45:])
    passed, follows, findings = read(tmp_path)
    # The row after one whose clock or number is wrong may look wrong too.
    assert {n for n in range(60) if rows[n] not in passed} <= {30, 31}
    assert rows[30] not in passed
    assert [r for r in passed if r in rows] == passed
    finding = findings.listed[0]
    assert (finding.path, finding.kind, finding.action, finding.row) == (str(path), kind, "excluded", 30)
    assert says in finding.text
    assert str(finding).startswith(f"{path}, row 30 (record ")
    assert findings.excluded == 60 - len(passed)
    assert follows.count(False) == 2


def test_a_step_number_far_too_high_costs_a_few_rows_not_the_rest(tmp_path: Path) -> None:
    rows = spoiled(steps(0, 60), 30, step=1 << 40)
    write(tmp_path, rows)
    passed, _, findings = read(tmp_path)
    assert len(passed) >= 57
    assert findings.counts == {"out of order": 1}


def test_missing_records_are_counted_and_not_joined(tmp_path: Path) -> None:
    rows = steps(0, 50)
    path = write(tmp_path, rows[:20], rows[25:])
    passed, follows, findings = read(tmp_path)
    assert passed == rows[:20] + rows[25:]
    assert [n for n, joined in enumerate(follows) if not joined] == [0, 20]
    (finding,) = findings.listed
    assert (finding.kind, finding.row, finding.record_seq, finding.records) == ("missing records", 20, 25, 5)
    assert str(finding) == f"{path}, row 20 (record 25): 5 records are missing before it: not joined"


def test_a_missing_segment_is_found_by_number_and_by_its_records(tmp_path: Path) -> None:
    rows = steps(0, 60)
    for start in (0, 20, 40):
        last = write(tmp_path, rows[start : start + 20])
    segments([tmp_path])[1].unlink()
    _, _, findings = read(tmp_path)
    assert findings.counts == {"missing segment": 1, "missing records": 1}
    assert findings.records["missing records"] == 20
    assert {finding.path for finding in findings.listed} == {str(last)}
    assert "1 segments are missing between 000001.arrows and this one" in findings.listed[0].text


def test_a_copy_of_a_segment_is_not_counted_twice(tmp_path: Path) -> None:
    rows = steps(0, 40)
    first = write(tmp_path, rows[:20])
    second = write(tmp_path, rows[20:])
    shutil.copy(first, first.with_name("000003.arrows"))
    shutil.copy(second, first.with_name("000004.arrows"))
    passed, _, findings = read(tmp_path)
    assert passed == rows
    assert findings.counts == {"out of order": 40}
    assert len(findings.listed) == LISTED_PER_KIND
    assert findings.lines()[-1] == "and 20 of out of order more"


def test_a_restart_begins_anew_and_its_clock_may_not_go_back(tmp_path: Path) -> None:
    write(tmp_path, steps(100, 20))
    later = steps(500, 20)
    write(
        tmp_path, [msgspec.structs.replace(r, record_seq=r.record_seq - 500, step=r.step - 900) for r in later],
        instance="i2",
    )  # fmt: skip
    passed, follows, findings = read(tmp_path)
    assert (len(passed), follows.count(False), findings.lines()) == (40, 2, [])
    earlier = write(tmp_path, steps(0, 20), instance="i3")
    passed, _, findings = read(tmp_path)
    assert len(passed) == 59
    assert findings.counts == {"clock jump": 1}
    assert (findings.listed[0].path, findings.listed[0].row) == (str(earlier), 0)


def test_a_torn_tail_is_named_and_the_whole_batches_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, steps(0, 20), steps(20, 20))
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    passed, _, findings = read(tmp_path)
    assert passed == steps(0, 20)
    (finding,) = findings.listed
    assert (finding.kind, finding.path, finding.row) == ("torn tail", str(path), 20)
    path.write_bytes(data[:100])
    with pytest.raises(TraceError, match=r"no trace is there.*\n.*000001\.arrows: it ends within its header"):
        read(tmp_path)


def test_a_file_that_is_no_segment_is_named_and_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, steps(0, 20))
    path.with_name("000002.arrows").write_text("something else")
    passed, _, findings = read(tmp_path)
    assert len(passed) == 20
    assert findings.lines() == [f"{path.with_name('000002.arrows')}: is not a specpilot trace: excluded"]


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace is there: name a trace folder"):
        read(tmp_path)
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "nowhere")
    path = write(tmp_path, steps(0, 1))
    with pa.OSFile(str(path)) as file:
        header = pa.ipc.read_schema(file)
    path.write_bytes(header.serialize().to_pybytes())
    with pytest.raises(TraceError, match="the trace of node:30000/0 is empty: no whole record batch in"):
        read(tmp_path)


def test_a_trace_of_which_no_row_passes_is_refused_with_the_reasons(tmp_path: Path) -> None:
    path = write(tmp_path, steps(0, 3, probability=0.0))
    with pytest.raises(
        TraceError, match=r"passes the checks:\n.*row 0 \(record 0\): probability 0\.0 is not above 0"
    ) as e:
        read(tmp_path)
    assert str(path) in str(e.value)


def test_servers_and_fingerprints_are_not_mixed(tmp_path: Path) -> None:
    a = write(tmp_path, steps(0, 10))
    b = write(tmp_path, steps(0, 20), key="other:1/1")
    newer = write(tmp_path, steps(10, 30), sglang_version="0.5.20")
    with pytest.raises(TraceError, match="are of several servers or fingerprints, which are not mixed: ") as error:
        read(tmp_path)
    assert all(str(path) in str(error.value) for path in (a, b, newer))
    assert len(read(tmp_path, server="other:1/1")[0]) == 20
    assert len(read(tmp_path, server=fingerprint(hello(sglang_version="0.5.20")))[0]) == 30
    with pytest.raises(TraceError, match="not mixed"):
        read(tmp_path, server=KEY)
    with pytest.raises(TraceError, match="no server or fingerprint 'x' in these traces; they hold node:30000/0"):
        read(tmp_path, server="x")
    assert [len(source.segments) for source in survey([tmp_path], Findings())] == [1, 1, 1]
    # In one folder, too: whose a segment is, is what it says of itself.
    shutil.copy(b, a.with_name("000007.arrows"))
    with pytest.raises(TraceError, match="not mixed"):
        read(a.parent)


NUMERIC = [field.name for field in SCHEMA if not pa.types.is_list(field.type) and not pa.types.is_boolean(field.type)]


def _extremes(name: str) -> st.SearchStrategy[Any]:
    kind = SCHEMA.field(name).type
    if pa.types.is_floating(kind):
        return st.floats() | st.sampled_from([0.0, -1.0, 2.0, math.nan, math.inf, 1e300])
    bits = kind.bit_width - 1
    return st.integers(-(1 << bits), (1 << bits) - 1) | st.integers(-3, 70)


SPOILS = st.sampled_from(NUMERIC).flatmap(lambda name: st.tuples(st.just(name), _extremes(name), st.integers(0, 49)))


@settings(max_examples=150, deadline=None)
@given(st.lists(SPOILS, min_size=1, max_size=3), st.lists(st.integers(1, 49), max_size=3))
def test_whatever_stands_in_a_column_what_passes_is_plausible_and_the_rest_is_named(
    spoils: list[tuple[str, Any, int]], cuts: list[int]
) -> None:
    rows = steps(0, 50)
    for name, value, at in spoils:
        rows = spoiled(rows, at, **{name: value})
    ends = [0, *sorted(set(cuts)), 50]
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), *(rows[a:b] for a, b in pairwise(ends)))
        passed, follows, findings = read(path)
    _plausible(passed, follows)
    # A row that is wrong takes with it at most the two after it, unless its numbers agree on what is wrong.
    if len({"record_seq", "step"}.intersection(name for name, _, _ in spoils)) < 2:
        assert len(passed) >= 50 - 3 * len(spoils)
    assert findings.rows == 50
    assert findings.excluded == 50 - len(passed)
    named = {finding.row for finding in findings.listed if finding.action == "excluded"}
    passed_seqs = [r.record_seq for r in passed]
    assert all(row in named or rows[row].record_seq in passed_seqs for row in range(50))


def _plausible(passed: list[StepRecord], follows: list[bool]) -> None:
    for one, joined, before in zip(passed, follows, [None, *passed], strict=False):
        assert 0.0 < one.probability <= 1.0
        assert 0.0 <= one.seconds < 1e9
        assert 1 <= one.batch_size == len(one.accepted_drafts) <= one.padded_batch_size
        assert all(-1 <= drafts < max(one.draft_tokens, 1) for drafts in one.accepted_drafts)
        if before is not None:
            assert one.record_seq > before.record_seq
        if joined:
            assert before is not None
            assert one.record_seq == before.record_seq + 1
            assert one.time - before.time >= one.seconds - 0.1001


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_but_trace_errors(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), steps(0, 30), steps(30, 30))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        try:
            passed, follows, _ = read(path)
        except TraceError:
            return
        _plausible(passed, follows)


def test_missing_values_in_a_column_that_has_none(tmp_path: Path) -> None:
    path = write(tmp_path, steps(0, 5))
    batch = to_batch(steps(0, 5))
    loose = pa.schema([field.with_nullable(True) for field in SCHEMA])
    at = SCHEMA.names.index("seconds")
    arrays = [*batch.columns[:at], pa.array([0.01, None, 0.01, 0.01, 0.01]), *batch.columns[at + 1 :]]
    with pa.OSFile(str(path)) as file:
        header = pa.ipc.read_schema(file).serialize().to_pybytes()
    path.write_bytes(header + pa.record_batch(arrays, schema=loose).serialize().to_pybytes())
    passed, _, findings = read(path)
    assert [r.record_seq for r in passed] == [0, 2, 3, 4]
    assert "seconds 0.0 is missing" in findings.listed[0].text
