"""Programs that a command starts: their command line, how they are watched, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specpilot.controller.client.status import NO_KEYS, StatusError, fetch_status
from specpilot.controller.serve.report import ControllerStatus
from specpilot.sglang_hooks.connection import KeyFiles

LOG_LINES = 15
"""Last lines of a program's output that are shown when it failed."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
LOOK_SECONDS = 0.1
"""Seconds between two looks at a controller that starts."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` with this Python, whatever the current folder holds.

    ``-P`` keeps the current folder out of the import path: it may have a ``numpy.py`` or a ``specpilot`` of its own.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def specpilot_command(*words: str) -> list[str]:
    """Return the command line of ``specpilot WORDS``."""
    return python_module("specpilot.controller.cli", *words)


def start_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, so that Ctrl-C reaches it through us; what it prints goes to ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def last_lines(log: Path) -> str:
    """Return the last lines of a program's log, each on a line of its own below the sentence that comes before it."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "".join(f"\n  {line}" for line in lines or ["(none)"])


def await_controller(
    endpoint: str,
    process: subprocess.Popen[Any],
    seconds: float,
    keys: KeyFiles = NO_KEYS,
    ready: Callable[[ControllerStatus], object] = lambda _: True,
) -> ControllerStatus | None:
    """Return the report of a controller that was just started as ``process``, once there is one that is ``ready``.

    None if the process has ended, or there is no such report after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            status = fetch_status(endpoint, keys=keys)
        except StatusError:
            pass
        else:
            if ready(status):
                return status
        time.sleep(LOOK_SECONDS)
    return None


def end(process: subprocess.Popen[Any], seconds: float) -> None:
    """Ask ``process`` to end, unless it has, and kill it if it is there still after ``seconds``."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session of its own, unless it has ended, and whatever it started there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block has ended, so that what it starts is known to whoever ends it.

    An interrupt between the start of a program and the line that sees to its end would leave it running.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C, so that it can put right what it began."""
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
