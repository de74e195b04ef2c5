"""Choose, for every batch size and context, the K with the most expected tokens per second.

Tokens per step come from the acceptance model, seconds per step from the cost model; both are
learned from the server's own steps (the goodput of SmartSpec, Liu et al. 2024, with learned and
uncertain terms). Around that argmax stand three small rules: a choice changes only for a gain
above its price, what is nearly as good may be kept in force, and exploration has a budget.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy as np

from policies.acceptance import AcceptanceModel
from policies.cost import CostModel
from policies.exploration import BLOCK_STEPS, LEAST_LOSS, PROBE_STEPS, Budget, alternatives, probe
from policies.interface import Grid, Plan
from sglang_hooks.wire import Hello, StepRecord

CONTEXT_EDGES = (1024, 4096, 16384)
"""Tokens per request; attention's share of a step differs by more than noise between these."""

STAY = 0.005
"""A choice changes for a gain above this share: ties stay put."""

KEEP = 0.01
"""What is within this share of the choice may stay in force when the batch moves between cells."""

RECENT_STEPS = 256
REFRESH_CELLS = 8
"""Cells not visited of late are decided anew in turn, this many at a time."""

LEVEL = 0.95
_SIGMAS = 2 * 1.96


@dataclass
class _Cell:
    """The last decision of one cell."""

    choice: int
    keep: frozenset[int] = frozenset()
    scores: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()


