"""What a replay was worth: every decode step by the truth, and the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from controller.simserver import Decode
from controller.surface import ContextSurface

SKIPPED_STEPS = 2000
WINDOW_STEPS = 200
GOOD_SHARE = 0.95


@dataclass(frozen=True)
class Judged:
    """Every decode step of a run by the truth; arrays with one entry a step."""

    steps: npt.NDArray[np.int64]
    explored: npt.NDArray[np.bool_]
    """The exploration drew another K than the table held."""
    expected: npt.NDArray[np.float64]
    """Tokens to expect of the applied K."""
    best: npt.NDArray[np.float64]
    """Tokens to expect in the step's time at the goodput of the state's best K."""
    seconds: npt.NDArray[np.float64]
    lost_seconds: npt.NDArray[np.float64]
    """Of an explored step, beyond the time in which the held K makes as many tokens; it may be below 0."""

    @staticmethod
    def of(decodes: Sequence[Decode], surface: ContextSurface) -> Judged:
        """Judge against every K of ``surface``, the speculating one also for a server without speculation."""
        _, steps, held, batch, context, acceptance, seconds = (
            np.array(column) for column in zip(*decodes, strict=True)
        )
        tokens = [batch * sum(acceptance**position for position in range(k + 1)) for k in surface.steps]
        goodput = [
            made / surface.decode_seconds_of(k, batch, context) for k, made in zip(surface.steps, tokens, strict=True)
        ]
        expected = np.select([steps == k for k in surface.steps], tokens, np.nan)
        explored = steps != held
        of_held = np.select([held == k for k in surface.steps], goodput, np.nan)
        return Judged(
            steps=steps,
            explored=explored,
            expected=expected,
            best=seconds * np.max(goodput, axis=0),
            seconds=seconds,
            lost_seconds=np.where(explored, seconds - expected / of_held, 0.0),
        )

    def reference_share(self) -> float:
        """Return expected tokens over those of the best K, without the first 2,000 steps (or a tenth, of fewer)."""
        skipped = SKIPPED_STEPS if len(self.steps) > SKIPPED_STEPS else len(self.steps) // 10
        return float(self.expected[skipped:].sum() / self.best[skipped:].sum())

    def switches_per_100_steps(self) -> tuple[float, float]:
        """Return changes of K, and those of them into or out of an explored step."""
        switched = self.steps[1:] != self.steps[:-1]
        probing = switched & (self.explored[1:] | self.explored[:-1])
        return 100.0 * int(switched.sum()) / len(self.steps), 100.0 * int(probing.sum()) / len(self.steps)

    def exploration_loss(self) -> float:
        """Return the share of all decoding time that exploration cost."""
        return float(self.lost_seconds.sum() / self.seconds.sum())

    def steps_to_95(self) -> int | None:
        """Return the step from which on the share of the last 200 steps is at least 0.95 for 200 steps."""
        window = np.ones(WINDOW_STEPS)
        if len(self.steps) < 2 * WINDOW_STEPS:
            return None
        share = np.convolve(self.expected, window, "valid") / np.convolve(self.best, window, "valid")
        good = np.convolve(share >= GOOD_SHARE, window, "valid").round() == WINDOW_STEPS
        return int(good.argmax()) + WINDOW_STEPS if good.any() else None


class TimePerOutputToken(msgspec.Struct, frozen=True):
    """Seconds per output token after the first, over the requests that ended; None if none did."""

    mean: float | None
    p99: float | None


class Result(msgspec.Struct, frozen=True):
    """One run, as it is written to the output file."""

    policy: str
    surface: str
    load: float | None
    concurrency: int | None
    seed: int
    tokens_per_second: float
    time_per_output_token: TimePerOutputToken
    reference_share: float
    switches_per_100_steps: float
    probe_switches_per_100_steps: float
    exploration_loss: float
    steps_to_95: int | None
    steps: int
