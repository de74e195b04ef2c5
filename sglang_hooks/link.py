"""The one socket of a server to its controller, in a thread of its own.

The scheduler thread never touches a socket: records go into a bounded queue that this thread
drains, and a table arrives in a mailbox that the scheduler's next receiving pass empties.
Both are plain attribute and deque operations. When the controller does not read, sends fail
at once, the queue fills, and new records are dropped and counted.

Thread-safety: the queue and the waiting table are ``deque``s, whose append and popleft are
atomic; the lease is a tuple, replaced by one assignment.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import zmq

from specpilot.sglang_hooks.connection import HANDSHAKE_SECONDS, EndpointError, HandshakeMonitor, KeyFiles, connect
from specpilot.sglang_hooks.counters import Announcer
from specpilot.sglang_hooks.table_policy import CompiledTable, TableError
from specpilot.sglang_hooks.wire import (
    MAX_TABLE_BYTES,
    DecisionTable,
    FrameDecoder,
    Hello,
    HelloRequest,
    HookState,
    Lease,
    StepBatch,
    StepRecord,
    ToHook,
    WireError,
    encode,
)

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.02
"""How often the record queue is looked at; a table wakes the thread at once."""

STATE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""Without a word from the controller for this long, Hello is repeated: it may have restarted."""

RECONNECT_SECONDS = 0.2
"""Between two attempts to connect, and after a connection that ended or an error."""

MESSAGES_PER_TURN = 16
"""Taken in before DRAIN_SECONDS of rest: decoding holds the GIL, which the scheduler thread needs."""

UNANSWERED_SECONDS = 10.0
"""With nothing sent or heard for this long the operator is told."""

RETRY_SECONDS = 1.0
"""Between two looks at a folder or keys that cannot be used, and before a refused key is tried again."""

REMIND_SECONDS = 3600.0
"""Why there is no connection is logged once, and again after this long if it still holds."""

STOP_SECONDS = 0.5
"""At the end ZMQ may take this long to hand over frames it holds already: it would drop them at once."""

BATCH_RECORDS = 32
"""Per frame: encoding holds the GIL, and 32 records at batch size 256 take it for about 70 us."""

MAX_LEAP = 1 << 40
"""Largest increment of the epoch accepted from one table to the next: a false one must leave numbers for others."""

SEND_HIGH_WATER = 256
"""Frames ZMQ may hold for a controller that does not read: about 8,000 records."""


class Delivery(NamedTuple):
    """A table as it lies in the mailbox; times are monotonic seconds."""

    table: CompiledTable
    deadline: float
    received_at: float


class Mailbox:
    """What the controller last sent, for the scheduler thread of rank 0 to take."""

    def __init__(self) -> None:
        self.tables: deque[Delivery] = deque(maxlen=1)
        """The newest table that was not taken yet; popped, never cleared: another may arrive in between."""
        self.lease: tuple[int, float] = (0, 0.0)
        """Epoch of the newest table, and until when it may be in force."""


class RecordQueue:
    """Bounded hand-over of records from the scheduler thread to the link."""

    def __init__(self, limit: int) -> None:
        self._records: deque[StepRecord] = deque()
        self._limit = limit
        self.dropped = 0

    def put(self, record: StepRecord) -> None:
        """Append, or drop and count; never waits."""
        if len(self._records) >= self._limit:
            self.dropped += 1
        else:
            self._records.append(record)

    def waiting(self) -> int:
        """Return how many records are not sent yet."""
        return len(self._records)

    def take(self, limit: int) -> list[StepRecord]:
        """Return up to ``limit`` records, oldest first (link thread)."""
        records = self._records
        return [records.popleft() for _ in range(min(limit, len(records)))]

    def put_back(self, records: Sequence[StepRecord]) -> None:
        """Return records that could not be sent to the front (link thread)."""
        self._records.extendleft(reversed(records))


