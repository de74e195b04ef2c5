"""What the steps and prefills of a trace cost, as a surface for the simulated server."""

from __future__ import annotations

import statistics
from collections import Counter, deque

from specpilot.controller.simulation.named_surfaces import NamedSurface
from specpilot.controller.simulation.surface import H200_8B, ContextSurface, Costs
from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.cost import CostModel
from specpilot.sglang_hooks.wire import ForwardKind, Hello, StepRecord

ARM_STEPS = 64
"""Steps from which on the cost of a K counts as known; the cost model is within a few per cent by then."""
CONTEXTS = (64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0)
"""Mean contexts of the surface, in tokens per request."""
LEAST_PREFILLS = 16
"""Steps after one prefill from which on their excess tells what prefills cost."""


class TracedCosts:
    """A ``CostModel`` that learns every step of a trace, and what it has seen of each K."""

    def __init__(self, server: str, hello: Hello) -> None:
        self._server = server
        self._hello = hello
        self._cost = CostModel(hello)
        self._applied = AppliedSteps(hello.topk)
        self._steps_of: Counter[int] = Counter()
        self._batches: dict[int, tuple[int, int]] = {}
        self._largest_batch = 0
        self._longest_context = 0.0
        self._prefills: deque[tuple[int, float]] = deque(maxlen=4096)

    def take(self, step: StepRecord) -> None:
        """Learn a step."""
        steps = self._applied.of(step)
        mean_context = step.context_tokens / step.batch_size
        self._largest_batch = max(self._largest_batch, step.batch_size)
        self._longest_context = max(self._longest_context, mean_context)
        if step.forwards == 2 and self._cost.cells and steps is not None:
            self._take_prefill(step, self._cost.predict(steps, step.batch_size, mean_context)[0])
        if self._cost.learn(step) and steps is not None:
            self._steps_of[steps] += 1
            least, most = self._batches.get(steps, (step.batch_size, step.batch_size))
            self._batches[steps] = min(least, step.batch_size), max(most, step.batch_size)

    def _take_prefill(self, step: StepRecord, decode_seconds: float) -> None:
        after_prefill = step.previous_kind == ForwardKind.EXTEND and not step.after_idle
        if after_prefill and step.prefill_tokens and step.seconds > decode_seconds:
            self._prefills.append((step.prefill_tokens, step.seconds - decode_seconds))

    def known_steps(self) -> list[int]:
        """Return every K of the server whose cost is known, rising."""
        return sorted(k for k, n in self._steps_of.items() if n >= ARM_STEPS and k in self._hello.candidate_steps)

    def prefill_factor(self, context_factor: float) -> float | None:
        """Return what prefills cost, as a median multiple of ``H200_8B``'s estimate; None if too few were seen.

        ``context_factor``: how many times longer prompts are than what is prefilled of them.
        """
        if len(self._prefills) < LEAST_PREFILLS:
            return None
        return statistics.median(
            seconds / H200_8B.prefill_seconds(context_factor * tokens) for tokens, seconds in self._prefills
        )

    def resume_seconds(self) -> float:
        """Return what the first step with drafts after one with K=0 takes longer."""
        if 0 not in self._steps_of:
            return 0.0
        return max([0.0, *(self._cost.switch_seconds(0, k)[0] for k in self._steps_of if k)])

    def surface(self, prefill_factor: float | None) -> tuple[NamedSurface | None, str]:
        """Return the server as fitted; or None, and why it cannot be."""
        known = self.known_steps()
        if len(known) < 2:
            seen = ", ".join(f"K={k} {n:,} steps" for k, n in sorted(self._steps_of.items())) or "none"
            return None, (
                f"the trace of {self._server} tells the cost of {len(known)} K ({seen} fit to learn from, {ARM_STEPS} "
                "are needed): name a --surface for what the others cost, or record with a policy that tries them"
            )
        sizes, contexts = self._batch_sizes(), self._contexts()
        costs = {
            k: Costs(
                contexts,
                tuple(tuple(self._cost.predict(k, size, at)[0] for at in contexts) for size in sizes),
            )
            for k in known
        }
        ranges = "; ".join(
            f"K={k} {self._steps_of[k]:,} steps, batch {self._batches[k][0]} to {self._batches[k][1]}" for k in known
        )
        factor = 1.0 if prefill_factor is None else prefill_factor
        return (
            NamedSurface(
                "fitted",
                f"model-based: fitted to the steps of {self._server} ({ranges})",
                ContextSurface(sizes, costs, factor, self._hello.skip),
                ContextSurface(sizes, {0: costs[0]} if 0 in costs else {}, factor),
            ),
            "",
        )

    def _batch_sizes(self) -> tuple[int, ...]:
        """Return the captured batch sizes, and eight an octave above them, where steps run eagerly."""
        sizes = list(self._hello.captured_batch_sizes) or [1, 2]
        top = max(self._largest_batch, self._hello.max_running_requests)
        while sizes[-1] < top:
            sizes.append(min(max(sizes[-1] + 1, round(sizes[-1] * 2**0.125)), top))
        return tuple(sizes)

    def _contexts(self) -> tuple[float, ...]:
        """Return ``CONTEXTS`` up to the first at or above the longest mean context seen."""
        above = next((edge for edge in CONTEXTS if edge >= self._longest_context), CONTEXTS[-1])
        return tuple(edge for edge in CONTEXTS if edge <= max(above, CONTEXTS[1]))
