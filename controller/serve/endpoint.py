"""The controller's socket: a private folder or CURVE keys, one owner, no leftovers.

A second controller on the same endpoint is refused, for ipc by a lock file beside the socket,
since ZMQ itself would quietly take the address over and split the servers between the two.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import Protocol

import zmq

from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.keys import DOMAIN, REFUSED_NAMED, Authenticator, read_authorized
from specpilot.sglang_hooks.connection import (
    EndpointError,
    HandshakeMonitor,
    check_folder,
    is_tcp,
    read_key_pair,
    secure,
    socket_path,
)
from specpilot.sglang_hooks.wire import MAX_MESSAGE_BYTES, Message, encode

logger = logging.getLogger(__name__)

HIGH_WATER = 64
"""Frames that ZMQ holds of each peer, in each direction: a peer that floods waits in its own queue."""
KEYS_SECONDS = 2.0
"""Seconds between two looks at the folder of authorized keys."""
REBIND_SECONDS = 5.0
"""Seconds to wait for a port that another program has taken while it was free for a moment."""


class HasFileno(Protocol):
    """What can be waited for beside the socket."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""


class Endpoint:
    """A bound ROUTER socket and the lock that makes it the only one; ``close`` gives both up.

    ``socket`` is a new one after ``tend`` has noticed a withdrawn key: libzmq asks for a key at the handshake
    only, so all connections are ended and every client has to show its key again.
    """

    def __init__(self, endpoint: str, key: str = "", authorized_keys: str = "") -> None:
        """Bind; ConfigError names what stands in the way. ``key`` and ``authorized_keys`` are paths, for tcp."""
        self.endpoint = endpoint
        self.handshakes_failed = 0
        """Connections that failed before a message: without the right key, or not of specpilot's protocol."""
        self._said: set[str] = set()
        self._faults: list[str] = []
        self._looked_at = float("-inf")
        self._lock: int | None = None
        self._authorized: Path | None = None
        self._allowed: dict[bytes, str] = {}
        self._keys: tuple[bytes, bytes] | None = None
        if is_tcp(self.endpoint):
            self._read_keys(key, Path(authorized_keys))
            self._open()
            return
        path = socket_path(self.endpoint)
        _private_folder(path.parent)
        self._lock = _lock(path)
        try:
            if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"{path} is there and is no socket: choose another controller.endpoint")
            if _answers(path):
                raise ConfigError(f"{path} is in use by another program: choose another controller.endpoint")
            self._open()
        except ConfigError:
            os.close(self._lock)
            raise

    def _read_keys(self, key: str, authorized: Path) -> None:
        self._authorized = authorized
        try:
            self._keys = read_key_pair(key)
            self._allowed, faults = read_authorized(authorized)
        except EndpointError as error:
            raise ConfigError(str(error)) from error
        if faults:
            raise ConfigError(faults[0])
        if not self._allowed:
            logger.warning("no key is in %s, so nobody can connect: see `specpilot keygen`", authorized)

    def _open(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: Authenticator | None = None
        self.socket = self._context.socket(zmq.ROUTER)
        self._watch = HandshakeMonitor(self.socket)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
            self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
            secure(self.socket, self.endpoint)
            if self._keys is not None:
                self._authenticator = Authenticator(self._context, self._allowed)
                self._authenticator.start()
                self.socket.curve_server = True
                self.socket.curve_secretkey = self._keys[1]
                self.socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
                # Without this libzmq lets everybody in when nobody answers for the domain.
                self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            mask = os.umask(0o177)  # the socket file is private from its first moment
            try:
                self.socket.bind(self.endpoint)
            finally:
                os.umask(mask)
        except zmq.ZMQError as error:
            self._shut()
            raise ConfigError(f"{self.endpoint} cannot be bound: {error.strerror}") from error

    def _shut(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._watch.close()
        self._context.destroy(linger=0)

    def wait(self, seconds: float, other: HasFileno) -> bool:
        """Return once a message is here or ``other`` is readable, or after ``seconds``; was there anything?"""
        poller = zmq.Poller()  # not kept: ``socket`` may be a new one by the next time
        poller.register(self.socket, zmq.POLLIN)
        poller.register(other, zmq.POLLIN)
        return bool(poller.poll(int(seconds * 1000)))

    def receive(self) -> list[bytes] | None:
        """Return the next message's frames, the peer's address first; None if there is no message."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, address: bytes, message: Message) -> None:
        """Send a message; a peer that does not read, or is gone, costs nothing: ROUTER drops for it."""
        self.socket.send_multipart([address, encode(message)], zmq.NOBLOCK)

    def tend(self, now: float) -> None:
        """Note who was refused, and let new keys in and withdrawn ones out; ``now`` in seconds."""
        failures = self._watch.failures()
        self.handshakes_failed += len(failures)
        for address, key in self._authenticator.take_refused() if self._authenticator is not None else ():
            self._say(f"a client at {address} was refused: its public key {key.decode()} is not in {self._authorized}")
        for failure in failures:
            if failure.event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._say(f"a connection failed: {failure.seen_by_controller()}")
        if self._authenticator is not None and not self._authenticator.is_alive():
            logger.error("the authentication of clients has failed; all connections are made again")
            self._shut()
            self._reopen()
        if self._authorized is not None and now - self._looked_at >= KEYS_SECONDS:
            self._looked_at = now
            self._refresh_keys(self._authorized)

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < REFUSED_NAMED:
            self._said.add(text)
            logger.warning("%s (said once; counted as handshakes_failed)", text)

    def _refresh_keys(self, folder: Path) -> None:
        try:
            allowed, faults = read_authorized(folder)
        except EndpointError as error:
            allowed, faults = self._allowed, [f"{error}. The keys read before stay in force"]
        for fault in faults:
            if fault not in self._faults:
                logger.error("%s", fault)
        self._faults = faults
        if allowed == self._allowed:
            return
        withdrawn = [name for key, name in self._allowed.items() if key not in allowed]
        logger.info("keys that may connect: %s", ", ".join(sorted(allowed.values())) or "none")
        self._allowed = allowed
        # What was said of a key before may be news of it again.
        self._said.clear()
        assert self._authenticator is not None
        self._authenticator.allowed = allowed
        if withdrawn:
            logger.warning("withdrawn: %s. All connections are made again", ", ".join(withdrawn))
            self._shut()
            self._reopen()

    def _reopen(self) -> None:
        deadline = time.monotonic() + REBIND_SECONDS
        while True:
            try:
                return self._open()
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """Unbind, leave no socket file behind, and give the lock up."""
        self._shut()
        if self._lock is not None:
            socket_path(self.endpoint).unlink(missing_ok=True)
            os.close(self._lock)


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(folder)
    except OSError as error:
        raise ConfigError(f"the socket's folder {folder} cannot be made: {error.strerror}") from error
    except EndpointError as error:
        raise ConfigError(str(error)) from error


def _lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
