"""How many drafts a server's requests accept: a discounted Beta-Bernoulli chain with a change detector.

    record -> trials by position -> evidence of the pool and of the record's band -> hazards -> length

A record's rows are trials: draft j of a request was a trial if the j-1 before it were accepted, a
success if it was too. Beyond a request's end, beyond K, and at K=0 there is no trial, and what is
censored biases nothing (Kaplan & Meier 1958). The hazard h_j = P(draft j accepted | drafts 1..j-1
accepted) gives the tokens per request and step at K drafts:

    L_K = 1 + sum_{j<=K} prod_{i<=j} h_i        (the 1 is the bonus token)

*Samples* are trials after weighting; the time of this model is records and their samples, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from specpilot.policies.interface import Grid
from specpilot.policies.knowledge import Estimate, Position
from specpilot.policies.models.applied import AppliedSteps
from specpilot.sglang_hooks.wire import MASKED, StepRecord

BANDS = Grid((4, 32), (1024, 4096, 16384))
"""Batch sizes and context tokens within which acceptance is taken to be the same."""

HALF_LIFE_SAMPLES, HALF_LIFE_STEPS = 256.0, 32.0
"""Evidence halves after whichever of the two is longer: 256 steps at batch 1, 32 steps from batch 8 on.

The floor in steps is there since a step's rows are the same requests as the step before's: what 32
steps of 64 requests show are 64 texts. The sum of the weights, taken as the number of samples, is
half of Kish's effective size of exponential weights, so intervals allow for a design effect of two.
"""
STALE_RATE = 0.125
"""Positions beyond a record's K age this much slower: nothing newer replaces what they know."""

UNSEEN_HALF_LIFE = 2048.0
"""Records of other bands after which a band's own evidence halves: what tells it from the pool gets old too."""

RECORD_SAMPLES, RECORD_FLOOR, RECORD_SHARE = 32.0, 4.0, 0.25
"""A record counts at a position for FLOOR + SHARE * (samples known there), at most for RECORD_SAMPLES."""

PRIOR_STRENGTH, FIRST_MEAN, CHAIN_DECAY = 4.0, 0.5, 0.98
"""The prior of h_1 is Agresti & Coull's two successes and two failures (1998); that of h_j has as many
samples around CHAIN_DECAY * h_{j-1}: measured drafters fall off slowly, but what was never tried is wide."""
STORED_SAMPLES = 32.0
"""A stored prior counts for this many samples a position, at most."""
OUTVOTED_SAMPLES = 128.0
"""What was seen since the start counts for four times as much by then; the detectors are armed."""

DETECTORS = ((1.0, 40.0), (2.0, 30.0))
"""(tilt, nats): log-odds by which a detector's alternatives lie above and below the hazards known, and its alarm.

Tilt 1 is 0.8 to 0.6 or 0.92, tilt 2 is 0.9 to 0.55: a collapse is found nearly twice as fast by it.
Independent samples give one false alarm in e^A of them (Lorden 1971), so A = 10 for 20,000 samples.
Three times that, since a request's samples are alike: a single odd request at batch 8 is no change,
nor at batch 1 unless it is odd for long. Four times where the alternative is near: more requests
come near it by themselves.
"""
ALARM_RECORDS = 4
"""No fewer records than this raise an alarm."""
ARM_SAMPLES, REFRESH_RECORDS, RUN_RECORDS = 64.0, 8, 256
"""The detector relies on positions with so many samples, looks so often, and remembers so far back."""
CHANGED_SAMPLES, OLD_SAMPLES = 64.0, 2.0
"""After a change what was seen since counts for at most the former, what was before for the latter."""

BROKEN_HAZARD, BROKEN_SAMPLES, BROKEN_LEVEL = 0.05, 200.0, 0.99
"""A drafter is broken whose first drafts are accepted so rarely, by so many samples, so surely."""

Hazard = tuple[float, float, float]
"""Mean, own variance, and by how much it moves with the hazard of the position before."""
FloatArray = npt.NDArray[np.float64]


