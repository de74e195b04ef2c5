"""A simulated scheduler that runs the real hooks: SGLang's loop with only the GPU made up.

``SimServer`` holds a real ``Agent`` and ``TablePolicy`` and calls them at the places of
SGLang's loop where ``sglang_hooks/plugin.py`` does: ``event_loop_overlap`` (launch step N,
then settle step N-1) or ``event_loop_normal``. Instead of a forward pass there is a
``Surface`` (``surface.py``), and accepted drafts are drawn request by request from a
``Workload`` (``workload.py``). So whatever the hooks must cope with is here: results that
come one step late, requests that ended while their next step was in flight, accepted runs
that pass a request's end, prefills between decodes.

Time comes from a ``Clock`` and randomness from a seeded generator. With ``WallClock`` this is
the server of the demo, a process of its own:

    python -m specpilot.controller.simulation.server --endpoint ipc:///run/specpilot/controller.ipc --seconds 20

With ``VirtualClock`` it runs as fast as it can and repeats itself to the last record. (The
link's thread still counts the leases of tables by the host's clock: ``replay.py`` does without it.)
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import logging
import os
import random
import signal
import sys
import time
from bisect import insort_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specpilot.controller.simulation.surface import H200_8B, Surface
from specpilot.controller.simulation.workload import Arrival, Clients, Draws, SequentialDraws, Workload
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.broadcast import PolicyUpdate
from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.table_policy import TablePolicy

CANDIDATE_STEPS = (0, 1, 3)
INITIAL_STEPS = 3
MAX_RUNNING_REQUESTS = 64
MAX_PREFILL_TOKENS = 8192
IDLE_SECONDS = 0.002
"""An idle scheduler looks for requests, and for tables, this often."""

_TOKENS = [[0] * count for count in range(66)]
"""What a step emits for a request, by the count of tokens: nobody reads their values."""


# -- time --


CONTEXT_LENGTH = 8192
"""Of the simulated process, in tokens."""


class Clock(Protocol):
    """Where the scheduler's time comes from, in seconds."""

    def now(self) -> float:
        """Return the time since some fixed moment."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` (not negative) pass."""


class WallClock:
    """The host's monotonic clock, which the hooks read as well."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class VirtualClock:
    """Time that passes only when somebody sleeps.

    >>> clock = VirtualClock()
    >>> clock.sleep(1.5)
    >>> clock.now()
    1.5
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Return the seconds slept so far."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Move on by ``seconds``."""
        self._now += seconds


# -- what the hooks are shown: as much of SGLang's Req, ScheduleBatch and result as they read --


class Mode(enum.Enum):
    """``ForwardMode``."""

    DECODE = enum.auto()
    EXTEND = enum.auto()

    def is_decode(self) -> bool:
        """Is it a decode, speculative or not?"""
        return self is Mode.DECODE

    def is_extend(self) -> bool:
        """Is it a prefill?"""
        return self is Mode.EXTEND

    def is_mixed(self) -> bool:
        """No chunked prefill is simulated, so none carries decode rows."""
        return False


@dataclass(eq=False, slots=True)
class Req:
    """A request; it ends at ``output_tokens``, which the scheduler does not foresee, as at a stop token."""

    prompt_tokens: int
    output_tokens: int
    index: int = 0
    """In the order of arrival."""
    position: int = 0
    """Output tokens decided so far, those in flight included; it goes on past the end."""
    acceptance: float | None = None
    """Of its own text; None: the workload's at the time."""
    first_token_at: float = 0.0
    """Seconds since the start of the server."""
    output_ids: list[int] = field(default_factory=list)
    finished_reason: str | None = None
    finished_len: int | None = None
    """Output length at the end; ``output_ids`` may go on past it."""
    is_retracted: bool = False

    @property
    def seqlen(self) -> int:
        """Tokens in its KV cache."""
        return self.prompt_tokens + len(self.output_ids)


