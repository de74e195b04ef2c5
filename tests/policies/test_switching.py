"""What a switch costs, weighed against how long a choice lasts."""

from __future__ import annotations

import pytest

from specpilot.policies.rules.switching import FIRST_SPELL, MOST_LOST, Spells, may_lose


def test_spells_follow_the_newest_and_the_one_going_on() -> None:
    spells = Spells()
    for _ in range(20):
        for choice, length in ((3, 30), (0, 5)):
            for _ in range(length):
                spells.step(choice)
    assert (spells.expected(3), spells.expected(0)) == (30.0, 5.0)
    for _ in range(500):
        spells.step(0)
    assert spells.expected(0) == 505.0  # it has settled: what was kept for short spells is kept no more
    for _ in range(60):
        for choice, length in ((3, 100), (0, 100)):
            for _ in range(length):
                spells.step(choice)
    assert spells.expected(3) == pytest.approx(100.0, rel=0.02)
    assert Spells().expected(1) == FIRST_SPELL


def test_keeping_is_worth_the_switches_and_no_more() -> None:
    assert may_lose(0.0, 0.01, 50.0) == 0.0
    assert may_lose(-1.0, 0.01, 50.0) == 0.0
    assert may_lose(0.01, 0.01, 20.0) == pytest.approx(0.05)
    assert may_lose(10.0, 0.01, 20.0) == MOST_LOST
