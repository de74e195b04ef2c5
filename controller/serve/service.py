"""The controller's loop: receive steps, log them, learn, decide, push tables, renew leases.

One thread, one ROUTER socket. Every server (and every data-parallel replica of one) has a
``Session`` with its own policy, trace segment and table. Sessions are found by the name in
Hello, so a server that restarts, or whose controller restarts, goes on where it was.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec

from specpilot.controller.config import Config, GoodputPolicy, ServerConfig, default_endpoint
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.counters import CONTROLLER_COUNTERS, Once, cause
from specpilot.controller.serve.endpoint import Endpoint
from specpilot.controller.serve.live_config import Layers, LiveConfig
from specpilot.controller.serve.pace import Pace
from specpilot.controller.serve.priors import PriorStore
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.controller.serve.session import ALIVE_SECONDS, REPUSH_SECONDS, RIVAL_SECONDS, Session
from specpilot.controller.serve.snapshot import Board, Snapshot
from specpilot.controller.serve.switchback import Arm, Stored, Switchback, fallback_plan
from specpilot.controller.trace.writer import TraceWriter, check_directory
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Plan, Policy, PolicyError
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import (
    DecisionSource,
    FrameDecoder,
    FromHook,
    Hello,
    HelloRequest,
    HookState,
    Lease,
    SetReply,
    SetRequest,
    StatusReport,
    StatusRequest,
    StepBatch,
    WireError,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
FORGET_SECONDS = 86_400.0
ON_THE_WAY_SECONDS = 0.5
"""A server that says Hello and does not know a table may be about to get it; after this time it was lost."""
ASK_SECONDS = 1.0
STRANGERS = 64
HELD_MESSAGES = 64
HELD_BYTES = 1 << 20
"""Of each peer that has not said yet who it is: sent before our question reached it."""
SERVERS = 256
"""A peer that keeps inventing names must not fill the memory with policies."""
MESSAGES_PER_TURN = 1000
TURN_SECONDS = 0.1
"""Handled before leases are looked at again, and for how long: a flood from one server must not let another's run
out. Among peers ZMQ takes turns."""


class Stranger:
    """A peer that has sent something but not said who it is, or whose name another one holds."""

    def __init__(self) -> None:
        self.asked_at = float("-inf")
        self.turned_away = False
        self.held: deque[tuple[int, StepBatch | HookState]] = deque()
        self.held_bytes = 0

    def hold(self, size: int, message: StepBatch | HookState) -> int:
        """Keep a message that came as ``size`` bytes; return how many older ones gave way."""
        self.held.append((size, message))
        self.held_bytes += size
        dropped = 0
        while self.held_bytes > HELD_BYTES or len(self.held) > HELD_MESSAGES:
            self.held_bytes -= self.held.popleft()[0]
            dropped += 1
        return dropped

    def turn_away(self) -> int:
        """Keep nothing of a peer whose name another one holds; return how many messages that drops."""
        self.turned_away = True
        dropped = len(self.held)
        self.held.clear()
        self.held_bytes = 0
        return dropped


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

        ``file``: where ``config`` was read from, to be followed.
        """
        self._live = LiveConfig(config, file)
        self._config = config = self._live.config
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = clock()
        # What the policy needs and cannot be read is an error now, not when the first server connects.
        for one in config.all_servers:
            one.policy.build(None)
        self._trace_directory = config.trace.folder
        own = config.controller
        self._endpoint = Endpoint(own.endpoint or default_endpoint(), own.key, own.authorized_keys)
        if self._trace_directory is not None:
            try:
                check_directory(self._trace_directory)
            except ConfigError:
                self._endpoint.close()
                raise
        self._priors: PriorStore | None = None
        try:
            self._priors = self._priors_for(config)
        except ConfigError:
            self._endpoint.close()
            raise
        self._decoder = FrameDecoder(FromHook)
        self._sessions: dict[str, Session] = {}
        self._by_address: dict[bytes, Session] = {}
        self._strangers: dict[bytes, Stranger] = {}
        self._refused = 0
        self._stopping = self._reload = False
        self._counters = dict.fromkeys(CONTROLLER_COUNTERS, 0)
        self._once = Once(logger)
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
        self._reload = True

    def run(self) -> None:
        """Serve until ``stop``."""
        try:
            while not self._stopping:
                self.turn()
        finally:
            for session in self._sessions.values():
                self._save_prior(session)
                if session.trace is not None:
                    session.trace.close()
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

    def _tend(self) -> None:
        """Do what time demands."""
        now = self._clock()
        self._follow_config(now)
        self._endpoint.tend(now)
        for session in list(self._sessions.values()):
            turning = session.switchback is not None and session.switchback.due(now)
            if session.pace.due(now, session.policy.urgent) or turning:
                self._decide(session, now)
            if now - session.saved_at >= self._config.prior.save_seconds:
                self._save_prior(session)
            self._renew(session, now)
            if session.trace is not None:
                session.trace.tick(now)
            if now - session.heard_at > FORGET_SECONDS:
                self._forget(session)

    # -- what comes in --

    def _receive(self, frames: list[bytes]) -> None:
        address = frames[0]
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames) - 1} frames instead of 1")
            message = self._decoder.decode(frames[1])
        except WireError as error:
            self._refuse(address, cause(error), str(error))
            return
        if isinstance(message, StatusRequest):
            report = msgspec.json.encode(self.status())
            self._endpoint.send(address, StatusReport(report))
            return
        if isinstance(message, SetRequest):
            refused = self._set(message)
            report = msgspec.json.encode(self._live.report(self._clock(), [*self._sessions]))
            self._endpoint.send(address, SetReply(refused, report))
            return
        if isinstance(message, Hello):
            self._greet(address, message)
            return
        assert isinstance(message, StepBatch | HookState)
        session = self._by_address.get(address)
        if session is None:
            self._ask(address, message, len(frames[1]))
            return
        session.heard_at = self._clock()
        if isinstance(message, StepBatch):
            session.learn(message)
        else:
            self._compare(session, message)

    def _refuse(self, address: bytes, key: str, why: str) -> None:
        """Count a message, and say why once for each cause (``key``)."""
        self._refused += 1
        who = self._by_address[address].key if address in self._by_address else "an unknown peer"
        self._once.warn(key, f"a message of {who} was refused: {why}", "refused_messages")

    def _ask(self, address: bytes, message: StepBatch | HookState, size: int) -> None:
        """Ask a peer who it is, and keep what it sent until it has answered."""
        stranger = self._stranger(address)
        self._drop(1 if stranger.turned_away else stranger.hold(size, message))
        now = self._clock()
        if now - stranger.asked_at > ASK_SECONDS:
            stranger.asked_at = now
            self._endpoint.send(address, HelloRequest())

    def _drop(self, messages: int) -> None:
        """Count messages of peers that have not said who they are, or may not be who they say."""
        if messages:
            self._counters["messages_unclaimed"] += messages
            text = "messages of a peer without a name of its own are dropped"
            self._once.warn("messages_unclaimed", text, "messages_unclaimed")

    def _stranger(self, address: bytes) -> Stranger:
        stranger = self._strangers.setdefault(address, Stranger())
        if len(self._strangers) > STRANGERS:
            self._drop(len(self._strangers.pop(next(iter(self._strangers))).held))
        return stranger

    def _greet(self, address: bytes, hello: Hello) -> None:
        key = f"{hello.server_id}/{hello.dp_rank}"
        now = self._clock()
        session = self._sessions.get(key)
        if session is None and len(self._sessions) >= SERVERS:
            self._refuse(address, "servers", f"{key} is one server too many, a controller serves {SERVERS}")
            return
        if session is None:
            config = self._config.for_server(key)
            trace = None
            if self._trace_directory is not None:
                trace = TraceWriter(self._trace_directory, key, hello, self._config.trace)
            pace = Pace(self._config.controller.decide_seconds)
            session = self._sessions[key] = Session(
                key, config, self._policy_for(hello, config), pace, trace, self._clock
            )
            session.saved_at = now
            logger.info(
                "%s connected: %s on %s, candidate steps %s",
                key,
                hello.model,
                hello.gpu,
                hello.candidate_steps,
            )
        elif session.hello is not None and session.hello.instance != hello.instance:
            if now - session.heard_at < ALIVE_SECONDS:
                self._turn_away(session, address, hello, now)
                return
            logger.info("%s restarted", key)
            if fingerprint(session.hello) != fingerprint(hello):
                self._save_prior(session)
                session.policy, session.failed = self._policy_for(hello, session.config), False
                session.shelved = None
            session.next_seq = session.state = None
            session.rival_heard_at = float("-inf")
        self._by_address.pop(session.address, None)
        self._by_address[address] = session
        session.address = address
        session.heard_at = now
        self._describe(session, hello)
        changed = session.hello is None or session.hello.instance != hello.instance
        if changed:
            self._set_up_switchback(session, hello, now)
        session.hello = hello
        for _, message in self._strangers.pop(address, Stranger()).held:
            if isinstance(message, StepBatch):
                session.learn(message)
        if changed or hello.epoch > session.epoch:
            session.epoch = max(session.epoch, hello.epoch)
            session.plan = None
            self._decide(session, now)
        elif hello.epoch < session.epoch and session.plan is not None:
            if now - session.pushed_at > ON_THE_WAY_SECONDS:
                self._push(session, session.plan, now)  # the table was lost, with a connection say
        else:
            session.leased_at = 0.0  # renewed in this very turn: the answer to a repeated Hello

    def _turn_away(self, session: Session, address: bytes, hello: Hello, now: float) -> None:
        """Keep a second server of one name waiting; it is an error once the first is sure to be alive still."""
        stranger = self._stranger(address)
        session.counters["rivals_turned_away"] += 1
        self._drop(stranger.turn_away())
        known = session.conflict(now)
        if session.rival != hello.instance or now - session.rival_heard_at > RIVAL_SECONDS:
            session.rival, session.rival_since = hello.instance, now
        session.rival_heard_at = now
        if not known and (conflict := session.conflict(now)):
            logger.error("%s: %s", session.key, conflict)

    def _compare(self, session: Session, state: HookState) -> None:
        """Note what the server reports, and send its table again if it is not in force in time."""
        previous, session.state = session.state, state
        now = self._clock()
        if state.epoch == session.epoch or state.source == DecisionSource.HALTED:
            session.repush_seconds = REPUSH_SECONDS
        elif session.plan is not None and previous is not None and previous.epoch and not state.epoch:
            self._push(session, session.plan, now)  # it gave its table up: we were not heard for too long
        elif session.plan is not None and now - session.pushed_at > session.repush_seconds:
            session.repush_seconds = min(2 * session.repush_seconds, 60.0)
            session.counters["tables_resent"] += 1
            text = f"{session.key}: table {session.epoch} is not in force there, it is sent again"
            self._once.warn(f"tables_resent {session.key}", text, "tables_resent")
            self._push(session, session.plan, now)

    # -- what goes out --

    def _decide(self, session: Session, now: float) -> None:
        hello = session.hello
        assert hello is not None
        if session.failed:
            return
        try:
            plan, note = session.policy.decide(hello, now), session.policy.note
            session.decider = session.policy.name
            # The policy has decided all the same: it goes on learning, and its budgets with it.
            if session.switchback is not None and session.switchback.arm(now) is Arm.FALLBACK:
                session.decider, plan = "fallback", fallback_plan(hello)
            plan = session.config.bounds.apply(plan, hello)
        except PolicyError as error:
            if session.policy_error != str(error):
                session.policy_error = str(error)
                logger.error("%s: %s; it runs on its fallback", session.key, error)
            return
        except Exception:
            session.fail("deciding")
            return
        session.policy_error = ""
        if note != session.policy_note:
            session.policy_note = note
            logger.warning("%s: %s", session.key, note or "what was noted is over")
        if plan != session.plan:
            self._push(session, plan, now)
        else:
            table, _, decided_at = session.tables[session.epoch]
            session.tables[session.epoch] = table, plan.reason, decided_at
        if session.switchback is not None:
            self._note_switchback(session, session.switchback, now)

    def _set_up_switchback(self, session: Session, hello: Hello, now: float) -> None:
        """Begin to measure, or go on after a restart of the controller or of the server."""
        before = session.switchback
        config = session.config.switchback
        if not config.share or session.mode_of(hello) != "control":
            session.switchback = None  # in shadow mode the fallback is in force whoever decides
            return
        identity = self._switchback_identity(session, hello)
        same = before is not None and session.switchback_of == identity
        if before is not None:
            before.interrupted(now)
        if before is not None and same and before.config == config:
            return
        if before is not None and same:
            stored: Stored | None = before.stored(identity, now, self._wall_clock())
        else:
            stored = self._priors.load_switchback(session.key) if self._priors is not None else None
        session.switchback, session.switchback_of = Switchback(config, hello, session.seed, now), identity
        if stored is not None and stored.identity == identity:
            session.switchback.resume(stored, now, self._wall_clock())

    def _switchback_identity(self, session: Session, hello: Hello) -> str:
        """Return what a measurement is of: another policy, fallback or machine is another experiment."""
        policy = msgspec.json.encode(session.config.policy).decode()
        bounds = msgspec.json.encode(session.config.bounds).decode()
        return f"{fingerprint(hello)} fallback {hello.fallback_steps} policy {policy} bounds {bounds}"

    def _note_switchback(self, session: Session, switchback: Switchback, now: float) -> None:
        switchback.decided(session.epoch)
        if switchback.news:
            logger.warning("%s: %s", session.key, switchback.news)
            switchback.news = ""
        if switchback.changed:
            switchback.changed = False
            if self._priors is not None and session.hello is not None:
                identity = session.switchback_of
                self._priors.save_switchback(session.key, switchback.stored(identity, now, self._wall_clock()))

    def _policy_for(self, hello: Hello, config: ServerConfig) -> Policy:
        return config.policy.build(self._priors.load(hello) if self._priors is not None else None)

    # -- changes of the configuration --

    def _follow_config(self, now: float) -> None:
        """Take in what was written into the file, and end what was set for a time."""
        at_once, self._reload = self._reload, False
        try:
            edited = self._live.edited(now, at_once)
            if edited is not None:
                self._reconfigure(edited)
                self._live.error = ""
        except ConfigError as error:
            source = self._live.source
            where = "" if source in str(error) else f"{source}: "
            self._live.error = f"{where}{error}; what was in force before stays so"
            logger.error("%s", self._live.error)
        expired = self._live.expired(now)
        if expired is not None:
            logger.info("what was set for a time is over")
            try:
                self._reconfigure(expired, tried=False)
            except ConfigError as error:  # a file of a policy that is gone by now
                logger.error("%s; what was set for a time stays in force", error)

    def _set(self, request: SetRequest) -> str:
        """Do what was asked for, and return why not; a request for nothing is one for the report."""
        if not request.values and not request.reset:
            return ""
        before = self._config
        known = {*self._config.servers, *self._sessions, *(key.rpartition("/")[0] for key in self._sessions)}
        try:
            if request.server and request.server not in known:
                raise ConfigError(f"no server {request.server} is known here; there are {sorted(known) or 'none'}")
            self._reconfigure(self._live.asked(request, self._clock()))
        except ConfigError as error:
            logger.error("not set: %s", error)
            return str(error)
        if self._config != before:  # and not a renewal
            whose = f" for {request.server}" if request.server else ""
            logger.info("set%s: %s", whose, request.values or "as in the file")
        return ""

    def _reconfigure(self, layers: Layers, tried: bool = True) -> None:
        """Put new layers in force for every server at once; ConfigError before anything has changed.

        ``tried``: a policy that a server cannot have is an error.
        """
        now = self._clock()
        config = self._live.build(layers)
        priors = self._priors_for(config)
        changes = []
        for one in config.all_servers:
            one.policy.build(None)
        for session in self._sessions.values():
            new = config.for_server(session.key)
            if new != session.config:
                changes.append((session, new, self._try(session, new, now) if tried else new.policy.build(None)))
        self._live.commit(layers, config)
        self._config, self._priors = config, priors
        for session, new, policy in changes:
            self._change(session, new, policy, now)

    def _try(self, session: Session, new: ServerConfig, now: float) -> Policy:
        """Return a fresh policy that can decide for this server; ConfigError if it cannot."""
        policy = new.policy.build(None)
        try:
            if session.hello is not None and not session.policy_error:
                new.bounds.apply(policy.decide(session.hello, now), session.hello)
        except PolicyError as error:
            raise ConfigError(str(error)) from error
        return policy

    def _change(self, session: Session, new: ServerConfig, fresh: Policy, now: float) -> None:
        """Put a server's new configuration in force."""
        old, session.config = session.config, new
        hello = session.hello
        assert hello is not None
        if new.policy != old.policy:
            self._save_prior(session)
            if isinstance(session.policy, Goodput):
                session.shelved = None if session.failed else session.policy
            if isinstance(new.policy, GoodputPolicy):
                learned = session.shelved or self._policy_for(hello, new)
                assert isinstance(learned, Goodput)
                new.policy.change(learned)
                fresh = learned
            session.policy, session.failed, session.policy_error, session.policy_note = fresh, False, "", ""
        logger.info("%s: mode %s, policy %s", session.key, new.mode, msgspec.json.encode(new.policy).decode())
        self._set_up_switchback(session, hello, now)
        session.plan = None  # so that a table goes out, whose epoch tells records of the two apart
        self._describe(session, hello)
        self._decide(session, now)

    def _describe(self, session: Session, hello: Hello) -> None:
        """Tell the trace whose records follow, and by which configuration the tables from now on are made."""
        if session.trace is not None:
            mode = session.mode_of(hello)
            session.trace.update_hello(msgspec.structs.replace(hello, mode=mode))
            session.trace.update_config(session.config, max(session.epoch, hello.epoch) + 1, self._wall_clock())

    def _priors_for(self, config: Config) -> PriorStore | None:
        kept = any(isinstance(one.policy, GoodputPolicy) or one.switchback.share for one in config.all_servers)
        folder = config.prior.folder if kept else None
        if folder is None:
            return self._priors  # what has learned until now is still kept
        return self._priors or PriorStore(folder)

    def _save_prior(self, session: Session) -> None:
        """Keep what was learned; a policy that failed has learned who knows what."""
        session.saved_at = self._clock()
        if self._priors is None or session.hello is None or session.failed:
            return
        try:
            prior = (session.shelved or session.policy).to_prior()
        except Exception:
            session.fail("telling what it learned")
            return
        if prior is not None:
            self._priors.save(session.hello, prior)

    def _push(self, session: Session, plan: Plan, now: float) -> None:
        session.epoch += 1
        session.plan = plan
        session.pushed_at = session.leased_at = now
        shadow = session.config.mode == "shadow"
        table = plan.table(session.epoch, self._config.controller.lease_seconds, session.decider, session.seed, shadow)
        session.tables[session.epoch] = (table, plan.reason, now)
        while len(session.tables) > 8:
            del session.tables[next(iter(session.tables))]
        self._endpoint.send(session.address, table)

    def _renew(self, session: Session, now: float) -> None:
        lease = self._config.controller.lease_seconds
        if now - session.leased_at > lease / 3:
            session.leased_at = now
            self._endpoint.send(session.address, Lease(session.epoch if session.plan is not None else 0, lease))

    def _forget(self, session: Session) -> None:
        logger.info("%s was silent for a day and is forgotten", session.key)
        self._save_prior(session)
        self._by_address.pop(session.address, None)
        del self._sessions[session.key]
        if session.trace is not None:
            session.trace.close()

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
        return ControllerStatus(
            version=version("specpilot"),
            pid=os.getpid(),
            endpoint=self.endpoint,
            policy=str(type(self._config.policy).__struct_config__.tag),
            uptime_seconds=now - self._started_at,
            trace_directory=str(self._trace_directory.resolve()) if self._trace_directory is not None else "",
            trace_written=sum(trace.written_records for trace in traces),
            trace_lost=sum(trace.lost_records for trace in traces),
            trace_bytes=max((trace.bytes_on_disk for trace in traces), default=0),
            trace_error="; ".join(trace.last_error for trace in traces if trace.last_error),
            refused_messages=self._refused,
            handshakes_failed=self._endpoint.handshakes_failed,
            config_error=self._live.error,
            changes=self._live.changes(now),
            prior_error=self._priors.error if self._priors is not None else "",
            servers=servers,
            page=self.board.page,
            counters={
                **self._counters,
                "trace_failures": sum(trace.failures for trace in traces),
                "prior_failures": self._priors.failures if self._priors is not None else 0,
            },
        )
