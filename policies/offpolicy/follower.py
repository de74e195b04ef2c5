"""What a policy's table would have run in the states that were logged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specpilot.policies.interface import Plan
from specpilot.policies.offpolicy.logged_steps import FloatArray, IntArray


class Follower:
    """The K that a deterministic table runs along logged states; a plan for each fold.

    What is held goes on from step to step as in ``specpilot.sglang_hooks.table_policy``: keep sets and dwell
    are the target's own, whatever the log held.

    >>> from specpilot.policies.interface import Grid
    >>> plan = Plan(Grid((4, 6)), (3, 3, 0), (frozenset(), frozenset({0}), frozenset()), "threshold")
    >>> follower = Follower([plan], [0, 3], 0)
    >>> batch = np.array([4, 5, 7, 5, 4])
    >>> follower.follow(batch, np.zeros(5), np.zeros(5, int)).tolist()
    [1, 1, 0, 0, 1]
    """

    def __init__(self, plans: Sequence[Plan], arms: Sequence[int], held: int) -> None:
        """``plans``: one for each fold. ``arms``: candidate K. ``held``: K in force before the first step."""
        arm_of = {steps: arm for arm, steps in enumerate(arms)}
        self._plans = plans
        self._choice = [np.array([arm_of[steps] for steps in plan.choice]) for plan in plans]
        self._keep = [[frozenset(arm_of[k] for k in kept if k in arm_of) for kept in plan.keep] for plan in plans]
        self._memoryless = not any(plan.min_dwell_steps or any(plan.keep) for plan in plans)
        self._held = arm_of.get(held, 0)
        self._since_switch = 0

    def follow(self, batch_size: IntArray, mean_context: FloatArray, fold: IntArray) -> IntArray:
        """Return the arm of each step; the states go on from those of the last call."""
        cells = np.empty(len(batch_size), np.int64)
        chosen = np.empty(len(batch_size), np.int64)
        for index, plan in enumerate(self._plans):
            own = fold == index if len(self._plans) > 1 else slice(None)
            grid = plan.grid
            cells[own] = np.searchsorted(grid.batch_edges, batch_size[own]) * grid.shape[1]
            cells[own] += np.searchsorted(grid.context_edges, mean_context[own])
            chosen[own] = self._choice[index][cells[own]]
        if self._memoryless or not len(cells):
            return chosen
        dwells = any(plan.min_dwell_steps for plan in self._plans)
        moves = np.ones(len(cells), bool)
        # Within a cell what is held does not change, unless it only dwells.
        if not dwells:
            moves[1:] = (cells[1:] != cells[:-1]) | (fold[1:] != fold[:-1])
        begins = np.flatnonzero(moves)
        which = fold[begins] if len(self._plans) > 1 else np.zeros(len(begins), np.int64)
        ran = np.empty(len(begins), np.int64)
        held, since = self._held, self._since_switch
        rows = zip(cells[begins].tolist(), chosen[begins].tolist(), which.tolist(), strict=True)
        for i, (cell, choice, index) in enumerate(rows):
            plan_dwell = self._plans[index].min_dwell_steps
            if held != choice and held not in self._keep[index][cell] and since >= plan_dwell:
                held, since = choice, 0
            else:
                since += 1
            ran[i] = held
        self._held, self._since_switch = held, since
        return np.repeat(ran, np.diff(np.append(begins, len(cells))))
