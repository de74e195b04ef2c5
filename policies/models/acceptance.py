"""How many drafts a server's requests accept: a discounted Beta-Bernoulli chain with a change detector.

    record ── trials ──► evidence of the pool and of the record's band ──► hazards ──► length
               │                        ▲
               └──► change detector ────┘ restart

A record's rows are trials of drafts (``trials``). What is censored, by a request's end or by K, biases
nothing (Kaplan & Meier 1958). Discounted trials by position are the evidence (``acceptance_evidence``),
of a band of batch sizes and contexts and of the pool of all bands. It gives the hazards
h_j = P(draft j accepted | drafts 1..j-1 accepted), and these the tokens per request and step at K
drafts (``acceptance_length``). A sequential test restarts evidence that no longer holds
(``acceptance_change``). What is kept for the next start is in ``acceptance_prior``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from specpilot.policies.interface import Grid
from specpilot.policies.knowledge import Estimate, PositionAcceptance
from specpilot.policies.models.acceptance_change import CHANGED_SAMPLES, ChangeDetector
from specpilot.policies.models.acceptance_evidence import PRIOR_STRENGTH, Evidence, Hazard
from specpilot.policies.models.acceptance_length import FloatArray, lengths_and_covariance, lengths_and_intervals
from specpilot.policies.models.acceptance_prior import STORED_SAMPLES, read_prior, store
from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.trials import trials_of
from specpilot.sglang_hooks.wire import StepRecord

BANDS = Grid((4, 32), (1024, 4096, 16384))
"""Batch sizes and context tokens per request within which acceptance is taken to be the same."""

UNSEEN_HALF_LIFE = 2048.0
"""Records of other bands after which a band's own evidence halves: what tells it from the pool gets old too."""

OUTVOTED_SAMPLES = 128.0
"""Samples since the start at which a stored prior is no longer doubted: they count for four times as much as it
by then, and the change detectors are armed."""

BROKEN_HAZARD, BROKEN_SAMPLES, BROKEN_LEVEL = 0.05, 200.0, 0.99
"""A drafter is broken if h_1 is below the first, known from the second, with the third as probability."""


class Band:
    """The evidence of one band of batch size and context, and the detector of its changes."""

    def __init__(self, positions: int) -> None:
        self.evidence = Evidence.none(positions)
        self._detector = ChangeDetector()
        self._updated = 0
        """Records of the model when this band took its newest."""

    def since_change(self, trials: Sequence[int], passed: Sequence[int]) -> Evidence | None:
        """Test a record against the hazards known; return what was seen since the change, if there is one."""
        return self._detector.since_change(self.evidence, trials, passed)

    def as_of(self, record: int) -> Evidence:
        """Return the evidence as it is after the model's ``record``-th record, of whichever band."""
        return self.evidence.faded(0.5 ** ((record - self._updated) / UNSEEN_HALF_LIFE))

    def learn(self, trials: Sequence[int], passed: Sequence[int], record: int) -> None:
        """Count the model's ``record``-th record, after discounting for those of other bands before it."""
        self.evidence, self._updated = self.as_of(record - 1), record
        self.evidence.add(trials, passed)

    def restart(self, since: Evidence) -> None:
        """Go on from what was seen ``since`` a change."""
        self.evidence, self._detector = self.evidence.restarted(since), ChangeDetector()

    def clear(self) -> None:
        """Forget everything: what holds for the pool holds here."""
        self.evidence, self._detector = Evidence.none(len(self.evidence.trials)), ChangeDetector()


