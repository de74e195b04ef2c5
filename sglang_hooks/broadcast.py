"""How a table comes into force on every rank at the same step.

Rank 0 alone hears the controller and alone reads a clock. On every receiving pass SGLang
broadcasts the requests it received from rank 0 to the other ranks; ``UpdateSource.poll``
appends a ``PolicyUpdate`` to them when something changed, and SGLang's request dispatcher
hands it to ``apply_update`` on every rank, at the same pass, before the next batch runs.
Renewing a lease changes nothing on the other ranks and is not broadcast.

Every ``check_steps`` forward passes (and soon after a change) such an update asks the ranks
to compare what they hold. The broadcast only leads away from rank 0, so the comparison itself
is one all-gather of three integers over SGLang's own CPU group; it is reached by all ranks at
the same pass, as the broadcast a moment before was, and it needs no controller to be alive.
A difference stops all switching, on all ranks, at that pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import CompiledTable, TablePolicy
from specpilot.sglang_hooks.wire import DecisionSource

if TYPE_CHECKING:
    from specpilot.sglang_hooks.link import Mailbox

logger = logging.getLogger(__name__)

CHECK_AFTER_CHANGE = 64
"""Forward passes from a new table to the check that confirms it on every rank."""

BURST = 8
"""Changes that may come faster than ``min_table_interval_seconds``, on credit: after a sudden change
of the load the controller corrects itself several times within a second."""

AllGather = Callable[[tuple[int, int, int]], list[tuple[int, int, int]]]
"""Gives every rank's value to every rank, in rank order; the identity list on a single rank."""


@dataclass(frozen=True)
class PolicyUpdate:
    """A change of the policy that rides SGLang's request broadcast (pickled there, by SGLang).

    A table to adopt, then a source to change to, then a check; each may be missing.
    """

    table: CompiledTable | None = None
    source: DecisionSource | None = None
    check: bool = False
    halt_steps: int = 0
    """Rank 0's; used by all if the check fails, so that they stop at one K."""


class UpdateSource:
    """Rank 0: decides on each receiving pass whether the ranks must hear of something."""

    def __init__(self, settings: Settings, policy: TablePolicy, mailbox: Mailbox, ranks: int) -> None:
        self._policy = policy
        self._mailbox = mailbox
        self._ranks = ranks
        self._stale_seconds = settings.stale_seconds
        self._check_steps = settings.check_steps
        self._min_interval = settings.min_table_interval_seconds
        # Generic cell rate algorithm (ITU-T I.371): when the next change is due at the sustained rate.
        self._due = 0.0
        self._deadline = 0.0
        self._next_check = 0

    def poll(self, now: float) -> PolicyUpdate | None:
        """Return what changed since the last pass, or None. ``now`` in seconds, monotonic.

        Costs well under a microsecond when nothing did: this runs on the scheduler thread.
        """
        policy = self._policy
        if policy.source == DecisionSource.HALTED:
            return None
        update = self._change(now)
        if self._ranks > 1 and policy.forward_iter >= self._next_check:
            # Rides on the change, if there is one: neither may keep the other waiting for a pass.
            self._next_check = policy.forward_iter + self._check_steps
            table, source = (update.table, update.source) if update is not None else (None, None)
            return PolicyUpdate(table, source, check=True, halt_steps=policy.halt_steps)
        return update

    def _change(self, now: float) -> PolicyUpdate | None:
        policy, mailbox = self._policy, self._mailbox
        if mailbox.tables and self._may_change(now):
            delivery = mailbox.tables.popleft()
            deadline = self._renewed(delivery.deadline, delivery.table.epoch)
            if now <= deadline + self._stale_seconds:
                self._changed(now)
                self._deadline = deadline
                self._next_check = min(self._next_check, policy.forward_iter + CHECK_AFTER_CHANGE)
                # It may have waited for longer than its lease, behind a long prefill.
                late = now > deadline
                return PolicyUpdate(table=delivery.table, source=DecisionSource.STALE if late else None)
        if policy.source == DecisionSource.FALLBACK:
            return None
        if policy.table is not None:
            self._deadline = self._renewed(self._deadline, policy.table.epoch)
        if now <= self._deadline:
            if policy.source == DecisionSource.TABLE or not self._may_change(now):
                return None
            # Bounded like a new table: leases that are too short must not cost a broadcast a pass.
            self._changed(now)
            return PolicyUpdate(source=DecisionSource.TABLE)
        if now > self._deadline + self._stale_seconds:
            return PolicyUpdate(source=DecisionSource.FALLBACK)
        if policy.source == DecisionSource.TABLE:
            return PolicyUpdate(source=DecisionSource.STALE)
        return None

    def _renewed(self, deadline: float, epoch: int) -> float:
        lease_epoch, lease_deadline = self._mailbox.lease
        return max(deadline, lease_deadline) if lease_epoch == epoch else deadline

    def _may_change(self, now: float) -> bool:
        return now >= self._due - BURST * self._min_interval

    def _changed(self, now: float) -> None:
        self._due = max(self._due, now) + self._min_interval


@dataclass
class Confirmation:
    """What the last comparison of the ranks found, and how many found a difference."""

    epoch: int = 0
    ranks: int = 0
    mismatches: int = 0


def apply_update(
    update: PolicyUpdate,
    policy: TablePolicy,
    settings_hash: int,
    all_gather: AllGather,
    confirmation: Confirmation,
) -> None:
    """Every rank: carry out one update, called by SGLang's dispatcher in broadcast order."""
    if update.table is not None:
        policy.adopt(update.table)
    if update.source is not None:
        policy.set_source(update.source)
    if update.check:
        epoch = policy.table.epoch if policy.table is not None else 0
        held = all_gather((epoch, policy.decision_hash, settings_hash))
        if all(one == held[0] for one in held):
            confirmation.epoch, confirmation.ranks = epoch, len(held)
            return
        confirmation.mismatches += 1
        what = "table epochs", "decisions", "SPECPILOT_ settings"
        differing = [name for name, values in zip(what, zip(*held, strict=True), strict=True) if len(set(values)) > 1]
        reason = f"the ranks differ in their {', '.join(differing)}"
        policy.halt(update.halt_steps, reason)
        logger.error(
            "specpilot: %s (forward pass %d, per rank: %s). Switching stops at %d steps until the server restarts.",
            reason,
            policy.forward_iter,
            held,
            update.halt_steps,
        )
