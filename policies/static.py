"""One K for every step."""

from __future__ import annotations

from specpilot.policies.interface import Grid, Plan, Policy, require_candidate
from specpilot.sglang_hooks.wire import Hello


class Static(Policy):
    """Always ``steps``; the baseline of every comparison, and K=0 is "no speculation"."""

    name = "static"

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def decide(self, server: Hello, now: float) -> Plan:  # noqa: ARG002
        """Return ``steps`` for every batch; PolicyError if the server did not declare it."""
        setting = f"policy.steps = {self._steps}"
        require_candidate(server, self._steps, setting)
        return Plan.exact(Grid(), (self._steps,), setting)
