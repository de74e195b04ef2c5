"""What a simulated server is asked: requests over time, and how many drafts of their text are accepted."""

from __future__ import annotations

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Arrival:
    """One request to come, with its lengths in tokens."""

    at: float
    """Seconds after the start of the server."""
    prompt_tokens: int
    output_tokens: int
    acceptance: float | None = None
    """Acceptance of the request's own text, whatever the time; None: the workload's."""


@dataclass(frozen=True)
class Phase:
    """A stretch of time with text of one kind."""

    start: float
    """Seconds after the start of the server; a phase lasts until the next one starts."""
    name: str
    acceptance: float
    """Probability that a draft is accepted given that those before it were."""


@dataclass(frozen=True)
class Workload:
    """Requests by rising arrival, and the acceptance of their text by time."""

    arrivals: tuple[Arrival, ...]
    phases: tuple[Phase, ...]

    def acceptance(self, at: float) -> float:
        """Return the acceptance ``at`` seconds after the start; the first phase also holds before it."""
        index = bisect_right(self.phases, at, key=lambda phase: phase.start)
        return self.phases[max(index - 1, 0)].acceptance


# -- which drafts are accepted --


class Decoding(Protocol):
    """A request as far as draws depend on it."""

    index: int
    """Place of the request in the order of arrival."""
    position: int
    """Position of the next output token."""


class Draws(Protocol):
    """Decides how many drafts of a step are accepted."""

    def accepted(self, request: int, position: int, steps: int, acceptance: float) -> int:
        """Return how many of ``steps`` drafts for ``request`` are accepted, the first at output ``position``."""

    def accepted_each(self, requests: Sequence[Decoding], steps: int, acceptance: float) -> list[int]:
        """Return for each request how many of its ``steps`` drafts are accepted."""


