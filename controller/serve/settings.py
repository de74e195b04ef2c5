"""Changes of the configuration while everything runs: by ``specpilot set``, by an edited file, by the end of a time.

A change is built and tried for every server first, and then applied to all of them, or refused and nothing changes.
What is in force, and where each value comes from, is in ``live_config.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from specpilot.controller.config import GoodputPolicy, ServerConfig
from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.live_config import Layers, LiveConfig
from specpilot.controller.serve.priors import PriorKeeper
from specpilot.controller.serve.session import Session
from specpilot.controller.serve.switchback_keeper import SwitchbackKeeper
from specpilot.controller.serve.tables import TableSender
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Policy, PolicyError
from specpilot.sglang_hooks.wire import SetReply, SetRequest

logger = logging.getLogger(__name__)


class SettingsChanger:
    """Applies changes of the configuration to the sessions."""

    def __init__(
        self,
        live: LiveConfig,
        sessions: Mapping[str, Session],
        priors: PriorKeeper,
        switchbacks: SwitchbackKeeper,
        tables: TableSender,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """``sessions`` by name ``NAME/RANK``, as they come and go."""
        self._live = live
        self._sessions = sessions
        self._priors = priors
        self._switchbacks = switchbacks
        self._tables = tables
        self._clock = clock
        self._wall_clock = wall_clock
        self._read_now = False

    def reload(self) -> None:
        """Read the file at the next ``follow``, changed or not; safe to call from a signal handler."""
        self._read_now = True

    def follow(self, now: float) -> None:
        """Apply what was written into the file, and end what was set for a time."""
        at_once, self._read_now = self._read_now, False
        try:
            edited = self._live.edited(now, at_once)
            if edited is not None:
                self._reconfigure(edited)
                self._live.error = ""
        except ConfigError as error:
            source = self._live.source
            where = "" if source in str(error) else f"{source}: "
            self._live.error = f"{where}{error}; what was in force before stays in force"
            logger.error("%s", self._live.error)
        expired = self._live.expired(now)
        if expired is not None:
            logger.info("what was set for a time is reverted")
            try:
                self._reconfigure(expired, tried=False)
            except ConfigError as error:  # a file of a policy that is gone by now
                logger.error("%s; what was set for a time stays in force", error)

    def answer(self, request: SetRequest) -> SetReply:
        """Do what ``specpilot set`` asks for, and return why not, and what is in force now."""
        refused = self.change(request)
        return SetReply(refused, msgspec.json.encode(self._live.report(self._clock(), [*self._sessions])))

    def change(self, request: SetRequest) -> str:
        """Do what was asked for, and return why not; a request for nothing is one for the report."""
        if not request.values and not request.reset:
            return ""
        before = self._live.config
        known = {*before.servers, *self._sessions, *(key.rpartition("/")[0] for key in self._sessions)}
        try:
            if request.server and request.server not in known:
                raise ConfigError(f"no server {request.server} is known here; there are {sorted(known) or 'none'}")
            self._reconfigure(self._live.asked(request, self._clock()))
        except ConfigError as error:
            logger.error("not set: %s", error)
            return str(error)
        if self._live.config != before:  # and not a renewal
            whose = f" for {request.server}" if request.server else ""
            logger.info("set%s: %s", whose, request.values or "as in the file")
        return ""

    def _reconfigure(self, layers: Layers, tried: bool = True) -> None:
        """Apply new layers to every server at once; ConfigError before anything has changed.

        ``tried``: a policy that a server cannot have is an error.
        """
        now = self._clock()
        config = self._live.build(layers)
        store = self._priors.store_for(config)
        changes = []
        for server in config.all_servers:
            server.policy.build(None)
        for session in self._sessions.values():
            new = config.for_server(session.key)
            if new != session.config:
                changes.append((session, new, _tried(session, new, now) if tried else new.policy.build(None)))
        self._live.commit(layers, config)
        self._priors.store = store
        for session, new, policy in changes:
            self._change_session(session, new, policy, now)

    def _change_session(self, session: Session, new: ServerConfig, fresh: Policy, now: float) -> None:
        """Apply a server's new configuration; ``fresh`` is its policy if that is another one."""
        old, session.config = session.config, new
        hello = session.hello
        assert hello is not None
        if new.policy != old.policy:
            self._priors.save(session)
            if isinstance(session.policy, Goodput):
                session.shelved = None if session.failed else session.policy
            if isinstance(new.policy, GoodputPolicy):
                learned = session.shelved or self._priors.policy_for(hello, new)
                assert isinstance(learned, Goodput)
                new.policy.change(learned)
                fresh = learned
            session.policy, session.failed, session.policy_error, session.policy_note = fresh, False, "", ""
        logger.info("%s: mode %s, policy %s", session.key, new.mode, msgspec.json.encode(new.policy).decode())
        self._switchbacks.set_up(session, hello, now)
        session.plan = None  # so that a table goes out, whose epoch tells records of the two apart
        session.describe_in_trace(hello, self._wall_clock())
        self._tables.decide(session, now)


def _tried(session: Session, new: ServerConfig, now: float) -> Policy:
    """Return a fresh policy that can decide for this server; ConfigError if it cannot."""
    policy = new.policy.build(None)
    try:
        if session.hello is not None and not session.policy_error:
            new.bounds.apply(policy.decide(session.hello, now), session.hello)
    except PolicyError as error:
        raise ConfigError(str(error)) from error
    return policy
