"""The controller's socket in the file system: a private folder, one owner, no leftovers.

A second controller on the same endpoint is refused by a lock file beside the socket, since
ZMQ itself would quietly take the address over and split the servers between the two.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

import zmq

from controller.config import ConfigError
from sglang_hooks.wire import MAX_MESSAGE_BYTES


def socket_path(endpoint: str) -> Path:
    """Return the file of an ``ipc://`` endpoint."""
    return Path(endpoint.removeprefix("ipc://"))


class Endpoint:
    """A bound ROUTER and the lock that makes it the only one; ``close`` gives both up."""

    def __init__(self, endpoint: str) -> None:
        """Bind; raise ConfigError naming what stands in the way."""
        self.endpoint = endpoint
        path = socket_path(endpoint)
        _private_folder(path.parent)
        self._lock = _lock(path)
        try:
            if _answers(path):
                raise ConfigError(f"{path} is in use by another program: choose another controller.endpoint")
            self._context = zmq.Context()
            self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            os.close(self._lock)
            raise ConfigError(f"{endpoint} cannot be bound: {error.strerror}") from error
        except ConfigError:
            os.close(self._lock)
            raise
        path.chmod(0o600)

    def close(self) -> None:
        """Unbind, leave no socket file behind, and give the lock up."""
        self._context.destroy(linger=0)
        socket_path(self.endpoint).unlink(missing_ok=True)
        os.close(self._lock)


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"the socket's folder {folder} cannot be made: {error.strerror}") from error
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"the socket's folder {folder} belongs to user {found.st_uid}: choose another endpoint")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigError(
            f"others may write into the socket's folder {folder}: chmod 700 it, or choose another endpoint"
        )


def _lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{lock_path} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ConfigError(
            f"another specpilot controller (pid {owner}) serves {path}: stop it, or choose another endpoint"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _answers(path: Path) -> bool:
    if not path.exists():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True
