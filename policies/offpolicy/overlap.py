"""Where a log can tell what another policy would have done: strata of steps, what was drawn in each, and refusals.

A *stratum* is a region of batch size and context, the K of the target, and how that compares to the K held there.
An estimate is a mean by stratum, or by a *group* of strata that are estimated together where one alone has too few
draws. What the log cannot answer is named with its reason, and with the exploration that would have answered it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specpilot.policies.interface import Grid
from specpilot.policies.offpolicy.logged_steps import FloatArray, IntArray
from specpilot.policies.student import NORMAL_975

REGIONS = Grid((1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1024, 4096, 16384))
"""Batch sizes and context tokens per request within which steps are taken together."""

LEAST_BLOCKS = 10.0
"""Effective blocks from which on a group's mean is used: below, its own bootstrap is too coarse to trust."""

LEAST_SUPPORT = 0.8
"""Share of the steps in which the draw must have been possible, as far as the weights can tell."""

LEAST_ANSWERED = 0.95
"""Share of the logged steps that the answered strata must hold, or there is no estimate."""

RELATIONS = 3
SAME, BELOW, ABOVE = range(RELATIONS)
"""The target's K against the one held: equal, less, more."""


@dataclass(frozen=True)
class Strata:
    """How strata are numbered."""

    arms: int
    """Number of candidates."""

    @property
    def count(self) -> int:
        """Number of strata."""
        return REGIONS.cells * self.arms * RELATIONS

    def of(self, batch_size: IntArray, mean_context: FloatArray, target: IntArray, relation: IntArray) -> IntArray:
        """Return the stratum of each step; all of shape (steps,)."""
        region = np.searchsorted(REGIONS.batch_edges, batch_size) * REGIONS.shape[1]
        region += np.searchsorted(REGIONS.context_edges, mean_context)
        return np.asarray((region * self.arms + target) * RELATIONS + relation, np.int64)

    def named(self, stratum: int) -> tuple[int, int, int]:
        """Return region, arm and relation."""
        rest, relation = divmod(stratum, RELATIONS)
        region, arm = divmod(rest, self.arms)
        return region, arm, relation


@dataclass(frozen=True)
class Unanswered:
    """A cell for which the log cannot tell what the target would have done there."""

    batch: tuple[int, int | None]
    """Batch sizes (requests) from and to; to None: and above."""
    context: tuple[int, int | None]
    """Context tokens per request from and to; to None: and above."""
    steps: int
    """Steps (K) of the target."""
    logged_steps: int
    """Decode steps there."""
    effective_blocks: float
    """Effective number of blocks that drew the target's K there."""
    reason: str
    """Why there is no answer, in a sentence for an operator."""


@dataclass
class Group:
    """Strata that are estimated together."""

    drawn: list[int]
    """Strata of one K and relation, from which the means come."""
    alike: list[int] = field(default_factory=list)
    """Strata of the same regions and K, where it could not be drawn: they are taken to be like ``drawn``."""

    @property
    def strata(self) -> list[int]:
        """All strata of the group."""
        return self.drawn + self.alike


