"""The controller's loop: receive steps, log them, learn, decide, push tables, renew leases.

One thread, one ROUTER socket. Every server (and every data-parallel replica of one) has a ``Session`` with its own
policy, trace segment and table. What a turn consists of is here; how each part of it is done is in

    router.py             whose message it is: names, strangers, rivals, refusals
    session.py            one server: learning from its records
    tables.py             deciding, pushing tables, renewing leases, sending again
    settings.py           changes of the configuration, by ``specpilot set`` or in the file
    priors.py             storing what was learned, and starting from it
    switchback_keeper.py  the measurement of what the policy gains
    endpoint.py           the socket, its folder or keys
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec

from specpilot.controller.config import Config, default_endpoint
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.counters import CONTROLLER_COUNTERS, Once
from specpilot.controller.serve.endpoint import Endpoint
from specpilot.controller.serve.live_config import LiveConfig
from specpilot.controller.serve.pace import Pace
from specpilot.controller.serve.priors import PriorKeeper
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.controller.serve.router import Router
from specpilot.controller.serve.session import Session
from specpilot.controller.serve.settings import SettingsChanger
from specpilot.controller.serve.snapshot import Board, Snapshot
from specpilot.controller.serve.switchback_keeper import SwitchbackKeeper
from specpilot.controller.serve.tables import TableSender
from specpilot.controller.trace.writer import TraceWriter, check_directory
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import Hello, HookState, SetRequest, StatusReport, StatusRequest, StepBatch

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Longest time that a turn waits for messages."""
FORGET_SECONDS = 86_400.0
"""A server that was silent for this long is forgotten."""
MESSAGES_PER_TURN = 1000
"""Messages handled before leases are looked at again: a flood from one server must not let another's lease run out.
Among peers ZMQ takes turns."""
TURN_SECONDS = 0.1
"""Seconds of handling messages before leases are looked at again."""