@dataclass(eq=False)
class _Evidence:
    """Discounted trials and accepted drafts by position."""

    trials: list[float]
    passed: list[float]

    def rows(self) -> Iterator[tuple[float, float]]:
        """Trials and accepted drafts of each position."""
        return zip(self.trials, self.passed, strict=True)

    def add(self, trials: Sequence[int], passed: Sequence[int]) -> None:
        """Forget a little, and count one record, which went ``len(trials)`` positions deep."""
        known, good = self.trials, self.passed
        samples = min(trials[0], RECORD_SAMPLES, RECORD_FLOOR + RECORD_SHARE * known[0])
        keep = 0.5 ** min(samples / HALF_LIFE_SAMPLES, 1.0 / HALF_LIFE_STEPS)
        for j, count in enumerate(trials):
            limit = RECORD_FLOOR + RECORD_SHARE * known[j]
            if limit > RECORD_SAMPLES:
                limit = RECORD_SAMPLES
            weight = limit / count if count > limit else 1.0
            known[j] = known[j] * keep + weight * count
            good[j] = good[j] * keep + weight * passed[j]
        if len(trials) < len(known):
            keep **= STALE_RATE
            for j in range(len(trials), len(known)):
                known[j] *= keep
                good[j] *= keep

    def capped(self, samples: float) -> _Evidence:
        """Return the same with at most ``samples`` at every position."""
        scaled = [good * min(1.0, samples / known) if known else 0.0 for known, good in self.rows()]
        return _Evidence([min(known, samples) for known in self.trials], scaled)

    def restart(self, since: _Evidence) -> None:
        """Start anew from what was seen ``since`` a change."""
        old = self.capped(OLD_SAMPLES)
        self.trials = [before + new for before, new in zip(old.trials, since.trials, strict=True)]
        self.passed = [before + new for before, new in zip(old.passed, since.passed, strict=True)]

    def posterior(self) -> list[Hazard]:
        """Return h_j ~ Beta(s m_j + passed, s (1 - m_j) + failed), s = PRIOR_STRENGTH, m_j = CHAIN_DECAY h_{j-1}."""
        prior, chain = FIRST_MEAN, 0.0
        hazards = []
        for known, good in self.rows():
            total = PRIOR_STRENGTH + known
            mean = (PRIOR_STRENGTH * prior + good) / total
            hazards.append((mean, mean * (1.0 - mean) / (total + 1.0), chain / total))
            prior, chain = CHAIN_DECAY * mean, CHAIN_DECAY * PRIOR_STRENGTH
        return hazards


@dataclass(eq=False)
class _Cusum:
    """Page's CUSUM (1954) of what records say for hazards of other log-odds, by ``tilt``, than those known.

    Against hazards h that alternative has, of x passed in n trials, the log-likelihood ratio
    tilt x - n log(1 - h + h e^tilt). Its sum is set to 0 whenever it falls below; so the records
    since it left 0, its run, are those after the change.
    """

    tilt: float
    nats: float
    """Sum that is an alarm."""
    logs: list[float] = field(default_factory=list)
    total: float = 0.0
    run: deque[tuple[Sequence[int], Sequence[int]]] = field(default_factory=lambda: deque(maxlen=RUN_RECORDS))

    def refresh(self, evidence: _Evidence) -> None:
        """Take the hazards as they are now, down to the first position that has too few samples."""
        self.logs.clear()
        for known, (mean, _, _) in zip(evidence.trials, evidence.posterior(), strict=True):
            if known < ARM_SAMPLES:
                break
            self.logs.append(math.log(1.0 - mean + mean * math.exp(self.tilt)))

    def alarm(self, trials: Sequence[int], passed: Sequence[int]) -> bool:
        """Take one record in; does the sum say that there was a change?"""
        gain = 0.0
        for log, count, good in zip(self.logs, trials, passed, strict=False):
            gain += self.tilt * good - count * log
        self.total += min(gain, self.nats / ALARM_RECORDS)
        if self.total > 0.0:
            self.run.append((trials, passed))
            return self.total >= self.nats
        self.total = 0.0
        self.run.clear()
        return False

    def since(self, max_steps: int) -> _Evidence:
        """Return the evidence of the run."""
        seen = _Evidence([0.0] * max_steps, [0.0] * max_steps)
        for trials, passed in self.run:
            for j, count in enumerate(trials):
                seen.trials[j] += count
                seen.passed[j] += passed[j]
        return seen.capped(CHANGED_SAMPLES)


_Samples = Annotated[list[Annotated[float, Meta(ge=0.0, le=1e9)]], Meta(min_length=1, max_length=4096)]


class _Stored(msgspec.Struct, frozen=True):
    """What is kept for the next start: trials and accepted drafts by position."""

    trials: _Samples
    passed: _Samples


