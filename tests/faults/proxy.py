"""A wire that misbehaves: stands between a server's link and its controller, and knows where frames end.

It forwards the bytes of ZMTP connections over unix sockets (RFC 37, NULL security): a greeting of 64 bytes,
then frames of flags, size and body. So it can cut, garble, repeat, inject and withhold single messages,
and write what is no ZMTP at all. A connection that ends on one side is ended on the other.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

GREETING = 64
COMMAND, LONG = 0x04, 0x02
REMEMBERED = 32

Direction = Literal["to_hook", "to_controller"]
Tamper = Callable[[bytes], list[bytes]]
"""From the body of a message to those that are sent in its place."""


def frame(body: bytes) -> bytes:
    """Return a whole ZMTP message of one frame."""
    if len(body) < 256:
        return bytes((0, len(body))) + body
    return bytes((LONG,)) + len(body).to_bytes(8, "big") + body


class _Half:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        self.source, self.sink, self.direction = source, sink, direction
        self.buffer = bytearray()
        self.pending = bytearray()
        self.greeted = 0
        self.ready = False

    def take(self, tamper: Callable[[Direction, bytes], list[bytes]]) -> bytes:
        """Return what is to be forwarded of the bytes received so far."""
        out = bytearray()
        if self.greeted < GREETING:  # sent in parts, each an answer to the other side's
            out += self.buffer[: GREETING - self.greeted]
            del self.buffer[: GREETING - self.greeted]
            self.greeted += len(out)
        while len(self.buffer) >= 2:
            head = 9 if self.buffer[0] & LONG else 2
            if len(self.buffer) < head:
                break
            end = head + int.from_bytes(self.buffer[1:head], "big")
            if len(self.buffer) < end:
                break
            whole, body = bytes(self.buffer[:end]), bytes(self.buffer[head:end])
            del self.buffer[:end]
            if whole[0] & COMMAND:
                out += whole
                self.ready = True
            else:
                for changed in tamper(self.direction, body):
                    out += frame(changed)
        return bytes(out)


class Proxy(threading.Thread):
    """Listens at ``front`` and forwards to ``back``, both paths of unix sockets."""

    def __init__(self, front: Path, back: Path) -> None:
        super().__init__(name="proxy", daemon=True)
        self._back = back
        self._front = front
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(front))
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._lock = threading.RLock()
        self._halves: list[_Half] = []
        self._tampers: dict[Direction, deque[Tamper]] = {"to_hook": deque(), "to_controller": deque()}
        self._held: set[Direction] = set()
        self.seen: dict[Direction, deque[bytes]] = {
            "to_hook": deque(maxlen=REMEMBERED),
            "to_controller": deque(maxlen=REMEMBERED),
        }
        self.connections = 0
        self._stopping = False

    # -- faults --

    def inject(self, direction: Direction, *bodies: bytes) -> bool:
        """Send messages that nobody sent; False if there is no connection to send them on."""
        return self.inject_bytes(direction, b"".join(map(frame, bodies)))

    def inject_bytes(self, direction: Direction, data: bytes) -> bool:
        """Write bytes between two frames."""
        with self._lock:
            halves = [half for half in self._halves if half.direction == direction and half.ready]
            for half in halves:
                self._write(half, data)
        return bool(halves)

    def tamper(self, direction: Direction, *changes: Tamper) -> None:
        """Change the next messages, one each."""
        with self._lock:
            self._tampers[direction].extend(changes)

    def waiting(self) -> list[Tamper]:
        """Return the changes that no message has come for yet."""
        with self._lock:
            return [change for changes in self._tampers.values() for change in changes]

    def hold(self, direction: Direction) -> None:
        """Read no more: whoever sends finds the socket full in the end."""
        with self._lock:
            self._held.add(direction)

    def release(self) -> None:
        """Read again, and leave what comes as it is."""
        with self._lock:
            self._held.clear()
            for changes in self._tampers.values():
                changes.clear()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            for half in list(self._halves):
                self._end(half)

    def stop(self) -> None:
        self._stopping = True
        self.join()
        self.cut()
        self._listener.close()
        self._front.unlink(missing_ok=True)

    # -- the thread --

    def run(self) -> None:
        while not self._stopping:
            ready = self._selector.select(0.02)
            with self._lock:
                idle = True
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    elif key.data.direction not in self._held and not self._flush(key.data):
                        idle = False
                        self._forward(key.data)
                for half in list(self._halves):
                    self._flush(half)
            if ready and idle:
                time.sleep(0.005)  # what is held, or waits for a slow reader, stays readable

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            self._join_ends(client)

    def _join_ends(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(os.fspath(self._back))
        except OSError:
            client.close()
            server.close()
            return
        self.connections += 1
        for source, sink, direction in ((client, server, "to_controller"), (server, client, "to_hook")):
            source.setblocking(False)
            half = _Half(source, sink, direction)  # type: ignore[arg-type]
            self._halves.append(half)
            self._selector.register(source, selectors.EVENT_READ, half)

    def _forward(self, half: _Half) -> None:
        if half not in self._halves:
            return
        try:
            data = half.source.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(half)
            return
        half.buffer += data
        self._write(half, half.take(self._changed))

    def _changed(self, direction: Direction, body: bytes) -> list[bytes]:
        self.seen[direction].append(body)
        changes = self._tampers[direction]
        return changes.popleft()(body) if changes else [body]

    def _write(self, half: _Half, data: bytes) -> None:
        half.pending += data
        self._flush(half)

    def _flush(self, half: _Half) -> bool:
        """Write what the reader takes; return whether some is left, so that nothing more is read for it."""
        try:
            while half.pending:
                del half.pending[: half.sink.send(half.pending)]
        except BlockingIOError:
            return True
        except OSError:
            self._end(half)
        return False

    def _end(self, half: _Half) -> None:
        for other in [h for h in self._halves if {h.source, h.sink} == {half.source, half.sink}]:
            self._halves.remove(other)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(other.source)
        half.source.close()
        half.sink.close()
