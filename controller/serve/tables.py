"""From a policy's plan to the table that a server holds: deciding, pushing, renewing the lease, sending again."""

from __future__ import annotations

import logging

from specpilot.controller.serve.counters import Once
from specpilot.controller.serve.endpoint import Endpoint
from specpilot.controller.serve.session import REPUSH_SECONDS, Session
from specpilot.controller.serve.switchback import Arm, fallback_plan
from specpilot.controller.serve.switchback_keeper import SwitchbackKeeper
from specpilot.policies.interface import Plan, PolicyError
from specpilot.sglang_hooks.wire import DecisionSource, Hello, HookState, Lease

logger = logging.getLogger(__name__)

ON_THE_WAY_SECONDS = 0.5
"""Seconds that a table may take to a server: if its Hello does not know the table after that, the table was lost."""
MOST_REPUSH_SECONDS = 60.0
"""Longest time between two pushes of a table that does not come into force."""
KEPT_TABLES = 8
"""Newest tables remembered of each server, to say what the one that it reports was decided from."""


class TableSender:
    """Sends every server its tables and leases."""

    def __init__(self, endpoint: Endpoint, switchbacks: SwitchbackKeeper, once: Once, lease_seconds: float) -> None:
        self._endpoint = endpoint
        self._switchbacks = switchbacks
        self._once = once
        self._lease_seconds = lease_seconds

    def decide(self, session: Session, now: float) -> None:
        """Have the policy decide, and push a table if the plan is another one."""
        if session.failed or (plan := self._plan(session, now)) is None:
            return
        if plan != session.plan:
            self.push(session, plan, now)
        else:
            table, _, decided_at = session.tables[session.epoch]
            session.tables[session.epoch] = table, plan.reason, decided_at
        self._switchbacks.decided(session, now)

    def push(self, session: Session, plan: Plan, now: float) -> None:
        """Send the plan as a table of the next epoch."""
        session.epoch += 1
        session.plan = plan
        session.pushed_at = session.leased_at = now
        shadow = session.config.mode == "shadow"
        table = plan.table(session.epoch, self._lease_seconds, session.decider, session.seed, shadow)
        session.tables[session.epoch] = (table, plan.reason, now)
        while len(session.tables) > KEPT_TABLES:
            del session.tables[next(iter(session.tables))]
        self._endpoint.send(session.address, table)

    def renew(self, session: Session, now: float) -> None:
        """Renew the lease of the server's table once a third of it has passed."""
        if now - session.leased_at > self._lease_seconds / 3:
            session.leased_at = now
            epoch = session.epoch if session.plan is not None else 0
            self._endpoint.send(session.address, Lease(epoch, self._lease_seconds))

    def answer_hello(self, session: Session, hello: Hello, restarted: bool, now: float) -> None:
        """Give a server that introduced itself its table, or a lease if it has it; ``restarted``: it is another one."""
        if restarted or hello.epoch > session.epoch:
            session.epoch = max(session.epoch, hello.epoch)
            session.plan = None
            self.decide(session, now)
        elif hello.epoch < session.epoch and session.plan is not None:
            if now - session.pushed_at > ON_THE_WAY_SECONDS:
                self.push(session, session.plan, now)  # the table was lost, with a connection say
        else:
            session.leased_at = 0.0  # renewed in this very turn: the answer to a repeated Hello

    def compare(self, session: Session, state: HookState, now: float) -> None:
        """Note what the server reports, and send its table again if it is not in force in time."""
        previous, session.state = session.state, state
        if state.epoch == session.epoch or state.source == DecisionSource.HALTED:
            session.repush_seconds = REPUSH_SECONDS
        elif session.plan is not None and previous is not None and previous.epoch and not state.epoch:
            self.push(session, session.plan, now)  # it gave its table up: we were not heard for too long
        elif session.plan is not None and now - session.pushed_at > session.repush_seconds:
            session.repush_seconds = min(2 * session.repush_seconds, MOST_REPUSH_SECONDS)
            session.counters["tables_resent"] += 1
            text = f"{session.key}: table {session.epoch} is not in force there, it is sent again"
            self._once.warn(f"tables_resent {session.key}", text, "tables_resent")
            self.push(session, session.plan, now)

    def _plan(self, session: Session, now: float) -> Plan | None:
        """Return the plan that is to apply now, within the bounds; None if there is none, which the session says."""
        hello = session.hello
        assert hello is not None
        try:
            plan, note = session.policy.decide(hello, now), session.policy.note
            session.decider = session.policy.name
            # The policy has decided all the same: it goes on learning, and its budgets with it.
            if session.switchback is not None and session.switchback.arm(now) is Arm.FALLBACK:
                session.decider, plan = "fallback", fallback_plan(hello)
            plan = session.config.bounds.apply(plan, hello)
        except PolicyError as error:
            if session.policy_error != str(error):
                session.policy_error = str(error)
                logger.error("%s: %s; it runs on its fallback", session.key, error)
            return None
        except Exception:
            session.fail("deciding")
            return None
        session.policy_error = ""
        if note != session.policy_note:
            session.policy_note = note
            logger.warning("%s: %s", session.key, note or "what the policy noted does not hold any more")
        return plan
