"""Waiting for what is meant, in tests: an event, a count, a record; never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

PATIENCE = 120.0
"""Seconds after which a wait is given up. Only what hangs takes so long, however busy the machine is: it says nothing
about how fast something must be."""


def until(
    done: Callable[[], Found],
    seconds: float = PATIENCE,
    *,
    meanwhile: Callable[[], object] | None = None,
    what: str | Callable[[], str] = "what was waited for",
) -> Found:
    """Ask ``done`` until it answers with something true, and return that; fail after ``seconds``.

    ``meanwhile`` is called between two questions in place of a short sleep, as where the test itself turns a loop.
    ``what`` names what is waited for in the failure.
    """
    deadline = time.monotonic() + seconds
    while not (found := done()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what if isinstance(what, str) else what()} did not come in {seconds:g} s")
        if meanwhile is None:
            time.sleep(0.01)
        else:
            meanwhile()
    return found
