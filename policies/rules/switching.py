"""What a change of K costs, and how long a choice lasts: whether a switch pays.

A batch that hovers over the boundary of two cells with different choices would switch at every
crossing. The first step at a new K takes longer (graphs change, and a draft that was left behind
has to catch up), so what is in force may stay as long as it loses less than two switches cost,
over the steps until the batch is expected to cross back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_SPELL = 1000.0
"""Steps that a choice is taken to last before any has ended."""
RECENT_SPELLS = 8.0
"""Spells that the mean length remembers."""
MOST_LOST = 0.1
"""Share of goodput that not switching may cost at most, whatever the price of a switch is estimated at."""


@dataclass
class Spells:
    """How many decode steps in a row fall into cells that choose the same K, by K.

    >>> spells = Spells()
    >>> for choice in [0] * 10 + [3] * 40 + [0] * 2:
    ...     spells.step(choice)
    >>> spells.expected(3), spells.expected(0), spells.expected(5)
    (40.0, 10.0, 1000.0)
    """

    _mean: dict[int, float] = field(default_factory=dict)
    _count: dict[int, int] = field(default_factory=dict)
    _choice: int = -1
    _length: int = 0

    def step(self, choice: int) -> None:
        """Count one decode step in a cell that chooses ``choice``."""
        if choice == self._choice:
            self._length += 1
            return
        if self._length:
            ended = self._choice
            n = self._count[ended] = self._count.get(ended, 0) + 1
            mean = self._mean.get(ended, 0.0)
            self._mean[ended] = mean + (self._length - mean) / min(n, RECENT_SPELLS)
        self._choice, self._length = choice, 1

    def expected(self, choice: int) -> float:
        """Return the mean spell in steps; that of the spell going on, once it is longer."""
        mean = self._mean.get(choice, FIRST_SPELL)
        return max(mean, float(self._length)) if choice == self._choice else mean


def may_lose(price_seconds: float, step_seconds: float, spell_steps: float) -> float:
    """Return the share of goodput that may be lost by not switching, for a spell of ``spell_steps`` steps.

    ``price_seconds``: seconds that switching there and back costs. ``step_seconds``: seconds of a step.

    >>> may_lose(0.010, 0.010, 50.0)
    0.02
    """
    return min(max(price_seconds, 0.0) / (step_seconds * max(spell_steps, 1.0)), MOST_LOST)
