"""The acceptance model against chains whose hazards are known, and against records made to mislead it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.policies.models.acceptance import AcceptanceModel
from specpilot.policies.models.acceptance_change import ALARM_RECORDS
from specpilot.policies.models.acceptance_evidence import (
    HALF_LIFE_STEPS,
    PRIOR_STRENGTH,
    RECORD_FLOOR,
    RECORD_SAMPLES,
    RECORD_SHARE,
)
from specpilot.policies.models.acceptance_prior import STORED_SAMPLES
from specpilot.sglang_hooks.wire import MASKED, StepRecord
from tests.support.messages import record

FALLING = (0.8, 0.75, 0.7, 0.66, 0.62, 0.6, 0.55)
LONG = 30_000


def length(hazards: Sequence[float], steps: int) -> float:
    return 1.0 + float(np.cumprod(hazards[:steps]).sum())


def step(accepted: Sequence[int], depth: int, context: int = 500, **changes: object) -> StepRecord:
    batch = len(accepted)
    facts = {"steps": depth, "draft_tokens": depth + 1, "batch_size": batch, "context_tokens": context * batch}
    return record(accepted_drafts=list(accepted), **(facts | changes))


def draw(
    rng: np.random.Generator, hazards: Sequence[float], batch: int, count: int, depth: int = 0, context: int = 500
) -> Iterator[StepRecord]:
    """``count`` records of ``batch`` requests, all drafts of which are accepted by ``hazards``."""
    depth = depth or len(hazards)
    passes = rng.random((count, batch, depth)) < np.asarray(hazards[:depth])
    for accepted in np.cumprod(passes, axis=2).sum(axis=2).tolist():
        yield step(accepted, depth, context)


def fed(model: AcceptanceModel, records: Iterator[StepRecord]) -> AcceptanceModel:
    for entry in records:
        model.learn(entry)
    return model


def pooled(model: AcceptanceModel) -> np.ndarray:
    return np.array([mean for mean, _, _ in model._pool.posterior()])


# -- what the trials are --

ROWS = st.lists(st.tuples(st.integers(MASKED, 7), st.booleans()), min_size=1, max_size=4)


@given(ROWS, st.integers(0, 7), st.integers(1, 7))
def test_trials_are_those_of_the_definition(rows: list[tuple[int, bool]], depth: int, max_steps: int) -> None:
    accepted = [min(count, depth) for count, _ in rows]
    ended = [row for row, (_, end) in enumerate(rows) if end and accepted[row] != MASKED]
    trials, passed = [0] * max_steps, [0] * max_steps
    for row, count in enumerate(accepted):
        for j in range(1, min(depth, max_steps) + 1):
            if j <= count:
                trials[j - 1] += 1
                passed[j - 1] += 1
            elif j == count + 1 and row not in ended and count != MASKED:
                trials[j - 1] += 1
    model = AcceptanceModel(max_steps)
    model.learn(step(accepted, depth, truncated=ended))
    # Up to four samples a fresh model takes at full weight.
    assert model.to_prior() == {"trials": trials, "passed": passed}


def requests(
    rng: np.random.Generator, hazards: Sequence[float], depths: Sequence[int], count: int
) -> Iterator[StepRecord]:
    """Requests of some 12 tokens each, that end within a run as SGLang's do, and a K that changes."""
    left = rng.geometric(1 / 12, 8)
    for depth in rng.choice(depths, count).tolist():
        runs = np.cumprod(rng.random((8, depth)) < np.asarray(hazards[:depth]), axis=1).sum(axis=1)
        ended = np.flatnonzero(runs + 1 >= left)
        accepted = runs.copy()
        accepted[ended] = left[ended] - 1
        left -= accepted + 1
        left[ended] = rng.geometric(1 / 12, len(ended))
        yield step(accepted.tolist(), depth, truncated=ended.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("depths", [(7,), (1, 3, 7), (0, 1, 1, 7)], ids=str)
def test_ends_of_requests_and_changes_of_k_do_not_bias(depths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    found = [fed(AcceptanceModel(7), requests(rng, FALLING, depths, 400)).hazard(8, 500.0) for _ in range(60)]
    error = np.mean(found, axis=0) - FALLING
    # 60 repetitions; the prior may pull deep positions, which have some 20 trials, a little.
    assert np.abs(error[:3]).max() < 0.012
    assert np.abs(error).max() < 0.04


def test_masked_rows_and_skipped_steps_say_nothing() -> None:
    plain, noisy = AcceptanceModel(3), AcceptanceModel(3)
    for entry in draw(np.random.default_rng(2), FALLING, 6, 200, depth=3):
        plain.learn(entry)
        noisy.learn(step([0] * 6, 0))
        noisy.learn(step([MASKED] * 6, 3))
        noisy.learn(step([MASKED, *entry.accepted_drafts, MASKED], 3))
    assert noisy.lengths(6, 500.0)[0] == pytest.approx(plain.lengths(6, 500.0)[0], abs=0.0)
    assert noisy.samples == plain.samples


def test_asking_changes_nothing_and_equal_records_give_equal_models() -> None:
    asked, silent = AcceptanceModel(7), AcceptanceModel(7)
    for entry in draw(np.random.default_rng(3), FALLING, 8, 300):
        asked.learn(entry)
        asked.lengths(8, 500.0)
        assert not asked.drafter_broken
        silent.learn(entry)
    for mine, other in zip(asked.lengths(8, 500.0), silent.lengths(8, 500.0), strict=True):
        assert mine.tolist() == other.tolist()


# -- estimates and intervals --


@pytest.mark.parametrize("hazards", [FALLING, (0.5, 0.9, 0.4, 0.8), (0.95,) * 7, (0.1,) * 3], ids=str)
def test_hazards_are_found(hazards: tuple[float, ...]) -> None:
    model = fed(AcceptanceModel(len(hazards)), draw(np.random.default_rng(4), hazards, 64, 400))
    reached = np.cumprod((1.0, *hazards[:-1])) > 0.05
    assert np.abs(model.hazard(64, 500.0) - hazards)[reached].max() < 0.07
    for steps in range(len(hazards) + 1):
        assert model.expected_length(steps, 64, 500.0) == pytest.approx(length(hazards, steps), rel=0.05)


CHAINS = {"falling": FALLING, "good": (0.95,) * 7, "poor": (0.15, 0.1) + (0.1,) * 5}


@pytest.mark.slow
@pytest.mark.parametrize("hazards", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize(
    ("batch", "count", "depth", "steps"),
    [(1, 40, 3, 3), (1, 600, 3, 3), (8, 60, 7, 7), (64, 60, 3, 1), (256, 20, 3, 3), (16, 60, 1, 3), (16, 60, 1, 7)],
)
def test_intervals_cover(hazards: tuple[float, ...], batch: int, count: int, depth: int, steps: int) -> None:
    rng = np.random.default_rng(5)
    truth, covered, repetitions = length(hazards, steps), 0, 300 if batch * count < 1000 else 200
    for _ in range(repetitions):
        model = fed(AcceptanceModel(7), draw(rng, hazards, batch, count, depth))
        low, high = model.interval(steps, batch, 500.0)
        assert 1.0 <= low <= model.expected_length(steps, batch, 500.0) <= high <= 1 + steps
        covered += low <= truth <= high
    assert covered / repetitions >= 0.93


def test_what_was_never_tried_is_wide() -> None:
    low, high = AcceptanceModel(7).interval(3, 8, 500.0)
    assert (low, high) == (pytest.approx(1.0, abs=0.05), pytest.approx(3.27, abs=0.05))
    shallow = fed(AcceptanceModel(3), draw(np.random.default_rng(6), FALLING, 16, 200, depth=1))
    deep = fed(AcceptanceModel(3), draw(np.random.default_rng(6), FALLING, 16, 200, depth=3))
    _, lows, highs = (bounds.tolist() for bounds in shallow.lengths(16, 500.0))
    assert highs[1] - lows[1] < 0.2
    assert highs[3] - lows[3] > 1.0 > 4 * np.diff(deep.interval(3, 16, 500.0))[0]
    assert shallow.interval(3, 16, 500.0, 0.8)[1] < highs[3]


def test_deep_positions_are_remembered_while_k_is_small() -> None:
    rng = np.random.default_rng(19)
    model = fed(AcceptanceModel(3), draw(rng, (0.8, 0.4, 0.9), 16, 200))
    fed(model, draw(rng, (0.8, 0.4, 0.9), 16, 200, depth=1))  # six half-lives
    assert model.hazard(16, 500.0) == pytest.approx([0.8, 0.4, 0.9], abs=0.07)
    assert np.diff(model.interval(3, 16, 500.0)) < 0.4
    fed(model, draw(rng, (0.8, 0.4, 0.9), 16, 2000, depth=1))  # for all it knows, they have changed since
    assert model.hazard(16, 500.0)[1] > 0.6


def test_easy_and_hard_requests_give_the_pools_length() -> None:
    rng = np.random.default_rng(7)
    easy, hard = 0.9, 0.3
    truth = (length((easy,) * 3, 3) + length((hard,) * 3, 3)) / 2
    model = AcceptanceModel(3)
    per_row = np.where(np.arange(16) % 2, easy, hard)[None, :, None]
    for accepted in np.cumprod(rng.random((500, 16, 3)) < per_row, axis=2).sum(axis=2).tolist():
        model.learn(step(accepted, 3))
    assert model.expected_length(3, 16, 500.0) == pytest.approx(truth, abs=0.1)
    # Drafts of easy requests survive: deeper hazards are higher.
    assert model.hazard(16, 500.0)[2] > model.hazard(16, 500.0)[0] + 0.15
    assert model.changes == 0


@pytest.mark.parametrize("batch", [2, 16, 64])
def test_a_mixed_batch_has_the_populations_length_within_the_interval(batch: int) -> None:
    rng = np.random.default_rng(22)
    hazards = np.where(np.arange(batch) % 2, 0.9, 0.3)[None, :, None]
    truth, covered = (length((0.9,) * 3, 3) + length((0.3,) * 3, 3)) / 2, []
    for _ in range(60):
        model = AcceptanceModel(3)
        for accepted in np.cumprod(rng.random((150, batch, 3)) < hazards, axis=2).sum(axis=2).tolist():
            model.learn(step(accepted, 3))
        low, high = model.interval(3, batch, 500.0)
        covered.append(low <= truth <= high)
    assert np.mean(covered) >= 0.9


class Load:
    """Requests of 200 to 500 tokens, each with an acceptance of its own, that come as others end."""

    def __init__(self, rng: np.random.Generator, batch: int, mean: float, deviation: float) -> None:
        self.rng, self.batch = rng, batch
        samples = mean * (1.0 - mean) / deviation**2 - 1.0
        self.shape = mean * samples, (1.0 - mean) * samples
        self.acceptance = self.draw(batch)
        self.left = rng.integers(1, 500, batch)

    def draw(self, count: int) -> np.ndarray:
        return self.rng.beta(*self.shape, count)

    def records(self, count: int, depth: int) -> Iterator[StepRecord]:
        for _ in range(count):
            runs = self.rng.random((self.batch, depth)) < self.acceptance[:, None]
            accepted = np.cumprod(runs, axis=1).sum(axis=1)
            ended = np.flatnonzero(accepted + 1 >= self.left)
            accepted[ended] = self.left[ended] - 1
            self.left -= accepted + 1
            self.acceptance[ended] = self.draw(len(ended))
            self.left[ended] = self.rng.integers(200, 501, len(ended))
            yield step(accepted.tolist(), depth, truncated=ended.tolist())

    def truth(self, depth: int) -> float:
        """Tokens per step: what a request takes more steps for counts for more of them."""
        lengths = np.array([length((acceptance,) * depth, depth) for acceptance in self.draw(20_000)])
        return float(1.0 / np.mean(1.0 / lengths))


@pytest.mark.parametrize("deviation", [0.1, 0.15])
@pytest.mark.parametrize("batch", [8, 64])
def test_requests_of_their_own_acceptance_bias_nothing_and_alarm_nobody(batch: int, deviation: float) -> None:
    load = Load(np.random.default_rng(23), batch, 0.7, deviation)
    model, estimates = AcceptanceModel(3), []
    for at, entry in enumerate(load.records(5000, 3)):
        model.learn(entry)
        if at > 500 and at % 50 == 0:
            estimates.append(model.expected_length(3, batch, 500.0))
    assert np.mean(estimates) == pytest.approx(load.truth(3), rel=0.03)
    assert model.changes == 0, "at most one in 20,000 steps"


# -- changes --


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.4), (0.4, 0.8)])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("batch", "bound"), [(1, 250), (8, 30), (64, 10)])
def test_a_sudden_change_is_found(batch: int, bound: int, depth: int, before: float, after: float) -> None:
    rng = np.random.default_rng(8)
    delays = []
    for _ in range(15):
        model = fed(AcceptanceModel(3), draw(rng, (before,) * depth, batch, 1000 if batch == 1 else 150))
        assert model.changes == 0
        for delay, entry in enumerate(draw(rng, (after,) * depth, batch, 1000), start=1):  # noqa: B007
            model.learn(entry)
            if model.changes:
                break
        delays.append(delay)
        assert model.change_seq == entry.record_seq
        # The estimate moves over at once, and is less sure of itself.
        assert model.hazard(batch, 500.0)[0] == pytest.approx(after, abs=0.2)
        assert model.samples < 100
    assert median(delays) <= bound


