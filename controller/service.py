"""The controller's loop: receive steps, log them, learn, decide, push tables, renew leases.

One thread, one ROUTER socket. Every server (and every data-parallel replica of one) has a
``Session`` with its own policy, trace segment and table. Sessions are found by the name in
Hello, so a server that restarts, or whose controller restarts, goes on where it was.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
import zmq

from controller.config import Config, ConfigError, GoodputPolicy, default_endpoint
from controller.endpoint import Endpoint
from controller.pace import Pace
from controller.priors import PriorStore
from controller.status import ControllerStatus, ServerStatus
from controller.switchback import Arm, Switchback, fallback_plan
from controller.trace import TraceWriter, check_directory
from policies.cost_prior import fingerprint
from policies.interface import Plan, Policy, PolicyError
from sglang_hooks.wire import (
    MASKED,
    DecisionSource,
    DecisionTable,
    FrameDecoder,
    FromHook,
    Hello,
    HelloRequest,
    HookState,
    Lease,
    StatusReport,
    StatusRequest,
    StepBatch,
    StepRecord,
    ToHook,
    WireError,
    encode,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
RECENT_STEPS = 512
ALIVE_SECONDS = 2.5
"""Servers speak once a second: one heard within this time is alive, another of its name a rival."""
FORGET_SECONDS = 86_400.0
REPUSH_SECONDS = 2.0
"""A table not in force by then is sent again, then at twice the time, up to a minute."""
ON_THE_WAY_SECONDS = 0.5
"""A server that says Hello and does not know a table may be about to get it; after this time it was lost."""
ASK_SECONDS = 1.0
STRANGERS = 256
HELD_MESSAGES = 64
"""Of each peer that has not said yet who it is: sent before our question reached it."""
RIVAL_SECONDS = 10.0
"""A second server of one name that was not heard for this long is no news any more."""
MESSAGES_PER_TURN = 1000
"""Handled before leases are looked at again: a flood from one server must not let another's run out."""


class Stranger:
    """A peer that has sent something but not said who it is, or whose name another one holds."""

    def __init__(self) -> None:
        self.asked_at = float("-inf")
        self.turned_away = False
        self.held: deque[StepBatch | HookState] = deque(maxlen=HELD_MESSAGES)


