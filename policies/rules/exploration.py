"""How much to try what looks worse, and where: in expected time lost, never more than a budget.

Two questions are answered, both as probabilities that the server draws from per block:

- ``alternatives``: which other K of a cell may be better than they look. An arm is worth trying
  by its expected improvement over the choice (Mockus 1978), which needs an estimate and its
  standard error; an arm that no plausible value could make the best is not tried at all.
- ``probe``: while a cell skips, nothing is seen of the draft, so acceptance may have come back
  unnoticed. A probe tries speculation now and then, if some plausible acceptance could win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specpilot.policies.interface import Alternatives

BLOCK_STEPS = 4
"""A block's first step carries the switch and teaches no cost; the other three do."""

PROBE_STEPS = 1
"""A probe asks for acceptance, which its first step tells."""

PROBE_PERIOD = 90
"""Forward passes between two probes: 1.1 % of the steps; what follows a hit comes on top."""

WORTH_TRYING, WORTH_TRYING_NEW = 0.002, 0.0002
"""Expected improvement, as a share of the choice's goodput, below which an arm is left alone.

The latter while there is credit of a start or a change: what is learned then is of use for long.
"""

MOST_EXPLORED = 0.5
"""Share of a cell's blocks that go to alternatives at most, also on a cold start."""

LEAST_LOSS = 0.35
"""What a tried step counts at least, in steps: also an arm that loses nothing costs switches to it and back."""

FLOOR_SHARE = 0.5
"""Share of what may be lost to exploration in the long run that a floor may lose: the rest is for learning."""

MOST_ERROR = 3.0
"""Largest error of the log of a ratio that counts: a factor of 20 either way is as good as unknown."""

LEAK_STEPS = 500.0
"""Steps in which credit beyond what may be saved falls to a third."""


@dataclass
class Budget:
    """Time that may be lost to exploration, counted in decode steps' worth.

    It earns ``rate`` of every step and starts with ``initial`` steps' worth, so that a cold
    start may learn fast and a settled server pays ``rate`` at most, in at most rate/LEAST_LOSS of
    its steps (1.1 %). What is not spent while things are new is not kept for later: beyond
    ``saved`` the credit leaks.

    >>> budget = Budget(rate=0.004, initial=30.0)
    >>> budget.spend(lost=10.0)
    >>> round(budget.credit, 1)
    19.9
    """

    rate: float = 0.004
    """Steps' worth earned with every decode step."""
    initial: float = 40.0
    """Steps' worth at the start."""
    saved: float = 2.0
    """Steps' worth that are kept however long they are not spent."""

    def __post_init__(self) -> None:
        self.credit = self.initial
        self._reserve = self.initial / 2.0

    def spend(self, lost: float) -> None:
        """Account for a decode step of which ``lost`` steps' worth of time was lost to exploring."""
        self.credit += self.rate - lost - max(self.credit - self.saved, 0.0) / LEAK_STEPS
        self._reserve = min(self._reserve + self.rate, self.initial / 2.0)

    def reopen(self) -> None:
        """On evidence of change: what was learned is less true than it was.

        A load that changes all the time gets less each time: the reserve fills as fast as the budget.
        """
        self.credit, self._reserve = max(self.credit, self._reserve), 0.0

    @property
    def worth_trying(self) -> float:
        """Expected improvement from which on an arm is worth trying now."""
        return WORTH_TRYING_NEW if self.credit > 2.0 * self.saved else WORTH_TRYING

    def affordable_rate(self, steps: int) -> float:
        """Share of the next ``steps`` decode steps that may be lost."""
        return max(self.credit, 0.0) / steps


