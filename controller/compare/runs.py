"""What a comparison is made of: single runs, and why one cannot go on."""

from __future__ import annotations

import msgspec


class CompareError(RuntimeError):
    """A comparison that cannot be made, or go on; the text says why and what to do."""


class ComparisonRun(msgspec.Struct, frozen=True):
    """One run of the load generator; time in seconds."""

    repetition: int
    concurrency: int
    arm: str
    place: int
    """Place of the arm in its block's order, from 0."""
    requests: int
    """Requests that were answered."""
    tokens_per_second: float
    """Output tokens of all requests over the run's time."""
    time_per_output_token: float
    """Mean over requests, without their first token."""
    time_to_first_token: float
    """Mean over requests."""
    seconds: float
    """Time that the load generator took for the requests."""
    started_at: float
    """When the load generator was started, in seconds since the Unix epoch."""
