"""Each server's switchback across decisions, changes of the configuration and restarts: begun, continued, stored."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from specpilot.controller.serve.priors import PriorKeeper
from specpilot.controller.serve.session import Session
from specpilot.controller.serve.switchback import Stored, Switchback
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.sglang_hooks.wire import Hello

logger = logging.getLogger(__name__)


class SwitchbackKeeper:
    """Gives sessions their switchback, and stores what it measures beside the priors."""

    def __init__(self, priors: PriorKeeper, wall_clock: Callable[[], float]) -> None:
        """``wall_clock``: seconds since the Unix epoch, which outlives a restart."""
        self._priors = priors
        self._wall_clock = wall_clock

    def set_up(self, session: Session, hello: Hello, now: float) -> None:
        """Begin to measure, or continue after a restart of the controller or of the server."""
        before = session.switchback
        config = session.config.switchback
        if not config.share or session.mode_of(hello) != "control":
            session.switchback = None  # in shadow mode the fallback runs whoever decides
            return
        identity = _identity(session, hello)
        same = before is not None and session.switchback_of == identity
        if before is not None:
            before.interrupted(now)
        if before is not None and same and before.config == config:
            return
        if before is not None and same:
            stored: Stored | None = before.stored(identity, now, self._wall_clock())
        else:
            stored = self._priors.load_switchback(session.key)
        session.switchback, session.switchback_of = Switchback(config, hello, session.seed, now), identity
        if stored is not None and stored.identity == identity:
            session.switchback.resume(stored, now, self._wall_clock())

    def decided(self, session: Session, now: float) -> None:
        """Note that a plan of the session's newest epoch applies; log and store what is new since."""
        switchback = session.switchback
        if switchback is None:
            return
        switchback.decided(session.epoch)
        if switchback.news:
            logger.warning("%s: %s", session.key, switchback.news)
            switchback.news = ""
        if switchback.changed:
            switchback.changed = False
            stored = switchback.stored(session.switchback_of, now, self._wall_clock())
            self._priors.save_switchback(session.key, stored)


def _identity(session: Session, hello: Hello) -> str:
    """Return what a measurement is of: another policy, fallback or machine is another experiment."""
    policy = msgspec.json.encode(session.config.policy).decode()
    bounds = msgspec.json.encode(session.config.bounds).decode()
    return f"{fingerprint(hello)} fallback {hello.fallback_steps} policy {policy} bounds {bounds}"
