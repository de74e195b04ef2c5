"""One K for every step."""

from __future__ import annotations

from specpilot.policies.interface import Grid, Plan, Policy, PolicyError
from specpilot.sglang_hooks.wire import Hello


class Static(Policy):
    """Always ``steps``; the baseline of every comparison, and K=0 is "no speculation"."""

    name = "static"

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def decide(self, server: Hello, now: float) -> Plan:  # noqa: ARG002
        """Return ``steps`` for every batch; PolicyError if the server did not declare it."""
        if self._steps not in server.candidate_steps:
            raise PolicyError(
                f"policy.steps = {self._steps} is not among the candidate steps {server.candidate_steps} of "
                f"{server.server_id}: choose one of them, or add it to the server's --speculative-adaptive-config"
            )
        return Plan(Grid(), (self._steps,), (frozenset(),), f"policy.steps = {self._steps}")
