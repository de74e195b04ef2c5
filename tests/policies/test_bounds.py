"""An operator's bounds around any plan."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot.policies.interface import Grid, Plan, PolicyError
from specpilot.policies.rules.bounds import bounded
from specpilot.sglang_hooks.table_policy import CompiledTable

ARMS = [0, 1, 3, 5]
edges = st.lists(st.integers(0, 40), max_size=4, unique=True).map(lambda one: tuple(sorted(one)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    grid = Grid(draw(edges), draw(st.sampled_from([(), (1024,)])))
    arms = st.sampled_from(ARMS)
    return Plan(
        grid,
        tuple(draw(st.lists(arms, min_size=grid.cells, max_size=grid.cells))),
        tuple(frozenset(draw(st.sets(arms))) for _ in range(grid.cells)),
        "why",
        explore=draw(st.dictionaries(st.integers(0, grid.cells - 1), arms.map(lambda k: ((k, 0.1),)), max_size=2)),
    )


@given(plans(), st.sets(st.sampled_from(ARMS)), st.dictionaries(st.integers(1, 40), st.integers(0, 6), max_size=3))
def test_at_every_batch_size_the_nearest_within_bounds_is_chosen(
    plan: Plan, only: set[int], caps: dict[int, int]
) -> None:
    limited = bounded(plan, ARMS, only, sorted(caps.items()))
    CompiledTable.compile(limited.table(1, 5.0, "p"), ARMS)
    allowed = [k for k in ARMS if not only or k in only]
    for batch in range(1, 45):
        cap = min((k for least, k in caps.items() if least <= batch), default=99)
        within = [k for k in allowed if k <= cap] or allowed[:1]
        for context in (10.0, 5000.0):
            before, after = plan.grid.cell(batch, context), limited.grid.cell(batch, context)
            smaller = [k for k in within if k <= plan.choice[before]]
            assert limited.choice[after] == (smaller[-1] if smaller else within[0])
            assert limited.keep[after] == plan.keep[before] & set(within)
            assert {k for k, _ in limited.explore.get(after, ())} <= set(within)
            if limited.choice[after] == plan.choice[before]:
                kept = [(k, share) for k, share in plan.explore.get(before, ()) if k in within]
                assert list(limited.explore.get(after, ())) == kept
    assert bisect_left(limited.grid.batch_edges, 0) == 0


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"bounds.steps = \[4\] has none of the candidate steps \[0, 1, 3, 5\]"):
        bounded(Plan(Grid(), (1,), (frozenset(),), "why"), ARMS, [4], [])
