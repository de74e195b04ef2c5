"""What a policy is: it learns from step records and answers with a plan for every cell.

A policy knows nothing of epochs, leases or sockets; the controller wraps those around it. A plan
is for one server and holds until the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from specpilot.policies.knowledge import Knowledge
from specpilot.sglang_hooks.wire import DecisionTable, Hello, StepRecord


@dataclass(frozen=True)
class Grid:
    """The cells of a plan: regions of batch size and of context tokens per request.

    Region i holds values in (edges[i-1], edges[i]]; one more lies above the last edge.

    >>> Grid((4, 6)).cell(5, 0.0), Grid((4, 6), (1024,)).cell(7, 2000.0)
    (1, 5)
    """

    batch_edges: tuple[int, ...] = ()
    """Upper edges of the regions of batch size, in requests, ascending."""
    context_edges: tuple[int, ...] = ()
    """Upper edges of the regions of mean context, in tokens per request, ascending."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of (batch, context) regions."""
        return len(self.batch_edges) + 1, len(self.context_edges) + 1

    @property
    def cells(self) -> int:
        """Number of cells, batch-major."""
        batch, context = self.shape
        return batch * context

    def cell(self, batch_size: int, mean_context: float) -> int:
        """Index of the cell of a step (batch size in requests, mean context in tokens)."""
        row = bisect_left(self.batch_edges, batch_size)
        return row * (len(self.context_edges) + 1) + bisect_left(self.context_edges, mean_context)


Alternatives = tuple[tuple[int, float], ...]
"""What one cell explores: pairs of steps (K) and the probability that a block draws them."""


@dataclass(frozen=True)
class Plan:
    """What to do in every cell; ``choice`` and ``keep`` have ``grid.cells`` entries."""

    grid: Grid
    """Cells that the plan is for."""
    choice: tuple[int, ...]
    """Steps (K) by cell."""
    keep: tuple[frozenset[int], ...]
    """Steps that may stay in force though ``choice`` differs, by cell."""
    reason: str = field(compare=False)
    """One line for an operator: what this was decided from. Plans that differ only in it are equal."""
    min_dwell_steps: int = 0
    """Decode steps that a K stays in force at least once it was switched to."""
    explore: dict[int, Alternatives] = field(default_factory=dict)
    """Alternatives by cell; a cell without an entry explores nothing."""
    block_steps: int = 1
    """Decode steps of one exploration block, which share a draw."""

    @classmethod
    def exact(cls, grid: Grid, choice: tuple[int, ...], reason: str) -> Plan:
        """Return the plan that runs the ``choice`` of every cell: nothing else may stay in force."""
        return cls(grid, choice, (frozenset(),) * len(choice), reason)

    def table(
        self, epoch: int, lease_seconds: float, policy: str, seed: int = 0, shadow: bool = False
    ) -> DecisionTable:
        """Put the plan on the wire; ``seed`` stays the same for all plans of a server."""
        return DecisionTable(
            epoch=epoch,
            lease_seconds=lease_seconds,
            policy=policy,
            batch_edges=list(self.grid.batch_edges),
            context_edges=list(self.grid.context_edges),
            choice=list(self.choice),
            keep=[sorted(kept) for kept in self.keep],
            min_dwell_steps=self.min_dwell_steps,
            explore={cell: list(row) for cell, row in self.explore.items()},
            block_steps=self.block_steps,
            seed=seed,
            shadow=shadow,
        )


class Policy(ABC):
    """Learns from every decode step of one server and decides when asked; one object per server."""

    name: str
    """Name of the policy, as in ``policy.name`` of the configuration and in tables."""

    note = ""
    """What an operator should look at, in a sentence; empty if there is nothing."""

    urgent = False
    """Whether something was learned that should not wait for the next regular decision; ``decide`` clears it."""

    def learn(self, step: StepRecord) -> None:  # noqa: B027 - what learns nothing is a policy too
        """Learn from one step, as it was applied. Called for every record, in order."""

    @abstractmethod
    def decide(self, server: Hello, now: float) -> Plan:
        """Return the plan for ``server``; ``now`` in seconds on a clock that never goes back.

        Raises PolicyError if this policy cannot serve such a server.
        """

    def describe(self) -> Knowledge | None:
        """Return what the decisions rest on, as of the last one; None from a policy that estimates nothing.

        For people, a few times a second at most; it computes nothing that deciding does not.
        """
        return None

    def to_prior(self) -> dict[str, Any] | None:
        """Return what was learned, fit for JSON, to begin with the next time; None if nothing."""
        return None


class PolicyError(ValueError):
    """A policy cannot work with a server; the text says why and what to change."""


def require_candidate(server: Hello, steps: int, wanted: str) -> None:
    """Raise PolicyError unless K = ``steps`` is among the server's candidates; ``wanted`` says what asks for it."""
    if steps not in server.candidate_steps:
        raise PolicyError(
            f"{wanted} is not among the candidate steps {server.candidate_steps} of {server.server_id}: "
            "choose one of them, or add it to the server's --speculative-adaptive-config"
        )
