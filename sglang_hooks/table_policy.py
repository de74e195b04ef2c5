"""The decision of every step, on every rank: a local lookup in the table in force.

SGLang asks ``get_steps_for_batch(batch_size)`` just before it drafts. The answer is a pure
function of the table, the batch size, the mean context, the K held so far and the steps
since it was last changed, so ranks that hold the same table take the same decision without
talking. Exploration is a counter-based draw keyed by (seed of the server, block of forward passes).

Hysteresis follows the *held* K, the one that the table chose last, not the K of an
exploration block: otherwise a probe that a keep set happens to allow would stick.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.wire import MAX_EDGES, DecisionSource, DecisionTable

logger = logging.getLogger(__name__)

_STASH = 8
"""Launches remembered until their result comes; overlap scheduling has two in flight."""

_MASK64 = (1 << 64) - 1


class TableError(ValueError):
    """A decision table that must not be applied; the text says which field is wrong."""


class Decision(NamedTuple):
    """What was decided for one forward pass, kept from its launch to its result."""

    forward_iter: int
    steps: int
    proposed_steps: int
    held_steps: int
    source: DecisionSource
    epoch: int
    cell: int
    probability: float
    block: int


class Choice(NamedTuple):
    """One lookup's answer; ``held`` is the K that hysteresis goes on from."""

    steps: int
    held: int
    cell: int
    probability: float
    block: int


@dataclass(frozen=True)
class CompiledTable:
    """A validated DecisionTable in the shape that a lookup needs: tuples, lists and frozensets.

    Plain data, so that it rides SGLang's own broadcast to the other ranks unchanged.
    """

    epoch: int
    policy: str
    batch_edges: tuple[int, ...]
    context_edges: tuple[int, ...]
    choice: tuple[int, ...]
    keep: tuple[frozenset[int], ...]
    min_dwell_steps: int
    explore: dict[int, tuple[tuple[int, float], ...]]
    block_steps: int
    seed: int = 0
    shadow: bool = False

    @staticmethod
    def compile(table: DecisionTable, candidate_steps: Sequence[int]) -> CompiledTable:
        """Check ``table`` against what this server declared; raise TableError for the first fault."""
        declared = set(candidate_steps)
        cells = (len(table.batch_edges) + 1) * (len(table.context_edges) + 1)
        for name, edges in (("batch_edges", table.batch_edges), ("context_edges", table.context_edges)):
            if len(edges) > MAX_EDGES:
                raise TableError(f"{name} has {len(edges)} edges, at most {MAX_EDGES} are taken")
            if any(a >= b for a, b in itertools.pairwise(edges)) or (edges and edges[0] < 0):
                raise TableError(f"{name} must rise and not be negative: {edges}")
        for name, column in (("choice", table.choice), ("keep", table.keep)):
            if len(column) != cells:
                raise TableError(f"{name} has {len(column)} cells, the edges make {cells}")
        undeclared = {k for k in table.choice if k not in declared}
        undeclared.update(k for kept in table.keep for k in kept if k not in declared)
        undeclared.update(k for row in table.explore.values() for k, _ in row if k not in declared)
        if undeclared:
            raise TableError(f"steps {sorted(undeclared)} were not declared (candidates: {sorted(declared)})")
        for cell, row in table.explore.items():
            if not 0 <= cell < cells:
                raise TableError(f"explore names cell {cell}, there are {cells}")
            if any(not 0.0 < p <= 1.0 for _, p in row) or sum(p for _, p in row) > 1.0 + 1e-9:
                raise TableError(f"explore of cell {cell} holds probabilities outside (0, 1]: {row}")
        if table.epoch <= 0 or table.block_steps < 1 or table.min_dwell_steps < 0:
            raise TableError(
                f"epoch {table.epoch}, block_steps {table.block_steps}, min_dwell_steps {table.min_dwell_steps}: "
                "must be at least 1, 1, 0"
            )
        if not 0.0 < table.lease_seconds < float("inf"):
            raise TableError(f"lease_seconds is {table.lease_seconds}")
        return CompiledTable(
            epoch=table.epoch,
            policy=table.policy,
            batch_edges=tuple(table.batch_edges),
            context_edges=tuple(table.context_edges),
            choice=tuple(table.choice),
            keep=tuple(frozenset(kept) for kept in table.keep),
            min_dwell_steps=table.min_dwell_steps,
            explore={cell: tuple((k, p) for k, p in row) for cell, row in table.explore.items() if row},
            block_steps=table.block_steps,
            seed=table.seed,
            shadow=table.shadow,
        )

    def choose(
        self,
        batch_size: int,
        mean_context: float,
        held: int,
        steps_since_switch: int,
        forward_iter: int,
        explore: bool = True,
    ) -> Choice:
        """Look up one step. ``mean_context`` in tokens per request; a pure function of its arguments.

        >>> table = CompiledTable(epoch=1, policy="threshold", batch_edges=(4, 6), context_edges=(),
        ...     choice=(3, 3, 0), keep=(frozenset(), frozenset({0}), frozenset()),
        ...     min_dwell_steps=0, explore={}, block_steps=1)
        >>> [table.choose(b, 100.0, held, 9, 1).steps for b, held in ((4, 0), (5, 0), (5, 3), (7, 3))]
        [3, 0, 3, 0]
        """
        cell = bisect_left(self.batch_edges, batch_size) * (len(self.context_edges) + 1)
        if self.context_edges:
            cell += bisect_left(self.context_edges, mean_context)
        steps = self.choice[cell]
        if held != steps and (held in self.keep[cell] or steps_since_switch < self.min_dwell_steps):
            steps = held
        if not explore or cell not in self.explore:
            return Choice(steps, steps, cell, 1.0, -1)
        block = forward_iter // self.block_steps
        draw = uniform(self.seed, block)
        drawn, ordinary, below = steps, 1.0, 0.0
        probability_of: dict[int, float] = {}
        for alternative, probability in self.explore[cell]:
            if below <= draw < below + probability:
                drawn = alternative
            below += probability
            ordinary -= probability
            probability_of[alternative] = probability_of.get(alternative, 0.0) + probability
        probability_of[steps] = probability_of.get(steps, 0.0) + max(ordinary, 0.0)
        return Choice(drawn, steps, cell, probability_of[drawn], block)


