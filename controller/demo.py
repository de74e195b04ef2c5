"""The demo: a simulated server under a bursty load, steered by a real controller, and a picture of it.

    this process ── starts ──► controller (``specpilot controller``, policy "threshold")
          │                        ▲  │ steps, tables over ipc://
          └─────── starts ──► simulated server (``controller/simserver.py``, the real hooks)

Here the two processes are started, followed and ended. What is shown live (``demo_view.py``),
told (``demo_summary.py``) and drawn at the end (``demo_picture.py``) is read back from the
trace that the controller writes and from its status, as an operator would; the server only
tells its totals.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from controller.demo_summary import STEPS, THRESHOLD, DemoError, Run, print_summary
from controller.demo_view import REFRESH_SECONDS, View
from controller.simserver import Summary
from controller.trace import records
from controller.trace_reader import Segment, segments
from controller.workload import bursty_workload
from sglang_hooks.wire import StepRecord

SEED = 1
SERVER_ID = "demo:1"

START_SECONDS = 30.0
"""A loaded machine may take this long to start Python twice."""
EXIT_SECONDS = 10.0
LOG_LINES = 12

_CONFIG = """\
[controller]
endpoint = {endpoint}
decide_seconds = 0.25

[policy]
name = "threshold"
threshold = {threshold}
steps = {steps}

[trace]
directory = {directory}
flush_seconds = 0.2
segment_bytes = 1_000_000
"""


def run_demo(seconds: float, json_path: Path | None, png_path: Path, keep: Path | None, console: Console) -> int:
    """Run for ``seconds`` and return the exit code: 0, 1 for a failure, 130 when interrupted.

    ``json_path`` takes a summary for scripts, ``png_path`` the picture, ``keep`` the trace,
    the logs and the configuration. Without a terminal a few lines stand in for the live view.
    """
    try:
        draw = _drawing()
        if not seconds >= 1:
            raise DemoError(f"{seconds:g} seconds are too short to show anything: use --seconds 1 or more")
        for path in (json_path, png_path):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="specpilot-demo-") as temporary, _terminable():
            try:
                run = _run(seconds, Path(temporary), console)
                draw(run, png_path)
            finally:
                if keep is not None:
                    shutil.copytree(temporary, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.ipc*"))
        if json_path is not None:
            json_path.write_text(json.dumps(run.report(), indent=2) + "\n")
        print_summary(run, console)
        kept = f", trace and logs: {keep}" if keep is not None else ""
        console.print(f"picture: {png_path}{kept}", markup=False, highlight=False)
    except (DemoError, OSError) as error:
        console.print(f"[red]specpilot demo:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the demo's controller and server are stopped")
        return 130
    return 0


def _drawing() -> Callable[[Run, Path], None]:
    """Return ``demo_picture.draw``; DemoError without matplotlib, which nothing else needs."""
    try:
        from controller.demo_picture import draw
    except ImportError as error:
        raise DemoError("the demo draws its picture with matplotlib: pip install 'specpilot[demo]'") from error
    return draw


# -- the two processes --


class _Child:
    """A process of the demo, in a session of its own: Ctrl-C reaches it through us."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        # Options that point at the user's real server are none of the demo's.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECPILOT_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def check(self) -> bool:
        """Return whether it still runs; DemoError if it failed."""
        code = self.process.poll()
        if code:
            raise self.failure(f"ended early with exit code {code}")
        return code is None

    def failure(self, what: str) -> DemoError:
        """Return an error that ends with the last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return DemoError("\n  ".join([f"the {self.name} {what}; its last lines were:", *(lines or ["(none)"])]))

    def end(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the demo like Ctrl-C, with its processes stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(seconds: float, folder: Path, console: Console) -> Run:
    endpoint = f"ipc://{folder}/controller.ipc"
    directory = folder / "trace"
    config = folder / "controller.toml"
    texts = {"endpoint": json.dumps(endpoint), "directory": json.dumps(str(directory))}
    config.write_text(_CONFIG.format(threshold=THRESHOLD, steps=STEPS, **texts))
    out = folder / "summary.json"
    with contextlib.ExitStack() as children:
        controller = _Child("controller", ["controller.cli", "controller", "--config", str(config)], folder)
        children.callback(controller.end)
        deadline = time.monotonic() + START_SECONDS
        while not (folder / "controller.ipc").exists():
            if not controller.check() or time.monotonic() > deadline:
                raise controller.failure("did not open its socket")
            time.sleep(0.05)
        options = ["--endpoint", endpoint, "--server-id", SERVER_ID, "--out", str(out)]
        options += ["--seconds", str(seconds), "--seed", str(SEED)]
        server = _Child("server", ["controller.simserver", *options], folder)
        children.callback(server.end)
        tail = Tail(directory)
        view = View(seconds, endpoint, tail.steps)
        _watch(view, tail, controller, server, console)
        summary = msgspec.json.decode(out.read_bytes(), type=Summary)
        _await_trace(tail, summary.steps, controller)
    # The controller has ended and thereby written what it held.
    tail.read()
    phases = bursty_workload(seconds, random.Random(SEED)).phases  # noqa: S311
    return Run(seconds, summary, view.policy, tail.steps, phases)


# -- following them --


def _watch(view: View, tail: Tail, controller: _Child, server: _Child, console: Console) -> None:
    """Show the run until the server has ended."""
    deadline = time.monotonic() + START_SECONDS + view.seconds
    next_line = 0.0
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while server.check():
            if not controller.check():
                raise controller.failure("ended early")
            if time.monotonic() > deadline:
                raise server.failure("did not end in time")
            tail.read()
            view.update()
            if live is not None:
                live.update(view.render(console.width), refresh=True)
            elif tail.steps and view.elapsed >= next_line:
                next_line = view.elapsed + max(1.0, view.seconds / 8)
                console.print(view.line(), highlight=False)
            time.sleep(REFRESH_SECONDS)
    tail.read()
    view.update()


class Tail:
    """Reads a growing trace: every ``read`` appends to ``steps`` what was written since."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: Counter[Path] = Counter()
        self.steps: list[StepRecord] = []

    def read(self) -> None:
        """Take in the record batches that are whole by now."""
        for path in segments([self._directory]):
            segment = Segment(path, self._offsets[path])
            for batch in segment:
                self.steps += records(batch)
            self._offsets[path] = segment.offset


def _await_trace(tail: Tail, steps: int, controller: _Child) -> None:
    """The server has sent everything: give the controller a moment to write it."""
    deadline = time.monotonic() + EXIT_SECONDS / 4
    while len(tail.steps) < steps and time.monotonic() < deadline and controller.check():
        time.sleep(0.1)
        tail.read()
