"""A simulated scheduler that runs the real hooks: SGLang's loop with only the GPU made up.

``SimServer`` holds a real ``Agent`` and ``TablePolicy`` and calls them at the places of SGLang's
loop where ``sglang_hooks/step_hooks.py`` does: ``event_loop_overlap`` (launch step N, then settle step
N-1) or ``event_loop_normal``. What the hooks must cope with is here: results that come one step
late, requests that ended while their next step was in flight, accepted runs that pass a request's
end, prefills between decodes. Around the loop:

    admission.py   requests that arrive and wait for their prefill, and their KV cache
    batch.py       the requests, batches and results that the hooks see
    gpu.py         when a forward pass is done and how many drafts it accepts, by ``surface.py`` (step times)
                   and ``workload.py`` (requests and the acceptance of their text)
    totals.py      what a run came to
    clock.py       the host's time, or virtual time

With ``WallClock`` this is the server of the demo, a process of its own:

    python -m specpilot.controller.simulation.server --endpoint ipc:///run/specpilot/controller.ipc --seconds 20

With ``VirtualClock`` it runs as fast as it can and repeats itself to the last record. (The link's
thread still counts the leases of tables by the host's clock: ``controller/replay`` does without it.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specpilot.controller.simulation.admission import Admission, KvPool
from specpilot.controller.simulation.batch import ForwardMode, SimBatch, SimRequest, SimResult
from specpilot.controller.simulation.clock import Clock, WallClock
from specpilot.controller.simulation.gpu import Decode, SimGpu
from specpilot.controller.simulation.surface import H200_8B, Surface
from specpilot.controller.simulation.totals import SimSummary, SimTotals
from specpilot.controller.simulation.workload import Arrival, Clients, Draws, SequentialDraws, Workload
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.broadcast import PolicyUpdate
from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.table_policy import TablePolicy

CANDIDATE_STEPS = (0, 1, 3)
INITIAL_STEPS = 3
MAX_RUNNING_REQUESTS = 64
CONTEXT_LENGTH = 8192
"""Context length that the process tells its controller, in tokens."""
IDLE_SECONDS = 0.002
"""An idle scheduler looks for requests, and for tables, this often."""

_SIMULATED = ServerFacts(
    server_id="",
    model="simulated 8B target",
    draft_model="simulated EAGLE3 draft",
    algorithm="EAGLE3",
    gpu="simulated H200",
    sglang_version="simulated",
)
_TOKENS = [[0] * count for count in range(66)]
"""What a step emits for a request, by the count of tokens: nobody reads their values."""


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
        agent: Agent | None = None,
        on_decode: Callable[[Decode], None] | None = None,
        on_end: Callable[[SimRequest, float], Arrival | None] | None = None,
        resume_seconds: float = 0.0,
        decode_limit: Callable[[float], int] | None = None,
        context_length: int = 0,
    ) -> None:
        """``kv_tokens`` 0: no limit. ``agent``: instead of one with K of ``CANDIDATE_STEPS``.

        ``on_end`` hears of each request that ends, and when (seconds since the start); what it
        returns arrives in its turn, which closes the loop. ``resume_seconds``: what the first step with
        drafts after one without takes longer, as where the draft model must catch up.
        ``context_length``: what the server says of itself, in tokens; 0: nothing, so that contexts are
        not told apart. ``decode_limit``: at most so many of the running requests are decoded, by seconds
        since the start; the others pause. So a batch size can be made to follow the time, and nothing else.
        """
        self.agent = agent or Agent(settings, TablePolicy(settings, CANDIDATE_STEPS, INITIAL_STEPS, clock.now))
        self.policy = self.agent.policy
        self._clock = clock
        self._overlap = overlap
        self._on_decode = on_decode
        self._on_end = on_end
        self._kv = KvPool(kv_tokens, slack=2 * (max(self.policy.candidate_steps) + 1))
        self._admission = Admission(workload.arrivals, max_running_requests, self._kv)
        draws = SequentialDraws(draws) if isinstance(draws, random.Random) else draws
        self._gpu = SimGpu(surface, workload, draws, clock, resume_seconds)
        self._totals = SimTotals()
        self._running = SimBatch([], ForwardMode.DECODE)
        self._decode_limit = decode_limit
        self._part, self._part_of = SimBatch([], ForwardMode.DECODE), self._running.reqs
        self._last: SimBatch | None = None
        self._in_flight: deque[tuple[SimBatch, SimResult]] = deque()
        self._forward_ct = 0
        self._idled = False
        self._stopping = False
        self._facts = dataclasses.replace(
            _SIMULATED,
            server_id=settings.server_id,
            captured_batch_sizes=surface.captured_batch_sizes,
            max_running_requests=max_running_requests,
            kv_tokens=kv_tokens,
            overlap=overlap,
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
        return self._totals.tokens

    @property
    def drained(self) -> bool:
        """Has every request been served, and every result been settled?"""
        admission = self._admission
        return not (admission.to_come or admission.waiting or self._running.reqs or self._in_flight or self._last)

    def summary(self) -> SimSummary:
        """Return what the run came to so far."""
        dropped = self.agent.state().counters["records_dropped"]
        return self._totals.summary(self._elapsed(), dropped, self._started_wall)

    def kv_needed(self, request: SimRequest | Arrival) -> int:
        """Return the KV tokens set aside for a request as long as it runs."""
        return self._kv.needed(request)

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
        received: list[Any] = [*self._admission.arrived(self._elapsed())]
        self.agent.pull(received)
        for item in received:
            if isinstance(item, PolicyUpdate):
                self.agent.apply(item)
                self._totals.tables_applied += item.table is not None
            else:
                self._admission.waiting.append(item)

    def _next_batch(self) -> SimBatch | None:
        """Prefill what waits and fits, else decode; under overlap the last result is not in yet."""
        if self._last is not None and self._last.forward_mode.is_extend():
            self._running.reqs = self._running.reqs + self._last.reqs
        self._kv.used -= sum([req.seqlen for req in self._running.drop_finished()])
        prefill = self._admission.next_prefill(len(self._running.reqs))
        if prefill is not None:
            return prefill
        return self._decodable() if self._running.reqs else None

    def _decodable(self) -> SimBatch:
        """Return the running requests that are not paused; the same batch as long as they are the same."""
        running = self._running
        if self._decode_limit is None or (limit := self._decode_limit(self._elapsed())) >= len(running.reqs):
            return running
        if self._part_of is not running.reqs or len(self._part.reqs) != limit:
            self._part, self._part_of = SimBatch(running.reqs[:limit], ForwardMode.DECODE), running.reqs
        return self._part

    def _launch(self, batch: SimBatch) -> SimResult:
        self._forward_ct += 1
        batch.forward_iter = self._forward_ct
        batch.launch_ts = self._clock.now()
        batch.after_idle_gap = self._idled
        self._idled = False
        # What follows is step_hooks.py's hook around forward_batch_generation.
        decode = batch.forward_mode.is_decode()
        self.agent.launching(batch)
        result = self._decode(batch) if decode else self._prefill(batch)
        self.agent.launched(batch, decode)
        return result

    def _prefill(self, batch: SimBatch) -> SimResult:
        return self._gpu.prefill(batch)

    def _decode(self, batch: SimBatch) -> SimResult:
        steps = self.policy.get_steps_for_batch(len(batch.reqs))
        result, decode = self._gpu.decode(batch, steps, self.policy.held_steps, self._elapsed())
        if self._on_decode is not None:
            self._on_decode(decode)
        return result

    def _settle(self) -> None:
        batch, result = self._in_flight.popleft()
        if not batch.forward_mode.is_decode():
            self._wait_for(result)
            for req in batch.reqs:
                req.first_token_at = self._elapsed()
                self._emit(req, 1)
            return
        # step_hooks.py's hook around process_batch_result_decode, and what is inside of it.
        ended = self.agent.settling(batch)
        self._wait_for(result)
        result.num_correct_drafts_per_req_cpu = result.accepted
        self.policy.on_verify_complete(result.accepted, len(batch.reqs))
        for req, accepted in zip(batch.reqs, result.accepted, strict=True):
            if req.finished_reason is None:
                self._emit(req, accepted + 1)
        self.agent.settled(batch, result, ended)
        self._totals.settled(result.speculative_num_draft_tokens - 1)

    def _emit(self, req: SimRequest, tokens: int) -> None:
        """Append an accepted run; its client sees as much of it as lies before the request's end."""
        output_ids = req.output_ids
        output_ids += _TOKENS[tokens]
        self._kv.used += tokens
        beyond = len(output_ids) - req.output_tokens
        self._totals.tokens += tokens - max(beyond, 0)
        if beyond >= 0:
            self._end(req)

    def _end(self, req: SimRequest) -> None:
        req.finished_reason = "stop"
        req.finished_len = req.output_tokens
        self._kv.release(req)
        if self._on_end is not None and (following := self._on_end(req, self._elapsed())) is not None:
            self._admission.expect(following)

    def _wait_for(self, result: SimResult) -> None:
        """``result.copy_done.synchronize()``."""
        remaining = result.done_at - self._clock.now()
        if remaining > 0.0:
            self._clock.sleep(remaining)

    def _load(self) -> tuple[int, int, int]:
        return len(self._running.reqs), len(self._admission.waiting), self._kv.used

    def _elapsed(self) -> float:
        return self._clock.now() - self._started_at


# -- as a process --


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the demo's clients in real time and write a ``SimSummary`` as JSON; return 2 for wrong input.

    The plugin's options are read from the environment as on a real server; SIGTERM and
    SIGINT end the run early, with its summary.
    """
    parser = argparse.ArgumentParser(
        prog="python -m specpilot.controller.simulation.server", description="A simulated server."
    )
    parser.add_argument("--endpoint", help="endpoint of the controller (default: $SPECPILOT_ENDPOINT)")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1, help="seed of arrivals and accepted drafts")
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
