"""What the commands that start other programs share: ending those, and being ended with them put right."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
