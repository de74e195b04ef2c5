"""What others do, for comparison: behind the same interface, or in place of the table's lookup.

    BatchTable        K by batch size from a table that somebody made (vLLM's Dynamic SD)
    InformedGreedy    the best K of every cell by the truth: a reference, which no server can run
    SGLangAdaptive    SGLang's own policy, the installed class, step by step as SGLang drives it

See the classes for sources. None of them learns through ``learn``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from specpilot.policies.interface import Grid, Plan, Policy, PolicyError, require_candidate
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import Decision, TablePolicy
from specpilot.sglang_hooks.wire import DecisionSource, Hello

DEFAULT_BATCH_TABLE = ((1, 5), (8, 3), (32, 1), (64, 0))
"""Rows of ``BatchTable`` if none are given: (batch size from which on, K)."""


class BatchTable(Policy):
    """K by batch size, as in vLLM's ``num_speculative_tokens_per_batch_size`` (vllm #32374).

    vLLM has no default, "because it is hardware and category dependent"; ours is in the spirit of
    its examples. Like there, nothing keeps a batch that hovers at a line from switching each step
    (vllm #49548).

    >>> from tests.support.messages import hello
    >>> plan = BatchTable(((1, 3), (8, 0))).decide(hello(candidate_steps=[0, 1, 3]), 0.0)
    >>> plan.grid.batch_edges, plan.choice
    ((7,), (3, 0))
    """

    name = "batch-table"

    def __init__(self, rows: Sequence[tuple[int, int]] = DEFAULT_BATCH_TABLE) -> None:
        """``rows``: (batch size from which on, K), by rising batch size from 1 on; else ValueError."""
        starts = [start for start, _ in rows]
        if not rows or starts[0] != 1 or any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"batch sizes must rise from 1 on, not {starts}")
        self._rows = tuple(rows)

    @staticmethod
    def parse(text: str) -> BatchTable:
        """Read ``"1:5,8:3,64:0"``; the empty text is the default. ValueError says what is wrong.

        >>> BatchTable.parse("1:5,8;3")
        Traceback (most recent call last):
        ValueError: '8;3' is no pair of batch size and steps: use 1:5,8:3,64:0
        """
        if not text:
            return BatchTable()
        rows = []
        for item in text.split(","):
            start, _, steps = item.partition(":")
            if not (start.isdecimal() and steps.isdecimal()):
                raise ValueError(f"{item!r} is no pair of batch size and steps: use 1:5,8:3,64:0")
            rows.append((int(start), int(steps)))
        return BatchTable(rows)

    def decide(self, server: Hello, now: float) -> Plan:  # noqa: ARG002
        """Return the table; PolicyError if the server did not declare one of its K."""
        for start, steps in self._rows:
            require_candidate(server, steps, f"K={steps} from batch size {start} on")
        edges = tuple(start - 1 for start, _ in self._rows[1:])
        choice = tuple(steps for _, steps in self._rows)
        reason = ", ".join(f"K={steps} from batch size {start} on" for start, steps in self._rows)
        return Plan.exact(Grid(edges), choice, reason)


# -- knowing the truth --


@dataclass(frozen=True)
class Truth:
    """What only a simulation can tell of a server."""

    seconds: Callable[[int, int, float], float]
    """Seconds of a decode step, by K, batch size and mean context (tokens per request)."""
    acceptance: Callable[[float], float]
    """Probability that a draft is accepted given that those before it were, by time in seconds."""

    def goodput(self, steps: int, batch_size: int, mean_context: float, acceptance: float) -> float:
        """Return the expected tokens per second."""
        length = sum(acceptance**position for position in range(steps + 1))
        return batch_size * length / self.seconds(steps, batch_size, mean_context)


class InformedGreedy(Policy):
    """In every cell the K with the most expected tokens per second, by the true surface and acceptance.

    A reference, not a bound. It is myopic: a step that is best by itself need not be best for the
    requests that wait. It knows the truth at the middle of a cell only, and its tables come as late
    as everybody's: half a second's decisions, a round trip, a receiving pass.
    """

    name = "informed-greedy"

    CONTEXT_EDGES = tuple(round(128 * 2 ** (half / 2)) for half in range(16))
    """Each 1.41 times the one before, from 128 to 23,170 tokens per request."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._decided: tuple[float, Plan] | None = None

    def decide(self, server: Hello, now: float) -> Plan:
        """Return the best K by captured batch size and context."""
        acceptance = self._truth.acceptance(now)
        if self._decided is None or self._decided[0] != acceptance:
            self._decided = acceptance, self._plan(server, acceptance)
        return self._decided[1]

    def _plan(self, server: Hello, acceptance: float) -> Plan:
        captured = server.captured_batch_sizes
        largest = max(server.max_running_requests, captured[-1]) if captured else server.max_running_requests
        edges = self.CONTEXT_EDGES
        between = ((low * high) ** 0.5 for low, high in itertools.pairwise(edges))
        middles = (edges[0] / 2, *between, 1.2 * edges[-1])
        choice = tuple(
            max(
                server.candidate_steps,
                key=lambda steps: self._truth.goodput(steps, batch_size, mean_context, acceptance),
            )
            for batch_size in (*captured, largest)
            for mean_context in middles
        )
        reason = f"the truth: acceptance {acceptance:.3f}"
        return Plan.exact(Grid(tuple(captured), edges), choice, reason)


# -- SGLang's own --


class AdaptivePolicy(Protocol):
    """``sglang.srt.speculative.adaptive_runtime_state.AdaptiveSpecPolicy``, as far as a step needs it."""

    @property
    def candidate_steps(self) -> list[int]:
        """Every K it may ask for."""

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Take the captured batch sizes."""

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return K for the step about to be launched."""

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Learn from a step's accepted drafts."""


def sglang_params(initial_steps: int, captured_batch_sizes: Sequence[int]) -> AdaptivePolicy:
    """Return the installed SGLang's ``AdaptiveSpeculativeParams`` with its default configuration.

    PolicyError without SGLang, or with one whose class is another.
    """
    try:
        from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams
    except ImportError as error:
        raise PolicyError(
            f"policy sglang runs the class of an installed SGLang, and there is none ({error}): "
            "pip install '.[sglang]' in Specpilot's checkout"
        ) from error
    params: AdaptivePolicy = AdaptiveSpeculativeParams(initial_steps=initial_steps)
    params.set_cuda_graph_bs(list(captured_batch_sizes))
    return params


class SGLangAdaptive(TablePolicy):
    """SGLang's ``--speculative-adaptive`` in the place of the table's lookup, no controller needed.

    Called as SGLang's ``AdaptiveController`` calls it: each launch asks for K by batch size, each
    result is fed when it is processed. Under overlap that is after the next launch, and it carries
    no mark of the K it was made with, so after every change of K one result of the old K is taken
    for one of the new.
    """

    def __init__(self, params: AdaptivePolicy, initial_steps: int, clock: Callable[[], float] = monotonic) -> None:
        """``initial_steps``: as given to ``params`` (``--speculative-num-steps``)."""
        candidates = params.candidate_steps
        # A slot may know neither: SGLang then starts it at its own middle.
        initial = candidates[min(bisect_left(candidates, initial_steps), len(candidates) - 1)]
        super().__init__(Settings(), candidates, initial, clock)
        self._params = params

    def _decide(self, batch_size: int) -> Decision:
        steps = self._params.get_steps_for_batch(batch_size)
        self.held_steps = steps
        return Decision(self.forward_iter, steps, steps, steps, DecisionSource.FALLBACK, 0, -1, 1.0, -1)

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        """Feed SGLang's policy; K changes at the next launch."""
        super().on_verify_complete(num_correct_drafts_per_req, batch_size)
        self._params.on_verify_complete(num_correct_drafts_per_req, batch_size)
