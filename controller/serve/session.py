"""One server as the controller knows it: what it said, what was learned for it, the table it should hold."""

from __future__ import annotations

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from specpilot.controller.config import ServerConfig
from specpilot.controller.serve.counters import SERVER_COUNTERS
from specpilot.controller.serve.history import History
from specpilot.controller.serve.pace import Pace
from specpilot.controller.serve.report import ServerStatus
from specpilot.controller.serve.snapshot import ServerSnapshot
from specpilot.controller.serve.switchback import Switchback
from specpilot.controller.trace.writer import TraceWriter
from specpilot.policies.goodput import Goodput
from specpilot.policies.interface import Plan, Policy
from specpilot.policies.knowledge import Knowledge
from specpilot.sglang_hooks.wire import MASKED, DecisionSource, DecisionTable, Hello, HookState, StepBatch, StepRecord

logger = logging.getLogger(__name__)

RECENT_STEPS = 512
"""Newest steps that the status sums up."""
ALIVE_SECONDS = 2.5
"""Seconds since a server was heard within which it is alive (servers speak once a second); a second one of its name is
then a rival."""
REPUSH_SECONDS = 2.0
"""Seconds after which a table that is not in force is sent again, then at twice the time, up to a minute."""
RIVAL_SECONDS = 10.0
"""Seconds since a second server of one name was heard after which it is not reported any more."""


