"""Stored costs: a good start, soon outweighed where wrong, and never a reason to fail."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specpilot.policies.models.cost import UNKNOWN_ERROR, CostModel
from specpilot.policies.models.cost_cell import MEMORY
from tests.support.costs import CAPTURED, NAMED, SERVER, STEPS, Seconds, Server, best, drawn, named, share_of_best

CONTEXT = 1000.0


def learned(surface: Seconds, seed: int = 1) -> dict[str, Any]:
    server = Server(CostModel(SERVER), random.Random(seed))
    for _ in range(2):
        for size in (1, 8, 32, 128):
            for steps in STEPS:
                server.run(surface, steps, size, CONTEXT, 40)
    return json.loads(json.dumps(server.model.to_prior()))


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return learned(named("h200-sglang"))


# -- anything but a prior --

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
WRONG: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("not an object", lambda prior: 5, "Expected `object`"),
    ("nothing in it", lambda prior: {}, "version"),
    ("no cells", lambda prior: prior.pop("cells") and prior, "cells"),
    ("no switches", lambda prior: prior.pop("switches") and prior, "switches"),
    ("a kind of switch missing", lambda prior: prior["switches"].pop("up") and prior, "$.switches"),
    ("something unknown", lambda prior: prior | {"extra": 1}, "extra"),
    ("another version", lambda prior: prior | {"version": 3}, "$.version"),
    ("another server", lambda prior: prior | {"fingerprint": "x" * 1000}, "it is of server xxx"),
    ("a fingerprint that is none", lambda prior: prior | {"fingerprint": [1]}, "$.fingerprint"),
    ("cells of another shape", lambda prior: prior | {"cells": [[3, 8.0]]}, "$.cells[0]"),
    ("too many cells", lambda prior: prior | {"cells": prior["cells"] * 1000}, "$.cells"),
]
for _at, _values in {
    0: [-1, 10**6, 1.5, "3", None],
    1: [0.0, -8.0, 1e300, math.nan],
    2: [0.0, -1.0, math.inf],
    3: [math.nan, -1e6, 1e6],
    4: [-1.0, math.inf],
    5: [-1.0],
    6: [math.nan],
    7: [-1.0, 1e9],
}.items():
    for _value in _values:

        def _spoil(prior: dict[str, Any], at: int = _at, value: object = _value) -> dict[str, Any]:
            prior["cells"][3][at] = value
            return prior

        WRONG.append((f"field {_at} is {_value}", _spoil, f"$.cells[3][{_at}]"))


@pytest.mark.parametrize(("spoil", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_malformed_prior_is_ignored_with_a_note(
    good: dict[str, Any], spoil: Callable[[dict[str, Any]], Any], said: str
) -> None:
    model = CostModel(SERVER, spoil(copy.deepcopy(good)))
    assert model.note.startswith("cost prior ignored: ")
    assert said in model.note
    assert len(model.note) < 300
    assert model.cells == 0
    assert model.predict(3, 8, 500.0)[1] == UNKNOWN_ERROR


@settings(max_examples=200, deadline=None)
@given(JSON)
@example({"version": 1, "fingerprint": "", "cells": [], "switches": {}})
def test_any_json_is_no_reason_to_fail(prior: object) -> None:
    model = CostModel(SERVER, prior)
    assert model.note.startswith("cost prior ignored: ") or prior is None
    assert model.predict(3, 8, 500.0)[1] == UNKNOWN_ERROR


FIELDS = st.tuples(
    st.sampled_from(STEPS) | st.integers(0, 4096),
    st.sampled_from([1.0, 8.0, 32.0, 128.0]) | st.floats(1e-3, 1e6),
    st.floats(1e-9, 1e9),
    st.floats(-50.0, 25.0),
    st.floats(0.0, 1e14),
    st.floats(0.0, 1e32),
    st.floats(-1e16, 1e16),
    st.floats(0.0, 100.0),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(FIELDS, max_size=8), st.floats(-1e9, 1e9), st.floats(0.0, 1e9))
def test_costs_that_pass_as_a_prior_leave_the_model_finite(
    cells: list[tuple[float, ...]], mean: float, deviation: float
) -> None:
    prior = CostModel(SERVER).to_prior()
    prior["cells"] = [list(cell) for cell in cells]
    prior["switches"] = {kind: [3.0, mean, deviation] for kind in ("up", "down", "other")}
    model = CostModel(SERVER, json.loads(json.dumps(prior)))
    server = Server(model, random.Random(0))
    for steps in STEPS:
        server.noisy(0.01, 8, steps=steps)
    seconds, error = model.predict_all(8, 500.0)
    assert np.isfinite(seconds).all()
    assert np.isfinite(error).all()
    assert np.isfinite(model.switch_seconds(0, 3)).all()
    again = CostModel(SERVER, model.to_prior())
    assert again.cells == model.cells, again.note


def test_cells_that_are_not_run_here_are_left_out(good: dict[str, Any]) -> None:
    prior = copy.deepcopy(good)
    prior["cells"][0][0] = 4  # no candidate
    prior["cells"][1][1] = 9.0  # no captured size
    prior["cells"][2] = prior["cells"][3]  # twice
    model = CostModel(SERVER, prior)
    assert model.cells == len(good["cells"]) - 3
    assert "3 more are" in model.note


# -- a good one --


@pytest.mark.parametrize("name", NAMED)
def test_a_stored_prior_is_right_from_the_first_step(name: str) -> None:
    surface = named(name)
    model = CostModel(SERVER, learned(surface))
    server = Server(model, random.Random(7))
    for step in range(0, 50, 10):
        for size in (1, 8, 32, 128):
            assert share_of_best(model, surface, size, CONTEXT) >= 0.95, step
        server.run(surface, 3, 8, CONTEXT, 10)


def test_what_is_stored_again_is_the_same_and_no_surer(good: dict[str, Any]) -> None:
    once = json.loads(json.dumps(CostModel(SERVER, good).to_prior()))
    twice = json.loads(json.dumps(CostModel(SERVER, once).to_prior()))
    for first, again, original in zip(once["cells"], twice["cells"], good["cells"], strict=True):
        assert again[:2] == first[:2] == original[:2]
        assert again[3:] == pytest.approx(original[3:])
        assert again[2] <= first[2] <= min(original[2], MEMORY)


def served(surface: Seconds, seed: int) -> CostModel:
    """A model after three loads, of its contexts and sizes each, on a server that is slower in the second."""
    server = Server(CostModel(SERVER), random.Random(seed))
    for low, high, scale in ((0, 8, 1.0), (6, 18, 1.15), (2, 20, 1.0)):
        server.scale = scale
        for _ in range(80):
            size = CAPTURED[server.rng.randrange(low, high)]
            for steps in server.rng.sample(STEPS, 3):
                server.run(surface, steps, size, server.rng.lognormvariate(math.log(CONTEXT), 0.5), 6)
    return server.model


def stored_again(model: CostModel) -> CostModel:
    return CostModel(SERVER, json.loads(json.dumps(model.to_prior())))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMED, *range(8)])
def test_what_is_stored_predicts_what_the_model_did(name: str | int) -> None:
    """Any K, size and context, tried or not: storing must not add an error that could change a choice."""
    surface = drawn(name) if isinstance(name, int) else named(name)
    model = served(surface, 5)
    new = stored_again(model)
    assert new.cells == model.cells
    added = [
        abs(math.log(new.predict(steps, size, context)[0] / model.predict(steps, size, context)[0]))
        for steps in STEPS
        for size in CAPTURED
        for context in (250.0, CONTEXT, 4000.0)
    ]
    assert float(np.quantile(added, 0.95)) < 0.015
    assert max(added) < 0.05


def test_a_level_in_doubt_takes_nothing_from_the_slope() -> None:
    """Records that a level counts for no more still tell the slope, and are counted with it."""
    model = served(named("h200-sglang"), 5)
    cells = {tuple(cell[:2]): cell for cell in model.to_prior()["cells"]}  # type: ignore[attr-defined]
    assert any(cell[2] < 0.5 * cell[8] for cell in cells.values())
    for (_, size), cell in cells.items():
        # Contexts are as they came: lognormal, of a deviation of 0.53 of their mean.
        assert math.sqrt(cell[5]) < 1.2 * cell[4], size


@pytest.mark.slow
def test_a_file_of_version_1_keeps_its_slopes() -> None:
    """It counted moments as the level's records, which were fewer: both too large, and their ratio right."""
    model = served(named("h200-sglang"), 5)
    new = json.loads(json.dumps(model.to_prior()))
    old = copy.deepcopy(new) | {"version": 1}
    for cell in old["cells"]:
        counted = cell.pop() / cell[2]
        cell[5:7] = cell[5] * counted, cell[6] * counted
    model, reread = CostModel(SERVER, new), CostModel(SERVER, old)
    assert reread.note == f"cost prior of {model.cells} cells"
    for steps in STEPS:
        for size in (4, 16, 48):
            for context in (500.0, CONTEXT, 2000.0):
                assert reread.predict(steps, size, context)[0] == pytest.approx(
                    model.predict(steps, size, context)[0], rel=0.04
                )


