"""Export of traces: exact values in three formats, whole files or none, and what was torn is said."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from specpilot.controller.cli import main
from specpilot.controller.trace import export as trace_export
from specpilot.controller.trace.export import ExportError, export_trace
from specpilot.controller.trace.format import SCHEMA
from specpilot.controller.trace.reader import segments
from specpilot.sglang_hooks.wire import StepRecord
from tests.controller.test_trace import numbered, write
from tests.support.messages import hello, record

FORMATS = ("parquet", "csv", "jsonl")

AWKWARD = [
    record(record_seq=0, time=1_700_000_000.123456789, seconds=0.1 + 0.2, accepted_drafts=[-1, 3, 0], truncated=[1]),
    record(record_seq=1, seconds=5e-324, accepted_drafts=[], truncated=[], after_idle=None, probability=1 / 3),
    record(record_seq=2, launch_gap_seconds=-1e-17, context_tokens=(1 << 53) - 1, kv_used_tokens=-5, grammar=True),
]


def parse(path: Path, kind: str) -> list[dict[str, Any]]:
    if kind == "parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    if kind == "jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    of = {field.name: str(field.type) for field in SCHEMA}

    def value(name: str, text: str) -> Any:
        if of.get(name, "string") == "string":
            return text
        if of[name] == "double":
            return float(text)
        return json.loads(text or "null")

    with path.open(newline="") as file:
        return [{name: value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def as_rows(records: list[StepRecord], server: str = "node:30000/0", instance: str = "i1") -> list[dict[str, Any]]:
    return [{"server": server, "instance": instance, "policy": ""} | msgspec.structs.asdict(one) for one in records]


@pytest.mark.parametrize("kind", FORMATS)
def test_values_come_back_exactly(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "t", AWKWARD, numbered(3, 5000))
    write(tmp_path / "t", numbered(0, 3), key="other/1", instance="i2")
    output = tmp_path / f"steps.{kind}"
    info = export_trace([tmp_path / "t"], output)
    expected = [*as_rows([*AWKWARD, *numbered(3, 5000)]), *as_rows(numbered(0, 3), "other/1", "i2")]
    found = parse(output, kind)
    assert list(found[0]) == ["server", "instance", "policy", *SCHEMA.names]
    assert found == expected
    assert {name: server.records for name, server in info.items()} == {"node:30000/0": 5003, "other/1": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == [output.name, "t"]
    if kind == "parquet":
        hellos = json.loads(pyarrow.parquet.read_metadata(output).metadata[b"specpilot.hello"])
        assert hellos["i1"] == msgspec.structs.asdict(hello())
        assert set(hellos) == {"i1", "i2"}


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_torn_or_missing_is_said_and_the_rest_exported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = write(tmp_path / "t", numbered(0, 10), numbered(20, 10))
    torn.write_bytes(torn.read_bytes()[:-7])
    write(tmp_path / "t", numbered(40, 10))
    (torn.parent / "000009.arrows").write_text("no trace at all")
    output = tmp_path / "out"
    assert main(["trace", "export", str(tmp_path / "t"), "-o", str(output), "--format", kind]) == 0
    assert [row["record_seq"] for row in parse(output, kind)] == [*range(10), *range(40, 50)]
    shown = capsys.readouterr().out
    for text in (
        "torn tail",
        "30 records missing",
        "000009.arrows is not a specpilot trace",
        "20 records of 1 servers",
    ):
        assert text in shown


def test_a_file_is_replaced_only_if_asked_and_stays_if_the_export_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "t", numbered(0, 3))
    output = tmp_path / "steps.csv"
    output.write_text("mine")
    with pytest.raises(ExportError, match="is there already"):
        export_trace([source], output)
    with pytest.raises(ExportError, match="a part of the trace itself"):
        export_trace([source], source, "csv", force=True)
    monkeypatch.setattr(trace_export._Csv, "close", lambda self, hellos: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(ExportError, match="cannot be written: disk"):
        export_trace([source], output, force=True)
    assert output.read_text() == "mine"
    monkeypatch.undo()
    export_trace([source], output, force=True)
    assert len(parse(output, "csv")) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.csv", "t"]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write(tmp_path / "t", numbered(0, 3)), tmp_path / "steps.jsonl"
    monkeypatch.setattr(trace_export._JsonLines, "close", lambda self, hellos: output.write_text("another's"))
    with pytest.raises(ExportError, match="appeared meanwhile"):
        export_trace([source], output)
    assert output.read_text() == "another's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.jsonl", "t"]


def test_wrong_input_is_an_error_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "t", numbered(0, 3))
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, says in (
        ([source, "-o", tmp_path / "steps.xls"], "which format?"),
        ([tmp_path / "none", "-o", tmp_path / "a.csv"], "No such file"),
        ([empty, "-o", tmp_path / "a.csv"], "nothing to export"),
        ([source, "-o", tmp_path / "nowhere" / "a.csv"], "cannot be written"),
    ):
        assert main(["trace", "export", *map(str, arguments)]) == 1
        assert says in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "t"]
    assert source.exists()
    assert segments([tmp_path / "t"]) == [source]


_MEASURE = """
import re, sys
from pathlib import Path
from specpilot.controller.trace.export import export_trace
export_trace([Path(sys.argv[1])], Path(sys.argv[2]), force=True)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
def test_memory_does_not_depend_on_the_length(tmp_path: Path) -> None:
    wide = {"accepted_drafts": [3] * 64, "batch_size": 64}
    peaks = []
    for name, batches in (("short", 100), ("long", 300)):
        path = write(tmp_path / name, *(numbered(n * 2000, 2000, **wide) for n in range(batches)))
        run = [sys.executable, "-c", _MEASURE, str(path.parent), str(tmp_path / f"{name}.parquet")]
        peaks.append(int(subprocess.run(run, capture_output=True, text=True, check=True).stdout))
    # Three times as much; what there is beyond one row group is the allocator's.
    assert peaks[1] < 1.2 * peaks[0], peaks
