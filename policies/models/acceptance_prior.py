"""What an acceptance model keeps for the next start: its form, and the refusal of anything else."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from specpilot.policies.models.acceptance_evidence import Evidence

STORED_SAMPLES = 32.0
"""A stored prior counts for at most so many samples at a position."""

_Samples = Annotated[list[Annotated[float, Meta(ge=0.0, le=1e9)]], Meta(min_length=1, max_length=4096)]


class StoredAcceptance(msgspec.Struct, frozen=True):
    """Trials and accepted drafts by position, two lists of the same length, for JSON."""

    trials: _Samples
    passed: _Samples


def store(evidence: Evidence) -> dict[str, list[float]]:
    """Return ``evidence`` as a prior, fit for JSON."""
    stored = evidence.capped(STORED_SAMPLES)
    return {"trials": stored.trials, "passed": stored.passed}


def read_prior(prior: object, max_steps: int | None = None) -> Evidence:
    """Return the evidence in ``prior``, for ``max_steps`` positions; None: as many as it has.

    Positions that it lacks have no trials. Raises ValueError if it makes no sense.
    """
    try:
        stored = msgspec.convert(prior, StoredAcceptance)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"not a prior of acceptance: {error}") from error
    trials, passed = stored.trials, stored.passed
    if len(trials) != len(passed) or any(p > t for p, t in zip(passed, trials, strict=True)):
        raise ValueError(f"a prior of acceptance has, by position, passed <= trials: {trials}, {passed}")
    positions = len(trials) if max_steps is None else max_steps
    padding = [0.0] * positions
    trials, passed = ([*counts, *padding][:positions] for counts in (trials, passed))
    return Evidence(trials, passed).capped(STORED_SAMPLES)
