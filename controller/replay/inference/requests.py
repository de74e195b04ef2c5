"""The requests of a trace: their lengths and arrivals, told from the rows of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from specpilot.controller.simulation.workload import Arrival
from specpilot.sglang_hooks.wire import MASKED, StepRecord


@dataclass(eq=False, slots=True)
class _Running:
    """A request that is running."""

    index: int
    """Place in the order in which requests were started."""
    prompt: int
    """Prompt tokens that were prefilled."""
    tokens: int
    """Output tokens so far; the first one comes from the prefill."""
    prefilled: bool = True
    """Was its start seen? Else ``prompt`` is all of its context at the trace's begin."""
    ended: bool = False


@dataclass
class TracedRequests:
    """The requests of a trace, told by following the rows of the batch from record to record."""

    lengths: list[tuple[int, int, bool] | None] = field(default_factory=list)
    """(prompt, output, prefilled) of every request that was started, in that order; None while it runs."""
    arrived: list[float] = field(default_factory=list)
    """Arrival of each, in seconds since the trace's begin, in the same order; those still queued are at the end."""
    guessed: int = 0
    """Requests whose end was not seen, or whose rows could not be told."""
    context_tokens: float = 0.0
    """Sum over steps of the context as recorded."""
    generated_tokens: float = 0.0
    """Sum over steps of the output tokens in it, and of the context of requests whose start was not seen."""
    prompt_tokens: float = 0.0
    """Sum over steps of the prompt tokens in it that were prefilled."""
    _rows: list[_Running] = field(default_factory=list)
    _left: list[bool] = field(default_factory=list)
    """For each row of the newest record: had its request ended before?"""
    _prefill: int = 0
    """Prompt tokens prefilled of requests that are in no record yet."""
    _mean_drafts: float = 1.0
    """Recent mean of the accepted drafts per row."""

    def take(self, step: StepRecord, follows: bool, at: float) -> None:
        """Take in a step launched ``at`` (seconds since the trace's begin); ``follows``: none is missing before it."""
        first = not self.lengths
        rest = self._staying(step) if follows else self._joined(step)
        self._prefill += step.prefill_tokens
        new = step.batch_size - len(rest)
        for index in range(new):
            prompt = self._prefill // new + (index < self._prefill % new)
            prefilled = not first and prompt > 0
            if not prefilled:
                prompt = step.context_tokens // max(step.batch_size, 1)
            rest.append(_Running(len(self.lengths), max(prompt, 1), 1, prefilled))
            self.lengths.append(None)
        if new:
            self._prefill = 0
        while len(self.arrived) < len(self.lengths) + step.queued:
            self.arrived.append(max(at, 0.0))
        self._rows = rest
        self._settle(step)

    def _staying(self, step: StepRecord) -> list[_Running]:
        """Return whose the first rows are: under overlap a request that has just ended is still there, masked."""
        before = [live for live, left in zip(self._rows, self._left, strict=True) if not left]
        accepted = step.accepted_drafts
        if len(before) <= step.batch_size and all(
            accepted[row] == MASKED for row, live in enumerate(before) if live.ended
        ):
            return before
        return self._shrunk([live for live in before if not live.ended], step.batch_size)

    def _joined(self, step: StepRecord) -> list[_Running]:
        """Return whose the first rows are after missing records: as many as must have ended did, the oldest first."""
        staying = [live for live in self._rows if not live.ended]
        self.guessed += min(len(staying), step.batch_size)
        return self._shrunk(staying, step.batch_size)

    def _shrunk(self, rows: list[_Running], size: int) -> list[_Running]:
        gone = max(len(rows) - size, 0)
        for live in rows[:gone]:
            self._end(live)
        self.guessed += gone
        return rows[gone:]

    def _settle(self, step: StepRecord) -> None:
        ending = set(step.truncated)
        live_rows = drafts = 0
        self._left = []
        for row, (live, accepted) in enumerate(zip(self._rows, step.accepted_drafts, strict=True)):
            self._left.append(live.ended)
            if live.ended:
                continue
            if live.prefilled:
                self.prompt_tokens += live.prompt
            else:
                self.generated_tokens += live.prompt
            self.generated_tokens += live.tokens
            if accepted == MASKED:
                # Masked though it runs: as many drafts as others have accepted.
                live.tokens += 1 + round(self._mean_drafts)
                continue
            live_rows += 1
            drafts += accepted
            live.tokens += accepted + 1
            if row in ending:
                self._end(live)
        if live_rows:
            self._mean_drafts += 0.02 * (drafts / live_rows - self._mean_drafts)
        self.context_tokens += step.context_tokens

    def _end(self, live: _Running) -> None:
        live.ended = True
        self.lengths[live.index] = live.prompt, live.tokens, live.prefilled

    def close(self) -> None:
        """End every request that still runs: the process is over."""
        for live in self._rows:
            if not live.ended:
                self._end(live)
        self._rows, self._left = [], []

    def context_factor(self) -> float:
        """Return how many times longer prompts are than what was prefilled of them: the rest was cached."""
        if not self.prompt_tokens:
            return 1.0
        return max((self.context_tokens - self.generated_tokens) / self.prompt_tokens, 1.0)

    def arrivals(self, factor: float, longest: int) -> list[Arrival]:
        """Return the requests by arrival, each of ``longest`` tokens at most.

        ``factor``: how many times longer prompts are than what was prefilled of them.
        """
        arrivals = []
        for at, length in zip(self.arrived, self.lengths, strict=False):
            assert length is not None
            prompt, output, prefilled = length
            prompt = round(prompt * factor) if prefilled else prompt
            output = max(output, 2)
            output = min(output, max(longest // 2, 2))
            prompt = max(min(prompt, longest - output), 1)
            arrivals.append(Arrival(at, prompt, output))
        return arrivals
