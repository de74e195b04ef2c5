"""One cell: which K is chosen, which others may stay in force, and what a step of each other one loses.

    Expected (of the models) ──► within ──► chosen ──► may_stay ──► CellDecision ──► losses (for exploration)

An *arm* is the index of a K among the server's candidates, ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot.policies.knowledge import Outlook
from specpilot.policies.rules.switching import may_lose
from specpilot.policies.student import NORMAL_975

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

STAY = 0.003
"""A choice changes for a gain above this share: ties stay put."""

KEEP = 0.005
"""What is within this share of the choice may stay in force when the batch moves between cells.

Not K=0, which would tell nothing of the drafts: it stays only for what a switch costs.
"""


@dataclass
class Expected:
    """What the models expect of each arm in one cell."""

    batch_size: int
    """Requests that stand for the cell."""
    mean_context: float
    """Tokens per request that stand for the cell."""
    lengths: FloatArray
    """Tokens per request and step, shape (arms,)."""
    length_covariance: FloatArray
    """Covariance of the logs of the lengths, shape (arms, arms)."""
    seconds: FloatArray
    """Seconds of a step, shape (arms,)."""
    second_covariance: FloatArray
    """Covariance of the logs of the seconds, shape (arms, arms)."""

    def __post_init__(self) -> None:
        self.scores: FloatArray = self.batch_size * self.lengths / self.seconds
        """Tokens per second of the whole batch, shape (arms,)."""
        self.covariance: FloatArray = self.length_covariance + self.second_covariance
        """Covariance of the logs of the scores, shape (arms, arms); lengths and seconds err independently."""
        self.variances: FloatArray = self.covariance.diagonal()
        """Variances of the logs of the scores, shape (arms,)."""

    def ratio_errors(self, arm: int) -> FloatArray:
        """Return relative standard errors of the ratios of the scores to that of ``arm``, shape (arms,)."""
        squares: FloatArray = self.variances + self.variances[arm] - 2.0 * self.covariance[arm]
        return np.asarray(np.sqrt(np.maximum(squares, 0.0)))

    def within(self, seconds_per_token: float | None) -> BoolArray:
        """Return which arms meet an objective with 97.5 % confidence, shape (arms,); all, if none does."""
        everything = np.ones(len(self.seconds), bool)
        if seconds_per_token is None:
            return everything
        error = np.sqrt(self.variances)
        meets: BoolArray = self.seconds / self.lengths * (1.0 + NORMAL_975 * error) <= seconds_per_token
        return meets if meets.any() else everything


@dataclass
class CellDecision:
    """The last decision of one cell. Tuples are by arm, empty before the first decision."""

    choice: int
    """Steps (K) that are chosen."""
    keep: frozenset[int] = frozenset()
    """Steps (K) that may stay in force though another is chosen."""
    scores: tuple[float, ...] = ()
    """Expected tokens per second of the whole batch."""
    errors: tuple[float, ...] = ()
    """Relative standard errors of the ratios of the scores to that of the choice."""
    seconds: tuple[float, ...] = ()
    """Seconds of a step."""
    prices: tuple[float, ...] = ()
    """Seconds that switching from the choice to that arm and back costs."""
    allowed: tuple[bool, ...] = ()
    """Whether the arm is within the objective."""
    winning: float = 0.0
    """Acceptance per draft at which speculating would win clearly, while the cell skips; 0: none would."""
    outlook: Outlook | None = None
    """What is told of the decision: to status, metrics and the web page."""


def chosen(scores: FloatArray, allowed: BoolArray, current: int) -> int:
    """Return the arm of the highest score that is allowed; the current one unless that gains more than STAY."""
    best = int(np.argmax(np.where(allowed, scores, -np.inf)))
    return best if not allowed[current] or scores[best] > scores[current] * (1.0 + STAY) else current


def may_stay(
    arms: Sequence[int],
    scores: Sequence[float],
    allowed: Sequence[bool],
    current: int,
    prices: Sequence[float],
    step_seconds: float,
    spell_steps: float,
) -> frozenset[int]:
    """Return the K that lose so little against arm ``current`` that they may stay in force.

    ``prices``: seconds of switching to each and back. ``step_seconds``: of a step of the choice, which is
    expected to last for ``spell_steps`` steps.
    """
    best = scores[current]
    return frozenset(
        k
        for arm, (k, score, price) in enumerate(zip(arms, scores, prices, strict=True))
        if arm != current
        and allowed[arm]
        and score > best * (1.0 - max(KEEP if k else 0.0, may_lose(price, step_seconds, spell_steps)))
    )


def outlook(expected: Expected, decision: CellDecision, arms: Sequence[int], tried: tuple[bool, ...]) -> Outlook:
    """Return what is told of a decision; ``tried``: by arm, whether steps of it ran at this batch size."""
    return Outlook(
        steps=tuple(arms),
        batch_size=expected.batch_size,
        mean_context=expected.mean_context,
        choice=decision.choice,
        keep=tuple(sorted(decision.keep)),
        lengths=tuple(expected.lengths.tolist()),
        length_errors=tuple(np.sqrt(expected.length_covariance.diagonal()).tolist()),
        seconds=decision.seconds,
        second_errors=tuple(np.sqrt(expected.second_covariance.diagonal()).tolist()),
        choice_errors=decision.errors,
        none_errors=tuple(expected.ratio_errors(0).tolist()) if arms[0] == 0 else (),
        tried=tried,
        allowed=decision.allowed,
    )


def losses(decision: CellDecision, arm: int, block_steps: int) -> list[float]:
    """Return the time that a step of each arm loses against ``arm``, in steps of that one.

    Lost is what is beyond the time in which ``arm`` makes as many tokens, and a step's share of the
    switches there and back, which a block of ``block_steps`` steps pays once.

    >>> decision = CellDecision(0, scores=(100.0, 75.0), seconds=(0.01, 0.02), prices=(0.0, 0.01))
    >>> losses(decision, arm=0, block_steps=4)
    [0.0, 0.75]
    """
    rows = zip(decision.scores, decision.seconds, decision.prices, strict=True)
    return [
        (max(1.0 - score / decision.scores[arm], 0.0) * seconds + price / block_steps) / decision.seconds[arm]
        for score, seconds, price in rows
    ]