@dataclass(eq=False, slots=True)
class Batch:
    """``ScheduleBatch``: ``reqs`` is replaced, never changed, when its members change."""

    reqs: list[Req]
    forward_mode: Mode
    forward_iter: int = 0
    launch_ts: float = 0.0
    extend_num_tokens: int | None = None
    has_grammar: bool = False
    after_idle_gap: bool = False

    def copy(self) -> Batch:
        """Return what stays as it was at the launch until the result is settled."""
        return dataclasses.replace(self, reqs=self.reqs[:])

    def drop_finished(self) -> list[Req]:
        """Keep the live requests, and return the others."""
        live = [req for req in self.reqs if req.finished_reason is None]
        if len(live) == len(self.reqs):
            return []
        ended = [req for req in self.reqs if req.finished_reason is not None]
        self.reqs = live
        return ended


@dataclass(eq=False, slots=True)
class Result:
    """``GenerationBatchResult``, and the moment at which the GPU will have it."""

    done_at: float
    accepted: list[int]
    speculative_num_draft_tokens: int
    can_run_cuda_graph: bool
    num_correct_drafts_per_req_cpu: list[int] | None = None


# -- the scheduler --


class Decode(NamedTuple):
    """One decode step at its launch, with what no scheduler knows: the truth it will be judged by."""

    at: float
    """Seconds since the start of the server."""
    steps: int
    held_steps: int
    """What the table would have chosen without exploration."""
    batch_size: int
    mean_context: float
    """Tokens per request, those in flight included."""
    acceptance: float
    """Of the workload at the time."""
    seconds: float
    acceptances: tuple[float, ...] = ()
    """Of each request, where they have their own; else empty."""


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    steps: int
    """Decode steps that were settled."""
    tokens: int
    """Of all requests, as far as their clients saw them."""
    seconds: float
    tokens_per_second: float
    share_by_k: dict[str, float]
    """Of the decode steps, by K."""
    switches: int
    """Decode steps at another K than the one before."""
    tables_applied: int
    dropped_records: int
    started_at: float
    """Seconds since the Unix epoch at which the workload's time 0 was."""