class Overlap:
    """What the log offers of one target, by stratum; every column of shape (strata,)."""

    def __init__(self, arms: IntArray) -> None:
        self.strata = Strata(len(arms))
        self._arms = arms
        columns = np.zeros((7, self.strata.count))
        self.steps, self.explorable, self.ran, self.can_settle, self.weight, self.squares, self.tokens = columns
        """Steps; those where something was explored; that ran the target's K; whose time would count if drawn; sum of
        the weights of the times, and of their squares by block; sum of the weights of the tokens."""

    def effective(self, strata: Sequence[int]) -> float:
        """Kish's effective number of blocks that the seconds of some strata rest on."""
        squares = self.squares[strata].sum()
        return float(self.weight[strata].sum() ** 2 / squares) if squares else 0.0

    def groups(self) -> tuple[list[Group], dict[int, str]]:
        """Return the strata that are estimated together, and why the others are not.

        Neighbours of one K and relation are put together until they have LEAST_BLOCKS: that is as right as each by
        itself, only less sharp. Left out before is where the draw was not possible; if that is a smaller part of a
        region, such as the blocks of the fallback in a switchback, it is taken to be as the rest of the region.
        """
        by_kind: dict[tuple[int, int], list[int]] = {}
        for stratum in np.flatnonzero(self.steps).tolist():
            _, arm, relation = self.strata.named(stratum)
            by_kind.setdefault((arm, relation), []).append(stratum)
        groups: list[Group] = []
        refused: dict[int, str] = {}
        for (arm, relation), strata in by_kind.items():
            reasons = {stratum: self._impossible(stratum, strata) for stratum in strata} if relation != SAME else {}
            refused.update({stratum: reason for stratum, reason in reasons.items() if reason})
            for neighbours in self._joined([stratum for stratum in strata if not reasons.get(stratum)]):
                reason = self._too_few(arm, relation, neighbours)
                if reason:
                    refused.update(dict.fromkeys(neighbours, reason))
                else:
                    groups.append(Group(neighbours))
        for stratum in list(refused):
            group = self._like(stratum, groups)
            if group is not None:
                group.alike.append(stratum)
                del refused[stratum]
        return groups, refused

    def _joined(self, strata: Sequence[int]) -> list[list[int]]:
        """Put neighbours together until each lot has LEAST_BLOCKS."""
        lots: list[list[int]] = []
        enough = True
        for stratum in strata:
            if enough:
                lots.append([stratum])
            else:
                lots[-1].append(stratum)
            enough = self.effective(lots[-1]) >= LEAST_BLOCKS
        if len(lots) > 1 and not enough:
            last = lots.pop()
            lots[-1] += last
        return lots

    def _like(self, stratum: int, groups: Sequence[Group]) -> Group | None:
        """Return the group of most steps in this region with this K, if nearly the whole region explored."""
        place = stratum // RELATIONS
        there = slice(place * RELATIONS, (place + 1) * RELATIONS)
        if not groups or self.explorable[there].sum() < LEAST_SUPPORT * self.steps[there].sum():
            return None
        steps = [sum(self.steps[drawn] for drawn in group.drawn if drawn // RELATIONS == place) for group in groups]
        most = int(np.argmax(steps))
        return groups[most] if steps[most] else None

    def unanswered(self) -> list[Unanswered]:
        """Return the cells that the log says nothing about, those of most steps first."""
        cells = []
        for stratum, reason in self.groups()[1].items():
            region, arm, _ = self.strata.named(stratum)
            row, column = divmod(region, REGIONS.shape[1])
            batch, context = _range(REGIONS.batch_edges, row, 1), _range(REGIONS.context_edges, column, 0)
            logged = int(self.steps[stratum])
            cells.append(Unanswered(batch, context, int(self._arms[arm]), logged, self.effective([stratum]), reason))
        return sorted(cells, key=lambda cell: -cell.logged_steps)

    @property
    def answered(self) -> float:
        """Share of the logged steps whose stratum is answered."""
        return float(1.0 - self.steps[list(self.groups()[1])].sum() / max(self.steps.sum(), 1.0))

    def _impossible(self, stratum: int, alike: Sequence[int]) -> str:
        """Say why the target's K could not be drawn there; empty if it could.

        The weights tell: over the steps where the draw was possible they sum up to the number of these steps,
        with an error that is taken from the strata ``alike``, since a stratum without a draw shows none.
        """
        k = f"K={self._arms[self.strata.named(stratum)[1]]}"
        number, explorable, can_settle = self.steps[stratum], self.explorable[stratum], self.can_settle[stratum]
        weight = self.weight[alike].sum()
        if not explorable:
            return f"{k} was never drawn there: nothing was explored"
        if explorable < LEAST_SUPPORT * number:
            return f"{k} was not drawn there: {100.0 * explorable / number:.0f} % of these steps explored"
        if not self.ran[alike].any():
            return f"{k} was never drawn there: it was not among what was explored"
        if not weight:
            return f"{k} was run only in first steps after a switch, whose time is not that of a step of {k}"
        if can_settle:
            share = self.weight[stratum] / can_settle
            usual = self.squares[alike].sum() / weight
            error = max(math.sqrt(self.squares[stratum]) / can_settle, math.sqrt(usual / can_settle))
            if share + 2.0 * error < LEAST_SUPPORT:
                if not self.ran[stratum]:
                    return f"{k} was never drawn there: it was not among what was explored"
                return f"{k} could be drawn in about {100.0 * share:.0f} % of these steps only"
        return ""

    def _too_few(self, arm: int, relation: int, strata: Sequence[int]) -> str:
        k = f"K={self._arms[arm]}"
        blocks, weight = self.effective(strata), self.weight[strata].sum()
        if not weight or not self.tokens[strata].sum():
            return f"no step of {k} there has a time and an acceptance of its own"
        everything = relation == SAME and weight >= LEAST_SUPPORT * self.can_settle[strata].sum()
        if blocks >= LEAST_BLOCKS or (everything and blocks >= 2.0):
            return ""
        return f"{k} was drawn too rarely: {blocks:.1f} effective blocks, {LEAST_BLOCKS:g} are needed"


def _range(edges: Sequence[int], row: int, least: int) -> tuple[int, int | None]:
    low = edges[row - 1] + 1 if row else least
    return low, edges[row] if row < len(edges) else None


def needed_floor(
    cells: Sequence[Unanswered], steps: int, spread: float, block_steps: int, half_width: float = 0.02
) -> float:
    """Return the exploration floor at which a log of as many steps would answer; inf if none could.

    Two things are asked. Each K that the target runs in more than the 1 - LEAST_ANSWERED of the steps that
    may be left out must get LEAST_BLOCKS blocks, with half as many to spare. And the interval must come
    down to +-``half_width`` of the estimate: with floor e, m of N steps in question and blocks of B, whose
    settled steps are taken to be as alike as one, its variance is (m/N)^2 spread^2 / (e m / B), so
    e = (z / half_width)^2 spread^2 B m / N^2 with z = 1.96.

    >>> cell = Unanswered((1, 1), (0, 1024), 3, 200_000, 0.0, "never run")
    >>> round(needed_floor([cell], 1_000_000, 0.3, 4), 4)
    0.0007
    """
    concerned = sum(cell.logged_steps for cell in cells)
    if not concerned:
        return 0.0
    # Neighbours of one K are estimated together; the K of fewest steps may go without.
    of_each: dict[int, int] = {}
    for cell in cells:
        of_each[cell.steps] = of_each.get(cell.steps, 0) + cell.logged_steps
    passed_over, smallest = 0, max(of_each.values())
    for count in sorted(of_each.values()):
        passed_over += count
        if passed_over > (1.0 - LEAST_ANSWERED) * steps:
            smallest = count
            break
    by_count = 1.5 * LEAST_BLOCKS * block_steps / smallest
    by_width = (NORMAL_975 / half_width) ** 2 * spread**2 * block_steps * concerned / steps**2
    needed = max(by_count, by_width)
    return needed if needed <= 0.25 else math.inf
