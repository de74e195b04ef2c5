"""The bootstrap by block, in one pass: Poisson weights that are a function of the block's number.

The steps of an exploration block share their draw, so blocks are resampled, not steps. Poisson(1) weights instead
of drawing with replacement need no second pass over the log (the online bootstrap of Oza & Russell 2001;
Chamandy et al. 2012).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specpilot.policies.offpolicy.logged_steps import FloatArray, IntArray, LoggedSteps
from specpilot.policies.student import student_975

REPLICATES = 256
"""A standard error is known to 1/sqrt(2 * 256) = 4.4 % of itself."""

_POISSON = (94, 188, 235, 251, 255)
"""Least bytes at which a Poisson(1) variable is 1, 2, ...: probabilities in 256ths, mean and variance 1.004."""


def poisson_weights(blocks: IntArray, replicates: int) -> FloatArray:
    """Return a Poisson(1) weight for each block and replicate, (blocks, 1 + replicates); the first column is 1.

    A pure function of the block's number, so a block that is met twice has its weights again
    (SplitMix64, Steele et al. 2014).

    >>> weights = poisson_weights(np.arange(4000), 64)[:, 1:]
    >>> weights.shape, round(float(weights.mean()), 1), round(float(weights.var()), 1)
    ((4000, 64), 1.0, 1.0)
    """
    words = -(-replicates // 8)
    numbers = blocks.astype(np.uint64)[:, None] * np.uint64(words)
    # Not +, which NumPy 2.4 is typed to make a float of.
    state: NDArray[np.uint64] = np.add(numbers, np.arange(words, dtype=np.uint64))
    state *= np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    weights = np.empty((len(blocks), 1 + replicates))
    weights[:, 0] = 1.0
    drawn = state.view(np.uint8)[:, :replicates]
    weights[:, 1:] = sum((drawn >= least).view(np.uint8) for least in _POISSON)
    return weights


@dataclass(frozen=True)
class Blocks:
    """The exploration blocks of some steps, and their bootstrap weights."""

    index: IntArray
    """Row of ``weights`` for each step, shape (steps,)."""
    weights: FloatArray
    """Poisson(1) weight of each block in each replicate, shape (blocks, 1 + replicates); the first column is 1."""

    @staticmethod
    def of(steps: LoggedSteps, replicates: int = REPLICATES) -> Blocks:
        """Return the blocks of ``steps``."""
        blocks, index = np.unique(steps.block, return_inverse=True)
        return Blocks(index, poisson_weights(blocks, replicates))


def interval(values: FloatArray, freedom: float) -> tuple[float, float]:
    """Return low and high of the 95 % interval of ``values[0]``, from the logs of its replicates ``values[1:]``.

    ``freedom``: degrees of freedom of Student's t.
    """
    error = float(np.log(values[1:]).std(ddof=1)) * student_975(max(freedom, 3.0))
    return float(values[0] * math.exp(-error)), float(values[0] * math.exp(error))
