"""What a policy knows of one server, read out: the estimates that its choices rest on, and how sure they are.

    Knowledge ─ acceptance by position
              └ Outlook, one a cell ─ Candidate, one a K: tokens / seconds = tokens per second

``Policy.describe`` hands out what was computed to decide; intervals and sentences are made here, by whoever
asks. Status, metrics and the web page all read this and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from specpilot.policies.student import NORMAL_975


class Estimate(msgspec.Struct, frozen=True):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def relative(cls, value: float, error: float) -> Estimate:
        """Return a positive estimate by its relative standard error, that of its log.

        >>> Estimate.relative(2.0, 0.0)
        Estimate(value=2.0, low=2.0, high=2.0)
        """
        stretch = math.exp(min(NORMAL_975 * error, 50.0))
        return cls(value, value / stretch, value * stretch)

    @classmethod
    def share(cls, value: float, variance: float) -> Estimate:
        """Return an estimate between 0 and 1 by its variance; the interval is that of its log-odds.

        >>> share = Estimate.share(0.5, 0.01)
        >>> share.value, round(share.low, 3), round(share.high, 3)
        (0.5, 0.313, 0.687)
        """
        if not 0.0 < value < 1.0:
            return cls(value, value, value)
        odds = value / (1.0 - value)
        stretch = math.exp(min(NORMAL_975 * math.sqrt(variance) / (value * (1.0 - value)), 50.0))
        return cls(value, odds / (odds + stretch), odds * stretch / (odds * stretch + 1.0))


class Candidate(msgspec.Struct, frozen=True):
    """One K in one cell: ``tokens_per_second`` is ``batch_size * tokens / seconds``."""

    steps: int
    """The candidate, K."""
    tokens: Estimate
    """Tokens per request and step, bonus token included."""
    seconds: Estimate
    """Seconds of a step."""
    tokens_per_second: float
    """Expected tokens per second of the whole batch."""
    against_choice: Estimate
    """Tokens per second over those of the choice, minus 1: -0.1 is a tenth less."""
    tried: bool
    """Whether steps of this K ran at this batch size; else its seconds are predicted from others."""
    allowed: bool
    """Whether this K is within ``policy.time_per_output_token``."""


class Outlook(msgspec.Struct, frozen=True):
    """One cell as it was last decided. Tuples are by K, in the order of ``Knowledge.steps``."""

    steps: tuple[int, ...]
    """Candidates (K), ascending."""
    batch_size: int
    """Requests that stand for the cell."""
    mean_context: float
    """Tokens per request that stand for the cell."""
    choice: int
    """Steps (K) that are chosen."""
    keep: tuple[int, ...]
    """Steps (K) that may stay in force though another is chosen."""
    lengths: tuple[float, ...]
    """Tokens per request and step, bonus token included."""
    length_errors: tuple[float, ...]
    """Relative standard errors of ``lengths``."""
    seconds: tuple[float, ...]
    """Seconds of a step."""
    second_errors: tuple[float, ...]
    """Relative standard errors of ``seconds``."""
    choice_errors: tuple[float, ...]
    """Relative standard errors of the ratio of tokens per second to that of the choice."""
    none_errors: tuple[float, ...]
    """Relative standard errors of the ratio of tokens per second to that of K=0; empty where K=0 is no candidate."""
    tried: tuple[bool, ...]
    """Whether steps of this K ran at this batch size."""
    allowed: tuple[bool, ...]
    """Whether this K is within ``policy.time_per_output_token``."""

    def tokens_per_second(self, arm: int) -> float:
        """Return the batch's tokens per second with the K of that index."""
        return self.batch_size * self.lengths[arm] / self.seconds[arm]

    def tokens(self, arm: int) -> Estimate:
        """Return tokens per request and step: at least the bonus token, at most all drafts and it."""
        tokens = Estimate.relative(self.lengths[arm], self.length_errors[arm])
        return Estimate(tokens.value, max(tokens.low, 1.0), min(tokens.high, self.steps[arm] + 1.0))

    def step_seconds(self, arm: int) -> Estimate:
        """Return the seconds of a step with the K of that index."""
        return Estimate.relative(self.seconds[arm], self.second_errors[arm])

    def candidates(self) -> list[Candidate]:
        """Return what each K is expected to give."""
        best = self.tokens_per_second(self.steps.index(self.choice))
        return [
            Candidate(
                k,
                self.tokens(arm),
                self.step_seconds(arm),
                self.tokens_per_second(arm),
                _gain(self.tokens_per_second(arm) / best, self.choice_errors[arm]),
                self.tried[arm],
                self.allowed[arm],
            )
            for arm, k in enumerate(self.steps)
        ]

    def gain(self, steps: int) -> Estimate | None:
        """Return what K = ``steps`` gains over K=0, as a share; None where K=0 or it is no candidate."""
        if not self.none_errors or steps not in self.steps:
            return None
        arm = self.steps.index(steps)
        return _gain(self.tokens_per_second(arm) / self.tokens_per_second(0), self.none_errors[arm])

    def explain(self) -> str:
        """Return one sentence on why its K is chosen here.

        >>> two = ((0, 3), 8, 512.0, 3, (), (1.0, 2.5), (0.0, 0.01), (0.010, 0.0125), (0.01, 0.01))
        >>> print(Outlook(*two, (0.02, 0.0), (0.0, 0.02), (True, False), (True, True)).explain())
        K=3 is expected to make 2.50 tokens a request in a step of 12.5 ms, 100 % more tokens a second than K=0 \
with 1.00 in 10.0 ms; K=3 was not tried at this batch size yet, its time is predicted from others.
        """
        candidates = self.candidates()
        chosen = candidates[self.steps.index(self.choice)]
        text = f"K={self.choice} is expected to make {chosen.tokens.value:.2f} tokens a request "
        text += f"in a step of {1e3 * chosen.seconds.value:.1f} ms"
        rivals = [candidate for candidate in candidates if candidate.steps != self.choice]
        if rivals:
            text += ", " + _compared(chosen, max(rivals, key=lambda candidate: candidate.tokens_per_second), rivals)
        if not chosen.tried:
            text += f"; K={self.choice} was not tried at this batch size yet, its time is predicted from others"
        return text + "."