class AcceptanceModel:
    """Acceptance of one server by position, batch size and context: ``learn`` every record, then ask.

    A band *is* the pool unless a test tells them apart (Bancroft's preliminary-test estimator, 1944,
    with a ramp for its step): the weight of its own hazards is G/q - 1 within 0..1, where G is the
    squared difference in units of its variance over the m positions tried, and q = 2m + 10 about the
    99.9 % quantile of G where there is no difference.

    Where n samples are known, the trials of one record move h_j, in the pool or a band, by at most
    c / (c + 4 + n) with c = min(32, 4 + n/4): 1/2 from nothing, 1/4 from 33 samples on, 0.02 in the
    steady state of large batches (and 0.006 by discounting). One request counts for 1 sample.
    Only an alarm does more, and at least four records raise it.

    >>> from tests.support.messages import record
    >>> model = AcceptanceModel(max_steps=3)
    >>> for seq in range(100):
    ...     model.learn(record(record_seq=seq, accepted_drafts=[3, 1, 0, 3, -1], batch_size=5))
    >>> [round(float(hazard), 3) for hazard in model.hazard(5, 40.0)]
    [0.746, 0.668, 0.989]
    >>> tuple(round(float(length[3]), 2) for length in model.lengths(5, 40.0))
    (2.74, 2.57, 2.9)
    """

    def __init__(self, max_steps: int, topk: int = 1) -> None:
        """``max_steps``: the largest K asked about, at least 1; deeper drafts of a record are ignored.

        ``topk``: top-k of the server; above 1 drafts are a tree, of which the accepted path is what counts.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps = {max_steps} must be at least 1")
        self.changes = 0
        """Changes so far, by whichever test."""
        self.change_seq = -1
        """``record_seq`` of the record that showed the last change; -1 before any."""
        self._max_steps = max_steps
        self._applied = AppliedSteps(topk)
        self._records = 0
        """Records with trials so far: the clock of the bands."""
        self._pool = Evidence.none(max_steps)
        self._bands = [Band(max_steps) for _ in range(BANDS.cells)]
        self._stored: Evidence | None = None
        """The prior that the model began with, until that turns out wrong or is outvoted."""
        self._since_start = Evidence.none(max_steps)
        """What was seen since the start, as long as there is such a prior."""

    # -- learning --

    def learn(self, step: StepRecord) -> None:
        """Learn from one record. Rows that are masked, and steps of K=0, say nothing."""
        depth = self._applied.of(step)
        if not depth:
            return
        trials, passed = trials_of(step, min(depth, self._max_steps))
        if not trials:
            return
        band = self._band(step)
        since = band.since_change(trials, passed)
        self._records += 1
        if since is None:
            band.learn(trials, passed, self._records)
            self._pool.add(trials, passed)
            if self._stored is not None:
                self._judge_stored(step, self._stored, trials, passed)
        else:
            self._changed(step, band, since)

    def presume_change(self, step: StepRecord, trials: Sequence[float], passed: Sequence[float]) -> None:
        """Restart the evidence at ``step``: another test says that what it saw, by position, is what holds now."""
        since = Evidence(list(trials), list(passed)).capped(CHANGED_SAMPLES)
        self._changed(step, self._band(step), since)

    def _band(self, step: StepRecord) -> Band:
        return self._bands[BANDS.cell(step.batch_size, step.context_tokens / max(step.batch_size, 1))]

    def _changed(self, step: StepRecord, band: Band, since: Evidence) -> None:
        self.changes += 1
        self.change_seq = step.record_seq
        self._stored = None
        self._restart(band, since)

    def _restart(self, band: Band, since: Evidence) -> None:
        """Restart ``band``; if it went with the pool, so do the pool and the bands that did too."""
        pool = self._pool.posterior()
        current = [other.as_of(self._records) for other in self._bands]
        together = [
            other
            for other, evidence in zip(self._bands, current, strict=True)
            if _own_weight(evidence, evidence.posterior(), pool) < 0.5
        ]
        band.restart(since)
        if band in together:
            self._pool = self._pool.restarted(since)
            for other in together:
                if (
                    other is not band
                ):  # what it knew of its own is of before the change, and would part it from the pool
                    other.clear()

    def _judge_stored(self, step: StepRecord, stored: Evidence, trials: Sequence[int], passed: Sequence[int]) -> None:
        """Test the stored prior against what was seen since the start; drop a wrong one at every position at once.

        It is of another time, so where it is wrong at the first drafts it is wrong at those that were not tried
        yet: outvoted position by position it would hold K back at each. The change detectors are not armed yet.
        """
        seen = self._since_start
        seen.add(trials, passed)
        if _own_weight(seen, seen.posterior(), stored.posterior()) > 0.0:
            self.changes += 1
            self.change_seq = step.record_seq
            self._pool, self._stored = seen, None
        elif seen.trials[0] >= OUTVOTED_SAMPLES:
            self._stored = None

    # -- asking --

    @property
    def samples(self) -> float:
        """Effective samples at position 1, of all bands together."""
        return self._pool.trials[0]

    @property
    def drafter_broken(self) -> bool:
        """Is h_1 below 0.05 with a posterior probability of 99 %, by 200 samples or more?"""
        mean, variance, _ = self._pool.posterior()[0]
        bound = mean + NormalDist().inv_cdf(BROKEN_LEVEL) * math.sqrt(variance)
        return self.samples >= BROKEN_SAMPLES and bound < BROKEN_HAZARD

    def hazard(self, batch_size: int, mean_context: float) -> FloatArray:
        """Return h_1..h_max_steps, shape (max_steps,), at a batch size and context tokens per request."""
        return np.array([mean for mean, _, _ in self._hazards(batch_size, mean_context)])

    def positions(self) -> tuple[PositionAcceptance, ...]:
        """Return acceptance by position, of all batch sizes and contexts together."""
        rows = zip(self._pool.posterior(), self._pool.trials, strict=True)
        return tuple(PositionAcceptance(Estimate.share(mean, variance), trials) for (mean, variance, _), trials in rows)

    def expected_length(self, steps: int, batch_size: int, mean_context: float) -> float:
        """Return tokens per request and step at ``steps`` drafts, bonus token included."""
        return float(self.lengths(batch_size, mean_context)[0][steps])

    def interval(self, steps: int, batch_size: int, mean_context: float, level: float = 0.95) -> tuple[float, float]:
        """Return the credible interval of ``expected_length``, in tokens per request and step."""
        _, low, high = self.lengths(batch_size, mean_context, level)
        return float(low[steps]), float(high[steps])

    def lengths(
        self, batch_size: int, mean_context: float, level: float = 0.95
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return mean, low and high of L_K for K = 0..max_steps, three arrays of shape (max_steps + 1,).

        L_K is in tokens per request and step, bonus token included; see ``lengths_and_intervals``.
        """
        return lengths_and_intervals(self._hazards(batch_size, mean_context), level)

    def lengths_together(self, batch_size: int, mean_context: float) -> tuple[FloatArray, FloatArray]:
        """Return L_K for K = 0..max_steps, and the covariance of their logs, shape (max_steps + 1, max_steps + 1).

        L_K is in tokens per request and step, bonus token included; see ``lengths_and_covariance``.
        """
        return lengths_and_covariance(self._hazards(batch_size, mean_context))

    def _hazards(self, batch_size: int, mean_context: float) -> list[Hazard]:
        """Return the hazards of a band, pooled as far as the evidence goes."""
        evidence = self._bands[BANDS.cell(batch_size, mean_context)].as_of(self._records)
        pool, own = self._pool.posterior(), evidence.posterior()
        weight = _own_weight(evidence, own, pool)
        if weight == 0.0:
            return pool
        rest = 1.0 - weight
        # A mixture's variance: where the two disagree, not knowing which holds is part of it.
        return [
            (
                weight * mean + rest * pool_mean,
                weight * variance + rest * pool_variance + weight * rest * (mean - pool_mean) ** 2,
                weight * coupling + rest * pool_coupling,
            )
            for (mean, variance, coupling), (pool_mean, pool_variance, pool_coupling) in zip(own, pool, strict=True)
        ]

    # -- the next start --

    def to_prior(self) -> dict[str, list[float]]:
        """Return what is known of the pool, fit for JSON."""
        return store(self._pool)

    @classmethod
    def from_prior(cls, prior: object, max_steps: int | None = None, topk: int = 1) -> AcceptanceModel:
        """Return a model that begins with what ``to_prior`` gave; ValueError if that makes no sense.

        ``max_steps`` None: as many as the prior has.
        """
        stored = read_prior(prior, max_steps)
        model = cls(len(stored.trials) if max_steps is None else max_steps, topk)
        model._pool, model._stored = stored, stored.capped(STORED_SAMPLES)
        return model


def _own_weight(evidence: Evidence, own: Sequence[Hazard], pool: Sequence[Hazard]) -> float:
    """Return the weight, 0 to 1, of the ``own`` hazards of some ``evidence`` against those of the ``pool``.

    See ``AcceptanceModel``: G/q - 1 with G in ``distance`` and q in ``quantile``.
    """
    distance, quantile = 0.0, 10.0
    rows = zip(evidence.trials, own, pool, strict=True)
    for trials, (mean, variance, _), (pool_mean, pool_variance, _) in rows:
        if trials >= PRIOR_STRENGTH:
            distance += (mean - pool_mean) ** 2 / (variance + pool_variance)
            quantile += 2.0
    return min(max(distance / quantile - 1.0, 0.0), 1.0)
