"""What a cost model keeps for the next start: its form, its key, and the refusal of anything else."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from specpilot.sglang_hooks.wire import Hello, Steps

LEAST_LEVEL, MOST_LEVEL, MOST_SECONDS = -50.0, 25.0, 1e9
"""Log seconds that may be a step's, and seconds that a switch may add."""
PRIOR_WEIGHT = 24.0
"""Records that a cell of a stored prior counts as, at most, and switches that a kind of them does."""
Count = Annotated[float, Meta(gt=0.0, le=1e9)]


class StoredCell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One K at one size; see ``specpilot.policies.models.cost_cell.CostCell``."""

    steps: Steps
    """K of the cell."""
    size: Annotated[float, Meta(gt=0.0, le=1e6)]
    """Batch size (requests) of the cell."""
    n: Count
    """Records that the level counts as."""
    level: Annotated[float, Meta(ge=LEAST_LEVEL, le=MOST_LEVEL)]
    """Log seconds, the common level included."""
    mean_context: Annotated[float, Meta(ge=0.0, le=1e14)]
    """Mean context of the records, in tokens of all requests."""
    context_variance: Annotated[float, Meta(ge=0.0, le=1e32)]
    """Variance of the context of the records, in squared tokens."""
    context_time: Annotated[float, Meta(ge=-1e16, le=1e16)]
    """Covariance of context and relative time, in tokens."""
    variance: Annotated[float, Meta(ge=0.0, le=100.0)]
    """Variance of the relative noise of one record."""
    context_n: Count | None = None
    """Records that the two moments are of; version 1 did not tell, and counted them as ``n``."""


class StoredSwitch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What first steps after a kind of switch take longer."""

    n: Count
    """Switches that the mean counts as."""
    mean: Annotated[float, Meta(ge=-MOST_SECONDS, le=MOST_SECONDS)]
    """Extra seconds of a first step."""
    deviation: Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]
    """Mean absolute deviation of the extra seconds."""


class StoredSwitches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What switches of each kind cost: from K=0, to K=0, or between others."""

    up: StoredSwitch
    down: StoredSwitch
    other: StoredSwitch


class StoredCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a cost model keeps, for JSON."""

    version: Literal[1, 2]
    fingerprint: str
    cells: Annotated[list[StoredCell], Meta(max_length=16384)]
    switches: StoredSwitches


def fingerprint(server: Hello) -> str:
    """Return the key of what step times depend on: hardware, models, algorithm, version, graphs."""
    facts = (
        *(server.gpu, server.model, server.draft_model, server.algorithm, server.topk),
        *(server.tp_size, server.sglang_version, sorted(server.captured_batch_sizes)),
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def read_prior(prior: object, server: Hello) -> tuple[StoredCosts | None, str]:
    """Return the costs in ``prior`` if it is one and of such a server, else None; and the reason why it is not.

    >>> from tests.support.messages import hello
    >>> read_prior({"version": 1, "fingerprint": "x", "cells": 0}, hello())
    (None, 'Expected `array`, got `int` - at `$.cells`')
    """
    try:
        stored = msgspec.convert(prior, StoredCosts)
    except (msgspec.ValidationError, RecursionError) as error:
        return None, str(error)
    if stored.fingerprint != fingerprint(server):
        return None, f"it is of server {stored.fingerprint[:64]}, this is {fingerprint(server)}"
    return stored, ""