def uniform(seed: int, block: int) -> float:
    """Return a block's draw in [0, 1), which every rank computes alike.

    Weyl's sequence with the golden ratio: for a random seed each draw is uniform, so the logged
    probabilities are true, and what has probability p comes at nearly even intervals of 1/p blocks
    (three-gap theorem), where independent draws would leave gaps several times as long.

    >>> hits = [block for block in range(1000) if uniform(12345, block) < 0.02]
    >>> len(hits), {b - a for a, b in zip(hits, hits[1:])} <= {34, 55, 89}
    (20, True)
    """
    return (((seed * 4 + block * 0x9E3779B97F4A7C15) & _MASK64) >> 11) * 2.0**-53


class TablePolicy:
    """SGLang's ``AdaptiveSpecPolicy``, answering from the table in force.

    State changes only through ``adopt``, ``set_source`` and ``halt``, which run on every rank
    at the same pass of the scheduler's loop (see ``broadcast.py``).
    """

    def __init__(
        self,
        settings: Settings,
        candidate_steps: Sequence[int],
        initial_steps: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``clock`` gives seconds that never go back: of completions, and of leases on rank 0."""
        self.clock = clock
        self._candidates = sorted(set(candidate_steps))
        fallback = initial_steps if settings.fallback is None else settings.fallback
        if fallback not in self._candidates:
            raise SettingsError(
                f"SPECPILOT_FALLBACK={fallback} is not among this server's candidate steps {self._candidates}: "
                "choose one of them, or add it to --speculative-adaptive-config"
            )
        self.fallback_steps = fallback
        self.shadow = settings.mode == "shadow"
        self._caps = settings.max_steps_by_batch
        self._cap_edges = [batch - 1 for batch, _ in self._caps]
        self.table: CompiledTable | None = None
        self.source = DecisionSource.FALLBACK
        self.halt_reason = ""
        # Set before each forward by the launch hook.
        self.forward_iter = 0
        self.mean_context = 0.0
        # What the next lookup depends on, beside its arguments.
        self.held_steps = fallback
        self._steps_since_switch = 0
        self.applied_steps = fallback
        self.decision_hash = 0
        self.completed_at = 0.0
        self.lease_expiries = self.fallbacks = self.steps_capped = 0
        self._launches: deque[Decision] = deque(maxlen=_STASH)

    # -- what SGLang's AdaptiveController calls --

    @property
    def candidate_steps(self) -> list[int]:
        """Every K that a step may be asked for, rising."""
        return list(self._candidates)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Take note of nothing: edges come with the table."""

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:  # noqa: ARG002
        """Return None: every candidate captures every batch size, any of them may be asked for."""
        return None

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return K for the step about to be launched, and remember why."""
        try:
            launch = self._decide(batch_size)
        except Exception:
            # The inputs are equal on every rank, so is the failure: all halt at this step.
            logger.exception("specpilot: lookup failed at batch size %d, switching stops", batch_size)
            self.halt(self.halt_steps, "a table lookup failed, see the server's log")
            launch = self._decide(batch_size)
        self._launches.append(launch)
        self.applied_steps = launch.steps
        self.decision_hash = (self.decision_hash * 1000003 + launch.forward_iter * 64 + launch.steps) & _MASK64
        return launch.steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:  # noqa: ARG002
        """Take the completion time; never switch from here (it would not be this step's result to judge).

        SGLang calls this right after the step's own ``copy_done.synchronize()``.
        """
        self.completed_at = self.clock()

    # -- what the hooks and the broadcast call --

    def _decide(self, batch_size: int) -> Decision:
        table = self.table
        fallback = self._capped(self.fallback_steps, batch_size)
        if table is None or self.source == DecisionSource.HALTED:
            if fallback != self.fallback_steps:
                self.steps_capped += 1
            return Decision(self.forward_iter, fallback, fallback, fallback, self.source, 0, -1, 1.0, -1)
        choice = table.choose(
            batch_size,
            self.mean_context,
            self.held_steps,
            self._steps_since_switch,
            self.forward_iter,
            self.source == DecisionSource.TABLE,
        )
        if choice.held == self.held_steps:
            self._steps_since_switch += 1
        else:
            self.held_steps = choice.held
            self._steps_since_switch = 0
        proposed = self._capped(choice.steps, batch_size)
        if proposed != choice.steps:
            self.steps_capped += 1
        # Where the cap changed the draw, the choice was certain, not the draw's.
        probability = choice.probability if proposed == choice.steps else 1.0
        block = choice.block if proposed == choice.steps else -1
        held = self._capped(choice.held, batch_size) if proposed == choice.steps else proposed
        return Decision(
            self.forward_iter,
            fallback if self.shadow or table.shadow else proposed,
            proposed,
            held,
            self.source,
            table.epoch,
            choice.cell,
            probability,
            block,
        )

    def _capped(self, steps: int, batch_size: int) -> int:
        if not self._caps:
            return steps
        region = bisect_left(self._cap_edges, batch_size)
        if region == 0 or steps <= (cap := self._caps[region - 1][1]):
            return steps
        return max((k for k in self._candidates if k <= cap), default=self._candidates[0])

    @property
    def halt_steps(self) -> int:
        """The one K to stay at when switching stops: the fallback under the tightest bound."""
        cap = min((steps for _, steps in self._caps), default=self.fallback_steps)
        return max((k for k in self._candidates if k <= min(cap, self.fallback_steps)), default=self._candidates[0])

    def adopt(self, table: CompiledTable) -> None:
        """Put a table in force."""
        if self.source != DecisionSource.HALTED:
            self.table = table
            self.source = DecisionSource.TABLE

    def set_source(self, source: DecisionSource) -> None:
        """Go on without exploration (STALE), with it again (TABLE), or without a table (FALLBACK)."""
        if self.source == DecisionSource.HALTED:
            return
        if self.source == DecisionSource.TABLE and source != DecisionSource.TABLE:
            self.lease_expiries += 1
        self.source = source
        if source == DecisionSource.FALLBACK:
            self.fallbacks += 1
            self.table = None
            self.held_steps = self.fallback_steps

    def halt(self, steps: int, reason: str) -> None:
        """Stop switching for good: ``steps`` at every batch size from now on, whatever arrives."""
        self.table = None
        self._caps = ()
        self.source = DecisionSource.HALTED
        self.fallback_steps = steps
        self.halt_reason = reason

    def take_launch(self, forward_iter: int) -> Decision | None:
        """Return what was decided for ``forward_iter``, once; None if that was never asked."""
        launches = self._launches
        while launches:
            launch = launches.popleft()
            if launch.forward_iter == forward_iter:
                return launch
            if launch.forward_iter > forward_iter:
                launches.appendleft(launch)
                return None
        return None
