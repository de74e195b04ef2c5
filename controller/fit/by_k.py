"""A trace's statistics by K: which K a kind of step was, and everything that was counted of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from specpilot.controller.fit.statistics import SAMPLE, WIDTHS, Sample, TraceStatistics

KAndSize = tuple[int, float]
"""K, and the captured batch size or the middle of a band above the largest: a cell of the cost model."""
Tables = dict[tuple[int, int, int], NDArray[np.int64]]
"""Requests that accepted so many drafts, by K, band and fold: shape (K + 1, 2); [:, 1] ended there."""


def kind_steps(kinds: Counter[int], tree: bool) -> dict[int, int | None]:
    """Return the K of each kind of step, None where it cannot be told; as ``policies/models/applied.py`` tells it.

    >>> kind_steps(Counter({2 * 8192 + 8: 3, 3 * 8192 + 16: 1, 2 * 8192 + 16: 1, 2 * 8192 + 4: 1}), tree=True)
    {16392: 2, 24592: 3, 16400: 3, 16388: None}
    """
    if not tree:
        return {kind: max(kind % WIDTHS - 1, 0) for kind in kinds}
    usual: dict[int, int] = {}
    for kind, _ in sorted(kinds.items(), key=lambda item: (-item[1], item[0])):
        usual.setdefault(kind // WIDTHS, kind % WIDTHS)
    of_width = {width: steps for steps, width in sorted(usual.items(), reverse=True)}
    return {
        kind: kind // WIDTHS if usual[kind // WIDTHS] == kind % WIDTHS else of_width.get(kind % WIDTHS)
        for kind in kinds
    }


class StatisticsByK:
    """A trace's statistics by K: costs, switches and acceptance, with K told from the kind of step."""

    def __init__(self, statistics: TraceStatistics) -> None:
        self.steps = kind_steps(statistics.kinds, statistics.tree)
        self.cells: dict[KAndSize, Sample] = {}
        for (kind, size), sample in statistics.cells.items():
            steps = self.steps[kind]
            if steps is not None:
                self.cells.setdefault((steps, size), Sample(SAMPLE)).add(sample.rows, sample.seen)
        self.switches = [
            (before, after, sample)
            for (old, new), sample in sorted(statistics.switches.items(), key=lambda item: item[0])
            if (before := self.steps[old]) is not None and (after := self.steps[new]) is not None and before != after
        ]
        """First steps after a switch: K before, K after, their sample."""
        self.tables: Tables = {}
        for (kind, band, fold), counted in statistics.accepted.items():
            steps = self.steps[kind]
            if steps:
                key = steps, band, fold
                # Of a tree, K is the depth of the path that can be accepted; the width is more.
                counted = counted[: steps + 1]
                self.tables[key] = self.tables[key] + counted if key in self.tables else counted
        self.blocks: list[Tables] = []
        """Tables of single blocks, for how acceptance varies over time."""
        for _, by_kind in sorted(statistics.blocks.items()):
            # Kinds of one K, if there are several, are apart in the key's place for the band.
            told = {
                (steps, kind, 0): counts[: steps + 1] for kind, counts in by_kind.items() if (steps := self.steps[kind])
            }
            if told:
                self.blocks.append(told)
