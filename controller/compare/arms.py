"""The arms of a comparison: what each sets, and the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from specpilot.controller.errors import ConfigError
from specpilot.controller.serve.report import ServerStatus


def values_of(arm: str) -> dict[str, str]:
    """Return what ``specpilot set`` must be told for an arm; ConfigError for an unknown one.

    >>> values_of("static:3")["policy.steps"], values_of("threshold:8")["policy.threshold"]
    ('3', '8')
    >>> values_of("configured")
    {'switchback.share': '0'}
    """
    name, _, argument = arm.partition(":")
    values = {"switchback.share": "0"}
    if arm == "configured":
        return values
    values["mode"] = "control"
    if arm == "skip" or (name == "static" and argument.isdecimal()):
        return {**values, "policy.name": "static", "policy.steps": "0" if arm == "skip" else argument}
    if name == "threshold" and argument.isdecimal():
        return {**values, "policy.name": "threshold", "policy.threshold": argument}
    if arm == "goodput":
        return {**values, "policy.name": "goodput"}
    raise ConfigError(f"arm {arm!r}: use skip, static:K, threshold:N, goodput or configured")


def orders(arms: Sequence[str]) -> list[list[str]]:
    """Return a Williams design: in its rows each arm is once at each place, and follows each other equally often.

    An even number of arms takes as many rows, an odd one twice as many.

    >>> orders(["a", "b", "c", "d"])
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a'], ['d', 'a', 'c', 'b']]
    """
    count = len(arms)
    first = [0, *((i + 1) // 2 if i % 2 else count - i // 2 for i in range(1, count))]
    rows = [[arms[(place + row) % count] for place in first] for row in range(count)]
    return rows if count % 2 == 0 else [*rows, *(row[::-1] for row in rows)]


def default_arms(server: ServerStatus) -> list[str]:
    """Return every K that the server declares, and the learned policy."""
    return [*("skip" if k == 0 else f"static:{k}" for k in sorted(server.candidate_steps)), "goodput"]
