"""What a server was asked, and what its steps cost, told from its trace: ``specpilot replay TRACE``.

A trace has no requests in it, only steps. What a replay needs of it is inferred:

- *Requests* (``requests.py``). SGLang keeps the order of a batch's rows: ended ones are taken out, new ones
  come last. So each row's request is known from step to step, and with it how many tokens it was given. Prompts
  are the tokens prefilled before a request's first step, shared evenly among those that came together.
- *Arrivals* (``requests.py``). Until a moment as many requests have arrived as have been started by then or are
  queued; they are taken to be started in the order in which they came.
- *Acceptance* (``acceptance.py``). Drafts that passed over drafts tried, of all positions down to the first
  refusal and none beyond a request's end, in windows: the maximum of the likelihood where each draft is accepted
  with one probability.
- *Costs* (``costs.py``). A ``CostModel`` learns every step; its predictions, on the batch sizes with a graph and a
  few contexts, are the surface of the simulated server. Only K that were seen often enough are on it.

Everything a policy earns on that is model-based, and its output says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from specpilot.controller.replay.inference.acceptance import WINDOW_SECONDS, WindowedAcceptance
from specpilot.controller.replay.inference.costs import TracedCosts
from specpilot.controller.replay.inference.requests import TracedRequests
from specpilot.controller.replay.policies import ReplayError
from specpilot.controller.replay.scenario import KV_TOKENS, Scenario
from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.simulation.workload import Arrival, Phase
from specpilot.controller.trace.checked_reader import read_source
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.format import records
from specpilot.controller.trace.reader import TraceError
from specpilot.controller.trace.sources import TraceSource, single_source
from specpilot.sglang_hooks.wire import MASKED, Hello, StepRecord

IDLE_SECONDS = 60.0
"""Longer gaps between steps are cut to this: nothing can be told apart by how long nothing happened."""
SLACK_TOKENS = 64
"""Tokens of each request's KV cache that are kept free for the drafts of two steps, of any surface's K."""


@dataclass(frozen=True)
class Inferred:
    """What a trace says, ready to be replayed."""

    hello: Hello
    server: str
    arrivals: tuple[Arrival, ...]
    acceptance: tuple[Phase, ...]
    seconds: float
    fitted: NamedSurface | None
    """The server as fitted; None where fewer than two K were seen often enough: ``unfit`` says which were."""
    unfit: str
    resume_seconds: float
    tokens_per_second: float
    """Tokens of all requests over the trace's time, as recorded."""
    records: int
    notes: tuple[str, ...]
    """What was inferred, and what is not known, a line each."""
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


def _kv_tokens(hello: Hello) -> int:
    """Return the room for context; a server that does not say what it has is taken for one that has enough."""
    return hello.kv_tokens or KV_TOKENS


def infer(paths: Sequence[Path], server: str | None = None, limit: int | None = None) -> Inferred:
    """Read a trace once and infer what a replay needs; ReplayError says why it cannot be.

    ``limit``: only of its first so many records.
    """
    findings = Findings()
    try:
        source = single_source(paths, server, findings)
        return _Inference(source.server, source.hello).run(islice(_rows(source, findings), limit), findings)
    except TraceError as error:
        raise ReplayError(str(error)) from error


def _rows(source: TraceSource, findings: Findings) -> Iterator[tuple[StepRecord, bool, str]]:
    for chunk in read_source(source, findings):
        instance = chunk.hello.instance
        for step, follows in zip(records(chunk.columns.batch), chunk.follows.tolist(), strict=True):
            yield step, follows, instance


class _Inference:
    """One pass over the steps of a trace."""

    def __init__(self, server: str, hello: Hello) -> None:
        self._server = server
        self._hello = hello
        self._requests = TracedRequests()
        self._acceptance = WindowedAcceptance()
        self._costs = TracedCosts(server, hello)
        self._tokens = 0
        self._processes = 0
        self._cut_seconds = 0.0
        self._unjoined = 0

    def run(self, rows: Iterable[tuple[StepRecord, bool, str]], findings: Findings) -> Inferred:
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
                seconds = step.seconds if follows else max(step.time - previous.time, 0.0)
                cut = min(seconds, IDLE_SECONDS)
                self._cut_seconds += seconds - cut
                # An idle spell ends when a request comes: its prefill is launched, and then this step.
                launched_at += min(max(step.launch_gap_seconds, 0.0), cut) if follows else cut
                ended_at += cut
            self._requests.take(step, follows and previous is not None, launched_at)
            self._acceptance.take(step, ended_at, depth)
            self._costs.take(step)
            self._tokens += sum([accepted + 1 for accepted in step.accepted_drafts if accepted != MASKED])
            previous = step
        self._requests.close()
        return self._inferred(ended_at, count, findings)

    def _inferred(self, seconds: float, count: int, findings: Findings) -> Inferred:
        factor = self._requests.context_factor()
        longest = max(_kv_tokens(self._hello) - SLACK_TOKENS, 4)
        arrivals = self._requests.arrivals(factor, longest)
        path = self._acceptance.path()
        if not path:
            raise TraceError(
                f"the trace of {self._server} holds no step with drafts: nothing tells how many would be accepted"
            )
        prefill = self._costs.prefill_factor(factor)
        fitted, unfit = self._costs.surface(prefill)
        return Inferred(
            hello=self._hello,
            server=self._server,
            arrivals=tuple(arrivals),
            acceptance=path,
            seconds=seconds,
            fitted=fitted,
            unfit=unfit,
            resume_seconds=self._costs.resume_seconds(),
            tokens_per_second=self._tokens / seconds if seconds else 0.0,
            records=count,
            notes=tuple(self._notes(arrivals, path, factor, prefill)),
            findings=tuple(findings.lines()),
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
            + ", ".join(f"{share:.2f}" for share in self._acceptance.by_position()[:8])
        )
        left = sorted(set(self._hello.candidate_steps).difference(self._costs.known_steps()))
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
