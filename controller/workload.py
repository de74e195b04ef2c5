"""What a simulated server is asked: requests over time, and how foreseeable their text is."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """One request to come: seconds after the start, and its lengths in tokens."""

    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Phase:
    """From ``start`` (seconds) on, each draft is accepted with ``acceptance`` given the ones before it."""

    start: float
    name: str
    acceptance: float


@dataclass(frozen=True)
class Workload:
    """Requests by rising arrival, and the acceptance of their text by time."""

    arrivals: tuple[Arrival, ...]
    phases: tuple[Phase, ...]

    def acceptance(self, at: float) -> float:
        """Return the acceptance ``at`` seconds after the start; the first phase also holds before it."""
        index = bisect_right(self.phases, at, key=lambda phase: phase.start)
        return self.phases[max(index - 1, 0)].acceptance


QUIET_CLIENTS = 3
BURST_CLIENTS = (42, 60)
BURST_EVERY_SECONDS = 10.0


def bursty_workload(seconds: float, rng: random.Random) -> Workload:
    """Return 1 to 3 requests at a time, bursts of 40 to 60 in between, and two changes of the text.

    About every 10 seconds comes a burst of 4. Code-like text, of which a draft model foresees
    much (0.8), gives way to chat (0.45) and comes back.
    """
    bursts = max(1, round(seconds / BURST_EVERY_SECONDS))
    length = seconds / bursts
    arrivals: list[Arrival] = []
    for index in range(bursts):
        begin = (index + rng.uniform(0.36, 0.44)) * length
        # The rates are guesses of what a request gets there; a server that does worse will queue.
        crowd = rng.randint(*BURST_CLIENTS)
        arrivals += _clients(begin, begin + 0.4 * length, crowd, 110.0, 0.05, rng)
    arrivals += _clients(0.0, seconds, QUIET_CLIENTS, 300.0, 0.35, rng)
    phases = (
        Phase(0.0, "code-like", 0.8),
        Phase(0.35 * seconds, "chat-like", 0.45),
        Phase(0.75 * seconds, "code-like", 0.8),
    )
    return Workload(tuple(sorted(arrivals, key=lambda arrival: arrival.at)), phases)


def _clients(
    begin: float, end: float, count: int, tokens_per_second: float, pause: float, rng: random.Random
) -> list[Arrival]:
    """Clients that each ask again some ``pause`` seconds after their answer should have come."""
    arrivals = []
    waiting = [begin + rng.uniform(0.0, 0.4) for _ in range(count)]
    heapq.heapify(waiting)
    while (at := heapq.heappop(waiting)) < end:
        arrival = Arrival(at, rng.randint(64, 256), int(rng.triangular(40, 400, 160)))
        arrivals.append(arrival)
        answer = arrival.output_tokens / tokens_per_second
        heapq.heappush(waiting, at + answer + rng.expovariate(1.0 / pause))
    return arrivals
