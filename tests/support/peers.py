"""The controller's end of the wire for tests of the hooks: a real ROUTER, driven by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from specpilot.sglang_hooks.wire import (
    DecisionTable,
    FrameDecoder,
    FromHook,
    Hello,
    HookState,
    Lease,
    StepBatch,
    StepRecord,
    encode,
)
from tests.support.waiting import PATIENCE, until


class Peer:
    """Binds ``endpoint``; keeps what the hooks sent."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/c.ipc"
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        # Before connections are made: one that ends holds what was sent on it for as long as was said by then.
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)
        self._decoder = FrameDecoder(FromHook)
        self.address = b""
        self.hellos: list[Hello] = []
        self.states: list[HookState] = []
        self.received: list[StepRecord] = []
        self.dropped = 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def poll(self, seconds: float = 0.01) -> None:
        while self.socket.poll(int(seconds * 1000)):
            self.address, frame = self.socket.recv_multipart()
            message = self._decoder.decode(frame)
            if isinstance(message, Hello):
                self.hellos.append(message)
                self.send(Lease(0, 5.0))
            elif isinstance(message, HookState):
                self.states.append(message)
            elif isinstance(message, StepBatch):
                self.received.extend(message.records)
                self.dropped = message.dropped
            seconds = 0.0

    def until(self, done: Any, seconds: float = PATIENCE) -> None:
        """Receive until ``done()``; fail after ``seconds``."""
        until(done, seconds, meanwhile=self.poll, what="what the hooks send")

    def hello(self) -> Hello:
        self.until(lambda: self.hellos)
        return self.hellos[-1]

    def records(self, count: int) -> list[StepRecord]:
        self.until(lambda: len(self.received) >= count)
        return self.received

    def send(self, message: Any) -> None:
        self.socket.send_multipart([self.address, encode(message)])

    def send_raw(self, frame: bytes) -> None:
        self.socket.send_multipart([self.address, frame])

    def send_table(self, message: DecisionTable, wait: Any) -> None:
        """Send a table and wait until it lies in the mailbox of agent ``wait``."""
        self.send(message)
        self.until(lambda: wait._link.newest_epoch >= message.epoch)
