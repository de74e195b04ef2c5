"""What ``specpilot doctor`` looked at: checks by area, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
from rich.console import Console
from rich.markup import escape

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red", "not checked": "dim"}
"""Colour of a check by its outcome."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    area: str
    outcome: str
    """How it is: a key of ``COLOURS``."""
    found: str
    """What was seen, in words."""
    change: str = ""
    """What to change; not empty for a warning or a problem."""


class Area:
    """Makes the checks of one area."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ok(self, found: str) -> Check:
        """Return a check of what is as it should be."""
        return Check(self.name, "ok", found)

    def warning(self, found: str, change: str) -> Check:
        """Return a check of what works, with less than there could be, or only for now."""
        return Check(self.name, "warning", found, change)

    def problem(self, found: str, change: str) -> Check:
        """Return a check of what does not work, or does nothing."""
        return Check(self.name, "problem", found, change)

    def not_checked(self, why: str) -> Check:
        """Return a check of what could not be looked at from here."""
        return Check(self.name, "not checked", why)


VERSIONS = Area("versions")
CONFIGURATION = Area("configuration")
SOCKET = Area("socket")
CONTROLLER = Area("controller")
STORAGE = Area("storage")
ARGUMENTS = Area("arguments")
RUNNING = Area("running server")
MEMORY = Area("memory")


def problems(checks: Iterable[Check]) -> bool:
    """Return whether a check is a problem."""
    return any(check.outcome == "problem" for check in checks)


def print_checks(checks: Sequence[Check], console: Console) -> None:
    """Print checks for a person, by area in the order given."""
    for area, group in groupby(checks, key=lambda check: check.area):
        console.print(f"[bold]{area}[/]")
        for check in group:
            colour = COLOURS[check.outcome]
            _print(console, f"  [{colour}]{check.outcome:<11}[/] {escape(check.found)}")
            if check.change:
                _print(console, f"              [bold]→[/] {escape(check.change)}")
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in COLOURS}
    _print(console, ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