@pytest.mark.parametrize("depth", [3, 5])
@pytest.mark.parametrize(
    ("batch", "before", "after", "bound"),
    [
        (1, 0.9, 0.3, 40),
        (8, 0.9, 0.3, 15),
        (64, 0.9, 0.3, 15),
        (1, 0.3, 0.9, 45),
        (4, 0.3, 0.9, 20),
        (64, 0.3, 0.9, 20),
    ],
)
def test_estimates_follow_a_collapse_and_a_recovery(
    batch: int, before: float, after: float, bound: int, depth: int
) -> None:
    """p90 of the steps, or probe steps between skipped ones, until three quarters of the change are seen."""
    rng = np.random.default_rng(24)
    start, end = length((before,) * depth, depth), length((after,) * depth, depth)
    delays = []
    for _ in range(30):
        model = fed(AcceptanceModel(7), draw(rng, (before,) * depth, batch, 1000 if batch == 1 else 200))
        for delay, entry in enumerate(draw(rng, (after,) * depth, batch, 400), start=1):  # noqa: B007
            model.learn(entry)
            if after > before:
                fed(model, iter([step([0] * batch, 0)] * 5))
            if abs(model.expected_length(depth, batch, 500.0) - end) < 0.25 * abs(start - end):
                break
        delays.append(delay)
    assert np.quantile(delays, 0.9) <= bound


