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
"""Share of a settled cell's movement that all cells take part in: where it drifts, where it is at another
level than before, by a jump or when it runs again, and where it is not what the stored prior says."""
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
    """The common level, and how far cells without recent records may trust it.

    ``now`` is the number of the record that is learned, by the model's count.
    """

    level: float = 0.0
    """Log seconds that all cells have moved by since the start."""
    jump_variance: float = 0.0
    """Variance that jumps have brought to cells without own records since, summed up from the start."""
    prior_variance: float = PRIOR_DOUBT**2
    """Variance of the error of stored cells that were not seen yet, estimated again with each that was."""
    _prior_cells: float = PRIOR_CELLS
    _prior_squares: float = PRIOR_CELLS * PRIOR_DOUBT**2
    _prior_worst: float = 0.0
    _shared_at: int = 0

    def doubt(self, cell: CostCell) -> float:
        """Return the variance of what may have happened to the cell's level since its last record."""
        return self.moved_variance(cell) + (0.0 if cell.last_record else self.prior_variance)

    def moved_variance(self, cell: CostCell) -> float:
        """Return the variance of what may have happened to the level, without what a stored prior may err by."""
        return (DOUBT * (self.level - cell.common_seen)) ** 2 + self.jump_variance - cell.jump_variance

    @property
    def prior_excess(self) -> float:
        """Standard deviation of what stored cells not seen yet err by beyond the error assumed at first."""
        return math.sqrt(max(self.prior_variance - PRIOR_DOUBT**2, 0.0))

    def before(self, cell: CostCell) -> None:
        """Make ``cell`` as uncertain as it is, before its next record is learned."""
        if cell.common_seen != self.level and self._shared_at > cell.known_record and cell.stored_level is None:
            cell.known_record, cell.corrects = self._shared_at, True
        cell.doubt(self.doubt(cell))

    def touch(self, cell: CostCell, now: int) -> None:
        """Note that ``cell`` has just been seen."""
        cell.common_seen, cell.jump_variance, cell.last_record = self.level, self.jump_variance, now
        if cell.n >= RETURNED and not cell.run:
            cell.known_record, cell.corrects, cell.unshared = now, False, 0.0

    def follow(self, cell: CostCell, moved: float, jumped: bool, cells: Iterable[CostCell], now: int) -> None:
        """Share how far a settled cell has ``moved``, by drift or because it ``jumped``; to be called before ``touch``.

        A cell that common movement was shared with takes back what was too much of it: cells that
        were seen since then know better, and keep their level. Otherwise the movement happened at
        some time since the cell was known to hold, and the later a cell was seen, the likelier
        after it; a cell that movement was not shared with, though wrongly, only catches up.
        """
        if cell.records < SETTLED:
            return
        late = min(max(moved, min(cell.unshared, 0.0)), max(cell.unshared, 0.0))
        cell.unshared -= late
        moved -= late
        if jumped:
            share = JUMP_SHARE if cell.stored_level is None else STORED_SHARE
            carried, cell.drifted = share * moved, 0.0
        else:
            cell.drifted += moved
            # An exponential mean of n has 1 / 2n of the noise's variance. A quarter more, so that this is rare.
            dead = DEAD_ZONE * cell.spread / math.sqrt(2.0 * cell.n)
            if abs(cell.drifted) < 1.25 * dead:
                return
            rest = math.copysign(dead, cell.drifted)
            carried, cell.drifted = DRIFT_SHARE * (cell.drifted - rest), rest
        jump_variance = (DOUBT * carried) ** 2 if jumped else 0.0
        self.level += carried
        self.jump_variance += jump_variance
        self._shared_at = now
        cell.level -= carried
        for other in cells:
            if other is not cell and other.last_record > cell.known_record:
                part = 1.0 if cell.corrects else (other.last_record - cell.known_record) / (now - cell.known_record)
                other.level -= part * carried
                other.common_seen += part * carried
                other.jump_variance += part * (jump_variance - (1.0 - part) * carried * carried)
                other.unshared += part * carried

    def judge_prior(self, cell: CostCell, jumped: bool) -> None:
        """Test a stored cell against its own records, once there are some; the other stored cells may err as much."""
        if cell.stored_level is None or not (jumped or cell.n >= RETURNED):
            return
        off = cell.level + self.level - cell.stored_level
        noise = cell.spread**2 / cell.n
        square = max(off * off - noise, 0.0)
        self._prior_squares += square
        self._prior_cells += 1.0
        self._prior_worst = max(self._prior_worst, square)
        self.prior_variance = max(self._prior_squares / self._prior_cells, PRIOR_TAIL * self._prior_worst)
        cell.stored_level = None
