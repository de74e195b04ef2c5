"""Upper bounds on K that hold for a while, whoever placed them, and then expire.

    memory       the KV cache has no room for the next step at a larger K
    retraction   requests were put back into the queue for want of KV cache
    operator     somebody said so

A veto only ever lowers K. It needs no learning and is no part of it: what the policy would have
chosen without it is chosen again as soon as the last veto has expired.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from specpilot.sglang_hooks.wire import StepRecord

MEMORY_SECONDS = 5.0
"""Seconds that a veto for want of KV cache holds."""
RETRACTION_SECONDS = 10.0
"""Seconds that a veto after a retraction holds."""
RESERVED_STEPS = 2
"""SGLang keeps room for two steps of a request under overlap: the one in flight and the next."""


@dataclass(frozen=True)
class Veto:
    """At most ``max_steps`` drafts until ``until`` (seconds, on the clock of ``Policy.decide``), for a reason."""

    max_steps: int
    until: float
    reason: str


class Vetoes:
    """The vetoes that are in force for one server.

    >>> vetoes = Vetoes()
    >>> vetoes.place("operator", 1, 10.0, "maintenance")
    >>> vetoes.max_steps(9.0), vetoes.reasons(9.0), vetoes.max_steps(10.0)
    (1, ['at most K=1 for 1 s: maintenance'], None)
    """

    def __init__(self) -> None:
        self._placed: dict[str, Veto] = {}

    def place(self, name: str, max_steps: int, until: float, reason: str) -> None:
        """Put a veto in force, in place of any other of that name; ``until`` (seconds) may be infinite."""
        self._placed[name] = Veto(max_steps, until, reason)

    def lift(self, name: str) -> None:
        """Lift the veto of that name, if there is one."""
        self._placed.pop(name, None)

    def max_steps(self, now: float) -> int | None:
        """Return the largest K that no veto forbids; None without any."""
        for name in [name for name, veto in self._placed.items() if now >= veto.until]:
            del self._placed[name]
        return min((veto.max_steps for veto in self._placed.values()), default=None)

    def reasons(self, now: float) -> list[str]:
        """Return one line for each veto in force."""
        return [
            f"at most K={veto.max_steps}"
            + (f" for {veto.until - now:.0f} s" if veto.until < float("inf") else "")
            + f": {veto.reason}"
            for veto in self._placed.values()
            if now < veto.until
        ]

    def observe(self, step: StepRecord, applied: int, candidates: Sequence[int], kv_tokens: int, now: float) -> None:
        """Place what a step at K = ``applied`` gives reason for; ``candidates`` ascending, ``kv_tokens`` 0 if unknown.

        Each retraction lowers the bound by one candidate below the K that was running, so a
        server that goes on retracting ends at its smallest.
        """
        if step.retracted:
            lower = candidates[max(bisect_left(candidates, applied) - 1, 0)]
            reason = f"{step.retracted} requests retracted, the KV cache is full"
            self.place("retraction", lower, now + RETRACTION_SECONDS, reason)
        if not kv_tokens:
            return
        free = kv_tokens - step.kv_used_tokens
        if RESERVED_STEPS * step.batch_size * (candidates[-1] + 1) <= free:
            return
        fitting = [k for k in candidates if RESERVED_STEPS * step.batch_size * (k + 1) <= free]
        reason = f"{max(free, 0):,} tokens of KV cache are free for {step.batch_size} requests"
        self.place("memory", max(fitting, default=candidates[0]), now + MEMORY_SECONDS, reason)
