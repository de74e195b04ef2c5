"""What a server was asked, and what its steps cost, told from its trace: ``specpilot replay TRACE``.

A trace has no requests in it, only steps. What a replay needs of it is inferred:

- *Requests*. SGLang keeps the order of a batch's rows: ended ones are taken out, new ones come last.
  So each row's request is known from step to step, and with it how many tokens it was given. Prompts are
  the tokens prefilled before a request's first step, shared evenly among those that came together.
- *Arrivals*. Until a moment as many requests have arrived as have been started by then or are queued; they
  are taken to be started in the order in which they came.
- *Acceptance*. Accepted drafts over drafts tried, of all positions down to the first refusal and none beyond
  a request's end, in windows: the maximum of the likelihood where each draft is accepted with one probability.
- *Costs*. A ``CostModel`` learns every step; its predictions, on the batch sizes with a graph and a few
  contexts, are the surface of the simulated server. Only K that were seen often enough are on it.

Everything a policy earns on that is model-based, and its output says so.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from specpilot.controller.replay.policies import ReplayError
from specpilot.controller.replay.scenario import KV_TOKENS, Scenario
from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.simulation.surface import H200_8B, ContextSurface, Costs
from specpilot.controller.simulation.workload import Arrival, Phase
from specpilot.controller.trace.checks import Findings, chosen, empty, only, read_source, survey
from specpilot.controller.trace.reader import TraceError
from specpilot.controller.trace.writer import records
from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.cost import CostModel
from specpilot.policies.models.trials import trials_of
from specpilot.sglang_hooks.wire import MASKED, ForwardKind, Hello, StepRecord

WINDOW_SECONDS, WINDOW_TRIALS = 20.0, 400
"""A window of acceptance is so long, and goes on until so many drafts were tried: +-0.05 at 95 %."""
ARM_STEPS = 64
"""Steps from which on a K's cost is taken to be known; the cost model is within a few per cent by then."""
IDLE_SECONDS = 60.0
"""Longer gaps between steps are cut to this: nothing can be told apart by how long nothing happened."""
CONTEXTS = (64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0)
SLACK_TOKENS = 64
"""Of a request's KV cache are kept free for the drafts of two steps, of any surface's K."""
LEAST_PREFILLS = 16
"""From so many steps with one prefill before them on, their excess tells what prefills cost."""


@dataclass(eq=False, slots=True)
class _Live:
    """A request that is running."""

    index: int
    """In the order in which they were started."""
    prompt: int
    tokens: int
    """Given so far; the first one comes from the prefill."""
    prefilled: bool = True
    """Was it seen to start? Else ``prompt`` is all of its context at the trace's begin."""
    ended: bool = False


