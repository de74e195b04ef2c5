"""What a step at each K costs and brings, by a model fitted on the other half of a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpilot.policies.models.acceptance import BANDS
from specpilot.policies.offpolicy.logged_steps import FloatArray, IntArray, LoggedSteps


@dataclass(frozen=True)
class StepModel:
    """What steps cost and bring, fitted on one fold."""

    arms: IntArray
    """Candidate K, ascending, shape (arms,)."""
    lengths: FloatArray
    """Tokens per request and step, shape (bands, largest K + 1); the bands are ``models.acceptance.BANDS``."""
    sizes: IntArray
    """Captured batch sizes (requests), ascending, shape (sizes,)."""
    contexts: FloatArray
    """Context tokens per request, ascending, shape (contexts,)."""
    seconds: FloatArray
    """Seconds of a settled step, shape (arms, sizes, contexts), linear in the context between."""

    def step_lengths(self, steps: LoggedSteps) -> FloatArray:
        """Return expected tokens per request at every K, shape (steps, largest K + 1)."""
        rows, columns = (
            np.searchsorted(edges, values)
            for edges, values in (
                (BANDS.batch_edges, steps.batch_size),
                (BANDS.context_edges, steps.mean_context),
            )
        )
        return np.asarray(self.lengths[rows * BANDS.shape[1] + columns], np.float64)

    def step_seconds(self, arm: IntArray, size: IntArray, mean_context: FloatArray) -> FloatArray:
        """Return expected seconds, all of shape (steps,); sizes above the largest in the model cost what that does."""
        row = np.minimum(np.searchsorted(self.sizes, size), len(self.sizes) - 1)
        right = np.clip(np.searchsorted(self.contexts, mean_context), 1, len(self.contexts) - 1)
        low, high = self.contexts[right - 1], self.contexts[right]
        part = np.clip((mean_context - low) / (high - low), 0.0, 1.0)
        return np.asarray(
            self.seconds[arm, row, right - 1] * (1.0 - part) + self.seconds[arm, row, right] * part, np.float64
        )


@dataclass(frozen=True)
class Predicted:
    """A chunk's steps by the model of the other fold, shared by all policies."""

    lengths: FloatArray
    """Expected tokens per request at every K, shape (steps, largest K + 1)."""
    seconds: FloatArray
    """Expected seconds of each step at every arm, shape (steps, arms)."""

    @staticmethod
    def of(steps: LoggedSteps, models: Sequence[StepModel]) -> Predicted:
        """Return what ``models`` expect of ``steps``; ``models[f]`` judges the steps of fold f."""
        lengths = np.empty(steps.tokens.shape)
        arms = len(models[0].arms)
        seconds = np.empty((len(steps), arms))
        for fold, model in enumerate(models):
            own = np.flatnonzero(steps.fold == fold)
            if len(own):
                part = steps.taken(own)
                lengths[own] = model.step_lengths(part)
                for arm in range(arms):
                    seconds[own, arm] = model.step_seconds(np.full(len(own), arm), part.size, part.mean_context)
        return Predicted(lengths, seconds)
