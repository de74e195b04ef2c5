"""The demo end to end: real processes, a picture, a summary, and clear words when a part fails."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import msgspec
import psutil
import pytest
from rich.console import Console

from specpilot.controller.config import TraceConfig
from specpilot.controller.demo import command as demo
from specpilot.controller.demo.picture import draw
from specpilot.controller.demo.run import DemoError, DemoRun, crossing
from specpilot.controller.demo.summary import explain
from specpilot.controller.demo.view import View
from specpilot.controller.serve.report import ControllerStatus
from specpilot.controller.simulation.totals import SimSummary
from specpilot.controller.simulation.workload import Phase
from specpilot.controller.trace.reader import segments
from specpilot.controller.trace.writer import TraceWriter
from specpilot.controller.web.view import CellView, KView, ServerView
from specpilot.policies.knowledge import Estimate
from specpilot.sglang_hooks.wire import DecisionTable, StepRecord
from tests.support.messages import hello, record
from tests.support.snapshots import status
from tests.support.waiting import PATIENCE, until

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "sglang"):
            raise RuntimeError(f"{name} was imported")

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Makes an import of torch or SGLang fail in every process of the demo."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    # Options meant for a real server must not reach the demo's, nor the width of a terminal that is not its own.
    return {
        **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
        "PYTHONPATH": path,
        "SPECPILOT_MODE": "shadow",
        "SPECPILOT_ENDPOINT": "ipc:///elsewhere",
    }


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, after checking that every chunk is whole."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    offset = 8
    kind = b""
    while offset < len(data):
        (length,) = struct.unpack(">I", data[offset : offset + 4])
        kind, body = data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + length]
        assert struct.unpack(">I", data[offset + 8 + length : offset + 12 + length])[0] == zlib.crc32(kind + body)
        offset += 12 + length
    assert kind == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_the_demo_end_to_end(tmp_path: Path, environment: dict[str, str]) -> None:
    paths = {name: tmp_path / "new" / name for name in ("out.json", "picture.png", "kept")}
    command = [
        sys.executable,
        "-m",
        "specpilot.controller.cli",
        "demo",
        "--seconds",
        "10",
        "--json",
        str(paths["out.json"]),
    ]
    command += ["--png", str(paths["picture.png"]), "--keep", str(paths["kept"])]
    process = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=4 * PATIENCE
    )
    assert process.returncode == 0, process.stdout + process.stderr

    report = json.loads(paths["out.json"].read_text())
    assert set(report) == {
        "steps", "tokens_per_second", "share_by_k", "switches", "tables_applied", "dropped_records", "policy",
        "learned",
    }  # fmt: skip
    assert report["steps"] > 50
    assert report["tokens_per_second"] > 100
    assert report["tables_applied"] >= 1
    assert report["dropped_records"] == 0
    assert report["policy"] == "goodput"
    assert report["switches"] >= 1
    assert report["share_by_k"]["0"] > 0.05
    assert report["share_by_k"]["3"] > 0.05
    assert sum(report["share_by_k"].values()) == pytest.approx(1.0)
    learned = report["learned"]
    gains = []
    for batch in ("8", "64"):
        rates = learned[batch]["tokens_per_second"]
        gains.append(rates["3"] / rates["0"])
    # Whatever the machine adds to each step.
    assert learned["8"]["choice"] == 3
    assert gains[0] > max(gains[1], 1.0)
    for at in learned.values():
        assert at["tokens_per_second"].keys() == {"0", "1", "3"}

    width, height = png_size(paths["picture.png"])
    assert width >= 1200
    assert height >= 700
    assert segments([paths["kept"] / "trace"])
    assert (paths["kept"] / "controller.log").exists()

    lines = process.stdout.splitlines()
    assert lines[0].startswith("The page: http://127.0.0.1:")
    assert sum("tokens/s   goodput, epoch " in line for line in lines) >= 3, "progress without a terminal"
    told = " ".join(process.stdout.split())
    assert re.search(r"At 8 requests a step with \d drafts takes \d\.\d times as long .* so K=3\. At 64 requests", told)
    assert "\x1b" not in process.stdout


def test_nothing_of_the_demo_imports_torch_or_sglang() -> None:
    code = (
        "import specpilot.controller.demo.command, specpilot.controller.simulation.server, sys; "
        "assert not {'torch', 'sglang', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def run_in_process(tmp_path: Path, width: int = 200) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=width)
    before = set(psutil.Process().children())  # other tests' processes may outlive them
    code = demo.run_demo(3.0, tmp_path / "out.json", tmp_path / "picture.png", None, console)
    assert set(psutil.Process().children()) <= before
    return code, text.getvalue()


def test_a_controller_that_dies_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_CONFIG", demo._CONFIG + "\n[nonsense]\n")
    code, text = run_in_process(tmp_path)
    assert code == 1
    assert "specpilot demo: the controller ended early with exit code 2; its last lines were:" in text
    assert "nonsense" in text
    assert not (tmp_path / "out.json").exists()


def test_a_server_that_dies_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SEED", "no number")
    code, text = run_in_process(tmp_path)
    assert code == 1
    assert "specpilot demo: the server ended early with exit code 2; its last lines were:" in text
    assert "invalid int value: 'no number'" in text


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "specpilot.controller.demo.picture")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, text = run_in_process(tmp_path)
    assert code == 1
    assert "pip install '.[demo]'" in text


def test_a_time_too_short_is_refused(tmp_path: Path) -> None:
    text = io.StringIO()
    code = demo.run_demo(0.0, None, tmp_path / "p.png", None, Console(file=text, width=200))
    assert code == 1
    assert "use --seconds 1 or more" in text.getvalue()


def test_a_controller_killed_in_the_middle_ends_the_demo(tmp_path: Path, environment: dict[str, str]) -> None:
    process = start_demo(tmp_path, environment)
    controller = next(
        child for child in psutil.Process(process.pid).children() if "specpilot.controller.cli" in child.cmdline()
    )
    controller.kill()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "the controller ended early with exit code -9; its last lines were:" in output
    assert "connected" in output


def test_a_demo_that_is_stopped_leaves_no_process_behind(tmp_path: Path, environment: dict[str, str]) -> None:
    process = start_demo(tmp_path, environment)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in output
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert not alive


def test_on_a_terminal_the_page_can_be_looked_at_until_enter(tmp_path: Path, environment: dict[str, str]) -> None:
    controlling, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "specpilot.controller.cli",
        "demo",
        "--seconds",
        "2",
        "--png",
        str(tmp_path / "p.png"),
    ]
    environment = {**environment, "TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = ""

    def read_until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([controlling], [], [], PATIENCE)[0], shown[-2000:]
            shown += os.read(controlling, 1 << 16).decode(errors="replace")

    try:
        read_until("end the demo with Ctrl-C or Enter")
        assert png_size(tmp_path / "p.png")[0] >= 1200
        page = re.search(r"look at (http://127\.0\.0\.1:\d+/)", shown)
        assert page is not None
        records = []
        for _ in range(2):
            # The page is there, and the load goes on.
            before = records[-1] if records else 0
            until(lambda: records_of(page[1]) > before)  # noqa: B023
            records.append(records_of(page[1]))
        started = psutil.Process(process.pid).children(recursive=True)
        os.write(controlling, b"\n")
        assert process.wait(PATIENCE) == 0
        assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    finally:
        process.kill()
        os.close(controlling)


def records_of(page: str) -> int:
    with urlopen(f"{page}api/status", timeout=PATIENCE) as answer:
        told = msgspec.json.decode(answer.read(), type=ControllerStatus)
    return sum(server.records for server in told.servers)


def start_demo(tmp_path: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a long demo and return once it shows progress."""
    command = [
        sys.executable,
        "-m",
        "specpilot.controller.cli",
        "demo",
        "--seconds",
        "60",
        "--png",
        str(tmp_path / "p.png"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    assert "The page" in process.stdout.readline()
    assert "tokens/s" in process.stdout.readline()
    return process


def test_the_tail_reads_every_step_once_while_the_trace_grows(tmp_path: Path) -> None:
    config = TraceConfig(segment_bytes=1 << 16, total_bytes=1 << 24, flush_seconds=0.0)
    writer = TraceWriter(tmp_path, "demo:1/0", hello(), config)
    tail = demo.Tail(tmp_path)
    written: list[StepRecord] = []
    for turn in range(60):
        batch = [record(record_seq=len(written) + i) for i in range(turn)]
        written += batch
        writer.append(batch)
        writer.tick(float(turn))
        if turn % 3 == 0:
            tail.read()
            assert tail.steps == written
    writer.close()
    assert len(segments([tmp_path])) > 2
    tail.read()
    assert tail.steps == written


def test_the_live_view_fits_and_shows_what_is_in_force() -> None:
    steps: list[StepRecord] = []
    view = View(30.0, "ipc:///nonexistent", steps)
    for width in (60, 100, 200):
        console = Console(file=io.StringIO(), width=width, height=40)
        steps.clear()
        console.print(view.render(width))
        steps += [
            record(step=i, time=1000.0 + 0.01 * i, batch_size=batch, steps=k, accepted_drafts=[k] * batch)
            for i, (batch, k) in enumerate([(2, 3)] * 300 + [(50, 0)] * 300)
        ]
        console.print(view.render(width))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(len(line) <= width for line in text.splitlines())
        assert "not speculating" in text
        assert "batch size  50" in text
        assert "3333333300000000" in text
    edges = [*range(1, 9), 64]
    view._status = status(
        table=DecisionTable(7, 5.0, "goodput", edges, [1024], [3, 3] * 8 + [0, 3] * 2, [[]] * 20),
        expected_gain=Estimate(0.31, 0.28, 0.34),
    )
    console = Console(file=io.StringIO(), width=100, height=40)
    console.print(view.render(100))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "K by batch   1 3333333300 64+" in text
    assert "gaining 31 % (28 … 34)" in text
    assert "goodput, epoch 7" in text


def page(cells: Sequence[CellView] = (), batch_sizes: Sequence[int] = ()) -> ServerView:
    return ServerView(
        name="demo:1/0", model="m", gpu="g", sglang_version="v", decides="the table in force", policy="goodput",
        steps=3, candidate_steps=[0, 1, 3], share_by_steps={}, tokens_per_second=1.0, batch_size=1.0, gain=None,
        measured="", reason="", table="", problems=[], batches=[str(size) for size in batch_sizes],
        batch_sizes=list(batch_sizes), contexts=["0-1k"], cells=list(cells), busiest=-1, positions=[],
    )  # fmt: skip


@pytest.mark.slow
def test_a_picture_of_few_steps_can_be_drawn(tmp_path: Path) -> None:
    summary = SimSummary(1, 4, 1.0, 4.0, {"3": 1.0}, 0, 0, 0, 1000.0)
    phases = (Phase(0.0, "code-like", 0.8),)
    for count in (1, 2):
        steps = [record(time=1000.5 + 0.01 * i, seconds=0.01 * i, launch_gap_seconds=0.0) for i in range(count)]
        run = DemoRun(1.0, summary, steps, phases, page(), "goodput")
        draw(run, tmp_path / "few.png")
        assert png_size(tmp_path / "few.png")[0] >= 1200
        assert explain(run).startswith("Nothing was learned in so short a time.")
    with pytest.raises(DemoError, match="holds no step"):
        draw(DemoRun(1.0, summary, [], phases, page(), "goodput"), tmp_path / "none.png")


def test_what_was_learned_is_told_with_its_figures(tmp_path: Path) -> None:
    """Three drafts double the tokens; at batch 8 the step is half as long again, at batch 64 three times as long."""
    summary = SimSummary(2, 4, 1.0, 4.0, {"3": 1.0}, 5, 1, 0, 1000.0)

    def cell(choice: int, times: float) -> CellView:
        def option(k: int, tokens: float, seconds: float) -> KView:
            rate = 8 * tokens / seconds
            return KView(k, (tokens,) * 3, (seconds,) * 3, rate, (0.0, 0.0, 0.0), None, True, True)

        return CellView(choice, [], 1, "", (option(0, 1.0, 0.01), option(1, 1.5, 0.02), option(3, 2.0, 0.01 * times)))

    steps = [record(time=1000.5 + 0.01 * i, seconds=0.01, launch_gap_seconds=0.0) for i in range(30)]
    known = page([cell(3, 1.5), cell(3, 1.6), cell(0, 3.0)], [8, 32, 64])
    run = DemoRun(1.0, summary, steps, (Phase(0.0, "code-like", 0.8),), known, "goodput")
    assert explain(run) == (
        "At 8 requests a step with 3 drafts takes 1.5 times as long as one without (15.0 instead of 10.0 ms) and makes "
        "2.0 times the tokens: 33 % more a second, so K=3. At 64 requests a step with 1 draft takes 2.0 times as long "
        "as one without (20.0 instead of 10.0 ms) and makes 1.5 times the tokens: 25 % fewer a second, so K=0. In "
        "between, at about 48, the two are even. Nobody told it: all of this the controller learned from 30 steps. "
        "K changed 5 times, and not one step record was lost."
    )
    where = crossing(run.learned)
    assert where is not None
    assert 32 < where < 64
    draw(run, tmp_path / "learned.png")
    assert png_size(tmp_path / "learned.png")[0] >= 1200