class SimServer:
    """One scheduler process; ``turn`` is one pass of its loop."""

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        surface: Surface,
        draws: Draws | random.Random,
        clock: Clock,
        *,
        overlap: bool = True,
        max_running_requests: int = MAX_RUNNING_REQUESTS,
        kv_tokens: int = 0,
        candidate_steps: Sequence[int] = CANDIDATE_STEPS,
        initial_steps: int = INITIAL_STEPS,
        agent: Agent | None = None,
        on_decode: Callable[[Decode], None] | None = None,
        on_end: Callable[[Req, float], Arrival | None] | None = None,
        resume_seconds: float = 0.0,
        decode_limit: Callable[[float], int] | None = None,
        context_length: int = 0,
    ) -> None:
        """``kv_tokens`` 0: no limit. ``agent``: instead of one made from ``settings`` and the steps.

        ``on_end`` hears of each request that ends, and when (seconds since the start); what it
        returns arrives in its turn, which closes the loop. ``resume_seconds``: what the first step with
        drafts after one without takes longer, as where the draft model must catch up.
        ``context_length``: what it says of itself, in tokens; 0: nothing, so that contexts are not told apart.
        ``decode_limit``: at most so many of the running requests are decoded, by seconds since the
        start; the others pause. So a batch size can be made to follow the time, and nothing else.
        """
        self.agent = agent or Agent(settings, TablePolicy(settings, candidate_steps, initial_steps, clock.now))
        self.policy = self.agent.policy
        self._surface = surface
        self._workload = workload
        self._draws: Draws = SequentialDraws(draws) if isinstance(draws, random.Random) else draws
        self._clock = clock
        self._overlap = overlap
        self._max_running = max_running_requests
        self._kv_tokens = kv_tokens
        self._kv_slack = 2 * (max(self.policy.candidate_steps) + 1)
        self._kv_reserved = 0
        self._kv_used = 0
        self._on_decode = on_decode
        self._on_end = on_end
        self._resume_seconds = resume_seconds
        self._launched_steps = -1
        self._decode_limit = decode_limit
        self._part = Batch([], Mode.DECODE)
        self._part_of: list[Req] = []
        self._received = 0
        self._own_acceptance = False
        self._to_come = deque(workload.arrivals)
        self._waiting: deque[Req] = deque()
        self._running = Batch([], Mode.DECODE)
        self._last: Batch | None = None
        self._in_flight: deque[tuple[Batch, Result]] = deque()
        self._gpu_free_at = 0.0
        self._forward_ct = 0
        self._idled = False
        self._stopping = False
        self._tokens = 0
        self._steps: Counter[int] = Counter()
        self._previous_steps: int | None = None
        self._switches = 0
        self._tables_applied = 0
        self._facts = ServerFacts(
            server_id=settings.server_id,
            model="simulated 8B target",
            draft_model="simulated EAGLE3 draft",
            algorithm="EAGLE3",
            captured_batch_sizes=surface.captured_batch_sizes,
            max_running_requests=max_running_requests,
            kv_tokens=kv_tokens,
            overlap=overlap,
            gpu="simulated H200",
            sglang_version="simulated",
            context_length=context_length,
            skip=surface.skip,
        )
        self._started_at = clock.now()
        self._started_wall = time.time()

    def start(self) -> None:
        """Start the agent; the workload's time 0 is now."""
        self._started_at = self._clock.now()
        self._started_wall = time.time()
        self.agent.start(self._facts, load=self._load)

    def run(self, seconds: float) -> None:
        """Serve for ``seconds`` or until ``stop``, settle what is in flight, and flush the agent."""
        self.start()
        while not self._stopping and self._elapsed() < seconds:
            self.turn()
        while self._in_flight:
            self._settle()
        self.agent.stop()

    def stop(self) -> None:
        """Make ``run`` return early; safe to call from a signal handler."""
        self._stopping = True

    @property
    def tokens(self) -> int:
        """Tokens of all requests so far, as far as their clients saw them."""
        return self._tokens

    @property
    def drained(self) -> bool:
        """Has every request been served, and every result been settled?"""
        return not (self._to_come or self._waiting or self._running.reqs or self._in_flight or self._last)

    def summary(self) -> Summary:
        """Return what the run came to so far."""
        seconds = self._elapsed()
        steps = self._steps.total()
        return Summary(
            steps=steps,
            tokens=self._tokens,
            seconds=seconds,
            tokens_per_second=self._tokens / seconds if seconds else 0.0,
            share_by_k={str(k): count / steps for k, count in sorted(self._steps.items())},
            switches=self._switches,
            tables_applied=self._tables_applied,
            dropped_records=self.agent.state().counters["records_dropped"],
            started_at=self._started_wall,
        )

    def turn(self) -> None:
        """One pass: receive, launch a batch, settle the one before (or, without overlap, this one)."""
        self._receive()
        batch = self._next_batch()
        if batch is not None:
            result = self._launch(batch)
            self._in_flight.append((batch.copy(), result))
        else:
            self._idled = True
        # SGLang's own condition for "a result is waiting": without overlap it is this pass's own.
        if (self._last if self._overlap else batch) is not None:
            self._settle()
        elif batch is None:
            self._clock.sleep(IDLE_SECONDS)
        self._last = batch

    # -- the parts of a pass, in SGLang's order --

    def _receive(self) -> None:
        received: list[Any] = []
        elapsed = self._elapsed()
        while self._to_come and self._to_come[0].at <= elapsed:
            arrival = self._to_come.popleft()
            request = Req(arrival.prompt_tokens, arrival.output_tokens, self._received, acceptance=arrival.acceptance)
            received.append(request)
            self._own_acceptance |= arrival.acceptance is not None
            self._received += 1
        self.agent.pull(received)
        for item in received:
            if isinstance(item, PolicyUpdate):
                self.agent.apply(item)
                self._tables_applied += item.table is not None
            else:
                self._waiting.append(item)

    def _next_batch(self) -> Batch | None:
        """Prefill what waits and fits, else decode; under overlap the last result is not in yet."""
        if self._last is not None and self._last.forward_mode.is_extend():
            self._running.reqs = self._running.reqs + self._last.reqs
        self._kv_used -= sum([req.seqlen for req in self._running.drop_finished()])
        prefill: list[Req] = []
        tokens = 0
        while self._waiting and len(self._running.reqs) + len(prefill) < self._max_running:
            prompt = self._waiting[0].prompt_tokens
            if prefill and tokens + prompt > MAX_PREFILL_TOKENS:
                break
            needed = self.kv_needed(self._waiting[0])
            if self._kv_tokens and self._kv_reserved + needed > self._kv_tokens:
                break
            self._kv_reserved += needed
            self._kv_used += prompt
            tokens += prompt
            prefill.append(self._waiting.popleft())
        if prefill:
            return Batch(prefill, Mode.EXTEND, extend_num_tokens=tokens)
        return self._decodable() if self._running.reqs else None

    def _decodable(self) -> Batch:
        running = self._running
        if self._decode_limit is None or (limit := self._decode_limit(self._elapsed())) >= len(running.reqs):
            return running
        if self._part_of is not running.reqs or len(self._part.reqs) != limit:
            self._part, self._part_of = Batch(running.reqs[:limit], Mode.DECODE), running.reqs
        return self._part

    def kv_needed(self, request: Req | Arrival) -> int:
        """Return the KV tokens set aside for a request as long as it runs.

        All that it will ever use: SGLang takes a part of that, and retracts requests when it was too
        little, which is not simulated.
        """
        return request.prompt_tokens + request.output_tokens + self._kv_slack

    def _launch(self, batch: Batch) -> Result:
        self._forward_ct += 1
        batch.forward_iter = self._forward_ct
        batch.launch_ts = self._clock.now()
        batch.after_idle_gap = self._idled
        self._idled = False
        # What follows is plugin.py's hook around forward_batch_generation.
        decode = batch.forward_mode.is_decode()
        self.agent.launching(batch)
        result = self._decode(batch) if decode else self._prefill(batch)
        self.agent.launched(batch, decode)
        return result

    def _prefill(self, batch: Batch) -> Result:
        assert batch.extend_num_tokens is not None
        for req in batch.reqs:
            req.position = 1
        done_at = self._occupy_gpu(self._surface.prefill_seconds(batch.extend_num_tokens))
        return Result(done_at, [0] * len(batch.reqs), 0, can_run_cuda_graph=False)

    def _decode(self, batch: Batch) -> Result:
        batch_size = len(batch.reqs)
        steps = self.policy.get_steps_for_batch(batch_size)
        at = self._elapsed()
        acceptance = self._workload.acceptance(at)
        mean_context = sum([req.prompt_tokens + req.position for req in batch.reqs]) / batch_size
        own: tuple[float, ...] = ()
        if self._own_acceptance:
            own = tuple(acceptance if req.acceptance is None else req.acceptance for req in batch.reqs)
            accepted = [
                self._draws.accepted(req.index, req.position, steps, its)
                for req, its in zip(batch.reqs, own, strict=True)
            ]
        else:
            accepted = self._draws.accepted_each(batch.reqs, steps, acceptance)
        for req, drafts in zip(batch.reqs, accepted, strict=True):
            req.position += drafts + 1
        seconds = self._surface.decode_seconds(steps, batch_size, mean_context)
        if steps and self._launched_steps == 0:
            seconds += self._resume_seconds
        self._launched_steps = steps
        if self._on_decode is not None:
            self._on_decode(
                Decode(at, steps, self.policy.held_steps, batch_size, mean_context, acceptance, seconds, own)
            )
        return Result(
            done_at=self._occupy_gpu(seconds),
            accepted=accepted,
            speculative_num_draft_tokens=steps + 1,
            can_run_cuda_graph=batch_size <= self._surface.captured_batch_sizes[-1],
        )

    def _occupy_gpu(self, seconds: float) -> float:
        """Queue ``seconds`` of work behind what the GPU has, and return when it will be done."""
        self._gpu_free_at = max(self._gpu_free_at, self._clock.now()) + seconds
        return self._gpu_free_at

    def _settle(self) -> None:
        batch, result = self._in_flight.popleft()
        if not batch.forward_mode.is_decode():
            self._wait_for(result)
            for req in batch.reqs:
                req.first_token_at = self._elapsed()
                self._emit(req, 1)
            return
        # plugin.py's hook around process_batch_result_decode, and what is inside of it.
        ended = self.agent.settling(batch)
        self._wait_for(result)
        result.num_correct_drafts_per_req_cpu = result.accepted
        self.policy.on_verify_complete(result.accepted, len(batch.reqs))
        for req, accepted in zip(batch.reqs, result.accepted, strict=True):
            if req.finished_reason is None:
                self._emit(req, accepted + 1)
        self.agent.settled(batch, result, ended)
        steps = result.speculative_num_draft_tokens - 1
        self._steps[steps] += 1
        self._switches += self._previous_steps not in (None, steps)
        self._previous_steps = steps

    def _emit(self, req: Req, tokens: int) -> None:
        """Append an accepted run; its client sees as much of it as lies before the request's end."""
        output_ids = req.output_ids
        output_ids += _TOKENS[tokens]
        self._tokens += tokens
        self._kv_used += tokens
        beyond = len(output_ids) - req.output_tokens
        if beyond >= 0:
            self._tokens -= beyond
            self._end(req)

    def _end(self, req: Req) -> None:
        req.finished_reason = "stop"
        req.finished_len = req.output_tokens
        self._kv_reserved -= self.kv_needed(req)
        if self._on_end is not None and (following := self._on_end(req, self._elapsed())) is not None:
            insort_right(self._to_come, following, key=lambda arrival: arrival.at)

    def _wait_for(self, result: Result) -> None:
        """``result.copy_done.synchronize()``."""
        remaining = result.done_at - self._clock.now()
        if remaining > 0.0:
            self._clock.sleep(remaining)

    def _load(self) -> tuple[int, int, int]:
        return len(self._running.reqs), len(self._waiting), self._kv_used

    def _elapsed(self) -> float:
        return self._clock.now() - self._started_at


