"""The hooks and the controller of a replay in one process and in one virtual time, without sockets and threads."""

from __future__ import annotations

import math
import random
from collections import deque

from specpilot.controller.config import ControllerConfig
from specpilot.controller.serve.pace import Pace
from specpilot.policies.interface import Plan, Policy
from specpilot.sglang_hooks.agent import Agent
from specpilot.sglang_hooks.link import Delivery, Link, Mailbox, RecordQueue
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import CompiledTable, TablePolicy


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
    """From records to tables, as ``serve.service.Service`` does for one server; ``turn`` after each pass."""

    def __init__(
        self, policy: Policy, agent: InProcessAgent, config: ControllerConfig, delay: float, seed: int
    ) -> None:
        """``delay``: seconds from a decision to its table in the mailbox. ``seed``: of the exploration."""
        self._policy = policy
        self._agent = agent
        self._hello = agent.hello()
        self._config = config
        self._delay = delay
        # As many bits as ``serve.session.Session`` takes: small seeds lie next to each other.
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
