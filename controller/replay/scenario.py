"""Policies against each other in virtual time: ``specpilot replay``.

    arrivals ──► SimServer (simserver.py) ── records ──► InProcessController ──► policy
                 the real hooks, a Surface  ◄── tables ──      0.5 s, 20 ms late

Everything between a record and a decision is the live code: the hooks, ``Policy``, ``Plan``,
``CompiledTable``, rank 0's receiving pass. Only the sockets and the threads are left out, and time
is the simulation's, so a run repeats itself exactly. All policies see the same requests, the same
acceptance path and, position by position, the same accepted drafts (common random numbers).

Around it: ``replay_policies.py`` (policies by name), ``replay_judge.py`` (every step by the truth),
``replay_command.py`` (the command), ``replay_report.py`` (its page).
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specpilot.controller.config import ControllerConfig
from specpilot.controller.replay.judge import Judged, Result, TimePerOutputToken
from specpilot.controller.replay.policies import Factory, ReplayError, parse_policy
from specpilot.controller.serve.pace import Pace
from specpilot.controller.simulation.batch import SimRequest
from specpilot.controller.simulation.clock import VirtualClock
from specpilot.controller.simulation.gpu import Decode
from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.simulation.server import SimServer
from specpilot.controller.simulation.surface import ContextSurface, DriftingSurface
from specpilot.controller.simulation.workload import (
    Arrival,
    KeyedDraws,
    Phase,
    Workload,
    acceptance_path,
)
from specpilot.policies.baselines import SGLangAdaptive, Truth, sglang_params
from specpilot.policies.interface import Plan, Policy, PolicyError
from specpilot.sglang_hooks.agent import Agent
from specpilot.sglang_hooks.link import Delivery, Link, Mailbox, RecordQueue
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import CompiledTable, TableError, TablePolicy

MAX_RUNNING_REQUESTS = 256
KV_TOKENS = 600_000
"""An 8B model with 8 KV heads needs 128 KB a token: about what an H200 holds beside its weights."""
INITIAL_STEPS = 3
ROUND_TRIP_SECONDS = 0.02
"""From the newest record that a decision knows to its table in the mailbox (``link.DRAIN_SECONDS``)."""
GENERATED_REQUESTS = 4000
SATURATION_SECONDS = 120.0


# -- hooks and controller in one process --


class InProcessLink(Link):
    """A link without a socket and a thread: who drives the agent takes the records and fills the mailbox."""

    @property
    def mailbox(self) -> Mailbox:
        """Where the next receiving pass takes a table from."""
        return self._mailbox

    def start(self) -> None:
        """Start nothing."""

    def stop(self, timeout: float = 0.0) -> None:
        """Nothing runs that could be ended."""


class InProcessAgent(Agent):
    """An agent in virtual time whose records and mailbox are at hand instead of behind a socket."""

    def __init__(self, settings: Settings, policy: TablePolicy) -> None:
        # Records carry the simulation's time, or no run would repeat itself.
        super().__init__(settings, policy, make_link=InProcessLink, wall_clock=policy.clock)

    @property
    def records(self) -> RecordQueue:
        """What was recorded and not taken yet."""
        return self._queue

    @property
    def mailbox(self) -> Mailbox:
        """Where tables for this server are delivered; there is one after ``start``."""
        assert isinstance(self._link, InProcessLink)
        return self._link.mailbox


class InProcessController:
    """Between records and tables what ``service.Service`` does for one server; ``turn`` after each pass."""

    def __init__(
        self, policy: Policy, agent: InProcessAgent, config: ControllerConfig, delay: float, seed: int
    ) -> None:
        """``delay``: seconds from a decision to its table in the mailbox. ``seed``: of exploration."""
        self._policy = policy
        self._agent = agent
        self._hello = agent.hello()
        self._config = config
        self._delay = delay
        # Of as many bits as ``service.Session`` takes: small seeds lie next to each other.
        self._seed = random.Random(f"exploration {seed}").getrandbits(62)  # noqa: S311
        self._plan: Plan | None = None
        self._epoch = 0
        self._pace = Pace(config.decide_seconds)
        self._on_the_way: deque[Delivery] = deque()

    def turn(self, now: float) -> None:
        """Learn, decide when it is time to, and let tables arrive."""
        for record in self._agent.records.take(self._agent.records.waiting()):
            self._policy.learn(record)
        if self._pace.due(now, self._policy.urgent):
            self._decide(now)
        while self._on_the_way and now >= self._on_the_way[0].received_at:
            delivery = self._on_the_way.popleft()
            self._agent.mailbox.tables.append(delivery)

    def _decide(self, now: float) -> None:
        plan = self._policy.decide(self._hello, now)
        if plan == self._plan:
            return
        self._plan = plan
        self._epoch += 1
        table = plan.table(self._epoch, self._config.lease_seconds, self._policy.name, self._seed)
        compiled = CompiledTable.compile(table, self._hello.candidate_steps)
        # The controller is there as long as the simulation is: the lease is always renewed.
        self._on_the_way.append(Delivery(compiled, math.inf, now + self._delay))


# -- what is served --


@dataclass(frozen=True)
class Scenario:
    """One server and its requests; the same for every policy."""

    surface: NamedSurface
    requests: Sequence[Arrival]
    """Open loop: each at its time. Closed loop: their lengths, in order, over and over."""
    seconds: float
    """Of virtual time; it may be infinite where ``steps`` ends the run."""
    seed: int
    """Of the acceptance path, the accepted drafts and the exploration."""
    load: float | None = None
    """Open loop, for the record: arrival rate in saturations of the server without speculation."""
    concurrency: int | None = None
    """Closed loop: requests at a time."""
    acceptance: float | Sequence[Phase] | None = None
    """Held for the whole run, or by phases; None: ``acceptance_path``."""
    max_running_requests: int = MAX_RUNNING_REQUESTS
    kv_tokens: int = KV_TOKENS
    drifts_to: NamedSurface | None = None
    """What steps cost at the end; it gets there evenly."""
    resume_seconds: float = 0.0
    """What the first step with drafts after one without takes longer."""
    steps: int | None = None
    """The run also ends after so many decode steps."""
    decode_limits: Sequence[tuple[float, int]] = ()
    """From each time on (seconds, rising) at most so many of the running requests are decoded."""

    def workload(self) -> Workload:
        """Return the first arrivals and the acceptance path."""
        if self.acceptance is None:
            phases = acceptance_path(self.seconds, self.seed)
        elif isinstance(self.acceptance, float):
            phases = (Phase(0.0, "constant", self.acceptance),)
        else:
            phases = tuple(self.acceptance)
        if self.concurrency is None:
            return Workload(tuple(self.requests), phases)
        return Workload(tuple(self.following(index, 0.0) for index in range(self.concurrency)), phases)

    def costs(
        self, speculating: bool = True, now: Callable[[], float] = lambda: 0.0
    ) -> ContextSurface | DriftingSurface:
        """Return what steps cost, with speculation configured or without; ``now`` only where that drifts."""
        begin, end = (
            one.speculating if speculating else one.plain for one in (self.surface, self.drifts_to or self.surface)
        )
        return DriftingSurface(begin, end, self.seconds, now) if self.drifts_to else begin

    def judge(self, decodes: Sequence[Decode]) -> Judged:
        """Judge a run by its true costs."""
        return Judged.of(decodes, self.costs())

    def decode_limit(self, at: float) -> int:
        """Return how many requests are decoded at a time, ``at`` seconds after the start."""
        index = bisect_right(self.decode_limits, at, key=lambda limit: limit[0]) - 1
        return self.decode_limits[index][1] if index >= 0 else self.max_running_requests

    def following(self, index: int, at: float) -> Arrival:
        """Return the ``index``-th request of a closed loop, to arrive ``at``."""
        return replace(self.requests[index % len(self.requests)], at=at)


def at_rate(requests: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """Return ``requests`` stretched to ``rate`` a second on average, over and over until ``seconds``.

    >>> [arrival.at for arrival in at_rate([Arrival(0.0, 1, 1), Arrival(3.0, 1, 1)], 1.0, 4.0)]
    [0.0, 1.0, 2.0, 3.0]
    """
    # The last request is followed by a mean gap before the first comes again.
    lap = requests[-1].at * len(requests) / (len(requests) - 1)
    scale = len(requests) / lap / rate
    return [
        replace(request, at=at)
        for begin in itertools.takewhile(lambda begin: begin * scale < seconds, itertools.count(0.0, lap))
        for request in requests
        if (at := (begin + request.at) * scale) < seconds
    ]


def saturation(surface: NamedSurface, requests: Sequence[Arrival]) -> float:
    """Return the requests per second that the server without speculation completes when many wait.

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


