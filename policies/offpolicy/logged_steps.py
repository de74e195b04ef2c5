"""Logged decode steps in columns, as an evaluation needs them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class LoggedSteps:
    """Logged decode steps in order, as columns of shape (steps,) unless said otherwise.

    K stands as an *arm*, its index among the server's candidates; -1 is none.
    """

    batch_size: IntArray
    """Requests in the step."""
    size: IntArray
    """Captured size (requests) that such a batch is padded to, or its own size above the largest."""
    mean_context: FloatArray
    """Context tokens per request."""
    arm: IntArray
    """Arm that was applied."""
    held: IntArray
    """Arm that runs there unless exploration draws another."""
    probability: FloatArray
    """Probability with which the applied arm was drawn."""
    explorable: BoolArray
    """Whether the cell explored at all: another draw was possible."""
    block: IntArray
    """Number of the exploration block, in the order of the log; steps of a block share a draw."""
    tokens: FloatArray
    """(steps, largest K + 1): tokens of the live requests, had each been given k drafts; true up to the applied K."""
    live: FloatArray
    """Requests in the step that had not ended."""
    informative: BoolArray
    """Whether ``tokens`` are known."""
    seconds: FloatArray
    """Seconds of the step."""
    timed: BoolArray
    """Whether ``seconds`` is the step's own; it may be the first after a switch."""
    same_cell: BoolArray
    """Whether the step before was of the same cell and table."""
    same_block: BoolArray
    """Whether the step before was of the same cell, table and draw."""
    previous_probability: FloatArray
    """Probability with which the arm of the step before was drawn."""
    previous_arm: IntArray
    """Arm of the decode step right before; -1 where that is not known."""
    fold: IntArray
    """Half of the log, 0 or 1: the model and the table that judge the step are fitted on the other one."""

    def __len__(self) -> int:
        return len(self.arm)

    def taken(self, rows: IntArray | BoolArray) -> LoggedSteps:
        """Return the steps of these ``rows``."""
        return LoggedSteps(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    @property
    def ordinary(self) -> BoolArray:
        """Whether the draw was for ``held``, shape (steps,)."""
        return np.asarray(self.arm == self.held, np.bool_)

    @property
    def settled(self) -> BoolArray:
        """Whether ``seconds`` tell what this K takes in a row of such steps, shape (steps,)."""
        return np.asarray(self.timed & (self.previous_arm == self.arm), np.bool_)
