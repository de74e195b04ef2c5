"""Speculate up to N running requests, skip above: the operator's first wish."""

from __future__ import annotations

from specpilot.policies.interface import Grid, Plan, Policy, PolicyError, require_candidate
from specpilot.sglang_hooks.wire import Hello


def default_band(threshold: int) -> int:
    """Return a quarter of the threshold, at least one request where speculation can still come on again.

    >>> [default_band(threshold) for threshold in (0, 1, 2, 5, 64)]
    [0, 0, 1, 1, 16]
    """
    return max(min(max(1, threshold // 4), threshold - 1), 0)


class Threshold(Policy):
    """``steps`` while at most ``threshold`` requests run, K=0 above, with a band around the line.

    A batch that hovers at the line would switch at every request that comes or goes. So
    within ``band`` requests of it whatever is in force stays: speculation that is on goes
    off above ``threshold + band``, speculation that is off comes on at ``threshold - band``.

    >>> from tests.support.messages import hello
    >>> plan = Threshold(threshold=5, steps=3, band=1).decide(hello(candidate_steps=[0, 1, 3]), 0.0)
    >>> plan.grid.batch_edges, plan.choice, [sorted(kept) for kept in plan.keep]
    ((4, 5, 6), (3, 3, 0, 0), [[], [0], [3], []])
    """

    name = "threshold"

    def __init__(self, threshold: int, steps: int | None = None, band: int | None = None) -> None:
        """``steps`` None: the server's largest candidate. ``band`` None: see ``default_band``.

        Raises ValueError for a band that reaches down to 0: what is off would never come on again.
        """
        self._threshold = threshold
        self._steps = steps
        self._band = default_band(threshold) if band is None else band
        if self._band >= max(threshold, 1):
            raise ValueError(f"band = {band} must be smaller than threshold = {threshold}, or speculation stays off")

    def decide(self, server: Hello, now: float) -> Plan:  # noqa: ARG002
        """Return the plan; PolicyError if the server cannot skip or does not know ``steps``."""
        candidates = server.candidate_steps
        steps = max(candidates) if self._steps is None else self._steps
        if 0 not in candidates:
            raise PolicyError(
                f"{server.server_id} cannot skip: its candidate steps are {candidates}; "
                "add 0 to the server's --speculative-adaptive-config"
            )
        require_candidate(server, steps, f"policy.steps = {steps}")
        on, off = self._threshold - self._band, self._threshold + self._band
        reason = f"K={steps} up to {self._threshold} running requests, K=0 above; kept within {on + 1}..{off}"
        if self._band == 0:
            return Plan.exact(Grid((self._threshold,)), (steps, 0), reason)
        keep = (frozenset[int](), frozenset({0}), frozenset({steps}), frozenset[int]())
        return Plan(Grid((max(on, 0), self._threshold, off)), (steps, steps, 0, 0), keep, reason)