def expected_improvement(scores: Sequence[float], errors: Sequence[float], best: int) -> list[float]:
    """Expected improvement of each arm over arm ``best``, as a share of its score.

    ``scores`` in tokens per second, ``errors`` standard errors of the log of their ratio to that of
    ``best``. The ratio r is taken as log-normal, since what is not known of it are factors; with m its
    log and s the error, E max(r - 1, 0) = exp(m + s^2/2) Phi(m/s + s) - Phi(m/s). For small errors
    that is the expected improvement of a normal difference (Mockus 1978; Jones et al. 1998).

    >>> [round(x, 3) for x in expected_improvement([100.0, 99.0, 50.0, 30.0], [0.0, 0.02, 0.02, 0.8], 0)]
    [0.0, 0.004, 0.0, 0.033]
    """
    improvements = []
    for arm, score in enumerate(scores):
        if arm == best or score <= 0.0:
            improvements.append(0.0)
            continue
        middle, error = math.log(score / scores[best]), errors[arm]
        if error <= 0.0:
            improvements.append(max(score / scores[best] - 1.0, 0.0))
            continue
        mean = score / scores[best] * math.exp(min(error, MOST_ERROR) ** 2 / 2.0)
        improvements.append(max(mean * _below(middle / error + error) - _below(middle / error), 0.0))
    return improvements


def _below(z: float) -> float:
    """Return the standard normal distribution at ``z``."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def alternatives(
    arms: Sequence[int],
    scores: Sequence[float],
    errors: Sequence[float],
    best: int,
    losses: Sequence[float],
    rate: float,
    worth: float = WORTH_TRYING,
) -> Alternatives:
    """Return (K, probability) of the arms worth trying, losing at most ``rate`` of the time.

    ``arms`` are the K, ``best`` the index of the choice, ``losses`` what a step of each loses against
    it, in steps. Each arm of more than ``worth`` gets a share of the rate by its expected improvement; what it may
    be tried is that share over what a try costs.
    """
    improvement = expected_improvement(scores, errors, best)
    worthy = [arm for arm, gain in enumerate(improvement) if gain > worth]
    total = sum(improvement[arm] for arm in worthy)
    tried = []
    for arm in worthy:
        loss = max(losses[arm], LEAST_LOSS)
        probability = _rounded_down(min(rate * improvement[arm] / total / loss, MOST_EXPLORED / len(worthy)))
        if probability > 1e-4:
            tried.append((arms[arm], probability))
    return tuple(tried)


def probe(loss: float) -> float:
    """Probability of a probing block of PROBE_STEPS, so that one comes every PROBE_PERIOD forward passes.

    ``loss`` is what a probed step loses when nothing has changed, in steps; an expensive probe comes more
    rarely, so that at most 0.4 % of the time is lost, and 0.1 % is left for what follows hits.

    >>> probe(0.1), probe(0.5)
    (0.0105, 0.00728)
    """
    return _rounded_down(min(PROBE_STEPS / PROBE_PERIOD, 0.004 / max(loss, 1e-9)))


def floored(
    tried: Alternatives,
    arms: Sequence[int],
    best: int,
    losses: Sequence[float],
    allowed: Sequence[bool],
    floor: float,
    rate: float,
) -> Alternatives:
    """Return ``tried`` with at least ``floor`` for every other K that is ``allowed``, as far as that loses little.

    What can be told from a log of a policy that never ran is told by what was drawn (``overlap.py``),
    so a floor buys answers, not better decisions. It loses at most FLOOR_SHARE of ``rate``, evenly over the K:
    one that loses much is drawn more rarely. Together they stay below MOST_EXPLORED, so that
    the table's own K is the rule.

    >>> floored(((3, 0.02),), [0, 1, 3], best=1, losses=[0.5, 0.0, 0.01], allowed=[True] * 3, floor=0.01, rate=0.004)
    ((3, 0.02), (0, 0.00169))
    """
    drawn = dict(tried)
    others = [arm for arm, within in enumerate(allowed) if within and arm != best]
    room = max(MOST_EXPLORED - 0.01 - sum(drawn.values()), 0.0)
    for arm in others:
        bearable = FLOOR_SHARE * rate / len(others) / max(losses[arm], 1e-9)
        probability = _rounded_down(min(floor, bearable))
        added = min(probability - drawn.get(arms[arm], 0.0), room / len(others))
        if added > 1e-4:
            drawn[arms[arm]] = drawn.get(arms[arm], 0.0) + added
    return tuple(drawn.items())


def _rounded_down(probability: float) -> float:
    """Return at most a sixth less: a table goes to the server whenever the plan differs."""
    if probability <= 0.0:
        return 0.0
    return float(f"{1.2 ** math.floor(math.log(probability, 1.2) + 1e-9):.3g}")
