"""Drift: cells that do not run follow those that do, and take back what was not theirs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from specpilot.policies.models.cost import CostModel
from tests.support.costs import SERVER, STEPS, Server, best, drawn, named, share_of_best

SIZE, CONTEXT = 16, 1000.0


def spread_of_errors(model: CostModel, truth: list[float]) -> float:
    """By how much K are off against each other, at most."""
    off = np.log(model.predict_all(SIZE, CONTEXT)[0] / truth)
    return float(off.max() - off.min())


def warm(seed: int, noise: float, sizes: tuple[int, ...] = (SIZE,), count: int = 100) -> Server:
    server = Server(CostModel(SERVER), random.Random(seed))
    for steps in STEPS:
        for size in sizes:
            server.run(named("h200-sglang"), steps, size, CONTEXT, count, noise=noise)
    return server


@pytest.mark.parametrize("noise", [0.01, 0.04])
@pytest.mark.parametrize("sizes", [(SIZE,), (1, 4, 8, 16, 32, 64)], ids=["one size", "many sizes"])
@pytest.mark.parametrize("total", [0.2, -0.2, 0.04])
def test_slow_common_drift_is_followed_where_nothing_runs(total: float, sizes: tuple[int, ...], noise: float) -> None:
    """1 % in 1,000 steps (0.2 % for the small one); only K=3 is run, after all K were learned."""
    surface = named("h200-sglang")
    server = warm(1, noise, sizes)
    errors = []
    for block in range(500):
        drift = 1.0 + total * block / 500
        size = server.rng.choice(sizes)
        server.noisy(surface(3, size, CONTEXT) * drift, 40, noise, steps=3, batch_size=size, mean_context=CONTEXT)
        truth = [surface(k, SIZE, CONTEXT) * drift for k in STEPS]
        errors.append(spread_of_errors(server.model, truth))
        assert share_of_best(server.model, surface, SIZE, CONTEXT) > 0.97
    assert np.mean(errors) < 0.03
    assert max(errors) < 0.045


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.04, 0.96, 1.2, 0.8])
def test_a_sudden_common_change_is_carried_over(factor: float) -> None:
    surface, sizes = named("h200-sglang"), (1, 4, 8, 16, 32, 64)
    for seed in range(5):
        server = warm(seed, 0.03, sizes)
        for block in range(100):
            size = server.rng.choice(sizes)
            now = factor if block >= 50 else 1.0
            server.noisy(surface(3, size, CONTEXT) * now, 40, steps=3, batch_size=size, mean_context=CONTEXT)
        assert spread_of_errors(server.model, [surface(k, SIZE, CONTEXT) * factor for k in STEPS]) < 0.06


def test_k_that_drift_together_while_all_are_visited_stay_right() -> None:
    surface = drawn(5)
    server = Server(CostModel(SERVER), random.Random(2))
    for steps in STEPS:
        server.run(surface, steps, SIZE, CONTEXT, 100)
    errors = []
    for block in range(500):
        drift = 1.0 + 0.3 * math.sin(block / 80.0)
        for steps, count in ((3, 40), (server.rng.choice(STEPS), 4)):
            server.noisy(
                surface(steps, SIZE, CONTEXT) * drift, count, steps=steps, batch_size=SIZE, mean_context=CONTEXT
            )
        errors.append(spread_of_errors(server.model, [surface(k, SIZE, CONTEXT) * drift for k in STEPS]))
    assert np.mean(errors) < 0.03
    assert np.quantile(errors, 0.95) < 0.06


def test_one_k_that_drifts_alone_is_told_apart() -> None:
    """An arm of its own becomes 10 % dearer; the others are visited now and then."""
    surface = named("h200-sglang")
    server = warm(4, 0.02)
    truth = [surface(k, SIZE, CONTEXT) * (1.1 if k == 3 else 1.0) for k in STEPS]
    for block in range(200):
        k = 3 if block % 2 else server.rng.choice(STEPS)
        server.noisy(truth[STEPS.index(k)], 20 if k == 3 else 5, 0.02, steps=k, batch_size=SIZE, mean_context=CONTEXT)
    assert spread_of_errors(server.model, truth) < 0.03
    assert best(server.model.predict_all(SIZE, CONTEXT)[0].tolist()) == best(truth)


@pytest.mark.slow
def test_noise_alone_moves_nothing_that_does_not_run() -> None:
    server = warm(6, 0.03)
    before = server.model.predict(0, SIZE, CONTEXT)
    for _ in range(300):
        server.run(named("h200-sglang"), server.rng.choice([2, 3]), SIZE, CONTEXT, 50)
    after = server.model.predict(0, SIZE, CONTEXT)
    assert after[0] == pytest.approx(before[0], rel=0.005)
    assert after[1] < before[1] + 0.005