@dataclass
class _Requests:
    """Follows the rows of the batch from record to record."""

    lengths: list[tuple[int, int, bool] | None] = field(default_factory=list)
    """(prompt, output, prefilled) of every request that was started, in that order; None while it runs."""
    arrived: list[float] = field(default_factory=list)
    """When each came, in the same order; those still queued are at the end."""
    guessed: int = 0
    """Requests that left without being seen to end, or whose rows could not be told."""
    context_tokens: float = 0.0
    generated_tokens: float = 0.0
    prompt_tokens: float = 0.0
    """Sums over steps: of context as recorded, and of what of it these requests account for."""
    _rows: list[_Live] = field(default_factory=list)
    _left: list[bool] = field(default_factory=list)
    """Of the newest record: had that row's request ended before it?"""
    _prefill: int = 0
    """Prompt tokens prefilled of requests that were not seen yet."""
    _mean_drafts: float = 1.0

    def take(self, step: StepRecord, follows: bool, at: float) -> None:
        """Take a record in that was launched ``at`` (seconds since the trace's begin)."""
        first = not self.lengths
        rest = self._staying(step) if follows else self._joined(step)
        self._prefill += step.prefill_tokens
        new = step.batch_size - len(rest)
        for index in range(new):
            prompt = self._prefill // new + (index < self._prefill % new)
            prefilled = not first and prompt > 0
            if not prefilled:
                prompt = step.context_tokens // max(step.batch_size, 1)
            rest.append(_Live(len(self.lengths), max(prompt, 1), 1, prefilled))
            self.lengths.append(None)
        if new:
            self._prefill = 0
        while len(self.arrived) < len(self.lengths) + step.queued:
            self.arrived.append(max(at, 0.0))
        self._rows = rest
        self._settle(step)

    def _staying(self, step: StepRecord) -> list[_Live]:
        """Return whose rows the first ones are: under overlap what has just ended is still there, masked."""
        before = [live for live, left in zip(self._rows, self._left, strict=True) if not left]
        accepted = step.accepted_drafts
        if len(before) <= step.batch_size and all(
            accepted[row] == MASKED for row, live in enumerate(before) if live.ended
        ):
            return before
        return self._shrunk([live for live in before if not live.ended], step.batch_size)

    def _joined(self, step: StepRecord) -> list[_Live]:
        """After missing records: those that run longest have ended, as many as must have."""
        staying = [live for live in self._rows if not live.ended]
        self.guessed += min(len(staying), step.batch_size)
        return self._shrunk(staying, step.batch_size)

    def _shrunk(self, rows: list[_Live], size: int) -> list[_Live]:
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
                # Kept from learning, not ended: as many drafts as others have accepted.
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

    def _end(self, live: _Live) -> None:
        live.ended = True
        self.lengths[live.index] = live.prompt, live.tokens, live.prefilled

    def close(self) -> None:
        """What still runs ends here."""
        for live in self._rows:
            if not live.ended:
                self._end(live)
        self._rows, self._left = [], []

    def context_factor(self) -> float:
        """Return how much longer prompts are than what was prefilled of them: the rest was cached."""
        if not self.prompt_tokens:
            return 1.0
        return max((self.context_tokens - self.generated_tokens) / self.prompt_tokens, 1.0)

    def arrivals(self, factor: float, longest: int) -> list[Arrival]:
        """Return the requests by arrival, none of more than ``longest`` tokens of context."""
        found = []
        for at, length in zip(self.arrived, self.lengths, strict=False):
            assert length is not None
            prompt, output, prefilled = length
            prompt = round(prompt * factor) if prefilled else prompt
            output = max(output, 2)
            output = min(output, max(longest // 2, 2))
            prompt = max(min(prompt, longest - output), 1)
            found.append(Arrival(at, prompt, output))
        return found


class _Acceptance:
    """Trials and accepted drafts, by window and by position."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.by_position: list[list[int]] = []
        self._begin = 0.0
        self._trials = self._passed = 0

    def take(self, step: StepRecord, at: float, depth: int) -> None:
        trials, passed = trials_of(step, depth)
        for position, (tried, good) in enumerate(zip(trials, passed, strict=True)):
            if position == len(self.by_position):
                self.by_position.append([0, 0])
            self.by_position[position][0] += tried
            self.by_position[position][1] += good
        self._trials += sum(trials)
        self._passed += sum(passed)
        if at - self._begin >= WINDOW_SECONDS and self._trials >= WINDOW_TRIALS:
            self._close(at)

    def _close(self, at: float) -> None:
        self.phases.append(Phase(self._begin, f"window {len(self.phases) + 1}", self._passed / self._trials))
        self._begin = at
        self._trials = self._passed = 0

    def path(self) -> tuple[Phase, ...]:
        """Return the windows; the last one also if it is short, unless it tells next to nothing."""
        if self._trials >= WINDOW_TRIALS // 4 or (self._trials and not self.phases):
            self._close(self._begin)
        return tuple(self.phases)

    def hazards(self) -> list[float]:
        """Return the share accepted by position, of those with enough trials."""
        return [good / tried for tried, good in self.by_position if tried >= WINDOW_TRIALS]


class _Prefills:
    """What prefills cost, as multiples of ``surface.py``'s estimate for so many tokens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=4096)

    def take(self, step: StepRecord, decode_seconds: float) -> None:
        one = step.forwards == 2 and step.previous_kind == ForwardKind.EXTEND and not step.after_idle
        if one and step.prefill_tokens and step.seconds > decode_seconds:
            self._seen.append((step.prefill_tokens, step.seconds - decode_seconds))

    def factor(self, context_factor: float) -> float | None:
        """Return the median multiple where prompts are longer than what is prefilled of them; None if untold."""
        if len(self._seen) < LEAST_PREFILLS:
            return None
        return statistics.median(
            seconds / H200_8B.prefill_seconds(context_factor * tokens) for tokens, seconds in self._seen
        )


@dataclass(frozen=True)
class Inferred:
    """What a trace says, ready to be replayed."""

    hello: Hello
    server: str
    arrivals: tuple[Arrival, ...]
    acceptance: tuple[Phase, ...]
    seconds: float
    fitted: NamedSurface | None
    """None where fewer than two K were seen often enough: ``unfit`` says which were."""
    unfit: str
    resume_seconds: float
    tokens_per_second: float
    """Recorded: tokens of all requests over the trace's time."""
    records: int
    notes: tuple[str, ...]
    """What was inferred, and what is not known: a line each."""
    findings: tuple[str, ...]
    """What of the trace was left out, and why."""

    def scenario(self, surface: NamedSurface, seconds: float, seed: int) -> Scenario:
        """Return the server and its requests up to ``seconds``."""
        return Scenario(
            surface=surface,
            requests=[arrival for arrival in self.arrivals if arrival.at < seconds],
            seconds=seconds,
            seed=seed,
            acceptance=self.acceptance,
            max_running_requests=min(
                self.hello.max_running_requests or surface.speculating.captured_batch_sizes[-1],
                surface.speculating.captured_batch_sizes[-1],
            ),
            kv_tokens=_kv_tokens(self.hello),
            resume_seconds=self.resume_seconds if surface is self.fitted else 0.0,
        )


class Outcome(msgspec.Struct, frozen=True):
    """The JSON file of a replayed trace, beside its runs."""

    model_based: bool
    server: str
    surface: str
    records: int
    seconds: float
    """Of the trace, idle stretches cut."""
    requests: int
    recorded_tokens_per_second: float
    inferred: list[str]
    findings: list[str]
    runs: list[Any]


def _kv_tokens(hello: Hello) -> int:
    """Return the room for context; a server that does not say what it has is taken for one that has enough."""
    return hello.kv_tokens or KV_TOKENS


def infer(paths: Sequence[Path], server: str | None = None, limit: int | None = None) -> Inferred:
    """Read a trace once and infer what a replay needs; ReplayError says why it cannot be.

    ``limit``: only of its first so many records.
    """
    findings = Findings()
    try:
        source = only(chosen(survey(paths, findings), server))
        return _Inference(source.server, source.hello).run(islice(_rows(source, findings), limit), findings, source)
    except TraceError as error:
        raise ReplayError(str(error)) from error


def _rows(source: Any, findings: Findings) -> Iterator[tuple[StepRecord, bool, str]]:
    for chunk in read_source(source, findings):
        instance = chunk.hello.instance
        for step, follows in zip(records(chunk.columns.batch), chunk.follows.tolist(), strict=True):
            yield step, follows, instance


class _Inference:
    def __init__(self, server: str, hello: Hello) -> None:
        self._server = server
        self._hello = hello
        self._requests = _Requests()
        self._acceptance = _Acceptance()
        self._prefills = _Prefills()
        self._cost = CostModel(hello)
        self._applied = AppliedSteps(hello.topk)
        self._arms: Counter[int] = Counter()
        self._batches: dict[int, list[int]] = {}
        self._largest = 0
        self._longest = 0.0
        self._tokens = 0
        self._processes = 0
        self._cut_seconds = 0.0
        self._unjoined = 0

    def run(self, rows: Iterable[tuple[StepRecord, bool, str]], findings: Findings, source: Any) -> Inferred:
        depth = max(max(self._hello.candidate_steps), 1)
        ended_at, count = 0.0, 0
        previous: StepRecord | None = None
        process = ""
        for step, follows, instance in rows:
            if not step.batch_size:
                continue
            count += 1
            if instance != process:
                process = instance
                self._processes += 1
                self._requests.close()
            elif not follows:
                self._unjoined += 1
            launched_at = ended_at
            if previous is not None:
                passed = step.seconds if follows else max(step.time - previous.time, 0.0)
                cut = min(passed, IDLE_SECONDS)
                self._cut_seconds += passed - cut
                # An idle spell ends when a request comes: its prefill is launched, and then this step.
                launched_at += min(max(step.launch_gap_seconds, 0.0), cut) if follows else cut
                ended_at += cut
            self._requests.take(step, follows and previous is not None, launched_at)
            self._acceptance.take(step, ended_at, depth)
            self._learn(step)
            previous = step
        if previous is None:
            raise TraceError(empty(source, findings))
        self._requests.close()
        return self._inferred(ended_at, count, findings)

    def _learn(self, step: StepRecord) -> None:
        steps = self._applied.of(step)
        live = [accepted for accepted in step.accepted_drafts if accepted != MASKED]
        self._tokens += sum(live) + len(live)
        mean_context = step.context_tokens / step.batch_size
        self._largest = max(self._largest, step.batch_size)
        self._longest = max(self._longest, mean_context)
        if step.forwards == 2 and self._cost.cells and steps is not None:
            self._prefills.take(step, self._cost.predict(steps, step.batch_size, mean_context)[0])
        if self._cost.learn(step) and steps is not None:
            self._arms[steps] += 1
            sizes = self._batches.setdefault(steps, [step.batch_size, step.batch_size])
            sizes[0], sizes[1] = min(sizes[0], step.batch_size), max(sizes[1], step.batch_size)

    # -- what comes out --

    def _inferred(self, seconds: float, count: int, findings: Findings) -> Inferred:
        factor = self._requests.context_factor()
        longest = max(_kv_tokens(self._hello) - SLACK_TOKENS, 4)
        arrivals = self._requests.arrivals(factor, longest)
        path = self._acceptance.path()
        if not path:
            raise TraceError(
                f"the trace of {self._server} holds no step with drafts: nothing tells how many would be accepted"
            )
        prefill = self._prefills.factor(factor)
        fitted, unfit = self._surface(prefill)
        resume = max((self._cost.switch_seconds(0, k)[0] for k in self._arms if k), default=0.0)
        return Inferred(
            hello=self._hello,
            server=self._server,
            arrivals=tuple(arrivals),
            acceptance=path,
            seconds=seconds,
            fitted=fitted,
            unfit=unfit,
            resume_seconds=max(resume, 0.0) if 0 in self._arms else 0.0,
            tokens_per_second=self._tokens / seconds if seconds else 0.0,
            records=count,
            notes=tuple(self._notes(arrivals, path, factor, prefill)),
            findings=tuple(findings.lines()),
        )

    def _known(self) -> list[int]:
        return sorted(k for k, n in self._arms.items() if n >= ARM_STEPS and k in self._hello.candidate_steps)

    def _surface(self, prefill: float | None) -> tuple[NamedSurface | None, str]:
        known = self._known()
        seen = ", ".join(f"K={k} {n:,} steps" for k, n in sorted(self._arms.items())) or "none"
        if len(known) < 2:
            return None, (
                f"the trace of {self._server} tells the cost of {len(known)} K ({seen} fit to learn from, {ARM_STEPS} "
                "are needed): name a --surface for what the others cost, or record with a policy that tries them"
            )
        sizes = list(self._hello.captured_batch_sizes) or [1, 2]
        top = max(self._largest, self._hello.max_running_requests)
        while sizes[-1] < top:  # eager steps: a point every eighth of an octave
            sizes.append(min(max(sizes[-1] + 1, round(sizes[-1] * 2**0.125)), top))
        above = next((edge for edge in CONTEXTS if edge >= self._longest), CONTEXTS[-1])
        contexts = tuple(edge for edge in CONTEXTS if edge <= max(above, CONTEXTS[1]))
        costs = {
            k: Costs(
                contexts,
                tuple(tuple(self._cost.predict(k, size, at)[0] for at in contexts) for size in sizes),
            )
            for k in known
        }
        factor = 1.0 if prefill is None else prefill
        plain = {0: costs[0]} if 0 in costs else {}
        ranges = "; ".join(
            f"K={k} {self._arms[k]:,} steps, batch {self._batches[k][0]} to {self._batches[k][1]}" for k in known
        )
        label = f"model-based: fitted to the steps of {self._server} ({ranges})"
        return (
            NamedSurface(
                "fitted",
                label,
                ContextSurface(tuple(sizes), costs, factor, self._hello.skip),
                ContextSurface(tuple(sizes), plain, factor),
            ),
            "",
        )

    def _notes(
        self, arrivals: Sequence[Arrival], path: Sequence[Phase], factor: float, prefill: float | None
    ) -> Iterator[str]:
        queued = len(self._requests.arrived) - len(arrivals)
        running = sum(length is not None and not length[2] for length in self._requests.lengths)
        yield (
            f"{len(arrivals):,} requests from the rows of the batches, mean prompt "
            f"{statistics.mean(arrival.prompt_tokens for arrival in arrivals):,.0f}, mean output "
            f"{statistics.mean(arrival.output_tokens for arrival in arrivals):,.0f} tokens; arrivals from what was "
            "queued and started"
        )
        if running or queued:
            yield (
                f"{running:,} requests ran already when the trace began, with their context as prompt; {queued:,} "
                "were queued when it ended and are left out"
            )
        if factor > 1.02:
            yield f"prompts are {factor:.2f} times what was prefilled, as the contexts say: the rest was cached"
        if self._requests.guessed:
            yield f"{self._requests.guessed:,} requests lost their rows or were not seen to end: outputs are guesses"
        values = [phase.acceptance for phase in path]
        yield (
            f"acceptance in {len(path):,} windows of {WINDOW_SECONDS:g} s or longer, from {min(values):.2f} to "
            f"{max(values):.2f}, one for all positions; by position it was "
            + ", ".join(f"{hazard:.2f}" for hazard in self._acceptance.hazards()[:8])
        )
        left = sorted(set(self._hello.candidate_steps).difference(self._known()))
        if left:
            yield f"K={', '.join(map(str, left))} ran too seldom for its cost to be known"
        if prefill is None:
            yield "prefills: too few alone before a step to tell their cost, the estimate for an 8B model stands"
        else:
            yield f"prefills cost {prefill:.2f} times the estimate for an 8B model"
        if self._processes > 1 or self._unjoined:
            yield (
                f"{self._processes} processes of the server, {self._unjoined} gaps: what came or went in between "
                "is guessed"
            )
        if self._cut_seconds:
            yield f"{self._cut_seconds:,.0f} s without steps are cut: stretches of more than {IDLE_SECONDS:g} s"