class Service:
    """The running controller; ``run`` returns after ``stop`` was called."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        file: Path | None = None,
    ) -> None:
        """Check the trace directory and bind the socket; ConfigError says what is in the way.

        ``clock`` in seconds, never going back; ``wall_clock`` in seconds since the Unix epoch. ``file``: where
        ``config`` was read from, to be followed.
        """
        self._live = LiveConfig(config, file)
        config = self._live.config
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = clock()
        self._stopping = False
        # What the policy needs and cannot be read is an error now, not when the first server connects.
        for server in config.all_servers:
            server.policy.build(None)
        self._trace_directory = config.trace.folder
        own = config.controller
        self._endpoint = Endpoint(own.endpoint or default_endpoint(), own.key, own.authorized_keys)
        try:
            if self._trace_directory is not None:
                check_directory(self._trace_directory)
            self._priors = PriorKeeper(config, clock)
        except ConfigError:
            self._endpoint.close()
            raise
        once = Once(logger)
        self._router = Router(self._endpoint, once, self._open_session)
        self._sessions = self._router.sessions
        self._switchbacks = SwitchbackKeeper(self._priors, wall_clock)
        self._tables = TableSender(self._endpoint, self._switchbacks, once, own.lease_seconds)
        self._settings = SettingsChanger(
            self._live, self._sessions, self._priors, self._switchbacks, self._tables, clock, wall_clock
        )
        self.board = Board()

    @property
    def endpoint(self) -> str:
        """The address that servers must be given."""
        return self._endpoint.endpoint

    def stop(self) -> None:
        """Make ``run`` return; safe to call from a signal handler."""
        self._stopping = True

    def reload(self) -> None:
        """Read the file again, changed or not; safe to call from a signal handler."""
        self._settings.reload()

    # -- the loop --

    def run(self) -> None:
        """Serve until ``stop``."""
        try:
            while not self._stopping:
                self.turn()
        finally:
            for session in self._sessions.values():
                self._end(session)
            self._endpoint.close()
            self.board.close()

    def turn(self) -> None:
        """One round: wait at most POLL_SECONDS for messages, then do what time demands."""
        if self._endpoint.wait(POLL_SECONDS, self.board):
            begun = self._clock()
            for _ in range(MESSAGES_PER_TURN):
                if self._clock() - begun > TURN_SECONDS:
                    break
                if (frames := self._endpoint.receive()) is None:
                    break
                self._receive(frames)
        self._tend()
        self.board.answer(self.snapshot)

    def _receive(self, frames: list[bytes]) -> None:
        """Do what one message asks for."""
        address, message = frames[0], self._router.decode(frames)
        match message:
            case StatusRequest():
                self._endpoint.send(address, StatusReport(msgspec.json.encode(self.status())))
            case SetRequest():
                self._endpoint.send(address, self._settings.answer(message))
            case Hello():
                self._greet(address, message)
            case StepBatch() | HookState():
                session, now = self._router.session_at(address), self._clock()
                if session is None:
                    self._router.hold(address, message, len(frames[1]), now)
                    return
                session.heard_at = now
                if isinstance(message, StepBatch):
                    session.learn(message)
                else:
                    self._tables.compare(session, message, now)

    def _tend(self) -> None:
        """Do what time demands."""
        now = self._clock()
        self._settings.follow(now)
        self._endpoint.tend(now)
        for session in list(self._sessions.values()):
            turning = session.switchback is not None and session.switchback.due(now)
            if session.pace.due(now, session.policy.urgent) or turning:
                self._tables.decide(session, now)
            if now - session.saved_at >= self._live.config.prior.save_seconds:
                self._priors.save(session)
            self._tables.renew(session, now)
            if session.trace is not None:
                session.trace.tick(now)
            if now - session.heard_at > FORGET_SECONDS:
                logger.info("%s was silent for a day and is forgotten", session.key)
                self._router.forget(session)
                self._end(session)

    # -- servers that come and go --

    def _greet(self, address: bytes, hello: Hello) -> None:
        """Take in a server that introduces itself: new, restarted, or asked because the controller restarted."""
        now = self._clock()
        session = self._router.admit(address, hello, now)
        if session is None:
            return
        restarted = session.hello is None or session.hello.instance != hello.instance
        if session.hello is not None and restarted:
            logger.info("%s restarted", session.key)
            if fingerprint(session.hello) != fingerprint(hello):
                self._priors.save(session)
                session.policy, session.failed = self._priors.policy_for(hello, session.config), False
                session.shelved = None
            session.next_seq = session.state = None
            session.rival_heard_at = float("-inf")
        session.describe_in_trace(hello, self._wall_clock())
        if restarted:
            self._switchbacks.set_up(session, hello, now)
        session.hello = hello
        for batch in self._router.take_held(address):
            session.learn(batch)
        self._tables.answer_hello(session, hello, restarted, now)

    def _open_session(self, key: str, hello: Hello, now: float) -> Session:
        """Return a session for a server that was not known, with a policy and a trace of its own."""
        config, own = self._live.config, self._live.config.for_server(key)
        trace = None
        if self._trace_directory is not None:
            trace = TraceWriter(self._trace_directory, key, hello, config.trace)
        pace = Pace(config.controller.decide_seconds)
        session = Session(key, own, self._priors.policy_for(hello, own), pace, trace, self._clock)
        session.saved_at = now
        logger.info("%s connected: %s on %s, candidate steps %s", key, hello.model, hello.gpu, hello.candidate_steps)
        return session

    def _end(self, session: Session) -> None:
        """Store what a session knows, and close its trace."""
        self._priors.save(session)
        if session.trace is not None:
            session.trace.close()

    # -- what may be told --

    def status(self) -> ControllerStatus:
        """Return the report behind ``specpilot status``."""
        return self.snapshot().status

    def snapshot(self) -> Snapshot:
        """Return all that may be told, of every server."""
        now = self._clock()
        servers = {key: session.snapshot(now) for key, session in self._sessions.items()}
        return Snapshot(now, self._status(now, [server.status for server in servers.values()]), servers)

    def _status(self, now: float, servers: list[ServerStatus]) -> ControllerStatus:
        traces = [session.trace for session in self._sessions.values() if session.trace is not None]
        counted = (self._router.unclaimed, sum(trace.failures for trace in traces), self._priors.failures)
        return ControllerStatus(
            version=version("specpilot"),
            pid=os.getpid(),
            endpoint=self.endpoint,
            policy=str(type(self._live.config.policy).__struct_config__.tag),
            uptime_seconds=now - self._started_at,
            trace_directory=str(self._trace_directory.resolve()) if self._trace_directory is not None else "",
            trace_written=sum(trace.written_records for trace in traces),
            trace_lost=sum(trace.lost_records for trace in traces),
            trace_bytes=max((trace.bytes_on_disk for trace in traces), default=0),
            trace_error="; ".join(trace.last_error for trace in traces if trace.last_error),
            refused_messages=self._router.refused,
            handshakes_failed=self._endpoint.handshakes_failed,
            config_error=self._live.error,
            changes=self._live.changes(now),
            prior_error=self._priors.error,
            servers=servers,
            page=self.board.page,
            counters=dict(zip(CONTROLLER_COUNTERS, counted, strict=True)),
        )