class Link(threading.Thread):
    """DEALER to the controller's ROUTER: sends Hello, records and state, takes tables and leases."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyFiles,
        hello: Callable[[], Hello],
        state: Callable[[], HookState],
        queue: RecordQueue,
        mailbox: Mailbox,
        candidate_steps: Sequence[int],
    ) -> None:
        super().__init__(name="specpilot-link", daemon=True)
        self._endpoint = endpoint
        self._keys = keys
        self._hello = hello
        self._state = state
        self._queue = queue
        self._mailbox = mailbox
        self._candidates = tuple(candidate_steps)
        self._decoder = FrameDecoder(ToHook, MAX_TABLE_BYTES)
        self._newest_epoch = self._refused_epoch = 0
        self._stopping = threading.Event()
        self._said: set[str] = set()
        self._complained_at: dict[str, float] = {}
        self.counters = {
            "tables_received": 0,
            "tables_refused": 0,
            "tables_replayed": 0,
            "messages_refused": 0,
            "leases_ignored": 0,
            "link_rebuilds": 0,
            "link_failures": 0,
            "handshakes_failed": 0,
        }
        self._announcer = Announcer()

    def stop(self, timeout: float = 2.0) -> None:
        """Send what is queued, as far as the controller takes it at once, and end the thread."""
        self._stopping.set()
        self.join(timeout)

    @property
    def newest_epoch(self) -> int:
        """Epoch of the newest table that was accepted (0: none yet)."""
        return self._newest_epoch

    def run(self) -> None:
        """Thread body: until ``stop``, or the process ends. Nothing that fails here may reach the server."""
        while True:
            context = None
            try:
                context = zmq.Context()
                while not self._session(context):
                    pass
                return
            except Exception:  # out of file descriptors, say; until it is over the lease runs out by itself
                self._count("link_failures", f"the link to {self._endpoint} failed and begins again", exc_info=True)
            finally:
                if context is not None:
                    context.destroy(linger=0)
            if self._stopping.wait(RECONNECT_SECONDS):
                return

    def _session(self, context: zmq.Context[zmq.Socket[bytes]]) -> bool:
        """Use one socket until its connection ends (False) or the thread does (True).

        A new one each time: after a frame that is too large, or not ZMTP, libzmq would not connect again.
        """
        self._refused_epoch = 0
        with context.socket(zmq.DEALER) as socket, HandshakeMonitor(socket, ends=True) as watch:
            self._configure(socket)
            try:
                connect(socket, self._endpoint, self._keys)
            except (EndpointError, OSError) as error:
                # No folder is a controller that was not started yet; anything else, an operator must hear of.
                if not isinstance(error, FileNotFoundError):
                    self._complain(str(error))
                return self._stopping.wait(RETRY_SECONDS)
            if self._serve(socket, watch):
                return True
        self.counters["link_rebuilds"] += 1
        return self._stopping.wait(RECONNECT_SECONDS)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_TABLE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        # Do not queue for a controller that is not there: records wait in our own bounded queue.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_SECONDS * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))

    def _serve(self, socket: zmq.Socket[bytes], watch: HandshakeMonitor) -> bool:
        """Talk until the connection ends (False) or the thread does (True)."""
        next_state = next_hello = 0.0
        greeted = False
        heard_at = float("-inf")
        alive_at = monotonic()
        retry_at = float("inf")
        last_said: tuple[int, int, int] | None = None
        while True:
            if socket.poll(int(DRAIN_SECONDS * 1000)):
                heard_at = monotonic()
                if not self._receive(socket):
                    greeted, next_hello = False, 0.0
            stopping = self._stopping.is_set()
            now = monotonic()
            sent = False
            silent = now - heard_at > SILENCE_SECONDS
            if (silent or not greeted) and now >= next_hello:
                greeted = sent = self._send(socket, encode(self._hello()))
                next_hello = now + STATE_SECONDS if greeted else now
            state = self._state()
            self._announcer.look(state.counters)
            said = (state.source, state.epoch, state.confirmed_epoch)
            if greeted and (now >= next_state or said != last_said or stopping):
                sent = self._send(socket, encode(state))
                next_state, last_said = now + STATE_SECONDS, said
            if greeted:
                self._send_records(socket)
            if stopping:
                socket.setsockopt(zmq.LINGER, int(STOP_SECONDS * 1000))
                return True
            for failure in watch.failures():
                self.counters["handshakes_failed"] += 1
                self._complain(failure.seen_by_client(self._endpoint))
                if failure.final:
                    retry_at = min(retry_at, now + RETRY_SECONDS)
            if sent or heard_at > alive_at:
                alive_at = now
            elif now - alive_at > UNANSWERED_SECONDS:
                self._complain(f"nothing answers there for {UNANSWERED_SECONDS:g} s: is it started, and reachable?")
            if now >= retry_at or (watch.ended and retry_at == float("inf")):
                return False

    def _send(self, socket: zmq.Socket[bytes], frame: bytes) -> bool:
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_records(self, socket: zmq.Socket[bytes]) -> None:
        """Send what is queued, as far as it is taken."""
        while records := self._queue.take(BATCH_RECORDS):
            try:
                frame = encode(StepBatch(records, self._queue.dropped))
            except Exception:  # a value that SGLang never gave before: not to be tried again
                self._queue.dropped += len(records)
                raise
            if not self._send(socket, frame):
                self._queue.put_back(records)
                break

    def _receive(self, socket: zmq.Socket[bytes]) -> bool:
        """Take the waiting messages; return False if the controller must hear who we are, and of which epoch."""
        known = True
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return known
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames instead of 1")
                message = self._decoder.decode(frames[0])
            except WireError as error:
                self._count("messages_refused", f"a message was ignored: {error}")
                continue
            if isinstance(message, DecisionTable):
                known &= self._take_table(message)
            elif isinstance(message, Lease):
                known &= self._take_lease(message)
            elif isinstance(message, HelloRequest):
                known = False
        self._stopping.wait(DRAIN_SECONDS)
        return known

    def _take_table(self, table: DecisionTable) -> bool:
        """Return False for an old one: whoever sent it must hear which epoch is the newest here."""
        self.counters["tables_received"] += 1
        if table.epoch <= self._newest_epoch:
            self._count("tables_replayed", f"table of epoch {table.epoch} is not newer than {self._newest_epoch}")
            return False
        try:
            if table.epoch > self._newest_epoch + MAX_LEAP:
                raise TableError(f"its epoch {table.epoch} leaps from {self._newest_epoch}")
            compiled = CompiledTable.compile(table, self._candidates)
        except TableError as error:
            self._refused_epoch = table.epoch
            self._count("tables_refused", f"a table of policy {table.policy!r} was refused: {error}")
            return True
        now = monotonic()
        self._newest_epoch, self._refused_epoch = table.epoch, 0
        self._mailbox.lease = (table.epoch, now + table.lease_seconds)
        self._mailbox.tables.append(Delivery(compiled, now + table.lease_seconds, now))
        return True

    def _take_lease(self, lease: Lease) -> bool:
        """Return False for one of another table: either side has missed one."""
        if lease.epoch in (0, self._refused_epoch):
            return True  # a sign of life, of no table or of one that was refused and counted
        if lease.epoch != self._newest_epoch or not 0.0 < lease.lease_seconds < float("inf"):
            self._count("leases_ignored", f"lease for epoch {lease.epoch}, the newest table is {self._newest_epoch}")
            return lease.epoch == self._newest_epoch
        self._mailbox.lease = (lease.epoch, monotonic() + lease.lease_seconds)
        return True

    def _complain(self, cause: str) -> None:
        """Log why there is no connection, once an hour for each cause."""
        now = monotonic()
        if now - self._complained_at.get(cause, float("-inf")) >= REMIND_SECONDS:
            self._complained_at[cause] = now
            logger.warning("specpilot: no connection to the controller at %s: %s", self._endpoint, cause)

    def _count(self, counter: str, text: str, exc_info: bool = False) -> None:
        """Count, and log once per kind: a controller gone wrong must not fill the server's log."""
        self.counters[counter] += 1
        if counter not in self._said:
            self._said.add(counter)
            logger.warning("specpilot: %s (counted from now on as %s)", text, counter, exc_info=exc_info)
