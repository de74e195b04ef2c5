"""Who speaks: which session a peer's messages belong to, who is asked for its name, and who is refused.

ZMQ gives every connection an address, and servers are known by the name in their Hello, so a server that restarts,
or whose controller restarts, continues where it was. Until a peer has said its name it is a *stranger*: it is asked
for the name, and what it sends is held. One live peer holds a name; a second one is a *rival*, which waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from specpilot.controller.serve.counters import Once, cause
from specpilot.controller.serve.endpoint import Endpoint
from specpilot.controller.serve.session import ALIVE_SECONDS, RIVAL_SECONDS, Session
from specpilot.sglang_hooks.wire import (
    FrameDecoder,
    FromHook,
    Hello,
    HelloRequest,
    HookState,
    StepBatch,
    WireError,
)

logger = logging.getLogger(__name__)

ASK_SECONDS = 1.0
"""Seconds between two questions to a stranger for its name."""
STRANGERS = 64
"""Strangers known at a time; the oldest gives way."""
HELD_MESSAGES = 64
"""Messages held of each stranger, sent before our question reached it; the oldest give way."""
HELD_BYTES = 1 << 20
"""Size of the messages held of each stranger."""
SERVERS = 256
"""Sessions at a time: a peer that keeps inventing names must not fill the memory with policies."""


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


class Router:
    """The sessions by name and by address, the strangers, and what was refused."""

    def __init__(self, endpoint: Endpoint, once: Once, open_session: Callable[[str, Hello, float], Session]) -> None:
        """``open_session`` returns a new server's session from its name ``NAME/RANK``, its Hello, and now."""
        self._endpoint = endpoint
        self._once = once
        self._open_session = open_session
        self._decoder = FrameDecoder(FromHook)
        self.sessions: dict[str, Session] = {}
        """Sessions by the server's name ``NAME/RANK``."""
        self._by_address: dict[bytes, Session] = {}
        self.strangers: dict[bytes, Stranger] = {}
        """Strangers by address, the oldest first."""
        self.refused = 0
        """Messages that were refused."""
        self.unclaimed = 0
        """Messages dropped that came from strangers."""

    def decode(self, frames: list[bytes]) -> object:
        """Return the message in ``frames`` (address, message), one of ``FromHook``; None if it is refused."""
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames) - 1} frames instead of 1")
            return self._decoder.decode(frames[1])
        except WireError as error:
            self._refuse(frames[0], cause(error), str(error))
            return None

    def session_at(self, address: bytes) -> Session | None:
        """Return the session of the peer at ``address``; None for a stranger."""
        return self._by_address.get(address)

    def admit(self, address: bytes, hello: Hello, now: float) -> Session | None:
        """Return the session that the peer's name means, a new one if need be; None if the peer is refused.

        The session's ``hello`` is still the one before, None for a new session.
        """
        key = f"{hello.server_id}/{hello.dp_rank}"
        session = self.sessions.get(key)
        if session is None:
            if len(self.sessions) >= SERVERS:
                self._refuse(address, "servers", f"{key} is one server too many, a controller serves {SERVERS}")
                return None
            session = self.sessions[key] = self._open_session(key, hello, now)
        elif _is_another(session, hello) and now - session.heard_at < ALIVE_SECONDS:
            self._turn_away(session, address, hello, now)
            return None
        self._by_address.pop(session.address, None)
        self._by_address[address] = session
        session.address = address
        session.heard_at = now
        return session

    def forget(self, session: Session) -> None:
        """Drop a session: its peer becomes a stranger."""
        self._by_address.pop(session.address, None)
        del self.sessions[session.key]

    def hold(self, address: bytes, message: StepBatch | HookState, size: int, now: float) -> None:
        """Keep what a stranger sent, as ``size`` bytes, until it has said its name, and ask it for that."""
        stranger = self._stranger(address)
        self._drop(1 if stranger.turned_away else stranger.hold(size, message))
        if now - stranger.asked_at > ASK_SECONDS:
            stranger.asked_at = now
            self._endpoint.send(address, HelloRequest())

    def take_held(self, address: bytes) -> list[StepBatch]:
        """Return the records that a peer sent before it said its name; it is no stranger any more."""
        held = self.strangers.pop(address, Stranger()).held
        return [message for _, message in held if isinstance(message, StepBatch)]

    def _stranger(self, address: bytes) -> Stranger:
        stranger = self.strangers.setdefault(address, Stranger())
        if len(self.strangers) > STRANGERS:
            self._drop(len(self.strangers.pop(next(iter(self.strangers))).held))
        return stranger

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

    def _refuse(self, address: bytes, key: str, why: str) -> None:
        """Count a message, and say why once for each cause (``key``)."""
        self.refused += 1
        who = self._by_address[address].key if address in self._by_address else "an unknown peer"
        self._once.warn(key, f"a message of {who} was refused: {why}", "refused_messages")

    def _drop(self, messages: int) -> None:
        """Count messages of peers that have not said who they are, or may not be who they say."""
        if messages:
            self.unclaimed += messages
            text = "messages of a peer without a name of its own are dropped"
            self._once.warn("messages_unclaimed", text, "messages_unclaimed")


def _is_another(session: Session, hello: Hello) -> bool:
    """Is this the Hello of another process than the one that the session is of?"""
    return session.hello is not None and session.hello.instance != hello.instance