class Session:
    """One server: what it said, what was learned for it, and the table it should hold."""

    def __init__(
        self, key: str, policy: Policy, pace: Pace, trace: TraceWriter | None, clock: Callable[[], float]
    ) -> None:
        self.key = key
        self.policy = policy
        self.pace = pace
        self.trace = trace
        self.switchback: Switchback | None = None
        self._clock = clock
        self.hello: Hello | None = None
        self.address = b""
        self.state: HookState | None = None
        self.heard_at = 0.0
        self.epoch = 0
        self.plan: Plan | None = None
        self.decider = policy.name
        """Whose plan that is: the policy, or the fallback in a block of the switchback."""
        self.tables: dict[int, tuple[DecisionTable, str, float]] = {}
        self.pushed_at = 0.0
        self.repush_seconds = REPUSH_SECONDS
        self.leased_at = 0.0
        self.seed = secrets.randbits(62)
        self.policy_error = ""
        self.failed = False
        self.policy_note = ""
        self.saved_at = float("-inf")
        self.rival = ""
        self.rival_since = self.rival_heard_at = float("-inf")
        self.records = 0
        self.records_lost = 0
        self.next_seq: int | None = None
        self.recent: deque[tuple[float, int, int]] = deque(maxlen=RECENT_STEPS)

    def learn(self, batch: StepBatch) -> None:
        """Take in a batch of records: count what is missing, log, learn."""
        now = self._clock()
        for record in batch.records:
            if self.next_seq is not None and record.record_seq > self.next_seq:
                self.records_lost += record.record_seq - self.next_seq
            self.next_seq = record.record_seq + 1
            if not self.failed:
                self._learn(record)
                if self.switchback is not None:
                    self.switchback.learn(record, now)
            live = [n for n in record.accepted_drafts if n != MASKED]
            # Time with a prefill or an idle spell in it says nothing about decoding.
            back_to_back = record.forwards == 1 and not record.after_idle
            # A chain's width tells the K that ran; a tree has one width for its one K.
            tree = self.hello is not None and self.hello.topk > 1
            steps = record.steps if tree else record.draft_tokens - 1
            self.recent.append((record.seconds if back_to_back else 0.0, sum(live) + len(live), steps))
        self.records += len(batch.records)
        if self.trace is not None:
            self.trace.append(batch.records)

    def _learn(self, record: StepRecord) -> None:
        try:
            self.policy.learn(record)
        except Exception:
            self.fail("learning from a step")

    def fail(self, where: str) -> None:
        """Give this server up, and none of the others: without leases it goes to its fallback."""
        self.failed = True
        self.plan = None
        self.policy_error = (
            f"policy {self.policy.name} failed in {where}, see the controller's log: it decides no more for this "
            "server until the controller restarts"
        )
        logger.exception("%s: %s", self.key, self.policy_error)

    def conflict(self, now: float) -> str:
        """Return what to do about a second live server of this name, if there is one."""
        if now - self.rival_heard_at > RIVAL_SECONDS or self.rival_heard_at - self.rival_since < ALIVE_SECONDS:
            return ""
        return (
            "two servers call themselves by this name, the second is not served: "
            "set SPECPILOT_SERVER_ID in the environment of one"
        )

    def status(self, now: float) -> ServerStatus:
        """Return what an operator may want to know."""
        hello, state = self.hello, self.state
        assert hello is not None
        source = state.source if state is not None else DecisionSource.FALLBACK
        table, reason, decided_at = self.tables.get(state.epoch if state is not None else 0, (None, "", now))
        busy = sum(seconds for seconds, _, _ in self.recent)
        steps = Counter(k for _, _, k in self.recent)
        switchback = self.switchback.status(now) if self.switchback is not None else None
        return ServerStatus(
            server=self.key,
            model=hello.model,
            gpu=hello.gpu,
            sglang_version=hello.sglang_version,
            mode=hello.mode,
            candidate_steps=hello.candidate_steps,
            silent_seconds=now - self.heard_at,
            source=source.name,
            steps=state.steps if state is not None else hello.fallback_steps,
            table=table,
            reason=reason,
            table_age_seconds=now - decided_at,
            pending_epoch=self.epoch
            if self.epoch in self.tables and (table is None or table.epoch < self.epoch)
            else 0,
            confirmed_ranks=state.confirmed_ranks
            if state is not None and table and state.confirmed_epoch == table.epoch
            else 0,
            tp_size=hello.tp_size,
            records=self.records,
            records_lost=self.records_lost,
            tokens_per_second=sum(tokens for seconds, tokens, _ in self.recent if seconds) / busy if busy else 0.0,
            share_by_steps={str(k): n / len(self.recent) for k, n in sorted(steps.items())},
            counters=state.counters if state is not None else {},
            note="; ".join(
                filter(
                    None,
                    (
                        state.halt_reason if state else "",
                        self.policy_error,
                        self.policy_note,
                        f"the policy is out of force: {switchback.text}"
                        if switchback and switchback.off_seconds
                        else "",
                        self.conflict(now),
                    ),
                )
            ),
            switchback=switchback,
        )


