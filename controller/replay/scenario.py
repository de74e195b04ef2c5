"""What a replay serves: one server and its requests, the same for every policy."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.simulation.gpu import Decode
from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.simulation.surface import ContextSurface, DriftingSurface
from specpilot.controller.simulation.workload import Arrival, Phase, Workload, acceptance_path

MAX_RUNNING_REQUESTS = 256
KV_TOKENS = 600_000
"""KV cache of the server, in tokens: an 8B model with 8 KV heads needs 128 KB a token, so about what an H200
holds beside its weights."""
GENERATED_REQUESTS = 4000
"""Requests that are made up where no file names any."""


@dataclass(frozen=True)
class Scenario:
    """One server and its requests; the same for every policy."""

    surface: NamedSurface
    requests: Sequence[Arrival]
    """Open loop: each at its time. Closed loop: their lengths, in order, over and over."""
    seconds: float
    """Length of the run in virtual time; it may be infinite where ``steps`` ends the run."""
    seed: int
    """Seed of the acceptance path, the accepted drafts and the exploration."""
    load: float | None = None
    """Open loop, for the record: arrival rate in saturations of the server without speculation."""
    concurrency: int | None = None
    """Closed loop: requests at a time."""
    acceptance: float | Sequence[Phase] | None = None
    """Acceptance of the text for the whole run, or by phases; None: ``acceptance_path``."""
    max_running_requests: int = MAX_RUNNING_REQUESTS
    kv_tokens: int = KV_TOKENS
    """KV cache of the server, in tokens."""
    drifts_to: NamedSurface | None = None
    """Costs at the end of the run; they get there evenly."""
    resume_seconds: float = 0.0
    """Seconds that the first step with drafts after one without takes longer."""
    steps: int | None = None
    """Decode steps after which the run ends too."""
    decode_limits: Sequence[tuple[float, int]] = ()
    """(seconds, requests), rising: from that time on at most so many of the running requests are decoded."""

    def workload(self) -> Workload:
        """Return the first arrivals and the acceptance path."""
        if self.acceptance is None:
            phases = acceptance_path(self.seconds, self.seed)
        elif isinstance(self.acceptance, float):
            phases = (Phase(0.0, "constant", self.acceptance),)
        else:
            phases = tuple(self.acceptance)
        if self.concurrency is None:
            return Workload(tuple(self.requests), phases)
        return Workload(tuple(self.following(index, 0.0) for index in range(self.concurrency)), phases)

    def costs(
        self, speculating: bool = True, now: Callable[[], float] = lambda: 0.0
    ) -> ContextSurface | DriftingSurface:
        """Return what steps cost, with speculation configured or without; ``now`` only where that drifts."""
        begin, end = (
            named.speculating if speculating else named.plain
            for named in (self.surface, self.drifts_to or self.surface)
        )
        return DriftingSurface(begin, end, self.seconds, now) if self.drifts_to else begin

    def judge(self, decodes: Sequence[Decode]) -> JudgedSteps:
        """Judge a run by its true costs."""
        return JudgedSteps.of(decodes, self.costs())

    def decode_limit(self, at: float) -> int:
        """Return how many requests are decoded at a time, ``at`` seconds after the start."""
        index = bisect_right(self.decode_limits, at, key=lambda limit: limit[0]) - 1
        return self.decode_limits[index][1] if index >= 0 else self.max_running_requests

    def following(self, index: int, at: float) -> Arrival:
        """Return the ``index``-th request of a closed loop, to arrive ``at``."""
        return replace(self.requests[index % len(self.requests)], at=at)


def at_rate(requests: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """Return ``requests`` stretched to ``rate`` a second on average, over and over until ``seconds``.

    >>> [arrival.at for arrival in at_rate([Arrival(0.0, 1, 1), Arrival(3.0, 1, 1)], 1.0, 4.0)]
    [0.0, 1.0, 2.0, 3.0]
    """
    # The last request is followed by a mean gap before the first comes again.
    lap = requests[-1].at * len(requests) / (len(requests) - 1)
    scale = len(requests) / lap / rate
    return [
        replace(request, at=at)
        for begin in itertools.takewhile(lambda begin: begin * scale < seconds, itertools.count(0.0, lap))
        for request in requests
        if (at := (begin + request.at) * scale) < seconds
    ]
