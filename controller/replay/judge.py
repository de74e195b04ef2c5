"""What a run was worth: every decode step held against the true costs and the true acceptance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot.controller.simulation.gpu import Decode
from specpilot.controller.simulation.surface import ContextSurface, DriftingSurface

SKIPPED_STEPS = 2000
"""Steps at the start of a run from which no share is taken."""
WINDOW_STEPS = 200
CHOOSE_WINDOW_STEPS = 50
GOOD_SHARE = 0.95
"""Share of the best K's tokens from which on a policy counts as right."""


@dataclass(frozen=True)
class JudgedSteps:
    """Every decode step of a run, judged by the truth; arrays with one entry a step."""

    at: npt.NDArray[np.float64]
    """Seconds since the start of the server, at the launch."""
    batch: npt.NDArray[np.int64]
    context: npt.NDArray[np.float64]
    """Mean context, in tokens per request."""
    acceptance: npt.NDArray[np.float64]
    """Acceptance of the workload's text at the time."""
    steps: npt.NDArray[np.int64]
    """The K that was applied."""
    explored: npt.NDArray[np.bool_]
    """Did the exploration draw another K than the table held?"""
    expected: npt.NDArray[np.float64]
    """Tokens to expect of the applied K."""
    best: npt.NDArray[np.float64]
    """Tokens to expect in the step's time at the goodput of the state's best K."""
    seconds: npt.NDArray[np.float64]
    """Seconds that the step took."""
    lost_seconds: npt.NDArray[np.float64]
    """Seconds of an explored step beyond those in which the held K makes as many tokens; they may be below 0."""
    held_share: npt.NDArray[np.float64]
    """Goodput of the held K over that of the state's best: what the table chose, whatever was explored."""
    goodput: dict[int, npt.NDArray[np.float64]]
    """Tokens per second to expect of each K in the step's state."""

    @staticmethod
    def of(decodes: Sequence[Decode], surface: ContextSurface | DriftingSurface) -> JudgedSteps:
        """Judge against every K of ``surface``, the speculating one also for a server without speculation."""
        *columns, own = zip(*decodes, strict=True)
        at, steps, held, batch, context, acceptance, seconds = map(np.array, columns)
        positions = np.arange(max(surface.steps) + 1)[:, None]
        passing = batch * acceptance**positions
        for index in (index for index, acceptances in enumerate(own) if acceptances):
            passing[:, index] = (np.array(own[index]) ** positions).sum(axis=1)
        tokens = passing.cumsum(axis=0)[list(surface.steps)]
        goodput = [
            made / surface.decode_seconds_of(k, batch, context, at)
            for k, made in zip(surface.steps, tokens, strict=True)
        ]
        expected = np.select([steps == k for k in surface.steps], list(tokens), np.nan)
        explored = steps != held
        of_held = np.select([held == k for k in surface.steps], goodput, np.nan)
        of_best = np.max(goodput, axis=0)
        return JudgedSteps(
            at=at,
            batch=batch,
            context=context,
            acceptance=acceptance,
            steps=steps,
            explored=explored,
            expected=expected,
            best=seconds * of_best,
            seconds=seconds,
            lost_seconds=np.where(explored, seconds - expected / of_held, 0.0),
            held_share=of_held / of_best,
            goodput=dict(zip(surface.steps, goodput, strict=True)),
        )

    def between(self, begin: int, end: int | None = None) -> JudgedSteps:
        """Return the steps from ``begin`` up to ``end``."""
        part = slice(begin, end)
        goodput = {k: values[part] for k, values in self.goodput.items()}
        arrays = {name: values[part] for name, values in vars(self).items() if name != "goodput"}
        return JudgedSteps(**arrays, goodput=goodput)

    def settled(self) -> JudgedSteps:
        """Return the steps that figures are taken from: without the first 2,000, or a tenth of fewer."""
        return self.between(SKIPPED_STEPS if len(self.steps) > SKIPPED_STEPS else len(self.steps) // 10)

    def reference_share(self) -> float:
        """Return expected tokens over those of the best K, of the settled steps."""
        settled = self.settled()
        return float(settled.expected.sum() / settled.best.sum())

    def regret_seconds(self) -> npt.NDArray[np.float64]:
        """Return the time lost up to each step: beyond that in which the best K makes as many tokens."""
        return np.asarray(np.cumsum(self.seconds * (1.0 - self.expected / self.best)), np.float64)

    def switches_per_100_steps(self) -> tuple[float, float]:
        """Return changes of K, and those of them into or out of an explored step."""
        switched = self.steps[1:] != self.steps[:-1]
        probing = switched & (self.explored[1:] | self.explored[:-1])
        return 100.0 * int(switched.sum()) / len(self.steps), 100.0 * int(probing.sum()) / len(self.steps)

    def exploration_loss(self) -> float:
        """Return the share of all decoding time that exploration cost."""
        return float(self.lost_seconds.sum() / self.seconds.sum())

    def steps_to_95(self) -> int | None:
        """Return the steps until the share of the best K is 0.95 to stay, exploration counted.

        The first step that is so good itself, and from which on every stretch of 200 steps that
        begins within 200 steps is: 0 for a policy that is right at once. None if there is none, or
        fewer than 399 steps after it.
        """
        return first_good(self.expected, self.best, WINDOW_STEPS, WINDOW_STEPS)

    def steps_to_choose(self, begin: int, end: int | None = None) -> int | None:
        """Return the steps from ``begin`` until the held K is within 5 % of the best to stay.

        The first step at which it is, and from which on it is on the average of each stretch of 50
        steps that begins within 50 steps. What exploration draws has no part in it: a probe neither
        answers a change nor undoes an answer. None if there is none before ``end``.
        """
        share = self.held_share[begin:end]
        return first_good(share, np.ones(len(share)), CHOOSE_WINDOW_STEPS, CHOOSE_WINDOW_STEPS)


def first_good(got: npt.NDArray[np.float64], best: npt.NDArray[np.float64], window: int, lasting: int) -> int | None:
    """Return the first step with 0.95 of ``best``, from which on each of ``lasting`` windows in a row has it.

    >>> first_good(np.array([1.0, 0.5, 1.0, 1.0, 1.0, 1.0]), np.ones(6), window=2, lasting=3)
    2
    """
    if len(got) < window + lasting - 1:
        return None
    ones = np.ones(window)
    share = np.convolve(got, ones, "valid") / np.convolve(best, ones, "valid")
    lasts = np.convolve(share >= GOOD_SHARE, np.ones(lasting), "valid").round() == lasting
    good = lasts & (got[: len(lasts)] >= GOOD_SHARE * best[: len(lasts)])
    return int(good.argmax()) if good.any() else None


# -- small enough to draw --

REGRET_POINTS = 200
COURSE_PARTS = 300


@dataclass(frozen=True)
class Regret:
    """The time lost so far, at some 200 of a run's steps."""

    steps: npt.NDArray[np.int64]
    """Steps taken, rising."""
    lost_seconds: npt.NDArray[np.float64]

    @staticmethod
    def of(judged: JudgedSteps) -> Regret:
        """Take steps at even distances, and the last one."""
        places = np.unique(np.linspace(0, len(judged.steps) - 1, REGRET_POINTS).round().astype(np.int64))
        return Regret(places + 1, judged.regret_seconds()[places])


@dataclass(frozen=True)
class Course:
    """A run over time: one entry for each of 300 parts of it that had a decode step."""

    at: npt.NDArray[np.float64]
    """Seconds since the start of the server, of a part's first step."""
    acceptance: npt.NDArray[np.float64]
    batch: npt.NDArray[np.float64]
    """Mean batch size."""
    steps: npt.NDArray[np.int64]
    """The K applied most often."""
    best_steps: npt.NDArray[np.int64]
    """The K that was the best one most often."""

    @staticmethod
    def of(judged: JudgedSteps) -> Course:
        """Divide the time from the first to the last step into even parts."""
        arms = np.array(list(judged.goodput))
        best = arms[np.argmax(list(judged.goodput.values()), axis=0)]
        edges = np.linspace(judged.at[0], judged.at[-1], COURSE_PARTS, endpoint=False)
        starts = np.unique(np.searchsorted(judged.at, edges))
        parts = [slice(*ends) for ends in itertools.pairwise([*starts, len(judged.at)])]
        return Course(
            at=judged.at[starts],
            acceptance=judged.acceptance[starts],
            batch=np.array([judged.batch[part].mean() for part in parts]),
            steps=np.array([np.bincount(judged.steps[part]).argmax() for part in parts]),
            best_steps=np.array([np.bincount(best[part]).argmax() for part in parts]),
        )
