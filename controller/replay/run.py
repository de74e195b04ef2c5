"""One policy through one scenario: ``serve`` simulates, ``examine`` also judges.

    arrivals ──► SimServer ── records ──► InProcessController ──► policy
       the real hooks, a Surface ◄── tables ──      0.5 s, 20 ms late

Everything between a record and a decision is the live code: the hooks, ``Policy``, ``Plan``,
``CompiledTable``, rank 0's receiving pass. Only the sockets and the threads are left out, and time
is the simulation's, so a run repeats itself exactly. All policies see the same requests, the same
acceptance path and, position by position, the same accepted drafts (common random numbers).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specpilot.controller.config import ControllerConfig
from specpilot.controller.replay.in_process import InProcessAgent, InProcessController
from specpilot.controller.replay.judge import JudgedSteps
from specpilot.controller.replay.policies import Factory, ReplayError, parse_policy
from specpilot.controller.replay.result import ReplayResult, TimePerOutputToken
from specpilot.controller.replay.scenario import MAX_RUNNING_REQUESTS, Scenario
from specpilot.controller.simulation.batch import SimRequest
from specpilot.controller.simulation.clock import VirtualClock
from specpilot.controller.simulation.gpu import Decode
from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.simulation.server import SimServer
from specpilot.controller.simulation.surface import ContextSurface, DriftingSurface
from specpilot.controller.simulation.workload import Arrival, KeyedDraws, Workload
from specpilot.policies.baselines import SGLangAdaptive, Truth, sglang_params
from specpilot.policies.interface import PolicyError
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TableError, TablePolicy

INITIAL_STEPS = 3
"""The K that a server starts with, where it has it."""
ROUND_TRIP_SECONDS = 0.02
"""Seconds from the newest record that a decision knows to its table in the mailbox (``link.DRAIN_SECONDS``)."""
SATURATION_SECONDS = 120.0

_SETTINGS = Settings(server_id="replay", queue_records=1 << 62)


@dataclass
class ReplayRun:
    """What a simulated server did."""

    decodes: list[Decode] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    """End of each request, in seconds since the start of the server."""
    token_seconds: list[float] = field(default_factory=list)
    """Seconds per output token after the first, of each request that ended."""
    tokens: int = 0
    seconds: float = 0.0
    """Length of the run in virtual time."""

    def ended(self, request: SimRequest, at: float) -> None:
        """Take in that ``request`` ended, ``at`` seconds after the start."""
        self.ended_at.append(at)
        if request.output_tokens > 1:
            self.token_seconds.append((at - request.first_token_at) / (request.output_tokens - 1))


def serve(policy: str, scenario: Scenario, make: Factory | None = None) -> ReplayRun:
    """Run one policy through a scenario; ReplayError says what cannot be run.

    ``make``: instead of the policy that the name stands for.
    """
    factory = make or parse_policy(policy)
    workload = scenario.workload()
    clock = VirtualClock()
    surface = scenario.costs(policy != "none", clock.now)
    run = ReplayRun()
    try:
        agent = InProcessAgent(_SETTINGS, _table_policy(policy, surface, clock))
        server = _server(scenario, workload, surface, agent, clock, run)
        server.start()
        controller = None
        if factory is not None:
            truth = Truth(surface.decode_seconds, workload.acceptance)
            controller = InProcessController(
                factory(agent.hello(), truth), agent, ControllerConfig(), ROUND_TRIP_SECONDS, scenario.seed
            )
        enough = math.inf if scenario.steps is None else scenario.steps
        while clock.now() < scenario.seconds and len(run.decodes) < enough:
            server.turn()
            if controller is not None:
                controller.turn(clock.now())
            else:
                agent.records.take(agent.records.waiting())
    except (PolicyError, TableError) as error:
        raise ReplayError(f"policy {policy!r}: {error}") from error
    if agent.failures or agent.policy.halt_reason:
        raise RuntimeError(f"policy {policy!r}: the hooks failed: {agent.policy.halt_reason or 'see the log'}")
    run.tokens, run.seconds = server.tokens, clock.now()
    return run


def _table_policy(policy: str, surface: ContextSurface | DriftingSurface, clock: VirtualClock) -> TablePolicy:
    """Return what chooses K in the server: SGLang's own adaptive speculation, or our tables."""
    if policy == "sglang":
        params = sglang_params(INITIAL_STEPS, surface.captured_batch_sizes)
        return SGLangAdaptive(params, INITIAL_STEPS, clock.now)
    initial = max((k for k in surface.steps if k <= INITIAL_STEPS), default=surface.steps[0])
    return TablePolicy(_SETTINGS, surface.steps, initial, clock.now)