class _Band(_Evidence):
    """The evidence of one band of batch size and context, and its detectors, upward and downward."""

    def __init__(self, max_steps: int) -> None:
        super().__init__([0.0] * max_steps, [0.0] * max_steps)
        self.seen = 0
        """The model's records when this band took its newest."""
        self._arm()

    def change(self, trials: Sequence[int], passed: Sequence[int]) -> _Evidence | None:
        """Hold a record against the hazards known; return what was seen since the change, if there is one."""
        for cusum in self._cusums:
            if self._records % REFRESH_RECORDS == 0:
                cusum.refresh(self)
            if cusum.alarm(trials, passed):
                return cusum.since(len(self.trials))
        self._records += 1
        return None

    def restart(self, since: _Evidence) -> None:
        """Start anew, the detectors too."""
        super().restart(since)
        self._arm()

    def clear(self) -> None:
        """Know nothing: be the pool."""
        self.trials, self.passed = [0.0] * len(self.trials), [0.0] * len(self.passed)
        self._arm()

    def as_of(self, record: int) -> _Evidence:
        """Return the evidence as it is after the model's ``record``-th record, of whichever band."""
        keep = 0.5 ** ((record - self.seen) / UNSEEN_HALF_LIFE)
        return _Evidence([keep * known for known in self.trials], [keep * good for good in self.passed])

    def take(self, trials: Sequence[int], passed: Sequence[int], record: int) -> None:
        """Count the model's ``record``-th record, after forgetting what those of other bands made old."""
        faded = self.as_of(record - 1)
        self.trials, self.passed, self.seen = faded.trials, faded.passed, record
        self.add(trials, passed)

    def _arm(self) -> None:
        self._records = 0
        self._cusums = [_Cusum(sign * tilt, nats) for tilt, nats in DETECTORS for sign in (1.0, -1.0)]


def trials_of(step: StepRecord, max_steps: int) -> tuple[list[int], list[int]]:
    """Return trials and accepted drafts by position of one record; both empty where it says nothing.

    >>> from tests.support.messages import record
    >>> trials_of(record(accepted_drafts=[3, 1, 0, MASKED, 1], truncated=[4]), max_steps=8)
    ([4, 2, 1], [3, 1, 1])
    """
    accepted = step.accepted_drafts
    reached = len(accepted) - accepted.count(MASKED)
    depth = min(step.draft_tokens - 1, max_steps)
    trials: list[int] = []
    passed: list[int] = []
    if reached == 0:
        return trials, passed
    ended = [accepted[row] for row in step.truncated]
    for position in range(depth):
        trials.append(reached - ended.count(position) if ended else reached)
        reached -= accepted.count(position)
        passed.append(reached)
    return trials, passed