class SequentialDraws:
    """Each draft takes the generator's next number."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random

    def accepted_each(self, requests: Sequence[Decoding], steps: int, acceptance: float) -> list[int]:
        """Return the lengths of the accepted runs."""
        return [self.accepted(request.index, request.position, steps, acceptance) for request in requests]

    def accepted(self, request: int, position: int, steps: int, acceptance: float) -> int:  # noqa: ARG002
        """Return the length of the accepted run."""
        accepted = 0
        while accepted < steps and self._random() < acceptance:
            accepted += 1
        return accepted


class KeyedDraws:
    """Every output position of every request has one random number, whoever asks, and however often.

    So two policies see the same texts (common random numbers): what one accepts at a position the
    other accepts too. A request's numbers are a stretch of one ring of 2^18, at a start of its own.

    >>> draws = KeyedDraws(seed=1)
    >>> [draws.accepted(7, position, 3, 0.7) for position in (1, 2, 3, 4, 5)]
    [0, 0, 0, 3, 3]
    """

    _SIZE = 1 << 18
    _LONGEST = 64

    def __init__(self, seed: int) -> None:
        self._ring = np.random.default_rng([seed, 1]).random(self._SIZE)
        self._acceptance = -1.0
        self._runs: dict[int, bytes] = {}

    def accepted(self, request: int, position: int, steps: int, acceptance: float) -> int:
        """Return the length of the accepted run; ``steps`` up to 64."""
        numbers = self._ring[(_start(request, position) + np.arange(steps)) % self._SIZE]
        refused = np.flatnonzero(numbers >= acceptance)
        return int(refused[0]) if len(refused) else steps

    def accepted_each(self, requests: Sequence[Decoding], steps: int, acceptance: float) -> list[int]:
        """Return the lengths of the accepted runs."""
        table = self._table(steps, acceptance)
        return [table[_start(request.index, request.position)] for request in requests]

    def _table(self, steps: int, acceptance: float) -> bytes:
        """Return the length of the accepted run from every place of the ring: acceptance changes seldom."""
        if acceptance != self._acceptance:
            self._acceptance = acceptance
            self._runs = {}
        if steps not in self._runs:
            self._runs[steps] = np.minimum(_accepted_runs(self._ring, acceptance, self._LONGEST), steps).tobytes()
        return self._runs[steps]


def _start(request: int, position: int) -> int:
    # Knuth's multiplicative hash spreads the starts over the ring.
    return ((request * 2654435761 % (1 << 32) >> 14) + position) % (1 << 18)


def _accepted_runs(ring: npt.NDArray[np.float64], acceptance: float, longest: int) -> npt.NDArray[np.uint8]:
    """Return how many numbers in a row from each place on are below ``acceptance``."""
    places = np.arange(len(ring) + longest)
    refused = np.where(np.append(ring, ring[:longest]) < acceptance, len(places), places)
    next_refused = np.minimum.accumulate(refused[::-1])[::-1]
    runs: npt.NDArray[np.uint8] = np.minimum(next_refused - places, longest)[: len(ring)].astype(np.uint8)
    return runs


# -- the clients of the demo --

LEVELS = ((0.0, 2), (0.12, 8), (0.35, 24), (0.48, 64), (0.8, 8))
"""(part of a cycle, clients): so many clients at a time from that part on."""
CYCLE_SECONDS = 10.0
RISE_SECONDS = 0.4


class Clients:
    """A closed loop: each client asks again once it has its answer, as long as so many are wanted.

    About every 10 seconds 2 of them become 8, 24 and 64, and leave again. Code-like text, which a draft
    model predicts well (0.8), gives way to chat (0.55) and comes back.

    >>> clients = Clients(20.0, random.Random(1))
    >>> [clients.wanted(at) for at in (0.0, 2.0, 6.0, 9.0, 10.0, 19.9, 20.0)]
    [2, 8, 64, 8, 2, 8, 0]
    """

    def __init__(self, seconds: float, rng: random.Random) -> None:
        self._rng = rng
        cycles = max(1, round(seconds / CYCLE_SECONDS))
        length = seconds / cycles
        self._levels = [((cycle + begin) * length, count) for cycle in range(cycles) for begin, count in LEVELS]
        self._levels.append((seconds, 0))
        rises: list[float] = []
        before = 0
        for at, count in self._levels:
            rises += [at + rng.uniform(0.0, RISE_SECONDS) for _ in range(count - before)]
            before = count
        self._rises = sorted(rises)
        self._left = 0
        phases = (
            Phase(0.0, "code-like", 0.8),
            Phase(0.35 * seconds, "chat-like", 0.55),
            Phase(0.75 * seconds, "code-like", 0.8),
        )
        self.workload = Workload(tuple(self._request(at) for at in self._rises), phases)
        """The first request of every client."""

    def wanted(self, at: float) -> int:
        """Return how many are to be there ``at`` seconds after the start."""
        return self._levels[bisect_right(self._levels, at, key=lambda level: level[0]) - 1][1]

    def again(self, _: object, at: float) -> Arrival | None:
        """Return the next request of a client that has its answer, or None if it leaves: for ``SimServer.on_end``."""
        there = bisect_right(self._rises, at) - self._left
        if there > self.wanted(at):
            self._left += 1
            return None
        return self._request(at)

    def _request(self, at: float) -> Arrival:
        return Arrival(at, self._rng.randint(64, 256), int(self._rng.triangular(40, 400, 160)))


# -- the requests of a replay --

ACCEPTANCE_BETWEEN = (0.3, 0.9)
ACCEPTANCE_SECONDS = 60.0


def acceptance_path(seconds: float, seed: int) -> tuple[Phase, ...]:
    """Return an acceptance drawn again every minute, evenly between 0.3 and 0.9; a longer path begins the same."""
    rng = random.Random(f"acceptance {seed}")  # noqa: S311
    phases = math.ceil(seconds / ACCEPTANCE_SECONDS)
    return tuple(
        Phase(index * ACCEPTANCE_SECONDS, f"minute {index}", rng.uniform(*ACCEPTANCE_BETWEEN))
        for index in range(max(phases, 1))
    )


def generated_requests(count: int, seed: int) -> list[Arrival]:
    """Return made-up requests, one a second on average, at a rate that changes at random times.

    Lengths are lognormal: prompts around 600 tokens, answers around 160, as those of chat are
    roughly. The rate is drawn again for every 200 requests, between a fifth of the mean and nearly
    twice it.
    """
    rng = random.Random(f"requests {seed}")  # noqa: S311
    at, rate = 0.0, 1.0
    arrivals = []
    for index in range(count):
        if index % 200 == 0:
            rate = rng.uniform(0.2, 1.8)
        at += rng.expovariate(rate)
        prompt = min(max(round(rng.lognormvariate(math.log(600), 0.9)), 8), 8192)
        output = min(max(round(rng.lognormvariate(math.log(160), 0.8)), 2), 2048)
        arrivals.append(Arrival(at, prompt, output))
    return arrivals


ARRIVAL_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class ArrivalsError(ValueError):
    """A file of arrivals that cannot be used; the text names file, line and column."""


def read_arrivals(path: Path) -> list[Arrival]:
    """Read a CSV file with the columns of Azure's LLM traces; times become seconds after the first.

    TIMESTAMP is ISO 8601 or a number of seconds; the tokens are whole numbers above 0.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in ARRIVAL_COLUMNS if name not in header]
            if missing:
                raise ArrivalsError(
                    f"{path}:1: column {missing[0]} is missing; wanted {', '.join(ARRIVAL_COLUMNS)}, "
                    f"found {', '.join(header) or 'an empty line'}"
                )
            columns = [header.index(name) for name in ARRIVAL_COLUMNS]
            arrivals = [
                _arrival(row, columns, header, f"{path}:{reader.line_num}")
                for row in reader
                if any(map(str.strip, row))
            ]
    except OSError as error:
        raise ArrivalsError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArrivalsError(f"{path}: not a CSV file: {error}") from error
    if len(arrivals) < 2:
        raise ArrivalsError(f"{path}: {len(arrivals)} requests, at least 2 are needed")
    arrivals.sort(key=lambda arrival: arrival.at)
    begin = arrivals[0].at
    if arrivals[-1].at == begin:
        raise ArrivalsError(f"{path}: all requests have one TIMESTAMP, no rate can be told")
    return [Arrival(arrival.at - begin, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals]


def _arrival(row: list[str], columns: Sequence[int], header: list[str], where: str) -> Arrival:
    if len(row) != len(header):
        raise ArrivalsError(f"{where}: {len(row)} values, the header has {len(header)}")
    timestamp, *tokens = (row[column].strip() for column in columns)
    counts = []
    for name, text in zip(ARRIVAL_COLUMNS[1:], tokens, strict=True):
        if not text.isdecimal() or len(text) > 15 or int(text) < 1:
            raise ArrivalsError(f"{where}: {name} is {text[:40]!r}, not a whole number above 0")
        counts.append(int(text))
    return Arrival(_seconds(timestamp, where), *counts)


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            # Azure writes seven digits of a second, Python reads six.
            moment = datetime.fromisoformat(text[:26] if len(text) == 27 else text)
        except ValueError:
            raise ArrivalsError(f"{where}: TIMESTAMP is {text!r}, neither a time nor seconds") from None
        seconds = moment.timestamp() if moment.tzinfo else (moment - datetime(1970, 1, 1)).total_seconds()
    if not math.isfinite(seconds):
        raise ArrivalsError(f"{where}: TIMESTAMP is {text!r}, neither a time nor seconds")
    return seconds