def _server(
    scenario: Scenario,
    workload: Workload,
    surface: ContextSurface | DriftingSurface,
    agent: InProcessAgent,
    clock: VirtualClock,
    run: ReplayRun,
) -> SimServer:
    """Return the scenario's server, which reports to ``run``; ReplayError if a request would never fit."""
    following = itertools.count(scenario.concurrency or 0)

    def on_end(request: SimRequest, at: float) -> Arrival | None:
        run.ended(request, at)
        return None if scenario.concurrency is None else scenario.following(next(following), at)

    server = SimServer(
        _SETTINGS,
        workload,
        surface,
        KeyedDraws(scenario.seed),
        clock,
        max_running_requests=scenario.max_running_requests,
        kv_tokens=scenario.kv_tokens,
        agent=agent,
        on_decode=run.decodes.append,
        on_end=on_end,
        resume_seconds=scenario.resume_seconds,
        decode_limit=scenario.decode_limit if scenario.decode_limits else None,
    )
    for request in scenario.requests:
        if (needed := server.kv_needed(request)) > scenario.kv_tokens:
            raise ReplayError(
                f"a request of {request.prompt_tokens:,} and {request.output_tokens:,} tokens needs {needed:,} of "
                f"KV cache, the server has {scenario.kv_tokens:,}"
            )
    return server


def saturation(surface: NamedSurface, requests: Sequence[Arrival]) -> float:
    """Return the requests per second that the server without speculation completes while many wait.

    A closed loop of as many requests as may run, in random order; the first third of the time is
    left out.
    """
    shuffled = random.Random("saturation").sample(requests, len(requests))  # noqa: S311
    closed = Scenario(surface, shuffled, SATURATION_SECONDS, seed=0, concurrency=MAX_RUNNING_REQUESTS)
    begin = SATURATION_SECONDS / 3
    ended = sum(at > begin for at in serve("none", closed).ended_at)
    if not ended:
        raise ReplayError(f"no request ends within {SATURATION_SECONDS:g} s: the arrivals are too long to replay")
    return ended / (SATURATION_SECONDS - begin)


def simulate(policy: str, scenario: Scenario) -> ReplayResult:
    """Run a policy through a scenario and judge it; ReplayError says what cannot be run."""
    return examine(policy, scenario)[0]


def examine(policy: str, scenario: Scenario) -> tuple[ReplayResult, JudgedSteps]:
    """Return what ``simulate`` does, and every step's judgement."""
    run = serve(policy, scenario)
    if len(run.decodes) < 2:
        raise ReplayError(f"only {len(run.decodes)} decode steps in {scenario.seconds:g} s: give more --seconds")
    judged = scenario.judge(run.decodes)
    switches, probes = judged.switches_per_100_steps()
    times = run.token_seconds
    result = ReplayResult(
        policy=policy,
        surface=scenario.surface.name,
        load=scenario.load,
        concurrency=scenario.concurrency,
        seed=scenario.seed,
        tokens_per_second=run.tokens / run.seconds,
        time_per_output_token=TimePerOutputToken(
            mean=float(np.mean(times)) if times else None,
            p99=float(np.quantile(times, 0.99)) if times else None,
        ),
        reference_share=judged.reference_share(),
        switches_per_100_steps=switches,
        probe_switches_per_100_steps=probes,
        exploration_loss=judged.exploration_loss(),
        steps_to_95=judged.steps_to_95(),
        steps=len(run.decodes),
    )
    return result, judged