class Session:
    """One server: what it said, what was learned for it, and the table it should hold."""

    def __init__(
        self,
        key: str,
        config: ServerConfig,
        policy: Policy,
        pace: Pace,
        trace: TraceWriter | None,
        clock: Callable[[], float],
    ) -> None:
        self.key = key
        self.config = config
        self.policy = policy
        self.shelved: Goodput | None = None
        """The policy that has learned, while another one decides; it continues from there when it decides again."""
        self.pace = pace
        self.trace = trace
        self.switchback: Switchback | None = None
        self.switchback_of = ""
        """What the switchback compares (policy, fallback, machine): a change of that starts another measurement."""
        self._clock = clock
        self.hello: Hello | None = None
        self.address = b""
        self.state: HookState | None = None
        """What the server last reported of itself."""
        self.heard_at = 0.0
        self.epoch = 0
        self.plan: Plan | None = None
        """What the newest table was made from; None: the next decision is pushed whatever it is."""
        self.decider = policy.name
        """Who made ``plan``: the policy by its name, or ``fallback`` in a block of the switchback."""
        self.tables: dict[int, tuple[DecisionTable, str, float]] = {}
        """Newest tables by epoch: the table, why it was decided, and when it was sent, on the controller's clock."""
        self.pushed_at = 0.0
        self.repush_seconds = REPUSH_SECONDS
        self.leased_at = 0.0
        self.seed = secrets.randbits(62)
        self.policy_error = ""
        self.failed = False
        """The policy raised an error: it decides no more for this server."""
        self.counters = dict.fromkeys(SERVER_COUNTERS, 0)
        self.policy_note = ""
        self.saved_at = float("-inf")
        self.rival = ""
        """``instance`` of a second server of this name; empty without one."""
        self.rival_since = self.rival_heard_at = float("-inf")
        self.records = 0
        self.records_lost = 0
        self.next_seq: int | None = None
        self.recent: deque[tuple[float, int, int]] = deque(maxlen=RECENT_STEPS)
        """Newest steps: seconds (0 where the time is not the step's own), tokens, K."""
        self.history = History()

    def learn(self, batch: StepBatch) -> None:
        """Take in a batch of records: count what is missing, log, learn."""
        now = self._clock()
        for record in batch.records:
            if self.next_seq is not None and record.record_seq > self.next_seq:
                self.records_lost += record.record_seq - self.next_seq
            self.next_seq = record.record_seq + 1
            if not self.failed:
                self._learn(record)
                if self.switchback is not None:
                    self.switchback.learn(record, now)
            live = [n for n in record.accepted_drafts if n != MASKED]
            # Time with a prefill or an idle spell in it says nothing about decoding.
            back_to_back = record.forwards == 1 and not record.after_idle
            # A chain's width tells the K that ran; a tree has one width for its one K.
            tree = self.hello is not None and self.hello.topk > 1
            steps = record.steps if tree else record.draft_tokens - 1
            seconds, tokens = record.seconds if back_to_back else 0.0, sum(live) + len(live)
            self.recent.append((seconds, tokens, steps))
            self.history.add(record, steps, tokens, seconds, now)
        self.records += len(batch.records)
        if self.trace is not None:
            self.trace.append(batch.records)

    def _learn(self, record: StepRecord) -> None:
        try:
            self.policy.learn(record)
        except Exception:
            self.fail("learning from a step")

    def fail(self, where: str) -> None:
        """Give this server up, and none of the others: without leases it goes to its fallback."""
        self.failed = True
        self.counters["policy_failures"] += 1
        self.plan = None
        self.policy_error = (
            f"policy {self.policy.name} failed in {where}, see the controller's log: it decides no more for this "
            "server until its policy is changed or the controller restarts"
        )
        logger.exception("%s: %s", self.key, self.policy_error)

    def mode_of(self, hello: Hello) -> str:
        """Return ``shadow`` if the server or the configuration wants nothing applied, else ``control``."""
        return "shadow" if "shadow" in (self.config.mode, hello.mode) else "control"

    def describe_in_trace(self, hello: Hello, wall: float) -> None:
        """Tell the trace whose records follow, and by which configuration the tables from now on are made.

        ``wall``: seconds since the Unix epoch.
        """
        if self.trace is not None:
            self.trace.update_hello(msgspec.structs.replace(hello, mode=self.mode_of(hello)))
            self.trace.update_config(self.config, max(self.epoch, hello.epoch) + 1, wall)

    def conflict(self, now: float) -> str:
        """Return what to do about a second live server of this name, if there is one."""
        if now - self.rival_heard_at > RIVAL_SECONDS or self.rival_heard_at - self.rival_since < ALIVE_SECONDS:
            return ""
        return (
            "two servers call themselves by this name, the second is not served: "
            "set SPECPILOT_SERVER_ID in the environment of one"
        )

    def snapshot(self, now: float) -> ServerSnapshot:
        """Return all that may be told of this server."""
        knowledge = self._describe()
        totals, hour = self.history.totals(), self.history.hour()
        return ServerSnapshot(self._status(now, knowledge), knowledge, totals, hour, self.failed)

    def _describe(self) -> Knowledge | None:
        if self.failed:
            return None
        try:
            return self.policy.describe()
        except Exception:
            self.fail("telling what it knows")
            return None

    def _status(self, now: float, knowledge: Knowledge | None) -> ServerStatus:
        hello, state = self.hello, self.state
        assert hello is not None
        source = state.source if state is not None else DecisionSource.FALLBACK
        table, reason, decided_at = self.tables.get(state.epoch if state is not None else 0, (None, "", now))
        busy = sum(seconds for seconds, _, _ in self.recent)
        steps = Counter(k for _, _, k in self.recent)
        switchback = self.switchback.status(now) if self.switchback is not None else None
        return ServerStatus(
            server=self.key,
            model=hello.model,
            gpu=hello.gpu,
            sglang_version=hello.sglang_version,
            mode=self.mode_of(hello),
            candidate_steps=hello.candidate_steps,
            silent_seconds=now - self.heard_at,
            source=source.name,
            steps=state.steps if state is not None else hello.fallback_steps,
            table=table,
            reason=reason,
            table_age_seconds=now - decided_at,
            pending_epoch=self.epoch
            if self.epoch in self.tables and (table is None or table.epoch < self.epoch)
            else 0,
            confirmed_ranks=state.confirmed_ranks
            if state is not None and table and state.confirmed_epoch == table.epoch
            else 0,
            tp_size=hello.tp_size,
            records=self.records,
            records_lost=self.records_lost,
            tokens_per_second=sum(tokens for seconds, tokens, _ in self.recent if seconds) / busy if busy else 0.0,
            share_by_steps={str(k): n / len(self.recent) for k, n in sorted(steps.items())},
            counters={**(state.counters if state is not None else {}), **self.counters},
            note="; ".join(
                filter(
                    None,
                    (
                        state.halt_reason if state else "",
                        self.policy_error,
                        self.policy_note,
                        f"the policy is suspended: {switchback.text}" if switchback and switchback.off_seconds else "",
                        self.conflict(now),
                    ),
                )
            ),
            switchback=switchback,
            expected_gain=knowledge.gain() if knowledge is not None else None,
        )
