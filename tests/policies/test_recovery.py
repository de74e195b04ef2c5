"""The test that runs over probes while a server skips."""

from __future__ import annotations

import numpy as np
import pytest

from specpilot.policies.rules.recovery import RecoveryTest
from tests.support.messages import record

KNOWN = [0.3, 0.3, 0.3]


def probe(rng: np.random.Generator, accept: float, batch: int, steps: int = 3, ends: bool = False):  # type: ignore[no-untyped-def]
    accepted = [int(np.argmin([*(rng.random(steps) < accept), False])) for _ in range(batch)]
    return record(accepted_drafts=accepted, batch_size=batch, draft_tokens=steps + 1, truncated=[0] if ends else [])


def probes_until_sure(accept: float, batch: int, seed: int, limit: int) -> int:
    rng = np.random.default_rng(seed)
    test = RecoveryTest(3)
    for number in range(1, limit + 1):
        test.learn(probe(rng, accept, batch), KNOWN, winning=0.7)
        if test.sure:
            return number
    return limit + 1


@pytest.mark.parametrize(("batch", "probes"), [(1, 12), (4, 5), (64, 2)])
def test_acceptance_that_came_back_is_found_within_few_probes(batch: int, probes: int) -> None:
    needed = [probes_until_sure(0.9, batch, seed, 100) for seed in range(200)]
    assert np.quantile(needed, 0.9) <= probes


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_acceptance_that_did_not_is_hardly_ever_taken_for_it(batch: int) -> None:
    """1,000 probes are a quarter of an hour at 100 steps a second."""
    wrong = sum(probes_until_sure(0.3, batch, seed, 1000) <= 1000 for seed in range(50))
    assert wrong <= 5


def test_most_probes_are_not_followed_when_nothing_has_changed() -> None:
    rng = np.random.default_rng(0)
    for batch, share in ((1, 0.1), (16, 0.02)):
        test = RecoveryTest(3)
        following = 0
        for _ in range(5000):
            test.learn(probe(rng, 0.3, batch), KNOWN, winning=0.7)
            following += test.following
            if test.sure:
                test.clear()
        assert following / 5000 <= share


def test_a_request_that_ended_is_no_rejection() -> None:
    censored, rejected = RecoveryTest(3), RecoveryTest(3)
    for test, truncated in ((censored, [0]), (rejected, [])):
        for _ in range(3):
            test.learn(record(accepted_drafts=[2], batch_size=1, draft_tokens=4, truncated=truncated), KNOWN, 0.7)
    assert censored.nats > rejected.nats
    assert (censored.trials, rejected.trials) == ([3, 3, 0], [3, 3, 3])


def test_where_no_better_acceptance_is_asked_for_a_probe_says_nothing() -> None:
    test = RecoveryTest(3)
    test.learn(record(accepted_drafts=[3, 3], draft_tokens=4), [0.9, 0.9, 0.9], winning=0.7)
    assert test.nats == 0.0