@pytest.mark.parametrize(("batch", "count"), [(1, 400), (64, 60)])
@pytest.mark.parametrize(("before", "after"), [(0.8, 0.65), (0.8, 0.4), (0.3, 0.8)])
def test_any_change_is_tracked(batch: int, count: int, before: float, after: float) -> None:
    rng = np.random.default_rng(9)
    error = []
    for _ in range(20):
        model = fed(AcceptanceModel(3), draw(rng, (before,) * 3, batch, 600))
        fed(model, draw(rng, (after,) * 3, batch, count))
        error.append(model.expected_length(3, batch, 500.0) - length((after,) * 3, 3))
    assert abs(np.mean(error)) < 0.35 * abs(length((before,) * 3, 3) - length((after,) * 3, 3))


@pytest.mark.parametrize("hazards", [(0.8, 0.8, 0.8), (0.4, 0.4, 0.4), (0.95, 0.5, 0.7), (0.03, 0.5, 0.5)], ids=str)
def test_false_alarms_are_rare(hazards: tuple[float, ...]) -> None:
    rng = np.random.default_rng(10)
    samples = 0
    model = AcceptanceModel(3)
    for _ in range(30):
        fed(model, draw(rng, hazards, 16, 400))
        samples += 16 * 400
    assert model.changes <= samples / 20_000
    assert model.changes == 0  # in truth far fewer


