"""Has acceptance changed? Page's CUSUM (1954) over records, for hazards above and below those known."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specpilot.policies.models.acceptance_evidence import Evidence

DETECTORS = ((1.0, 40.0), (2.0, 30.0))
"""(tilt, nats): log-odds by which a detector's alternatives lie above and below the hazards known, and its alarm.

Tilt 1 is 0.8 to 0.6 or 0.92, tilt 2 is 0.9 to 0.55: it detects a collapse nearly twice as fast.
Independent samples give one false alarm in e^A of them (Lorden 1971), so A = 10 for 20,000 samples.
Three times that, since a request's samples are alike: a single odd request at batch 8 is no change,
nor at batch 1 unless it is odd for long. Four times where the alternative is near: more requests
come near it by themselves.
"""
ALARM_RECORDS = 4
"""No fewer records than this raise an alarm."""
ARM_SAMPLES = 64.0
"""The test relies on positions that are known from so many samples."""
REFRESH_RECORDS = 8
"""The hazards tested against are read again after so many records."""
RUN_RECORDS = 256
"""Records of a run that are remembered, at most."""
CHANGED_SAMPLES = 64.0
"""What was seen since a change counts for at most so many samples at a position."""


@dataclass(eq=False)
class _Cusum:
    """CUSUM for hazards whose log-odds are by ``tilt`` above those known.

    Against hazards h that alternative has, of x passed in n trials, the log-likelihood ratio
    tilt x - n log(1 - h + h e^tilt). Its sum is set to 0 whenever it falls below; so the records
    since it left 0, its run, are those after the change.
    """

    tilt: float
    nats: float
    """Sum that is an alarm."""
    logs: list[float] = field(default_factory=list)
    """log(1 - h + h e^tilt) by position, as far as the test relies on them."""
    total: float = 0.0
    run: deque[tuple[Sequence[int], Sequence[int]]] = field(default_factory=lambda: deque(maxlen=RUN_RECORDS))
    """Trials and accepted drafts by position of the records since the sum left 0."""

    def refresh(self, means: Sequence[float]) -> None:
        """Test against hazards of these ``means`` from now on."""
        self.logs = [math.log(1.0 - mean + mean * math.exp(self.tilt)) for mean in means]

    def alarm(self, trials: Sequence[int], passed: Sequence[int]) -> bool:
        """Add one record; return whether the sum says that there was a change."""
        gain = 0.0
        for log, tried, accepted in zip(self.logs, trials, passed, strict=False):
            gain += self.tilt * accepted - tried * log
        self.total += min(gain, self.nats / ALARM_RECORDS)
        if self.total > 0.0:
            self.run.append((trials, passed))
            return self.total >= self.nats
        self.total = 0.0
        self.run.clear()
        return False


class ChangeDetector:
    """The tests over the records of one band: two tilts of DETECTORS, each upward and downward."""

    def __init__(self) -> None:
        self._records = 0
        self._cusums = [_Cusum(sign * tilt, nats) for tilt, nats in DETECTORS for sign in (1.0, -1.0)]

    def since_change(self, known: Evidence, trials: Sequence[int], passed: Sequence[int]) -> Evidence | None:
        """Test a record against what is ``known`` before it; return the evidence since the change if there was one.

        After a change the detector is used up: make another for the evidence that begins then.
        """
        if self._records % REFRESH_RECORDS == 0:
            means = _armed(known)
            for cusum in self._cusums:
                cusum.refresh(means)
        for cusum in self._cusums:
            if cusum.alarm(trials, passed):
                return _seen(cusum.run, len(known.trials))
        self._records += 1
        return None


def _armed(known: Evidence) -> list[float]:
    """Return the mean hazards down to the first position that has too few samples."""
    means = []
    for samples, (mean, _, _) in zip(known.trials, known.posterior(), strict=True):
        if samples < ARM_SAMPLES:
            break
        means.append(mean)
    return means


def _seen(run: deque[tuple[Sequence[int], Sequence[int]]], positions: int) -> Evidence:
    """Return the evidence of a run of records, capped at CHANGED_SAMPLES."""
    seen = Evidence.none(positions)
    for trials, passed in run:
        for j, tried in enumerate(trials):
            seen.trials[j] += tried
            seen.passed[j] += passed[j]
    return seen.capped(CHANGED_SAMPLES)
