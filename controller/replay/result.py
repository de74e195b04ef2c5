"""What a replay comes to: the figures of a run, and the JSON files of ``--json``."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from specpilot.controller.replay.judge import Course, Regret


class TimePerOutputToken(msgspec.Struct, frozen=True):
    """Seconds per output token after the first, over the requests that ended; None if none did."""

    mean: float | None
    p99: float | None


class ReplayResult(msgspec.Struct, frozen=True):
    """One run, as ``--json`` writes it."""

    policy: str
    surface: str
    load: float | None
    """Open loop: arrival rate, in saturations of the server without speculation."""
    concurrency: int | None
    """Closed loop: requests at a time."""
    seed: int
    tokens_per_second: float
    time_per_output_token: TimePerOutputToken
    reference_share: float
    """Expected tokens over those of the best K in each state, see ``JudgedSteps.reference_share``."""
    switches_per_100_steps: float
    probe_switches_per_100_steps: float
    """Switches into or out of an explored step, in 100 steps."""
    exploration_loss: float
    """Share of the decoding time that exploration cost."""
    steps_to_95: int | None
    """Steps until the policy is within 5 % of the best K to stay; None: never."""
    steps: int
    """Decode steps of the run."""


@dataclass(frozen=True)
class Examined:
    """One run: its figures, and what a report draws of it."""

    result: ReplayResult
    regret: Regret
    course: Course


def load_in_words(result: ReplayResult) -> str:
    """Return a run's load in words.

    >>> times = TimePerOutputToken(None, None)
    >>> load_in_words(ReplayResult("none", "moe", None, 8, 1, 1.0, times, 1.0, 0.0, 0.0, 0.0, 0, 1))
    'closed loop, 8 at a time'
    """
    if result.load is not None:
        return f"load {result.load:g}"
    return "the trace's own load" if result.concurrency is None else f"closed loop, {result.concurrency} at a time"


class TraceOutcome(msgspec.Struct, frozen=True):
    """A replayed trace, as ``--json`` writes it: what was inferred, and the runs."""

    model_based: bool
    server: str
    surface: str
    records: int
    seconds: float
    """Length of the trace, idle stretches cut."""
    requests: int
    recorded_tokens_per_second: float
    inferred: list[str]
    findings: list[str]
    runs: list[ReplayResult]
