"""The mean context of the batch about to run, as every rank knows it alike.

It enters decisions, so it comes from host-side state that is equal on all ranks, and follows
it by the same rules on all: never from the GPU, a clock, or anything that rank 0 does alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specpilot.sglang_hooks.table_policy import TablePolicy

REFRESH_PASSES = 256
"""Forward passes after which lengths are read again though the batch's members stayed.

In between their sum grows by the tokens of each result, which is the same number without
looking at every request.
"""

REFRESH_ROWS = 64
"""A batch of n x 64 requests re-reads its lengths at most every n-th pass, however its members change."""


class ContextTracker:
    """Keeps ``policy.mean_context`` (tokens per request) and ``policy.forward_iter`` current."""

    def __init__(self, policy: TablePolicy) -> None:
        self._policy = policy
        # SGLang replaces the list when members change; holding it keeps its identity from being reused.
        self._members: Any = None
        self._batch_size = 0
        self._tokens = 0
        self._read_at = -REFRESH_PASSES

    def launched(self, batch: Any) -> None:
        """Before a forward pass."""
        policy, forward_iter = self._policy, batch.forward_iter
        policy.forward_iter = forward_iter
        if not batch.forward_mode.is_decode():
            return
        reqs = batch.reqs
        batch_size = len(reqs)
        age = forward_iter - self._read_at
        if age >= REFRESH_PASSES or (
            (reqs is not self._members or batch_size != self._batch_size) and age >= batch_size // REFRESH_ROWS
        ):
            self._members = reqs
            self._batch_size = batch_size
            self._tokens = sum([req.seqlen for req in reqs])
            self._read_at = forward_iter
        policy.mean_context = self._tokens / max(self._batch_size, 1)

    def settled(self, accepted: Sequence[int], ended: Sequence[int]) -> None:
        """After a decode result: ``accepted`` drafts per row, and the rows that had ended before it."""
        self._tokens += sum(accepted) + len(accepted)
        for row in ended:
            self._tokens -= accepted[row] + 1


def ended_rows(reqs: Sequence[Any]) -> list[int]:
    """Return the rows whose request is finished or retracted; mostly none, which is the quick way out."""
    if not [req for req in reqs if req.finished_reason is not None or req.is_retracted]:
        return []
    return [i for i, req in enumerate(reqs) if req.finished_reason is not None or req.is_retracted]
