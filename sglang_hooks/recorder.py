"""Makes one StepRecord per decode step, from where SGLang launches it to where it settles it.

``launched`` runs just before a forward (every rank: the lookup needs the context),
``settling`` and ``settled`` around the processing of its result (rank 0 only). Nothing here
reads the GPU, the network or a file; per request it costs a few attribute reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import time
from typing import Any

from sglang_hooks.link import RecordQueue
from sglang_hooks.table_policy import TablePolicy
from sglang_hooks.wire import MASKED, ForwardKind, StepRecord

CONTEXT_REFRESH = 256
"""Forward passes after which context lengths are read anew though the batch's members stayed.

In between their sum grows by the tokens of each result, which is the same number without
looking at every request.
"""

CONTEXT_REFRESH_ROWS = 64
"""A batch of n x 64 requests re-reads its lengths at most every n-th pass, however its members change."""

_KEPT = 8
"""Launches whose facts are kept; overlap scheduling has two in flight."""


class Recorder:
    """Per-process state of the recording: what was launched, what completed last."""

    def __init__(
        self,
        policy: TablePolicy,
        queue: RecordQueue | None,
        captured_batch_sizes: Sequence[int] = (),
        overlap: bool = False,
        load: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    ) -> None:
        """``queue`` is None on ranks that do not record; ``load`` gives running, queued, KV tokens used."""
        self._policy = policy
        self._queue = queue
        self.captured_batch_sizes = sorted(captured_batch_sizes)
        self.overlap = overlap
        self.load = load
        self.join_misses = 0
        self.steps_mismatched = 0
        self._record_seq = 0
        # Context, re-read as rarely as the constants above allow.
        self._members: Any = None
        self._context_batch_size = 0
        self._context_tokens = 0
        self._context_at = -CONTEXT_REFRESH
        # The forward launched last, and what piled up since the last decode.
        self._last_kind = ForwardKind.NONE
        self._last_width = 0
        self._prefill_tokens = 0
        self._facts: dict[int, tuple[int, int, int, int, int, int, int]] = {}
        # The decode step completed last.
        self._previous_step = 0
        self._previous_at = 0.0
        self._clock_offset = time() - policy.clock()

    def launched(self, batch: Any) -> None:
        """Before a forward pass: keep the context fresh and note what is launched."""
        forward_iter = batch.forward_iter
        mode = batch.forward_mode
        self._policy.forward_iter = forward_iter
        if not mode.is_decode():
            tokens = batch.extend_num_tokens or 0
            kind = ForwardKind.MIXED if mode.is_mixed() else ForwardKind.EXTEND
            self._last_kind = kind if mode.is_extend() else ForwardKind.OTHER
            self._last_width = tokens
            self._prefill_tokens += tokens
            return
        reqs = batch.reqs
        batch_size = len(reqs)
        age = forward_iter - self._context_at
        if age >= CONTEXT_REFRESH or (
            (reqs is not self._members or batch_size != self._context_batch_size)
            and age >= batch_size // CONTEXT_REFRESH_ROWS
        ):
            self._members = reqs
            self._context_batch_size = batch_size
            self._context_tokens = sum([req.seqlen for req in reqs])
            self._context_at = forward_iter
        self._policy.mean_context = self._context_tokens / max(self._context_batch_size, 1)

    def decided(self, batch: Any, steps: int) -> None:
        """After the forward was launched at ``steps``: keep the facts until its result comes (rank 0)."""
        if self._queue is not None:
            running, queued, kv_used = self.load()
            batch_size = len(batch.reqs)
            context = int(self._policy.mean_context * batch_size)
            self._facts[batch.forward_iter] = (
                context,
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
        self._last_width = len(batch.reqs) * (steps + 1)
        self._prefill_tokens = 0

    def settling(self, batch: Any) -> list[int]:
        """Before a decode result is processed: rows whose request is no longer live."""
        return _ended_rows(batch.reqs)

    def settled(self, batch: Any, result: Any, masked: list[int]) -> None:
        """After a decode result was processed: join it to its launch and queue the record."""
        policy, queue = self._policy, self._queue
        step = batch.forward_iter
        launch = policy.take_launch(step)
        accepted = result.num_correct_drafts_per_req_cpu
        self._context_tokens += sum(accepted) + len(accepted)
        for row in masked:
            self._context_tokens -= accepted[row] + 1
        if queue is None:
            return
        completed_at = policy.completed_at
        facts = self._facts.pop(step, None)
        seconds = completed_at - self._previous_at if self._previous_at else 0.0
        forwards = step - self._previous_step if self._previous_step else 0
        previous_at, self._previous_at, self._previous_step = self._previous_at, completed_at, step
        if launch is None or facts is None:
            self.join_misses += 1
            return
        draft_tokens = result.speculative_num_draft_tokens or 0
        if draft_tokens != launch.steps + 1:
            self.steps_mismatched += 1
        accepted = list(accepted)
        truncated = []
        ended = _ended_rows(batch.reqs)
        if len(ended) > len(masked):
            truncated = sorted(set(ended).difference(masked))
            for row in truncated:
                accepted[row] = _accepted_within(batch.reqs[row], accepted[row])
        for row in masked:
            accepted[row] = MASKED
        batch_size = len(accepted)
        graph = bool(result.can_run_cuda_graph)
        padded = batch_size
        if graph and self.captured_batch_sizes and batch_size <= self.captured_batch_sizes[-1]:
            padded = self.captured_batch_sizes[bisect_left(self.captured_batch_sizes, batch_size)]
        context, running, queued, kv_used, previous_kind, previous_width, prefill_tokens = facts
        record = StepRecord(
            self._record_seq,
            step,
            completed_at + self._clock_offset,
            seconds,
            batch_size,
            padded,
            context,
            launch.steps,
            launch.proposed_steps,
            draft_tokens,
            accepted,
            truncated,
            running,
            queued,
            kv_used,
            int(launch.source),
            launch.epoch,
            launch.cell,
            launch.probability,
            launch.block,
            previous_kind,
            previous_width,
            forwards,
            prefill_tokens,
            batch.launch_ts - previous_at if previous_at else 0.0,
            getattr(batch, "after_idle_gap", None),
            graph,
            self.overlap,
            bool(batch.has_grammar),
        )
        self._record_seq += 1
        queue.put(record)


def _ended_rows(reqs: Sequence[Any]) -> list[int]:
    return [i for i, req in enumerate(reqs) if req.finished_reason is not None or req.is_retracted]


def _accepted_within(req: Any, accepted: int) -> int:
    """Accepted drafts up to the request's end: the run may go on past its stop token or length."""
    beyond = len(req.output_ids) - req.finished_len if req.finished_len is not None else 0
    return max(accepted - max(beyond, 0), 0)