# -- as a process --


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the demo's clients in real time and write a Summary as JSON; 2 for wrong input.

    The plugin's options are read from the environment as on a real server; SIGTERM and
    SIGINT end the run early, with its summary.
    """
    parser = argparse.ArgumentParser(
        prog="python -m specpilot.controller.simulation.server", description="A simulated server."
    )
    parser.add_argument("--endpoint", help="of the controller (default: $SPECPILOT_ENDPOINT)")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and accepted drafts")
    parser.add_argument("--server-id", help="name of this server (default: $SPECPILOT_SERVER_ID, or demo:1)")
    parser.add_argument("--no-overlap", action="store_true", help="settle each step before the next is launched")
    parser.add_argument("--out", type=Path, help="write the summary here (default: standard output)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    environment = dict(os.environ)
    if options.endpoint is not None:
        environment["SPECPILOT_ENDPOINT"] = options.endpoint
    if options.server_id is not None:
        environment["SPECPILOT_SERVER_ID"] = options.server_id
    environment.setdefault("SPECPILOT_SERVER_ID", "demo:1")
    try:
        settings = Settings.from_environment(environment)
        if not settings.endpoint:
            raise SettingsError("give --endpoint, or set SPECPILOT_ENDPOINT")
        rng = random.Random(options.seed)  # noqa: S311
        clients = Clients(options.seconds, rng)
        server = SimServer(
            settings,
            clients.workload,
            H200_8B,
            rng,
            WallClock(),
            overlap=not options.no_overlap,
            context_length=CONTEXT_LENGTH,
            on_end=clients.again,
        )
    except SettingsError as error:
        sys.stderr.write(f"specpilot: {error}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, lambda *_: server.stop())
    server.run(options.seconds)
    text = json.dumps(dataclasses.asdict(server.summary()), indent=2) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
