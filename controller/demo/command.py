"""The demo: a simulated server under a changing load, steered by a real controller, and a picture of it.

    this process ── starts ──► controller (``specpilot controller``, policy "goodput", which knows nothing yet)
          │                        ▲  │ steps, tables over ipc://
          └─────── starts ──► simulated server (``controller/simulation/server.py``, the real hooks)

Here the two processes are started, followed and ended. What is shown live (``view.py``), told
(``summary.py``) and drawn at the end (``picture.py``) is read back from the trace that the
controller writes, from its status and from its web page, as an operator would; the server only
tells its totals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.request import urlopen

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from specpilot.controller.demo.run import DemoError, DemoRun
from specpilot.controller.demo.summary import print_summary
from specpilot.controller.demo.view import REFRESH_SECONDS, View
from specpilot.controller.processes import (
    await_controller,
    end,
    interrupts_held,
    last_lines,
    python_module,
    specpilot_command,
    start_logged,
    terminable,
)
from specpilot.controller.simulation.totals import SimSummary
from specpilot.controller.simulation.workload import Clients
from specpilot.controller.trace.format import records
from specpilot.controller.trace.reader import Segment, segments
from specpilot.controller.web.view import PageView, ServerView
from specpilot.sglang_hooks.wire import StepRecord

SEED = 1
SERVER_ID = "demo:1"

START_SECONDS = 30.0
"""Seconds that a loaded machine may take to start Python twice."""
EXIT_SECONDS = 10.0
LOOK_SECONDS = 3600.0
"""Seconds for which the page can be looked at after the picture is drawn, on a terminal."""

_CONFIG = """\
[controller]
endpoint = {endpoint}

[policy]
name = "goodput"

[prior]
directory = ""

[web]
listen = "127.0.0.1:0"

[trace]
directory = {directory}
flush_seconds = 0.2
segment_bytes = 1_000_000
"""


def run_demo(seconds: float, json_path: Path | None, png_path: Path, keep: Path | None, console: Console) -> int:
    """Run for ``seconds`` and return the exit code: 0, 1 for a failure, 130 when interrupted.

    ``json_path`` takes a summary for scripts, ``png_path`` the picture, ``keep`` the trace,
    the logs and the configuration. Without a terminal a few lines stand in for the live view; on one
    the controller and the server then go on, so that the page can be looked at, until Ctrl-C or Enter.
    """
    try:
        draw = _drawing()
        if not seconds >= 1:
            raise DemoError(f"{seconds:g} seconds are too short to show anything: use --seconds 1 or more")
        for path in (json_path, png_path):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="specpilot-demo-") as temporary, terminable():
            try:
                with _started(seconds, Path(temporary), console) as processes:
                    run = processes.run(console)
                    draw(run, png_path)
                    if json_path is not None:
                        json_path.write_text(json.dumps(run.report(), indent=2) + "\n")
                    print_summary(run, console)
                    kept = f", trace and logs: {keep}" if keep is not None else ""
                    console.print(f"picture: {png_path}{kept}", markup=False, highlight=False)
                    if console.is_terminal:
                        processes.look(console)
            finally:
                if keep is not None:
                    shutil.copytree(temporary, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.ipc*"))
    except (DemoError, OSError) as error:
        console.print(f"[red]specpilot demo:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the demo's controller and server are stopped")
        return 130
    return 0


def _drawing() -> Callable[[DemoRun, Path], None]:
    """Return ``picture.draw``; DemoError without matplotlib, which nothing else needs."""
    try:
        from specpilot.controller.demo.picture import draw
    except ImportError as error:
        raise DemoError(
            "the demo draws its picture with matplotlib: pip install '.[demo]' in Specpilot's checkout"
        ) from error
    return draw


# -- the two processes --


class _Child:
    """A process of the demo, in a session of its own: Ctrl-C reaches it through us."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        # Options that point at the user's real server are none of the demo's.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECPILOT_")}
        self.process = start_logged(command, self._log, environment)

    def check(self) -> bool:
        """Return whether it still runs; DemoError if it failed."""
        code = self.process.poll()
        if code:
            raise self.failure(f"ended early with exit code {code}")
        return code is None

    def failure(self, what: str) -> DemoError:
        """Return an error that ends with the last lines of the log."""
        return DemoError(f"the {self.name} {what}; its last lines were:{last_lines(self._log)}")

    def end(self) -> None:
        """Ask it to end, and kill it if it does not."""
        end(self.process, EXIT_SECONDS)