class Service:
    """The running controller; ``run`` returns after ``stop`` was called."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Check the trace directory and bind the socket; ConfigError says what is in the way."""
        self._config = config
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = clock()
        # What the policy needs and cannot be read is an error now, not when the first server connects.
        config.policy.build(None)
        self._trace_directory = Path(config.trace.directory) if config.trace.directory else None
        self._endpoint = Endpoint(config.controller.endpoint or default_endpoint())
        if self._trace_directory is not None:
            try:
                check_directory(self._trace_directory)
            except ConfigError:
                self._endpoint.close()
                raise
        self._priors: PriorStore | None = None
        if config.prior.directory and (isinstance(config.policy, GoodputPolicy) or config.switchback.share):
            try:
                self._priors = PriorStore(Path(config.prior.directory))
            except ConfigError:
                self._endpoint.close()
                raise
        self._decoder = FrameDecoder(FromHook)
        self._sessions: dict[str, Session] = {}
        self._by_address: dict[bytes, Session] = {}
        self._strangers: dict[bytes, Stranger] = {}
        self._refused = 0
        self._stopping = False

    @property
    def endpoint(self) -> str:
        """The address that servers must be given."""
        return self._endpoint.endpoint

    def stop(self) -> None:
        """Make ``run`` return; safe to call from a signal handler."""
        self._stopping = True

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

    def turn(self) -> None:
        """One round: wait at most POLL_SECONDS for messages, then do what time demands."""
        if self._endpoint.socket.poll(int(POLL_SECONDS * 1000)):
            for _ in range(MESSAGES_PER_TURN):
                try:
                    frames = self._endpoint.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._receive(frames)
        self._tend()

    def _tend(self) -> None:
        """Do what time demands."""
        now = self._clock()
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
            self._refused += 1
            if self._refused == 1 or self._refused % 1000 == 0:
                who = self._by_address[address].key if address in self._by_address else "an unknown peer"
                logger.warning("a message of %s was refused: %s (%d so far)", who, error, self._refused)
            return
        if isinstance(message, StatusRequest):
            report = msgspec.json.encode(self.status())
            self._endpoint.socket.send_multipart([address, encode(StatusReport(report))], zmq.NOBLOCK)
            return
        if isinstance(message, Hello):
            self._greet(address, message)
            return
        assert isinstance(message, StepBatch | HookState)
        session = self._by_address.get(address)
        if session is None:
            self._ask(address, message)
            return
        session.heard_at = self._clock()
        if isinstance(message, StepBatch):
            session.learn(message)
        else:
            self._compare(session, message)

    def _ask(self, address: bytes, message: StepBatch | HookState) -> None:
        """Ask a peer who it is, and keep what it sent until it has answered."""
        stranger = self._strangers.setdefault(address, Stranger())
        if len(self._strangers) > STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        if not stranger.turned_away:
            stranger.held.append(message)
        now = self._clock()
        if now - stranger.asked_at > ASK_SECONDS:
            stranger.asked_at = now
            self._send(address, HelloRequest())

    def _greet(self, address: bytes, hello: Hello) -> None:
        key = f"{hello.server_id}/{hello.dp_rank}"
        now = self._clock()
        session = self._sessions.get(key)
        if session is None:
            trace = None
            if self._trace_directory is not None:
                trace = TraceWriter(self._trace_directory, key, hello, self._config.trace)
            pace = Pace(self._config.controller.decide_seconds)
            session = self._sessions[key] = Session(key, self._policy_for(hello), pace, trace, self._clock)
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
                session.policy, session.failed = self._policy_for(hello), False
            session.next_seq = session.state = None
            session.rival_heard_at = float("-inf")
        self._by_address.pop(session.address, None)
        self._by_address[address] = session
        session.address = address
        session.heard_at = now
        if session.trace is not None:
            session.trace.update_hello(hello)
        changed = session.hello is None or session.hello.instance != hello.instance
        if changed:
            self._set_up_switchback(session, hello, now)
        session.hello = hello
        for message in self._strangers.pop(address, Stranger()).held:
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
        stranger = self._strangers.setdefault(address, Stranger())
        stranger.turned_away = True
        stranger.held.clear()
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
            self._push(session, session.plan, now)

    # -- what goes out --

    def _decide(self, session: Session, now: float) -> None:
        hello = session.hello
        assert hello is not None
        if session.failed:
            return
        try:
            plan, note = session.policy.decide(hello, now), session.policy.note
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
        session.decider = session.policy.name
        # The policy has decided all the same: it goes on learning, and its budgets with it.
        if session.switchback is not None and session.switchback.arm(now) is Arm.FALLBACK:
            session.decider, plan = "fallback", fallback_plan(hello)
        if plan != session.plan:
            self._push(session, plan, now)
        else:
            table, _, decided_at = session.tables[session.epoch]
            session.tables[session.epoch] = table, plan.reason, decided_at
        if session.switchback is not None:
            self._note_switchback(session, session.switchback, now)

    def _set_up_switchback(self, session: Session, hello: Hello, now: float) -> None:
        """Begin to measure, or go on after a restart of the controller or of the server."""
        old = session.hello
        if not self._config.switchback.share or hello.mode != "control":
            session.switchback = None  # in shadow mode the fallback is in force whoever decides
            return
        identity = self._switchback_identity(hello)
        if session.switchback is not None and old is not None and self._switchback_identity(old) == identity:
            session.switchback.interrupted(now)
            return
        session.switchback = Switchback(self._config.switchback, hello, session.seed, now)
        stored = self._priors.load_switchback(session.key) if self._priors is not None else None
        if stored is not None and stored.identity == identity:
            session.switchback.resume(stored, now, self._wall_clock())

    def _switchback_identity(self, hello: Hello) -> str:
        """Return what a measurement is of: another policy, fallback or machine is another experiment."""
        policy = msgspec.json.encode(self._config.policy).decode()
        return f"{fingerprint(hello)} fallback {hello.fallback_steps} policy {policy}"

    def _note_switchback(self, session: Session, switchback: Switchback, now: float) -> None:
        switchback.decided(session.epoch)
        if switchback.news:
            logger.warning("%s: %s", session.key, switchback.news)
            switchback.news = ""
        if switchback.changed:
            switchback.changed = False
            if self._priors is not None and session.hello is not None:
                identity = self._switchback_identity(session.hello)
                self._priors.save_switchback(session.key, switchback.stored(identity, now, self._wall_clock()))

    def _policy_for(self, hello: Hello) -> Policy:
        return self._config.policy.build(self._priors.load(hello) if self._priors is not None else None)

    def _save_prior(self, session: Session) -> None:
        """Keep what was learned; a policy that failed has learned who knows what."""
        session.saved_at = self._clock()
        if self._priors is None or session.hello is None or session.failed:
            return
        try:
            prior = session.policy.to_prior()
        except Exception:
            session.fail("telling what it learned")
            return
        if prior is not None:
            self._priors.save(session.hello, prior)

    def _push(self, session: Session, plan: Plan, now: float) -> None:
        session.epoch += 1
        session.plan = plan
        session.pushed_at = session.leased_at = now
        table = plan.table(session.epoch, self._config.controller.lease_seconds, session.decider, session.seed)
        session.tables[session.epoch] = (table, plan.reason, now)
        while len(session.tables) > 8:
            del session.tables[next(iter(session.tables))]
        self._send(session.address, table)

    def _renew(self, session: Session, now: float) -> None:
        lease = self._config.controller.lease_seconds
        if now - session.leased_at > lease / 3:
            session.leased_at = now
            self._send(session.address, Lease(session.epoch if session.plan is not None else 0, lease))

    def _send(self, address: bytes, message: ToHook) -> None:
        # A server that does not read, or is gone, costs nothing: ROUTER drops for it.
        self._endpoint.socket.send_multipart([address, encode(message)], zmq.NOBLOCK)

    def _forget(self, session: Session) -> None:
        logger.info("%s was silent for a day and is forgotten", session.key)
        self._save_prior(session)
        self._by_address.pop(session.address, None)
        del self._sessions[session.key]
        if session.trace is not None:
            session.trace.close()

    def status(self) -> ControllerStatus:
        """Return the report behind ``specpilot status``."""
        now = self._clock()
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
            prior_error=self._priors.error if self._priors is not None else "",
            servers=[session.status(now) for session in self._sessions.values()],
        )
