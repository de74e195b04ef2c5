"""Whether a record's ``seconds`` are its step's own time, or hold something else as well."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specpilot.controller.trace.columns import Columns
from specpilot.policies.models.cost import HOST_GAP, OVERLAP_GAP
from specpilot.sglang_hooks.wire import ForwardKind

REASONS = (
    "",
    "the record before it is missing or was excluded",
    "the batch had a grammar",
    "the server had been idle",
    "other forward passes came between",
    "the pass before was no decode",
    "no time is given",
    "the host waited before the launch",
    "K had just changed",
)
"""Reasons why a record's seconds are not taken for a step's own, the first that applies first; "": they are."""
NOT_FOLLOWING, SWITCHED = 1, len(REASONS) - 1


def why_not_own(
    columns: Columns, follows: NDArray[np.bool_], same: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return the index in REASONS for each row: ``specpilot.policies.models.cost.fit_to_learn`` for columns.

    ``follows``: whether the row before is the record made just before; ``same``: whether that had as many draft
    tokens, None where the first step after a switch of K counts too. All arrays have shape (rows,).
    """
    seconds = columns["seconds"]
    waited = columns["launch_gap_seconds"] > np.where(columns["overlap"], OVERLAP_GAP, HOST_GAP) * seconds
    tests = (
        ~follows,
        columns["grammar"],
        columns["after_idle"],
        columns["forwards"] != 1,
        columns["previous_kind"] != ForwardKind.DECODE,
        seconds <= 0.0,
        waited,
        np.zeros(len(columns), bool) if same is None else ~same,
    )
    return np.select(tests, range(1, len(REASONS)), 0)
