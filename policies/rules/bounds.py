"""An operator's bounds on K, put around whatever a policy has planned: only some K, and at most so many by batch size.

The policy knows nothing of them: it goes on learning, and what it would have chosen is chosen again without them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace

from specpilot.policies.interface import Grid, Plan, PolicyError


def bounded(
    plan: Plan, candidates: Sequence[int], only: Collection[int], max_steps_by_batch: Sequence[tuple[int, int]]
) -> Plan:
    """Return the plan with no K but ``only`` these (empty: all), and from each batch size on at most its steps.

    What is out of bounds becomes the next smaller K within them, or the smallest. Raises PolicyError if
    ``only`` has none of the server's candidates.

    >>> plan = Plan(Grid((4,)), (5, 3), (frozenset({0}), frozenset()), "why", explore={0: ((3, 0.1), (1, 0.1))})
    >>> within = bounded(plan, [0, 1, 3, 5], (), [(3, 3), (64, 0)])
    >>> within.grid.batch_edges, within.choice, within.explore
    ((2, 4, 63), (5, 3, 3, 0), {0: ((3, 0.1), (1, 0.1))})
    """
    if not only and not max_steps_by_batch:
        return plan
    allowed = sorted(k for k in candidates if not only or k in only)
    if not allowed:
        raise PolicyError(f"bounds.steps = {sorted(only)} has none of the candidate steps {sorted(candidates)}")
    old = plan.grid
    edges = sorted({*old.batch_edges, *(batch - 1 for batch, _ in max_steps_by_batch)})
    columns = len(old.context_edges) + 1
    choice: list[int] = []
    keep: list[frozenset[int]] = []
    explore = {}
    # Each region stands for its upper end; the last one for what lies above.
    for batch in [*edges, (edges[-1] if edges else 0) + 1]:
        cap = min((steps for least, steps in max_steps_by_batch if least <= batch), default=allowed[-1])
        within = [k for k in allowed if k <= cap] or allowed[:1]
        row = bisect_left(old.batch_edges, batch) * columns
        for cell in range(row, row + columns):
            wanted = plan.choice[cell]
            choice.append(max((k for k in within if k <= wanted), default=within[0]))
            keep.append(plan.keep[cell].intersection(within))
            drawn = tuple((k, probability) for k, probability in plan.explore.get(cell, ()) if k in within)
            if drawn and choice[-1] == wanted:
                explore[len(choice) - 1] = drawn
    grid = Grid(tuple(edges), old.context_edges)
    reason = f"{plan.reason}; within [bounds]"
    return replace(plan, grid=grid, choice=tuple(choice), keep=tuple(keep), reason=reason, explore=explore)