@pytest.mark.parametrize("count", [0, 7])
def test_fewer_than_four_records_raise_no_alarm(count: int) -> None:
    model = fed(AcceptanceModel(7), draw(np.random.default_rng(11), (0.5,) * 7, 256, 200))
    for _ in range(ALARM_RECORDS - 1):
        model.learn(step([count] * 256, 7))
    assert model.changes == 0
    model.learn(step([count] * 256, 7))
    assert model.changes == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 300), st.sampled_from([0, 3]), st.floats(0.05, 0.95))
def test_a_record_moves_no_hazard_far(seed: int, count: int, batch: int, accepted: int, hazard: float) -> None:
    model = fed(AcceptanceModel(3), draw(np.random.default_rng(seed), (hazard,) * 3, 16, count))
    before, known = pooled(model), np.array(model._pool.trials)
    model.learn(step([accepted] * batch, 3))
    keep = 0.5 ** (1 / HALF_LIFE_STEPS)
    counted = np.minimum(np.minimum(RECORD_SAMPLES, RECORD_FLOOR + RECORD_SHARE * known), batch)
    own = counted / (counted + PRIOR_STRENGTH + keep * known) + 0.25 * (1 - keep)
    moved = np.abs(pooled(model) - before)
    chained = 0.0
    for bound, moves, samples in zip(own, moved, known, strict=True):
        chained = bound + chained * PRIOR_STRENGTH / (PRIOR_STRENGTH + samples * keep)
        assert moves <= chained
    assert moved[0] <= 0.5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), batch=st.sampled_from([2, 8, 32, 128]), good=st.booleans(), own=st.floats(0.2, 0.8))
