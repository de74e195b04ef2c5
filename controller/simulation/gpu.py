"""The simulated GPU: when a forward pass will be done, and how many drafts its verify accepts."""

from __future__ import annotations

from typing import NamedTuple

from specpilot.controller.simulation.batch import SimBatch, SimRequest, SimResult
from specpilot.controller.simulation.clock import Clock
from specpilot.controller.simulation.surface import Surface
from specpilot.controller.simulation.workload import Draws, Workload


class Decode(NamedTuple):
    """One decode step at its launch, with what no scheduler knows: the truth it will be judged by."""

    at: float
    """Seconds since the start of the server."""
    steps: int
    """The K that was applied."""
    held_steps: int
    """The K that the table would have chosen without exploration."""
    batch_size: int
    mean_context: float
    """Tokens per request, those in flight included."""
    acceptance: float
    """Acceptance of the workload's text at the time."""
    seconds: float
    """Seconds that the step takes on the GPU."""
    acceptances: tuple[float, ...] = ()
    """Acceptance of each request, where requests have their own; else empty."""


class SimGpu:
    """Works off forward passes one after the other, each as long as a ``Surface`` says."""

    def __init__(
        self, surface: Surface, workload: Workload, draws: Draws, clock: Clock, resume_seconds: float = 0.0
    ) -> None:
        """``resume_seconds``: what the first step with drafts after one without takes longer."""
        self._surface = surface
        self._workload = workload
        self._draws = draws
        self._clock = clock
        self._resume_seconds = resume_seconds
        self._free_at = 0.0
        self._previous_steps = -1
        self._own_acceptance = False

    def prefill(self, batch: SimBatch) -> SimResult:
        """Queue a prefill, which gives each request its first token."""
        assert batch.extend_num_tokens is not None
        for req in batch.reqs:
            req.position = 1
            self._own_acceptance |= req.acceptance is not None
        done_at = self._occupy(self._surface.prefill_seconds(batch.extend_num_tokens))
        return SimResult(done_at, [0] * len(batch.reqs), 0, can_run_cuda_graph=False)

    def decode(self, batch: SimBatch, steps: int, held_steps: int, at: float) -> tuple[SimResult, Decode]:
        """Queue a decode step of K = ``steps``, ``at`` seconds after the start of the server."""
        batch_size = len(batch.reqs)
        acceptance = self._workload.acceptance(at)
        mean_context = sum([req.prompt_tokens + req.position for req in batch.reqs]) / batch_size
        accepted, acceptances = self._accepted(batch.reqs, steps, acceptance)
        for req, drafts in zip(batch.reqs, accepted, strict=True):
            req.position += drafts + 1
        seconds = self._surface.decode_seconds(steps, batch_size, mean_context)
        if steps and self._previous_steps == 0:
            seconds += self._resume_seconds
        self._previous_steps = steps
        result = SimResult(
            done_at=self._occupy(seconds),
            accepted=accepted,
            speculative_num_draft_tokens=steps + 1,
            can_run_cuda_graph=batch_size <= self._surface.captured_batch_sizes[-1],
        )
        return result, Decode(at, steps, held_steps, batch_size, mean_context, acceptance, seconds, acceptances)

    def _accepted(self, reqs: list[SimRequest], steps: int, acceptance: float) -> tuple[list[int], tuple[float, ...]]:
        """Return each request's accepted drafts, and each one's acceptance where requests have their own."""
        if not self._own_acceptance:
            return self._draws.accepted_each(reqs, steps, acceptance), ()
        acceptances = tuple(acceptance if req.acceptance is None else req.acceptance for req in reqs)
        accepted = [
            self._draws.accepted(req.index, req.position, steps, own)
            for req, own in zip(reqs, acceptances, strict=True)
        ]
        return accepted, acceptances

    def _occupy(self, seconds: float) -> float:
        """Queue ``seconds`` of work behind what the GPU has, and return when it will be done."""
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        return self._free_at
