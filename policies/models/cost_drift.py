"""What the cells of the cost model have in common: clocks slow every K alike, and a stored prior errs as a whole.

A cell's level is over the *common* level. As a cell that runs is seen to move, its movement is
split between the two, so that cells that do not run follow: a Kalman filter's gains for a common
and an own random walk (Harvey 1989), fixed, since only their ratio matters. What moves a cell to and
fro moves the common level to and fro, so nothing walks away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specpilot.policies.models.cost_cell import RETURNED, SETTLED, CostCell

DRIFT_SHARE, JUMP_SHARE, STORED_SHARE = 0.95, 0.8, 0.5
"""Share of a settled cell's movement that all cells take part in: where it drifts, where it is found at
another level than before, by a jump or on its return, and where it is not what the stored prior says."""
DEAD_ZONE = 3.0
"""Standard errors of a cell's level within which it moves alone: noise is not shared."""
DOUBT = 0.3
"""Error of an untouched cell per unit of common movement since its last record."""
PRIOR_DOUBT, PRIOR_CELLS = 0.02, 2.0
"""Relative error of a stored cell beside its noise: assumed at first, and for how many cells that counts."""
PRIOR_TAIL = 0.5
"""Where one stored cell is far off, as of another machine, another may be as far though most are right:
the variance is at least this share of the worst square."""


@dataclass
class CommonLevel:
    """The common level, and how far it may be trusted by cells that were not seen of late.

    ``now`` counts the records learned.
    """

    level: float = 0.0
    """Of log seconds; 0 at the start."""
    unrest: float = 0.0
    """Variance that jumps have brought to cells untouched by them, summed up since the start."""
    prior_variance: float = PRIOR_DOUBT**2
    """Of stored cells that were not seen yet, re-estimated with each that was."""
    _prior_cells: float = PRIOR_CELLS
    _prior_squares: float = PRIOR_CELLS * PRIOR_DOUBT**2
    _prior_worst: float = 0.0
    _shared_at: int = 0

    def doubt(self, cell: CostCell) -> float:
        """Return the variance of what may have happened to the cell's level since its last record."""
        return self.moved_variance(cell) + (0.0 if cell.last else self.prior_variance)

    def moved_variance(self, cell: CostCell) -> float:
        """Return the same without what a stored prior may err by."""
        return (DOUBT * (self.level - cell.seen)) ** 2 + self.unrest - cell.unrest

    @property
    def prior_excess(self) -> float:
        """Standard deviation of what stored cells not seen yet err by beyond the error assumed at first."""
        return math.sqrt(max(self.prior_variance - PRIOR_DOUBT**2, 0.0))

    def before(self, cell: CostCell) -> None:
        """Make ``cell`` as uncertain as it is, before its next record is learned."""
        if cell.seen != self.level and self._shared_at > cell.held and cell.stored is None:
            cell.held, cell.corrects = self._shared_at, True
        cell.doubt(self.doubt(cell))

    def touch(self, cell: CostCell, now: int) -> None:
        """Note that ``cell`` has just been seen."""
        cell.seen, cell.unrest, cell.last = self.level, self.unrest, now
        if cell.n >= RETURNED and not cell.run:
            cell.held, cell.corrects, cell.withheld = now, False, 0.0

    def follow(self, cell: CostCell, moved: float, found: bool, cells: Iterable[CostCell], now: int) -> None:
        """Take part in how far a settled cell has ``moved``, or was ``found`` off; to be called before ``touch``.

        A cell that common movement was shared with takes back what was too much of it: cells that
        were seen since then know better, and keep their level. Otherwise the movement happened at
        some time since the cell was known to hold, and the later a cell was seen, the likelier
        after it; a cell from which movement was withheld, and wrongly so, only catches up.
        """
        if cell.records < SETTLED:
            return
        late = min(max(moved, min(cell.withheld, 0.0)), max(cell.withheld, 0.0))
        cell.withheld -= late
        moved -= late
        if found:
            share = JUMP_SHARE if cell.stored is None else STORED_SHARE
            carried, cell.moved = share * moved, 0.0
        else:
            cell.moved += moved
            # An exponential mean of n has 1 / 2n of the noise's variance. A quarter more, so that this is rare.
            dead = DEAD_ZONE * cell.spread / math.sqrt(2.0 * cell.n)
            if abs(cell.moved) < 1.25 * dead:
                return
            rest = math.copysign(dead, cell.moved)
            carried, cell.moved = DRIFT_SHARE * (cell.moved - rest), rest
        unrest = (DOUBT * carried) ** 2 if found else 0.0
        self.level += carried
        self.unrest += unrest
        self._shared_at = now
        cell.level -= carried
        for other in cells:
            if other is not cell and other.last > cell.held:
                part = 1.0 if cell.corrects else (other.last - cell.held) / (now - cell.held)
                other.level -= part * carried
                other.seen += part * carried
                other.unrest += part * (unrest - (1.0 - part) * carried * carried)
                other.withheld += part * carried

    def judge_prior(self, cell: CostCell, found: bool) -> None:
        """Hold a stored cell against its own records, once there are some; the others may err as much."""
        if cell.stored is None or not (found or cell.n >= RETURNED):
            return
        off = cell.level + self.level - cell.stored
        noise = cell.spread**2 / cell.n
        square = max(off * off - noise, 0.0)
        self._prior_squares += square
        self._prior_cells += 1.0
        self._prior_worst = max(self._prior_worst, square)
        self.prior_variance = max(self._prior_squares / self._prior_cells, PRIOR_TAIL * self._prior_worst)
        cell.stored = None