def test_a_client_counts_for_its_share_of_the_rows(seed: int, batch: int, good: bool, own: float) -> None:
    """One row in every step accepts all or nothing: the others' hazard moves by no more than that row's share."""
    rng = np.random.default_rng(seed)
    plain, led = AcceptanceModel(1), AcceptanceModel(1)
    for entry in draw(rng, (own,), batch, 300):
        plain.learn(entry)
        led.learn(step([int(good), *entry.accepted_drafts[1:]], 1))
    assert abs(led.hazard(batch, 500.0)[0] - plain.hazard(batch, 500.0)[0]) <= 1.5 / batch
    assert batch < 8 or led.changes == 0


@settings(max_examples=15, deadline=None)
@given(asked_at=st.sets(st.integers(0, 400), max_size=20), seed=st.integers(0, 2**32))
def test_however_records_come_and_whenever_somebody_asks_the_model_is_the_same(asked_at: set[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    records = [*draw(rng, FALLING, 8, 200), *draw(rng, (0.2,) * 7, 8, 100), *draw(rng, FALLING, 40, 100, 3, LONG)]
    asked, silent = AcceptanceModel(7), AcceptanceModel(7)
    for at, entry in enumerate(records):
        asked.learn(entry)
        silent.learn(entry)
        if at in asked_at:
            asked.lengths(8, 500.0)
            asked.hazard(40, LONG)
            asked.to_prior()
            assert not asked.drafter_broken
    assert asked.to_prior() == silent.to_prior()
    assert (asked.changes, asked.change_seq) == (silent.changes, silent.change_seq)
    np.testing.assert_array_equal(asked.lengths(40, LONG), silent.lengths(40, LONG))


def test_a_tree_counts_its_accepted_path() -> None:
    """Top-k 4, K = 3, 16 tokens verified: the fourth draft of a path of three was never tried."""
    model = AcceptanceModel(5, topk=4)
    for _ in range(50):
        model.learn(step([3] * 8, 3, draft_tokens=16))
    assert model.hazard(8, 500.0)[:3] == pytest.approx([0.99] * 3, abs=0.02)
    assert model.to_prior()["trials"][3:] == [0.0, 0.0]


# -- bands --


def test_bands_of_one_acceptance_are_the_pool() -> None:
    rng = np.random.default_rng(12)
    model, batches, contexts = AcceptanceModel(3), (2, 16, 48), (500, 3000, 9000, LONG)
    for _ in range(400):
        for batch in batches:
            for context in contexts:
                fed(model, draw(rng, FALLING, batch, 1, 3, context))
    for batch in batches:
        for context in contexts:
            assert model.hazard(batch, context) == pytest.approx(pooled(model), abs=0.02)
    assert model.hazard(300, 500.0).tolist() == model.hazard(48, 500.0).tolist()


def test_a_band_that_differs_is_told_apart_and_its_visits_are_no_changes() -> None:
    rng = np.random.default_rng(13)
    model = AcceptanceModel(3)
    for _ in range(6):
        fed(model, draw(rng, (0.8,) * 3, 16, 100, 3, 500))
        fed(model, draw(rng, (0.4,) * 3, 16, 100, 3, LONG))
    assert model.expected_length(3, 16, 500.0) == pytest.approx(length((0.8,) * 3, 3), rel=0.08)
    # After its own visit the pool has come so near that the test does not tell the two apart.
    assert model.expected_length(3, 16, LONG) == pytest.approx(length((0.4,) * 3, 3), rel=0.12)
    assert model.interval(3, 16, 500.0)[0] > model.interval(3, 16, LONG)[1]
    assert model.changes == 0


def test_bands_that_went_with_the_pool_follow_its_change() -> None:
    rng = np.random.default_rng(14)
    model = AcceptanceModel(3)
    for _ in range(100):
        for context in (500, 3000):
            fed(model, draw(rng, (0.8,) * 3, 16, 1, 3, context))
        fed(model, draw(rng, (0.3,) * 3, 16, 1, 3, LONG))
    fed(model, draw(rng, (0.8,) * 3, 16, 100, 3, 500))
    apart = model.expected_length(3, 16, LONG)
    fed(model, draw(rng, (0.4,) * 3, 16, 40, 3, 500))
    assert model.changes == 1
    assert model.expected_length(3, 16, 3000.0) == pytest.approx(length((0.4,) * 3, 3), rel=0.15)
    assert model.expected_length(3, 16, LONG) == pytest.approx(apart, abs=0.2)


def test_a_change_of_a_band_apart_is_its_own() -> None:
    rng = np.random.default_rng(20)
    model = AcceptanceModel(3)
    for _ in range(100):
        fed(model, draw(rng, (0.8,) * 3, 16, 3, 3, 500))
        fed(model, draw(rng, (0.3,) * 3, 16, 1, 3, LONG))
    before = pooled(model)
    for entry in draw(rng, (0.95,) * 3, 16, 100, 3, LONG):
        model.learn(entry)
        if model.changes:
            break
    assert model.changes == 1
    assert pooled(model) == pytest.approx(before, abs=0.1)
    assert model.samples > 500
    assert model.hazard(16, LONG)[0] == pytest.approx(0.95, abs=0.1)
    assert model.hazard(16, 500.0)[0] == pytest.approx(0.8, abs=0.05)


def test_a_band_half_apart_is_unsure_between_the_two() -> None:
    rng = np.random.default_rng(21)
    model = fed(AcceptanceModel(1), draw(rng, (0.8,), 16, 200, 1, 500))
    pool, covered, half = 1.8, [], []
    for entry in draw(rng, (0.45,), 4, 120, 1, LONG):
        model.learn(entry)
        low, high = model.interval(1, 4, LONG)
        if 1.55 < model.expected_length(1, 4, LONG) < 1.7:
            half.append(high - low)
            covered.append(low < 1.45 and high > pool - 0.05)
    assert half
    assert all(covered)
    assert min(half) > 1.5 * (high - low)


# -- a drafter that does not work, and what is kept for the next start --


@pytest.mark.parametrize("batch", [1, 16])
def test_a_broken_drafter_is_seen_and_may_recover(batch: int) -> None:
    rng = np.random.default_rng(15)
    model = AcceptanceModel(3)
    fed(model, draw(rng, (0.0, 0.5, 0.5), batch, 180 // batch))
    assert not model.drafter_broken  # too few samples
    fed(model, draw(rng, (0.01, 0.5, 0.5), batch, 500))
    assert model.drafter_broken
    fed(model, draw(rng, (0.6, 0.5, 0.5), batch, 100))
    assert not model.drafter_broken


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_drafter_that_breaks_is_seen_within_400_samples_and_seen_to_be_mended(batch: int) -> None:
    rng = np.random.default_rng(25)
    model = fed(AcceptanceModel(3), draw(rng, (0.8,) * 3, batch, 500))
    samples = 0
    for entry in draw(rng, (0.0, 0.5, 0.5), batch, 1000):
        model.learn(entry)
        samples += min(batch, 32)  # as many count
        if model.drafter_broken:
            break
    assert model.drafter_broken
    assert samples <= 400
    fed(model, draw(rng, (0.8,) * 3, batch, max(40 // batch, 4)))
    assert not model.drafter_broken


@pytest.mark.parametrize("hazard", [0.08, 0.2])
def test_a_poor_drafter_is_not_broken(hazard: float) -> None:
    assert not fed(AcceptanceModel(3), draw(np.random.default_rng(16), (hazard,) * 3, 16, 300)).drafter_broken


def test_a_prior_is_worth_a_few_samples() -> None:
    old = fed(AcceptanceModel(3), draw(np.random.default_rng(17), FALLING, 16, 300, depth=3))
    prior = json.loads(json.dumps(old.to_prior()))
    model = AcceptanceModel.from_prior(prior)
    assert model.samples == pytest.approx(STORED_SAMPLES)
    assert model.expected_length(3, 16, 500.0) == pytest.approx(old.expected_length(3, 16, 500.0), rel=0.1)
    assert np.diff(model.interval(3, 16, 500.0)) > 3 * np.diff(old.interval(3, 16, 500.0))
    fed(model, draw(np.random.default_rng(18), (0.2,) * 3, 16, 60))
    assert model.expected_length(3, 16, 500.0) == pytest.approx(length((0.2,) * 3, 3), abs=0.15)
    assert len(AcceptanceModel.from_prior(prior, 7).hazard(1, 0.0)) == 7
    assert len(AcceptanceModel.from_prior(prior, 1).hazard(1, 0.0)) == 1
    heavy = {"trials": [1e9], "passed": [1e9]}
    assert AcceptanceModel.from_prior(heavy).samples == STORED_SAMPLES


@pytest.mark.parametrize(("before", "after"), [(0.3, 0.8), (0.85, 0.4)])
@pytest.mark.parametrize(("batch", "count"), [(1, 40), (8, 8), (64, 6)])
def test_a_wrong_prior_goes_at_every_position_though_one_tells(
    batch: int, count: int, before: float, after: float
) -> None:
    """Also at those beyond a small K: else K climbs one position at a time."""
    old = fed(AcceptanceModel(7), draw(np.random.default_rng(3), (before,) * 7, 16, 400)).to_prior()
    found = []
    for seed in range(20):
        model = AcceptanceModel.from_prior(old)
        fed(model, draw(np.random.default_rng(seed), (after,) * 2, batch, count))
        found.append(model.hazard(batch, 500.0))
        assert model.changes <= 1
    assert np.mean(found, axis=0) == pytest.approx(np.full(7, after), abs=0.13)


@pytest.mark.parametrize("deviation", [0.0, 0.15])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_right_prior_is_kept_and_tells_more_than_none(batch: int, deviation: float) -> None:
    """Also where each request has an acceptance of its own."""

    def drawn(seed: int, count: int) -> Iterator[StepRecord]:
        rng = np.random.default_rng(seed)
        return Load(rng, batch, 0.7, deviation).records(count, 3) if deviation else draw(rng, (0.7,) * 3, batch, count)

    old = fed(AcceptanceModel(3), drawn(1000, 5000))
    truth = Load(np.random.default_rng(1), 1, 0.7, deviation).truth(3) if deviation else length((0.7,) * 3, 3)
    errors: dict[str, list[float]] = {"prior": [], "none": []}
    dropped = 0
    for seed in range(40):
        models = {"prior": AcceptanceModel.from_prior(old.to_prior()), "none": AcceptanceModel(3)}
        for number, entry in enumerate(drawn(seed, 80)):
            for name, model in models.items():
                model.learn(entry)
                if number < 20:
                    errors[name].append((model.expected_length(3, batch, 500.0) - truth) ** 2)
        dropped += models["prior"].changes
    assert np.mean(errors["prior"]) < np.mean(errors["none"])
    # A request that is unlike the others is another acceptance as long as it lasts.
    assert deviation or dropped <= 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(JSON | st.fixed_dictionaries({"trials": JSON, "passed": JSON}), st.none() | st.integers(-1, 9))
def test_any_json_is_a_prior_or_a_value_error(prior: object, max_steps: int | None) -> None:
    try:
        model = AcceptanceModel.from_prior(prior, max_steps)
    except ValueError:
        return
    assert np.isfinite(model.lengths(1, 0.0)).all()


@pytest.mark.parametrize(
    "prior",
    [
        {},
        None,
        [[1.0], [0.5]],
        {"trials": [1.0], "passed": []},
        {"trials": [], "passed": []},
        {"trials": [1.0], "passed": [2.0]},
        {"trials": [np.nan], "passed": [0.0]},
        {"trials": [np.inf], "passed": [0.0]},
        {"trials": ["1"], "passed": [0.0]},
        {"trials": [1.0] * 10_000, "passed": [0.0] * 10_000},
    ],
    ids=str,
)
def test_a_prior_that_makes_no_sense_is_refused(prior: object) -> None:
    with pytest.raises(ValueError, match=r"prior|max_steps"):
        AcceptanceModel.from_prior(prior)


@pytest.mark.parametrize(("before", "after"), [(0.3, 0.9), (0.9, 0.3)])
def test_a_change_reaches_every_band_that_went_with_the_pool(before: float, after: float) -> None:
    """A batch whose mean context swings over a band's edge: what the other band knew is of before, too."""
    rng = np.random.default_rng(1)
    model = AcceptanceModel(7)

    def both(hazard: float, count: int) -> None:
        low, high = (draw(rng, [hazard] * 7, 64, count, context=context) for context in (500, 1100))
        for pair in zip(low, high, strict=True):
            for entry in pair:
                model.learn(entry)

    both(before, 100)
    both(after, 10)
    for context in (500.0, 1100.0, 5000.0):
        assert model.hazard(64, context)[:2] == pytest.approx([after] * 2, abs=0.08)
        assert model.hazard(2, context)[:2] == pytest.approx([after] * 2, abs=0.08)


def test_what_a_band_knew_of_its_own_gets_old_while_others_are_seen() -> None:
    rng = np.random.default_rng(2)
    model = fed(AcceptanceModel(3), draw(rng, [0.4] * 3, 8, 300, context=20_000))
    fed(model, draw(rng, [0.8] * 3, 8, 300))
    assert model.hazard(8, 20_000.0)[0] == pytest.approx(0.4, abs=0.06)
    fed(model, draw(rng, [0.8] * 3, 8, 20_000))
    assert model.hazard(8, 20_000.0)[0] == pytest.approx(0.8, abs=0.06)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(0.1, 0.95), min_size=1, max_size=7), st.integers(1, 200))
def test_lengths_together_say_what_each_says_alone(seed: int, hazards: list[float], count: int) -> None:
    rng = np.random.default_rng(seed)
    model = fed(AcceptanceModel(len(hazards)), draw(rng, hazards, 4, count))
    lengths, covariance = model.lengths_together(4, 500.0)
    means, low, high = model.lengths(4, 500.0)
    np.testing.assert_allclose(lengths, means, rtol=1e-9)
    errors = np.sqrt(covariance.diagonal()) * lengths
    # The interval there is the wider of two; this is the symmetric one.
    assert np.all(errors * 2 * 1.9 <= (high - low) + 0.05)
    assert np.linalg.eigvalsh(covariance).min() >= -1e-9


def test_the_ratio_of_two_lengths_is_known_as_well_as_sampling_says() -> None:
    """Against hazards drawn from their posteriors, position by position."""
    rng = np.random.default_rng(3)
    model = fed(AcceptanceModel(5), draw(rng, [0.8, 0.75, 0.7, 0.7, 0.7], 4, 60))
    _, covariance = model.lengths_together(4, 500.0)
    hazards = model._hazards(4, 500.0)
    draws, before = [], np.zeros(100_000)
    for mean, variance, chain in hazards:
        before = rng.normal(0.0, np.sqrt(variance), len(before)) + chain * before
        draws.append(np.clip(mean + before, 0.01, 0.99))
    sampled = 1.0 + np.cumsum(np.cumprod(draws, axis=0), axis=0)
    of_ratio = np.sqrt(covariance[5, 5] + covariance[3, 3] - 2.0 * covariance[5, 3])
    assert np.std(np.log(sampled[4] / sampled[2])) == pytest.approx(of_ratio, rel=0.1)
    assert of_ratio < 0.7 * np.sqrt(covariance[5, 5])