# -- a run --


@dataclass
class Run:
    """What a simulated server did."""

    decodes: list[Decode] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    """Seconds per output token after the first, of each request that ended."""
    tokens: int = 0
    seconds: float = 0.0


def serve(policy: str, scenario: Scenario, make: Factory | None = None) -> Run:
    """Run one policy through a scenario; ReplayError says what cannot be run.

    ``make``: instead of the policy that the name stands for.
    """
    factory = make or parse_policy(policy)
    workload = scenario.workload()
    clock = VirtualClock()
    surface = scenario.costs(policy != "none", clock.now)
    run = Run()
    issued = scenario.concurrency or 0

    def on_end(req: SimRequest, at: float) -> Arrival | None:
        nonlocal issued
        run.ended_at.append(at)
        if req.output_tokens > 1:
            run.token_seconds.append((at - req.first_token_at) / (req.output_tokens - 1))
        if scenario.concurrency is None:
            return None
        issued += 1
        return scenario.following(issued - 1, at)

    settings = Settings(server_id="replay", queue_records=1 << 62)
    try:
        if policy == "sglang":
            params = sglang_params(INITIAL_STEPS, surface.captured_batch_sizes)
            table_policy: TablePolicy = SGLangAdaptive(params, INITIAL_STEPS, clock.now)
        else:
            initial = max((k for k in surface.steps if k <= INITIAL_STEPS), default=surface.steps[0])
            table_policy = TablePolicy(settings, surface.steps, initial, clock.now)
        agent = InProcessAgent(settings, table_policy)
        server = SimServer(
            settings,
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


def simulate(policy: str, scenario: Scenario) -> Result:
    """Run a policy through a scenario and judge it; ReplayError says what cannot be run."""
    return examine(policy, scenario)[0]


def examine(policy: str, scenario: Scenario) -> tuple[Result, Judged]:
    """Return what ``simulate`` does, and every step's judgement."""
    run = serve(policy, scenario)
    if len(run.decodes) < 2:
        raise ReplayError(f"only {len(run.decodes)} decode steps in {scenario.seconds:g} s: give more --seconds")
    judged = scenario.judge(run.decodes)
    switches, probes = judged.switches_per_100_steps()
    times = run.token_seconds
    result = Result(
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
