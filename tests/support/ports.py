"""TCP ports for programs that must be told theirs: nobody else is given one while this process lives."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import TextIO

_held: list[TextIO] = []


def own_port() -> int:
    """Return a port of 127.0.0.1 that is free and stays this process's, bound or not.

    It lies below those that the kernel gives to whoever asks for any, outgoing connections among them, so nobody gets
    it by chance between two uses; other processes of the tests see the lock.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    folder = Path(tempfile.gettempdir()) / f"specpilot-test-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in range(first - 1, 1024, -1):
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise AssertionError(f"no port below {first} is free")
