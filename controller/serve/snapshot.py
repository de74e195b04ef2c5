"""How the controller's loop tells others what it knows, without ever waiting for them.

    web thread:  ask() ──► wakes the loop          loop:  answer(snapshot)
                   ◄── Future[Snapshot] ◄────────────────┘   only if somebody asked

A snapshot is immutable: what is made of it, intervals, JSON or metrics, is made by whoever asked. However
many ask, one is made every FRESH_SECONDS at most, and none while nobody does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from specpilot.controller.serve.history import Span, Totals
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.policies.knowledge import Knowledge

logger = logging.getLogger(__name__)

FRESH_SECONDS = 0.2
"""Seconds after an answer within which whoever asks gets the same one."""


@dataclass(frozen=True)
class ServerSnapshot:
    """One server at one moment."""

    status: ServerStatus
    knowledge: Knowledge | None
    """What the policy knows; None where it does not tell."""
    totals: Totals
    hour: tuple[Span, ...]
    """The last hour, oldest first, without spans that had no step."""
    policy_failed: bool
    """The policy raised an error: it decides no more."""


@dataclass(frozen=True)
class Snapshot:
    """The controller at one moment, ``at`` on its clock, in seconds."""

    at: float
    status: ControllerStatus
    servers: dict[str, ServerSnapshot]


class Board:
    """Between the loop and those who ask; ``fileno`` becomes readable when somebody has."""

    def __init__(self) -> None:
        self.page = ""
        """Address of the web page, or why there is none; for the status."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._answered_at = float("-inf")
        self._answer: Future[Snapshot] | None = None
        self._asked: Future[Snapshot] | None = None

    def fileno(self) -> int:
        """Return the descriptor that the loop waits on besides its socket."""
        return self._wake

    def close(self) -> None:
        """Leave those who asked without an answer."""
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def ask(self) -> Future[Snapshot]:
        """Return a fresh snapshot, or one to come; from any thread. Without a loop it never comes: set a timeout."""
        with self._lock:
            if self._answer is not None and time.monotonic() - self._answered_at < FRESH_SECONDS:
                return self._answer
            if self._asked is None:
                self._asked = Future()
                # Running: one of those who wait for it may give up without cancelling it for the others.
                self._asked.set_running_or_notify_cancel()
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)
            return self._asked

    def answer(self, snapshot: Callable[[], Snapshot]) -> None:
        """Answer if somebody asked; for the loop, which an error in this does not end."""
        if self._asked is None:
            return
        with self._lock:
            os.eventfd_read(self._wake)
            self._answered_at = time.monotonic()
            self._answer, self._asked = self._asked, None
        try:
            self._answer.set_result(snapshot())
        except Exception as error:
            logger.exception("what the controller knows cannot be told; it goes on deciding")
            self._answer.set_exception(error)
