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
    size: IntArray
    """Captured size that such a batch is padded to, or its own above the largest: the step of the staircase."""
    mean_context: FloatArray
    """Tokens per request."""
    arm: IntArray
    """Applied."""
    held: IntArray
    """What runs there unless exploration draws something else."""
    probability: FloatArray
    """Of the draw."""
    explorable: BoolArray
    """The cell explored at all: another draw was possible."""
    block: IntArray
    """Number of the block, of blocks of one draw in the order of the log."""
    tokens: FloatArray
    """(steps, largest K + 1): tokens of the live requests, had each been given k drafts; true up to the applied K."""
    live: FloatArray
    """Requests that had not ended."""
    informative: BoolArray
    """``tokens`` are known."""
    seconds: FloatArray
    timed: BoolArray
    """``seconds`` is the step's own; it may be the first after a switch."""
    same_cell: BoolArray
    """The step before was of the same cell and table."""
    same_block: BoolArray
    """And of the same draw."""
    previous_probability: FloatArray
    """Of the draw of the step before."""
    previous_arm: IntArray
    """Of the decode step right before; -1 where that is not known."""
    fold: IntArray
    """0 or 1: the model and the table to judge it by are fitted on the other one."""

    def __len__(self) -> int:
        return len(self.arm)

    def taken(self, rows: IntArray | BoolArray) -> LoggedSteps:
        """Return ``rows`` of them."""
        return LoggedSteps(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    @property
    def ordinary(self) -> BoolArray:
        """The draw was for ``held``."""
        return np.asarray(self.arm == self.held, np.bool_)

    @property
    def settled(self) -> BoolArray:
        """Steps whose ``seconds`` tell what this K takes in a row of such steps."""
        return np.asarray(self.timed & (self.previous_arm == self.arm), np.bool_)