class AcceptanceModel:
    """Acceptance of one server by position, batch size and context: ``learn`` every record, then ask.

    A band *is* the pool unless a test tells them apart (Bancroft's preliminary-test estimator, 1944,
    with a ramp for its step): the weight of its own hazards is G/q - 1 within 0..1, where G is the
    squared difference in units of its variance over the m positions tried, and q = 2m + 10 about the
    99.9 % quantile of G where there is no difference.

    Where n samples are known, the trials of one record move h_j, in the pool or a band, by at most
    c / (c + 4 + n) with c = min(32, 4 + n/4): 1/2 from nothing, 1/4 from 33 samples on, 0.02 in the
    steady state of large batches (and 0.006 by what is forgotten). One request counts for 1 sample.
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

        ``topk``: the server's; above 1 drafts are a tree, of which the accepted path is what counts.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps = {max_steps} must be at least 1")
        self.changes = 0
        """Alarms so far."""
        self.change_seq = -1
        """``record_seq`` of the last alarm; -1 before any."""
        self._max_steps = max_steps
        self._applied = AppliedSteps(topk)
        self._pool = _Evidence([0.0] * max_steps, [0.0] * max_steps)
        self._bands = [_Band(max_steps) for _ in range(BANDS.cells)]
        self._records = 0
        """Records with trials so far: the time of the bands."""
        self._stored: _Evidence | None = None
        """The prior that it began with, until that is found wrong or outvoted."""
        self._own = _Evidence([0.0] * max_steps, [0.0] * max_steps)
        """What was seen since, as long as there is one."""

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

    def learn(self, step: StepRecord) -> None:
        """Take one record in. Rows that are masked, and steps of K=0, say nothing."""
        depth = self._applied.of(step)
        if not depth:
            return
        trials, passed = trials_of(step, min(depth, self._max_steps))
        if not trials:
            return
        band = self._band(step)
        since = band.change(trials, passed)
        self._records += 1
        if since is None:
            band.take(trials, passed, self._records)
            self._pool.add(trials, passed)
            if self._stored is not None:
                self._judge_stored(step, self._stored, trials, passed)
        else:
            self._changed(step, band, since)

    def presume_change(self, step: StepRecord, trials: Sequence[float], passed: Sequence[float]) -> None:
        """Start anew at ``step``: another test says that what it saw by position is what holds now."""
        since = _Evidence(list(trials), list(passed)).capped(CHANGED_SAMPLES)
        self._changed(step, self._band(step), since)

    def _band(self, step: StepRecord) -> _Band:
        return self._bands[BANDS.cell(step.batch_size, step.context_tokens / max(step.batch_size, 1))]

    def _changed(self, step: StepRecord, band: _Band, since: _Evidence) -> None:
        self.changes += 1
        self.change_seq = step.record_seq
        self._stored = None
        self._restart(band, since)

    def _judge_stored(self, step: StepRecord, stored: _Evidence, trials: Sequence[int], passed: Sequence[int]) -> None:
        """Hold the stored prior against what was seen since the start; a wrong one goes at every position at once.

        It is of another time, so where it is wrong at the first drafts it is at those that were not tried yet:
        outvoted position by position it would hold K back at each. The detectors are not armed yet.
        """
        self._own.add(trials, passed)
        if _weight(self._own, self._own.posterior(), stored.posterior()) > 0.0:
            self.changes += 1
            self.change_seq = step.record_seq
            self._pool, self._stored = self._own, None
        elif self._own.trials[0] >= OUTVOTED_SAMPLES:
            self._stored = None

    def expected_length(self, steps: int, batch_size: int, mean_context: float) -> float:
        """Return tokens per request and step at ``steps`` drafts, bonus token included."""
        return float(self.lengths(batch_size, mean_context)[0][steps])

    def interval(self, steps: int, batch_size: int, mean_context: float, level: float = 0.95) -> tuple[float, float]:
        """Return the credible interval of ``expected_length``."""
        _, low, high = self.lengths(batch_size, mean_context, level)
        return float(low[steps]), float(high[steps])

    def hazard(self, batch_size: int, mean_context: float) -> FloatArray:
        """Return h_1..h_max_steps, shape (max_steps,)."""
        return np.array([mean for mean, _, _ in self._hazards(batch_size, mean_context)])

    def positions(self) -> tuple[Position, ...]:
        """Return acceptance by position, of all batch sizes and contexts together."""
        known = zip(self._pool.posterior(), self._pool.trials, strict=True)
        return tuple(Position(Estimate.share(mean, of_mean), trials) for (mean, of_mean, _), trials in known)

    def lengths(
        self, batch_size: int, mean_context: float, level: float = 0.95
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return mean, low and high of L_K for K = 0..max_steps, three arrays of shape (max_steps + 1,).

        Delta method: with P_j the product of the hazards down to j, dh_j = e_j + k_j dh_{j-1} (e_j of
        the own variance, independent), dP_j = h_j dP_{j-1} + P_{j-1} dh_j and dL_j = dL_{j-1} + dP_j,
        whose covariances are carried along. The interval is the wider of the one on L and the one on
        the log-odds of (L-1)/K, which is right-skewed where little is known; both end at 1 and 1+K.
        """
        z = NormalDist().inv_cdf(0.5 + 0.5 * level)
        product = length = 1.0
        hh = hp = hl = pp = pl = ll = 0.0
        rows = [(1.0, 1.0, 1.0)]
        for steps, (mean, variance, chain) in enumerate(self._hazards(batch_size, mean_context), start=1):
            hp, hl, hh = chain * hp, chain * hl, variance + chain * chain * hh
            pl = mean * pl + product * hl
            pp = mean * mean * pp + product * (2.0 * mean * hp + product * hh)
            hp = mean * hp + product * hh
            ll += 2.0 * pl + pp
            pl += pp
            hl += hp
            product *= mean
            length += product
            margin = z * math.sqrt(ll)
            won, lost = length - 1.0, 1.0 + steps - length
            stretch = math.exp(margin * steps / (won * lost))
            low = min(length - margin, 1.0 + steps * won / (won + lost * stretch))
            high = max(length + margin, 1.0 + steps * won / (won + lost / stretch))
            rows.append((length, max(low, 1.0), min(high, 1.0 + steps)))
        means, lows, highs = np.array(rows).T
        return means, lows, highs

    def lengths_together(self, batch_size: int, mean_context: float) -> tuple[FloatArray, FloatArray]:
        """Return L_K for K = 0..max_steps, and the covariance of their logs, shape (max_steps + 1,) squared.

        All K live on the same hazards, so what is not known of these is mostly common to them, and
        the ratio of two L_K is known better than either: its squared error is
        C[i, i] + C[j, j] - 2 C[i, j]. Delta method, as in ``lengths``.
        """
        means, variances, chains = np.array(self._hazards(batch_size, mean_context)).T
        by_error = np.eye(self._max_steps)  # dh_j / de_i
        for j in range(1, self._max_steps):
            by_error[j] += chains[j] * by_error[j - 1]
        products = np.cumprod(means)
        slopes = np.cumsum(products[:, None] * np.cumsum(by_error / means[:, None], axis=0), axis=0)
        lengths = np.concatenate(([1.0], 1.0 + np.cumsum(products)))
        relative = np.zeros((self._max_steps + 1, self._max_steps))
        relative[1:] = slopes / lengths[1:, None]
        return lengths, (relative * variances) @ relative.T

    def to_prior(self) -> dict[str, list[float]]:
        """Return what is known of the pool, for JSON."""
        pool = self._pool.capped(STORED_SAMPLES)
        return {"trials": pool.trials, "passed": pool.passed}

    @classmethod
    def from_prior(cls, prior: object, max_steps: int | None = None, topk: int = 1) -> AcceptanceModel:
        """Return a model that begins with what ``to_prior`` gave; ValueError if that makes no sense.

        ``max_steps`` None: as many as the prior has.
        """
        try:
            stored = msgspec.convert(prior, _Stored)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"not a prior of acceptance: {error}") from error
        trials, passed = stored.trials, stored.passed
        if len(trials) != len(passed) or any(good > known for good, known in zip(passed, trials, strict=True)):
            raise ValueError(f"a prior of acceptance has, by position, passed <= trials: {trials}, {passed}")
        model = cls(len(trials) if max_steps is None else max_steps, topk)
        padding = [0.0] * model._max_steps
        trials, passed = ([*counts, *padding][: model._max_steps] for counts in (trials, passed))
        model._pool = _Evidence(trials, passed).capped(STORED_SAMPLES)
        model._stored = model._pool.capped(STORED_SAMPLES)
        return model

    def _restart(self, band: _Band, since: _Evidence) -> None:
        """Restart ``band``; if it went with the pool, so do the pool and the bands that did too."""
        pool = self._pool.posterior()
        known = [other.as_of(self._records) for other in self._bands]
        together = [
            other
            for other, evidence in zip(self._bands, known, strict=True)
            if _weight(evidence, evidence.posterior(), pool) < 0.5
        ]
        if band in together:
            self._pool.restart(since)
            for other in together:
                if other is band:
                    band.restart(since)
                else:  # what it knew of its own is of before the change, and would part it from the pool
                    other.clear()
        else:
            band.restart(since)

    def _hazards(self, batch_size: int, mean_context: float) -> list[Hazard]:
        """Return the hazards of a band, pooled as far as the evidence goes."""
        band = self._bands[BANDS.cell(batch_size, mean_context)].as_of(self._records)
        pool, own = self._pool.posterior(), band.posterior()
        weight = _weight(band, own, pool)
        rest = 1.0 - weight
        if weight == 0.0:
            return pool
        # A mixture's variance: where the two disagree, not knowing which holds is part of it.
        return [
            (weight * h + rest * p, weight * v + rest * w + weight * rest * (h - p) ** 2, weight * k + rest * q)
            for (h, v, k), (p, w, q) in zip(own, pool, strict=True)
        ]


def _weight(band: _Evidence, own: list[Hazard], pool: list[Hazard]) -> float:
    distance, threshold = 0.0, 10.0
    for known, (h, v, _), (p, w, _) in zip(band.trials, own, pool, strict=True):
        if known >= PRIOR_STRENGTH:
            distance += (h - p) ** 2 / (v + w)
            threshold += 2.0
    return min(max(distance / threshold - 1.0, 0.0), 1.0)