class Goodput:
    """Learns acceptance and cost of one server, and plans for the most tokens per second."""

    name = "goodput"

    def __init__(self) -> None:
        self._server: Hello | None = None
        self._grid = Grid()
        self._cells: list[_Cell] = []
        self._visits: Counter[int] = Counter()
        self._recent: list[int] = []
        self._context = [512.0, 2048.0, 8192.0, 32768.0]
        self._budget = Budget()
        self._changes = 0
        self._turn = 0
        self._explored: dict[int, tuple[tuple[int, float], ...]] = {}

    # -- learning --

    def learn(self, step: StepRecord) -> None:
        """Take one step into both models, and account for what exploring it has cost."""
        if self._server is None or not step.batch_size:
            return
        self.acceptance.learn(step)
        self.cost.learn(step)
        mean_context = step.context_tokens / step.batch_size
        cell = self._grid.cell(step.padded_batch_size, mean_context)
        self._recent.append(cell)
        band = bisect_left(CONTEXT_EDGES, mean_context)
        self._context[band] += 0.02 * (mean_context - self._context[band])
        self._budget.spend(1, self._loss(cell, step.draft_tokens - 1) if step.block >= 0 else 0.0)

    def _loss(self, cell: int, steps: int) -> float:
        """Share of a step's time that was lost by running ``steps`` where the choice was another."""
        decided = self._cells[cell]
        if not decided.scores or steps == decided.choice or steps not in self._arms:
            return 0.0
        chosen = decided.scores[self._arms.index(decided.choice)]
        return max(1.0 - decided.scores[self._arms.index(steps)] / chosen, LEAST_LOSS)

    # -- deciding --

    def decide(self, server: Hello, now: float) -> Plan:  # noqa: ARG002
        """Return the plan; cells that were visited of late are decided anew, the others in turn."""
        if self._server is None or self._key(self._server) != self._key(server):
            self._begin(server)
        if self.acceptance.changes != self._changes:
            self._changes = self.acceptance.changes
            self._budget.reopen()
        visits = Counter(self._recent[-RECENT_STEPS:])
        self._recent = self._recent[-RECENT_STEPS:]
        for cell in {*visits, *self._next_in_turn()}:
            self._decide_cell(cell)
        explore = self._explore(visits) if visits else {}
        skipping = bool(visits) and self._cells[visits.most_common(1)[0][0]].choice == 0
        return Plan(
            self._grid,
            tuple(cell.choice for cell in self._cells),
            tuple(cell.keep for cell in self._cells),
            self._reason(visits),
            explore=explore,
            block_steps=PROBE_STEPS if skipping else BLOCK_STEPS,
        )

    @staticmethod
    def _key(server: Hello) -> tuple[object, ...]:
        return (
            server.candidate_steps,
            server.captured_batch_sizes,
            server.max_running_requests,
            server.gpu,
            server.model,
        )

    def _begin(self, server: Hello) -> None:
        self._server = server
        self._arms = sorted(server.candidate_steps)
        sizes = tuple(size for size in sorted(server.captured_batch_sizes) if size <= server.max_running_requests)
        self._grid = Grid(sizes, tuple(edge for edge in CONTEXT_EDGES if edge < max(server.context_length, 1)))
        self.acceptance = AcceptanceModel(max(self._arms))
        self.cost = CostModel(server)
        self._cells = [_Cell(server.fallback_steps) for _ in range(self._grid.cells)]
        self._recent = []
        self._turn = 0

    def _next_in_turn(self) -> list[int]:
        begin, self._turn = self._turn, (self._turn + REFRESH_CELLS) % len(self._cells)
        return [(begin + i) % len(self._cells) for i in range(min(REFRESH_CELLS, len(self._cells)))]

    def _place(self, cell: int) -> tuple[int, float]:
        """Batch size and mean context that stand for a cell: the padded size, and the context seen there."""
        columns = len(self._grid.context_edges) + 1
        row, column = divmod(cell, columns)
        sizes = self._grid.batch_edges
        batch = sizes[row] if row < len(sizes) else (sizes[-1] * 5 // 4 + 1 if sizes else 1)
        return batch, self._context[column]

    def _decide_cell(self, index: int) -> None:
        batch, context = self._place(index)
        lengths, low, high = self.acceptance.lengths(batch, context, LEVEL)
        seconds, relative = self.cost.predict_all(batch, context)
        length = lengths[self._arms]
        scores = batch * length / seconds
        errors = np.hypot((high - low)[self._arms] / _SIGMAS / length, relative)
        cell = self._cells[index]
        best = int(np.argmax(scores))
        current = self._arms.index(cell.choice)
        if scores[best] > scores[current] * (1.0 + STAY):
            current = best
        cell.choice = self._arms[current]
        cell.keep = frozenset(
            k
            for k, score in zip(self._arms, scores, strict=True)
            if k != cell.choice and score > scores[current] * (1.0 - KEEP)
        )
        cell.scores, cell.errors = tuple(scores.tolist()), tuple(errors.tolist())

    def _explore(self, visits: Counter[int]) -> dict[int, tuple[tuple[int, float], ...]]:
        rate = self._budget.affordable_rate(100)
        found = {}
        for index in visits:
            cell = self._cells[index]
            current = self._arms.index(cell.choice)
            tried = alternatives(self._arms, cell.scores, cell.errors, current, rate)
            if cell.choice == 0 and not tried and len(self._arms) > 1:
                tried = self._probe(index)
            if tried:
                found[index] = tried
        return found

    def _probe(self, index: int) -> tuple[tuple[int, float], ...]:
        """While skipping: one K now and then, if any acceptance that a draft may have could win with it."""
        cell = self._cells[index]
        batch, context = self._place(index)
        seconds, _ = self.cost.predict_all(batch, context)
        plausible = [batch * sum(0.9**i for i in range(k + 1)) / s for k, s in zip(self._arms, seconds, strict=True)]
        arm = int(np.argmax(plausible[1:])) + 1
        if plausible[arm] <= cell.scores[0] * (1.0 + STAY):
            return ()
        loss = max(1.0 - cell.scores[arm] / cell.scores[0], 0.0)
        return ((self._arms[arm], probe(loss)),)

    def _reason(self, visits: Counter[int]) -> str:
        """One line on the cell that most steps of late were in."""
        if not visits:
            return "no steps seen yet: the server's fallback everywhere"
        index = visits.most_common(1)[0][0]
        cell = self._cells[index]
        batch, context = self._place(index)
        scores = ", ".join(f"K={k} {score:,.0f}" for k, score in zip(self._arms, cell.scores, strict=True))
        return f"at batch {batch}, {context:,.0f} tokens: {scores} tokens/s"