def _compared(chosen: Candidate, best: Candidate, rivals: Sequence[Candidate]) -> str:
    # Against no speculation where there is a choice: that is what speculating has to beat.
    rival = next((candidate for candidate in rivals if candidate.steps == 0), best)
    ratio = chosen.tokens_per_second / rival.tokens_per_second - 1.0
    beside = f"K={rival.steps} with {rival.tokens.value:.2f} in {1e3 * rival.seconds.value:.1f} ms"
    if not best.allowed and best.tokens_per_second > chosen.tokens_per_second:
        return f"and K={best.steps}, which would make more, does not surely meet the time per token that was asked for"
    if abs(ratio) < 0.005:
        return f"as many tokens a second as {beside}, and a choice changes only for a gain"
    sure = "" if rival.against_choice.high < 0.0 or rival.against_choice.low > 0.0 else ", which is not certain yet"
    return f"{100 * abs(ratio):.0f} % {'more' if ratio > 0 else 'fewer'} tokens a second than {beside}{sure}"


class PositionAcceptance(msgspec.Struct, frozen=True):
    """Acceptance of the draft at one position."""

    acceptance: Estimate
    """Probability that the draft is accepted, given that those before it were."""
    samples: float
    """Effective number of drafts that the estimate is known from; near 0 it leans on the positions before."""


class Knowledge(msgspec.Struct, frozen=True):
    """All that a policy knows of one server."""

    steps: tuple[int, ...]
    """Candidates (K), ascending."""
    batch_edges: tuple[int, ...]
    """Edges of the cells in batch size (requests), as in ``Grid``."""
    context_edges: tuple[int, ...]
    """Edges of the cells in mean context (tokens per request), as in ``Grid``."""
    cells: tuple[Outlook | None, ...]
    """What was decided, by cell; None where nothing was yet."""
    recent: Mapping[tuple[int, int], int]
    """Number of the newest steps by cell and applied K."""
    positions: tuple[PositionAcceptance, ...]
    """Acceptance by position, from the first draft on, all batch sizes and contexts together."""
    drafter_broken: bool
    """Whether hardly any first draft is accepted."""
    explored_steps: int
    """Steps that ran another K than the choice, to learn."""
    explored_seconds: float
    """Seconds that these steps lost: those beyond the time in which the choice would have made as many tokens."""

    def visits(self) -> dict[int, int]:
        """Return how many of the newest steps were in each cell."""
        visits: dict[int, int] = {}
        for (cell, _), count in self.recent.items():
            visits[cell] = visits.get(cell, 0) + count
        return visits

    def busiest(self) -> int:
        """Return the cell that most of the newest steps were in; 0 before any."""
        visits = self.visits()
        return max(visits, key=visits.__getitem__, default=0)

    def gain(self) -> Estimate | None:
        """Return what the newest steps gained over K=0, as a share: at -0.1 speculation costs a tenth.

        The time that K=0 would have taken for as many tokens, over the time taken. Each cell's error counts
        as if all erred together, so the interval is rather too wide. None before it can be told.
        """
        seconds = low = value = high = 0.0
        for (cell, steps), count in self.recent.items():
            outlook = self.cells[cell]
            gain = outlook.gain(steps) if outlook is not None else None
            if outlook is None or gain is None:
                continue
            spent = count * outlook.seconds[outlook.steps.index(steps)]
            seconds += spent
            low, value, high = low + spent * gain.low, value + spent * gain.value, high + spent * gain.high
        return Estimate(value / seconds, low / seconds, high / seconds) if seconds else None


def _gain(ratio: float, error: float) -> Estimate:
    estimate = Estimate.relative(ratio, error)
    return Estimate(estimate.value - 1.0, estimate.low - 1.0, estimate.high - 1.0)


def describe_gain(gain: Estimate) -> str:
    """Return a gain over no speculation in words.

    >>> describe_gain(Estimate(0.312, 0.281, 0.34)), describe_gain(Estimate(-0.05, -0.08, -0.01))
    ('speculation is gaining 31 % (28 … 34)', 'speculation is costing 5 % (1 … 8)')
    >>> describe_gain(Estimate(0.0, 0.0, 0.0)), describe_gain(Estimate(0.02, -0.01, 0.05))
    ('speculation neither gains nor costs', 'speculation is gaining 2 % (-1 … 5)')
    """
    if abs(gain.value) < 0.005:
        return "speculation neither gains nor costs"
    sign = 1.0 if gain.value > 0.0 else -1.0
    low, high = sorted((100.0 * sign * gain.low, 100.0 * sign * gain.high))
    word = "gaining" if sign > 0 else "costing"
    return f"speculation is {word} {100 * abs(gain.value):.0f} % ({low:.0f} … {high:.0f})"
