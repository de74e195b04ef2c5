"""Rank 0: makes one StepRecord per decode step, from where SGLang launches it to where it settles it.

Nothing here reads the GPU, the network or a file, and no decision depends on it: if recording
fails on rank 0, the ranks go on deciding alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import time
from typing import Any, NamedTuple

from specpilot.sglang_hooks.context import ended_rows
from specpilot.sglang_hooks.link import RecordQueue
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import MASKED, ForwardKind, StepRecord

_KEPT = 8
"""Launches whose facts are kept; overlap scheduling has two in flight."""


class _Facts(NamedTuple):
    """What was true when a decode step was launched."""

    context_tokens: int
    running: int
    queued: int
    kv_used_tokens: int
    previous_kind: int
    previous_width: int
    prefill_tokens: int


class Recorder:
    """State of the recording: what was launched, what completed last."""

    def __init__(
        self,
        policy: TablePolicy,
        queue: RecordQueue,
        captured_batch_sizes: Sequence[int],
        overlap: bool,
        load: Callable[[], tuple[int, int, int]],
        tree_tokens: int = 0,
        wall_clock: Callable[[], float] = time,
    ) -> None:
        """``load`` gives running and queued requests, and KV tokens used.

        ``tree_tokens``: what a tree verifies per request, whatever its K; 0 for a chain.
        ``wall_clock``: seconds since the Unix epoch; records carry the policy's clock moved onto it.
        """
        self._policy = policy
        self._queue = queue
        self._captured = sorted(captured_batch_sizes)
        self._overlap = overlap
        self._load = load
        self._tree_tokens = tree_tokens
        self.join_misses = 0
        self.steps_mismatched = 0
        self.retracted = 0
        """Requests retracted since the newest record."""
        self.rows_quarantined = 0
        self._record_seq = 0
        self._facts: dict[int, _Facts] = {}
        # The forward launched last, and what piled up since the last decode.
        self._last_kind = ForwardKind.NONE
        self._last_width = 0
        self._prefill_tokens = 0
        # The decode step completed last.
        self._previous_step = 0
        self._previous_at = 0.0
        self._clock_offset = wall_clock() - policy.clock()

    def launched(self, batch: Any, decode: bool) -> None:
        """After a forward was launched: keep a decode's facts until its result comes."""
        if not decode:
            mode, tokens = batch.forward_mode, batch.extend_num_tokens or 0
            kind = ForwardKind.MIXED if mode.is_mixed() else ForwardKind.EXTEND
            self._last_kind = kind if mode.is_extend() else ForwardKind.OTHER
            self._last_width = tokens
            self._prefill_tokens += tokens
            return
        policy = self._policy
        batch_size = len(batch.reqs)
        running, queued, kv_used = self._load()
        self._facts[batch.forward_iter] = _Facts(
            round(policy.mean_context * batch_size),
            running,
            queued,
            kv_used,
            int(self._last_kind),
            self._last_width,
            self._prefill_tokens,
        )
        if len(self._facts) > _KEPT:
            del self._facts[next(iter(self._facts))]
        self._last_kind = ForwardKind.DECODE
        self._last_width = batch_size * self._width(policy.applied_steps)
        self._prefill_tokens = 0

    def settled(self, batch: Any, result: Any, masked: Sequence[int], quarantined: Sequence[int] = ()) -> None:
        """After a decode result was processed: join it to its launch and queue the record.

        ``masked`` are the rows whose request had ended before this result, ``quarantined`` those that
        drafted without all of their context: what they accepted tells nothing about others.
        """
        policy = self._policy
        step = batch.forward_iter
        decision = policy.take_launch(step)
        facts = self._facts.pop(step, None)
        completed_at = policy.completed_at
        previous_at = self._previous_at
        forwards = step - self._previous_step if self._previous_step else 0
        self._previous_at, self._previous_step = completed_at, step
        if decision is None or facts is None:
            self.join_misses += 1
            return
        draft_tokens = result.speculative_num_draft_tokens or 0
        if draft_tokens != self._width(decision.steps):
            self.steps_mismatched += 1
        accepted, truncated = self._accepted(batch.reqs, result.num_correct_drafts_per_req_cpu, masked, quarantined)
        batch_size = len(accepted)
        graph = bool(result.can_run_cuda_graph)
        record = StepRecord(
            record_seq=self._record_seq,
            step=step,
            time=completed_at + self._clock_offset,
            seconds=completed_at - previous_at if previous_at else 0.0,
            batch_size=batch_size,
            padded_batch_size=self._padded(batch_size) if graph else batch_size,
            context_tokens=facts.context_tokens,
            steps=decision.steps,
            proposed_steps=decision.proposed_steps,
            held_steps=decision.held_steps,
            draft_tokens=draft_tokens,
            accepted_drafts=accepted,
            truncated=truncated,
            running=facts.running,
            queued=facts.queued,
            kv_used_tokens=facts.kv_used_tokens,
            retracted=self.retracted,
            source=decision.source,
            epoch=decision.epoch,
            cell=decision.cell,
            probability=decision.probability,
            block=decision.block,
            previous_kind=facts.previous_kind,
            previous_width=facts.previous_width,
            forwards=forwards,
            prefill_tokens=facts.prefill_tokens,
            launch_gap_seconds=batch.launch_ts - previous_at if previous_at else 0.0,
            after_idle=getattr(batch, "after_idle_gap", None),
            graph=graph,
            overlap=self._overlap,
            grammar=bool(batch.has_grammar),
        )
        self._record_seq += 1
        self.retracted = 0
        self._queue.put(record)

    def _accepted(
        self, reqs: Sequence[Any], accepted: list[int], masked: Sequence[int], quarantined: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return accepted drafts per row as they may be learned from, and the rows whose request ended here."""
        if quarantined:
            live = set(quarantined).difference(masked)
            self.rows_quarantined += len(live)
            masked = sorted(live.union(masked))
        # Nearly always no row has ended, and SGLang's list goes out as it is.
        if not masked and not [req for req in reqs if req.finished_reason is not None]:
            return accepted, []
        truncated = sorted(set(ended_rows(reqs)).difference(masked))
        accepted = list(accepted)
        for row in truncated:
            accepted[row] = _accepted_within(reqs[row], accepted[row])
        for row in masked:
            accepted[row] = MASKED
        return accepted, truncated

    def _padded(self, batch_size: int) -> int:
        """Return the captured graph size that a batch is padded to, or its own size above the largest."""
        if not self._captured or batch_size > self._captured[-1]:
            return batch_size
        return self._captured[bisect_left(self._captured, batch_size)]

    def _width(self, steps: int) -> int:
        """Tokens that a step with ``steps`` verifies per request."""
        return self._tree_tokens if steps and self._tree_tokens else steps + 1


def _accepted_within(req: Any, accepted: int) -> int:
    """Accepted drafts up to the request's end: the run may go on past its stop token or length."""
    beyond = len(req.output_ids) - req.finished_len if req.finished_len is not None else 0
    return max(accepted - max(beyond, 0), 0)
