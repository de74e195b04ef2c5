"""The policies that ``specpilot replay`` knows, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from specpilot.controller.errors import ConfigError
from specpilot.controller.neural_file import load_model
from specpilot.policies.baselines import BatchTable, InformedGreedy, Truth
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Policy
from specpilot.policies.neural import Neural
from specpilot.policies.static import Static
from specpilot.policies.threshold import Threshold
from specpilot.sglang_hooks.wire import Hello


class ReplayError(ConfigError):
    """A replay that cannot be run as it was asked for; the text says what to change."""


Factory = Callable[[Hello, Truth], Policy]
"""Makes a fresh policy for one server."""


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"a whole number must follow the colon, not {text!r}")
    return int(text)


def _static(argument: str) -> Factory:
    steps = _number(argument)
    return lambda _hello, _truth: Static(steps)


def _threshold(argument: str) -> Factory:
    threshold = _number(argument)
    Threshold(threshold)
    return lambda _hello, _truth: Threshold(threshold)


def _batch_table(argument: str) -> Factory:
    policy = BatchTable.parse(argument)
    return lambda _hello, _truth: policy


def _neural(argument: str) -> Factory:
    if not argument:
        raise ValueError("the file of a model must follow the colon")
    model = load_model(Path(argument))
    return lambda _hello, _truth: Neural(model)


def _without_argument(argument: str, factory: Factory) -> Factory:
    if argument:
        raise ValueError("it takes no argument")
    return factory


POLICIES: dict[str, Callable[[str], Factory]] = {
    "static": _static,
    "threshold": _threshold,
    "batch-table": _batch_table,
    "goodput": partial(_without_argument, factory=lambda _hello, _truth: Goodput()),
    "neural": _neural,
    "informed-greedy": partial(_without_argument, factory=lambda _hello, truth: InformedGreedy(truth)),
}
"""The controller's policies by name; each makes a factory of what follows a colon, or raises ValueError."""

SERVERS = {
    "none": "a server started without speculation",
    "sglang": "SGLang's own --speculative-adaptive",
}
"""What needs no controller but a server of its own, and what that is."""


def split_policies(words: Sequence[str]) -> list[str]:
    """Return the policies of a list separated by spaces, commas or both.

    A comma before a number belongs to a batch table, since no policy's name begins with one.

    >>> split_policies(["none,static:3,batch-table:1:5,8:3", "goodput"])
    ['none', 'static:3', 'batch-table:1:5,8:3', 'goodput']
    """
    return [policy for word in words for policy in re.split(r",(?!\s*\d)\s*", word) if policy]


def parse_policy(text: str) -> Factory | None:
    """Return the factory for ``static:3``, ``threshold:16``, ``batch-table:1:5,8:3``, …; None for a server's own.

    >>> parse_policy("best")
    Traceback (most recent call last):
    specpilot.controller.replay.policies.ReplayError: no policy is called 'best': use one of batch-table, goodput, \
informed-greedy, neural, none, sglang, static, threshold
    """
    name, _, argument = text.partition(":")
    try:
        if name in SERVERS:
            if argument:
                raise ValueError("it takes no argument")
            return None
        if name in POLICIES:
            return POLICIES[name](argument)
    except ValueError as error:
        raise ReplayError(f"policy {text!r}: {error}") from error
    raise ReplayError(f"no policy is called {name!r}: use one of {', '.join(sorted([*POLICIES, *SERVERS]))}")
