"""Clocks that jump: runs a module with ``time.time`` and ``time.monotonic`` shifted, also from outside.

    SHIFT_FILE=FILE python -m tests.faults.shifted specpilot.controller.cli controller --config ...

FILE holds two float64, seconds added to either clock, and may be written to at any time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import runpy
import signal
import struct
import sys
import time
from pathlib import Path

_OFFSETS = struct.Struct("dd")
_CLOCKS = ("wall", "monotonic")


def install() -> None:
    """Replace both clocks in ``time``; call before anything imports them from there."""
    global _memory
    path = os.environ.get("SHIFT_FILE")
    if path is None:
        _memory = bytearray(_OFFSETS.size)
    else:
        make(Path(path))
        with open(path, "r+b") as file:
            _memory = mmap.mmap(file.fileno(), _OFFSETS.size)
    memory, unpack, wall, monotonic = _memory, _OFFSETS.unpack_from, time.time, time.monotonic
    time.time = lambda: wall() + unpack(memory)[0]
    time.monotonic = lambda: monotonic() + unpack(memory)[1]


_memory: bytearray | mmap.mmap


def shift(clock: str, seconds: float) -> None:
    """Let this process's ``clock`` jump by ``seconds``."""
    _jump(_memory, clock, seconds)


def make(path: Path) -> None:
    """Create the file of a process that is to be shifted."""
    if not path.exists():
        path.write_bytes(_OFFSETS.pack(0.0, 0.0))


def shift_other(path: Path, clock: str, seconds: float) -> None:
    """Let the clock of the process with SHIFT_FILE ``path`` jump."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), _OFFSETS.size) as memory:
        _jump(memory, clock, seconds)


def _jump(memory: bytearray | mmap.mmap, clock: str, seconds: float) -> None:
    offsets = list(_OFFSETS.unpack_from(memory))
    offsets[_CLOCKS.index(clock)] += seconds
    _OFFSETS.pack_into(memory, 0, *offsets)


def end_with_parent() -> None:
    """Be killed when the parent ends, however it ends: no test may leave processes behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    from tests.faults import shifted  # the module of this name, not this script: it holds the state

    shifted.end_with_parent()
    shifted.install()
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
