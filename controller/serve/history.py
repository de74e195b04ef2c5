"""What a server's steps came to: totals since the controller started, and the last hour by ten seconds."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from specpilot.sglang_hooks.wire import DecisionSource, StepRecord

SPAN_SECONDS = 10.0
"""Length of a span."""
SPANS = 360
"""Spans that are kept: an hour."""


class Span(msgspec.Struct, frozen=True):
    """Ten seconds of a server's decode steps."""

    number: int
    """Start of the span on the controller's clock, in units of SPAN_SECONDS."""
    steps: dict[int, int]
    """Decode steps by K."""
    requests: int
    """Sum of the batch sizes of these steps."""
    tokens: int
    """Tokens given to clients by all these steps."""
    seconds: float
    """Seconds of the steps that follow each other, with no prefill and no idle time in between."""


class Totals(msgspec.Struct, frozen=True):
    """Sums over all steps since the controller started, or the server was first heard."""

    steps: dict[tuple[int, DecisionSource], int]
    """Decode steps by K, as applied, and who decided them."""
    switches: int
    """Steps with a K other than that of the step before."""
    tokens: int
    """Tokens given to clients by decode steps."""
    seconds: float
    """Seconds of the decode steps that follow each other, with no prefill and no idle time in between."""


class History:
    """What one server's steps came to; ``add`` is for the controller's loop and costs about a microsecond."""

    def __init__(self) -> None:
        self._steps: Counter[tuple[int, DecisionSource]] = Counter()
        self._switches = 0
        self._tokens = 0
        self._seconds = 0.0
        self._previous: int | None = None
        self._spans: deque[Span] = deque(maxlen=SPANS)
        self._begin(-1)

    def _begin(self, number: int) -> None:
        self._number = number
        self._by_steps: Counter[int] = Counter()
        self._requests = self._span_tokens = 0
        self._span_seconds = 0.0

    def add(self, record: StepRecord, steps: int, tokens: int, seconds: float, now: float) -> None:
        """Count one decode step of K = ``steps``; ``seconds`` 0 where its time is not its own."""
        number = int(now // SPAN_SECONDS)
        if number != self._number:
            if self._by_steps:
                self._spans.append(self._span())
            self._begin(number)
        self._steps[steps, record.source] += 1
        self._switches += self._previous is not None and steps != self._previous
        self._previous = steps
        self._tokens += tokens
        self._seconds += seconds
        self._by_steps[steps] += 1
        self._requests += record.batch_size
        self._span_tokens += tokens
        self._span_seconds += seconds

    def _span(self) -> Span:
        return Span(self._number, dict(self._by_steps), self._requests, self._span_tokens, self._span_seconds)

    def totals(self) -> Totals:
        """Return a copy of the totals."""
        return Totals(dict(self._steps), self._switches, self._tokens, self._seconds)

    def hour(self) -> tuple[Span, ...]:
        """Return the spans with steps in them, oldest first, with the one going on."""
        return (*self._spans, self._span()) if self._by_steps else tuple(self._spans)
