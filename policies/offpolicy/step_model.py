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
    """Candidate K, rising."""
    lengths: FloatArray
    """(bands, largest K + 1): tokens per request and step, by band of ``specpilot.policies.models.acceptance``."""
    sizes: IntArray
    """Rising."""
    contexts: FloatArray
    """Tokens per request, rising."""
    seconds: FloatArray
    """(arms, sizes, contexts): of a settled step, linear in the context between."""

    def step_lengths(self, steps: LoggedSteps) -> FloatArray:
        """Return tokens per request at every K, (steps, largest K + 1)."""
        rows, columns = (
            np.searchsorted(edges, values)
            for edges, values in (
                (BANDS.batch_edges, steps.batch_size),
                (BANDS.context_edges, steps.mean_context),
            )
        )
        return np.asarray(self.lengths[rows * BANDS.shape[1] + columns], np.float64)

    def step_seconds(self, arm: IntArray, size: IntArray, mean_context: FloatArray) -> FloatArray:
        """Return seconds, all of shape (steps,); sizes above the largest known cost what that does."""
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
    """(steps, largest K + 1)."""
    seconds: FloatArray
    """(steps, arms)."""

    @staticmethod
    def of(steps: LoggedSteps, models: Sequence[StepModel]) -> Predicted:
        """``models[f]`` judges the steps of fold f."""
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