# -- a wrong one --

FACTORS = {
    "skipping looks cheap": (0.6, 0.9, 1.0, 1.2, 1.4, 1.6),
    "many drafts look cheap": (1.5, 1.3, 1.0, 0.8, 0.7, 0.6),
    "the best look twice as dear": (1.0, 1.0, 1.0, 2.0, 2.0, 1.0),
    "everything is 30 % slower": (0.7,) * 6,
}


def blocks(server: Server, surface: Seconds, size: int, steps: int) -> int:
    """Run what looks best, and each K in turn in a block of four every 20 steps; return the steps until it is right."""
    right_from = 0
    for step in range(0, steps, 20):
        looks_best = STEPS[best(server.model.predict_all(size, CONTEXT)[0].tolist())]
        server.run(surface, looks_best, size, CONTEXT, 16)
        server.run(surface, STEPS[step // 20 % len(STEPS)], size, CONTEXT, 4)
        if share_of_best(server.model, surface, size, CONTEXT) < 0.95:
            right_from = step + 20
    return right_from


@pytest.mark.parametrize("size", [1, 32, 128])
@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
def test_a_wrong_prior_is_left_once_each_k_was_tried(factors: tuple[float, ...], size: int) -> None:
    surface = named("h200-sglang")
    wrong = dict(zip(STEPS, factors, strict=True))
    for seed in range(3):
        prior = learned(lambda k, b, c: surface(k, b, c) * wrong[k], seed)
        server = Server(CostModel(SERVER, prior), random.Random(seed))
        assert blocks(server, surface, size, 600) <= 200, "the promise is 600"


def test_one_wrong_cell_makes_the_others_doubtful(good: dict[str, Any]) -> None:
    surface = named("h200-sglang")
    model = CostModel(SERVER, good)
    server = Server(model, random.Random(3))
    _, before = model.predict_all(32, CONTEXT)
    server.noisy(1.5 * surface(3, 32, CONTEXT), 6, steps=3, batch_size=32, mean_context=CONTEXT, outliers=0.0)
    seconds, after = model.predict_all(32, CONTEXT)
    assert seconds[STEPS.index(3)] == pytest.approx(1.5 * surface(3, 32, CONTEXT), rel=0.05)
    assert after[STEPS.index(1)] > 4.0 * before[STEPS.index(1)]
    agrees = CostModel(SERVER, good)
    Server(agrees, random.Random(3)).run(surface, 3, 32, CONTEXT, 30, outliers=0.0)
    assert agrees.predict_all(32, CONTEXT)[1][STEPS.index(1)] < 1.2 * before[STEPS.index(1)]