@contextlib.contextmanager
def _started(seconds: float, folder: Path, console: Console) -> Iterator[_Processes]:
    """Start controller and server, and end them with the context."""
    with contextlib.ExitStack() as children:
        processes = _Processes(seconds, folder, children)
        text = f"The page: {processes.page}  which K is chosen where, and why"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        yield processes


class _Processes:
    """The controller and the server of a demo."""

    def __init__(self, seconds: float, folder: Path, children: contextlib.ExitStack) -> None:
        self._seconds = seconds
        self._folder = folder
        self._children = children
        self._endpoint = f"ipc://{folder}/controller.ipc"
        self._trace = folder / "trace"
        config = folder / "controller.toml"
        texts = {"endpoint": json.dumps(self._endpoint), "directory": json.dumps(str(self._trace))}
        config.write_text(_CONFIG.format(**texts))
        self._controller = self._start("controller", specpilot_command("controller", "--config", str(config)))
        self.page = self._await_page()
        """Address of the web page."""

    def _start(self, name: str, command: Sequence[str]) -> _Child:
        with interrupts_held():
            child = _Child(name, command, self._folder)
            self._children.callback(child.end)
        return child

    def _start_server(self, seconds: float, out: Path) -> _Child:
        options = ["--endpoint", self._endpoint, "--server-id", SERVER_ID, "--out", str(out)]
        options += ["--seconds", str(seconds), "--seed", str(SEED)]
        return self._start("server", python_module("specpilot.controller.simulation.server", *options))

    def _await_page(self) -> str:
        status = await_controller(
            self._endpoint, self._controller.process, START_SECONDS, ready=lambda status: status.page
        )
        if status is None:
            self._controller.check()
            raise self._controller.failure("did not open its socket and its page")
        if not status.page.startswith("http"):
            raise self._controller.failure(f"has no page: it {status.page}")
        return status.page

    def run(self, console: Console) -> DemoRun:
        """Follow the server until it ends, and return what it came to."""
        out = self._folder / "summary.json"
        server = self._start_server(self._seconds, out)
        tail = Tail(self._trace)
        view = View(self._seconds, self._endpoint, tail.steps)
        _watch(view, tail, self._controller, server, console)
        summary = msgspec.json.decode(out.read_bytes(), type=SimSummary)
        _await_trace(tail, summary.steps, self._controller)
        phases = Clients(self._seconds, random.Random(SEED)).workload.phases  # noqa: S311
        return DemoRun(self._seconds, summary, tail.steps, phases, self._learned(), view.policy)

    def _learned(self) -> ServerView:
        """Return what the page shows of the server."""
        try:
            with urlopen(f"{self.page}api/view?server={SERVER_ID}/0", timeout=EXIT_SECONDS) as answer:  # noqa: S310
                server = msgspec.json.decode(answer.read(), type=PageView).server
        except (OSError, msgspec.DecodeError) as error:
            raise self._controller.failure(f"did not say what it learned ({error})") from error
        if server is None:
            raise self._controller.failure("does not know the server")
        return server

    def look(self, console: Console) -> None:
        """Serve on, so that the page can be looked at, until Ctrl-C or Enter."""
        server = self._start_server(LOOK_SECONDS, self._folder / "after.json")
        text = f"The server goes on: look at {self.page} and end the demo with Ctrl-C or Enter."
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            while server.check() and self._controller.check():
                if select.select([sys.stdin], [], [], REFRESH_SECONDS)[0]:
                    break


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


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot demo``."""
    command.add_argument("--seconds", type=float, default=30.0)
    command.add_argument("--json", type=Path, help="write a summary for scripts")
    command.add_argument("--png", type=Path, default=Path("demo/specpilot-demo.png"))
    command.add_argument("--keep", type=Path, help="keep the trace and the logs in this folder")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the demo; return the exit code."""
    return run_demo(options.seconds, options.json, options.png, options.keep, console)
