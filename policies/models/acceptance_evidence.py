"""What was seen of acceptance: discounted trials by position, and the hazards that follow from them.

*Samples* are trials after weighting. Their clock is the records that come in, not seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HALF_LIFE_SAMPLES, HALF_LIFE_STEPS = 256.0, 32.0
"""Evidence halves after whichever of the two is longer: 256 steps at batch 1, 32 steps from batch 8 on.

The floor in steps is there since a step's rows are the same requests as the step before's: what 32
steps of 64 requests show are 64 texts. The sum of the weights, taken as the number of samples, is
half of Kish's effective size of exponential weights, so intervals allow for a design effect of two.
"""
STALE_RATE = 0.125
"""Positions beyond a record's K lose their evidence this much more slowly: no newer trials replace it."""

RECORD_SAMPLES, RECORD_FLOOR, RECORD_SHARE = 32.0, 4.0, 0.25
"""A record counts at a position for FLOOR + SHARE * (samples known there), at most for RECORD_SAMPLES."""

PRIOR_STRENGTH, FIRST_MEAN, CHAIN_DECAY = 4.0, 0.5, 0.98
"""The prior of h_1 is Agresti & Coull's two successes and two failures (1998); that of h_j has as many
samples around CHAIN_DECAY * h_{j-1}: measured drafters fall off slowly, but what was never tried is wide."""

OLD_SAMPLES = 2.0
"""Evidence from before a change counts for at most so many samples after it."""

Hazard = tuple[float, float, float]
"""Estimate of h_j = P(draft j accepted | drafts 1..j-1 accepted): mean, own variance, coupling.

The own variance is that of the hazard given the one of the position before; the coupling
d mean_j / d mean_{j-1} is by how much the mean moves with that one. A plain tuple: a decision makes thousands.
"""


@dataclass(eq=False)
class Evidence:
    """Discounted trials and accepted drafts by position, two lists of the largest K entries."""

    trials: list[float]
    passed: list[float]

    @classmethod
    def none(cls, positions: int) -> Evidence:
        """Return the evidence before any record."""
        return cls([0.0] * positions, [0.0] * positions)

    def add(self, trials: Sequence[int], passed: Sequence[int]) -> None:
        """Discount what is known, and count one record, which went ``len(trials)`` positions deep."""
        known_trials, known_passed = self.trials, self.passed
        samples = min(trials[0], RECORD_SAMPLES, RECORD_FLOOR + RECORD_SHARE * known_trials[0])
        keep = 0.5 ** min(samples / HALF_LIFE_SAMPLES, 1.0 / HALF_LIFE_STEPS)
        for j, count in enumerate(trials):
            limit = RECORD_FLOOR + RECORD_SHARE * known_trials[j]
            if limit > RECORD_SAMPLES:
                limit = RECORD_SAMPLES
            weight = limit / count if count > limit else 1.0
            known_trials[j] = known_trials[j] * keep + weight * count
            known_passed[j] = known_passed[j] * keep + weight * passed[j]
        if len(trials) < len(known_trials):
            keep **= STALE_RATE
            for j in range(len(trials), len(known_trials)):
                known_trials[j] *= keep
                known_passed[j] *= keep

    def faded(self, keep: float) -> Evidence:
        """Return the same evidence with every weight multiplied by ``keep``."""
        return Evidence([keep * trials for trials in self.trials], [keep * passed for passed in self.passed])

    def capped(self, samples: float) -> Evidence:
        """Return the same shares of accepted drafts, known from at most ``samples`` at every position."""
        rows = zip(self.trials, self.passed, strict=True)
        scaled = [passed * min(1.0, samples / trials) if trials else 0.0 for trials, passed in rows]
        return Evidence([min(trials, samples) for trials in self.trials], scaled)

    def restarted(self, since: Evidence) -> Evidence:
        """Return the evidence after a change: what was seen ``since``, and OLD_SAMPLES of what was known before."""
        old = self.capped(OLD_SAMPLES)
        return Evidence(
            [before + new for before, new in zip(old.trials, since.trials, strict=True)],
            [before + new for before, new in zip(old.passed, since.passed, strict=True)],
        )

    def posterior(self) -> list[Hazard]:
        """Return h_j ~ Beta(s m_j + passed, s (1 - m_j) + failed), s = PRIOR_STRENGTH, m_j = CHAIN_DECAY h_{j-1}."""
        prior, chain = FIRST_MEAN, 0.0
        hazards = []
        for trials, passed in zip(self.trials, self.passed, strict=True):
            total = PRIOR_STRENGTH + trials
            mean = (PRIOR_STRENGTH * prior + passed) / total
            hazards.append((mean, mean * (1.0 - mean) / (total + 1.0), chain / total))
            prior, chain = CHAIN_DECAY * mean, CHAIN_DECAY * PRIOR_STRENGTH
        return hazards
