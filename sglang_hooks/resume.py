"""What the draft needs of skipped steps, kept in a ring, and the pass that catches up when it is needed again.

A draft-extend row at position p takes the target's hidden state at p (EAGLE3: of several layers), the
token at p + 1, the KV slot of p and p itself. A skipped step at length n makes exactly the row p = n.
Hidden state and token go into a ring of R positions for every request; the slot is still in
``req_to_token``, which target and draft share, and R is a power of two:

    after a skip        ring[row, n % R] = hidden state, token         store(), one scatter on the GPU
    before a draft      rows [length - gap, length) of every request   catch_up(), one ragged draft-extend

``gaps.py`` counts on the host which positions those are. The pass also gives what the last
draft-extend would have handed on, in place of the zeros that stood for it while skipping. It runs
eagerly: its widths differ from request to request, and no two resumes are alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from specpilot.sglang_hooks.gaps import Gaps

MOST_POSITIONS = 1024
"""Largest ring of a request: filling in more costs more than its next drafts gain."""

CHUNK_TOKENS = 4096
"""Rows of one pass at most: what SGLang prefills at once on the smallest GPUs, so that activations fit."""


def ring_positions(budget_bytes: int, rows: int, bytes_per_position: int) -> int:
    """Return the largest power of two of positions that ``rows`` requests can have within the budget, or 0.

    >>> ring_positions(512 << 20, 257, 3 * 4096 * 2 + 4)
    64
    >>> ring_positions(1 << 20, 257, 3 * 4096 * 2 + 4)
    0
    """
    most = min(budget_bytes // (rows * bytes_per_position), MOST_POSITIONS)
    return 1 << (most.bit_length() - 1) if most else 0


class Ring:
    """Hidden states and tokens of each request's last R positions, on the GPU.

    ``hidden``: [rows * R, width], None for a draft that reads none; ``tokens``: int64 [rows * R].
    """

    def __init__(self, rows: int, positions: int, width: int | None, dtype: Any, device: Any) -> None:
        """``rows`` as in the request pool; ``positions`` (R) is 0 or a power of two."""
        import torch

        self.positions = positions
        self.tokens = torch.zeros(rows * positions, dtype=torch.int64, device=device)
        self.hidden = None
        if width is not None:
            self.hidden = torch.zeros((rows * positions, width), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return int(self.tokens.nbytes) + (0 if self.hidden is None else int(self.hidden.nbytes))

    def cells(self, rows: Any, positions: Any) -> Any:
        """Return where ``positions`` of the requests in ``rows`` are kept; both int64 of one shape."""
        return rows * self.positions + (positions & (self.positions - 1))

    def store(self, rows: Any, positions: Any, hidden: Any, tokens: Any) -> None:
        """Keep one position of each request: ``hidden`` at it and the token after it, [batch] rows."""
        if not self.positions:
            return
        cells = self.cells(rows, positions)
        self.tokens.index_copy_(0, cells, tokens.to(self.tokens.dtype))
        if self.hidden is not None:
            self.hidden.index_copy_(0, cells, hidden.to(self.hidden.dtype))


class Resume:
    """The ring and the gaps of one scheduler process, and the passes that fill them in.

    All of it runs on the forward stream, in the launching thread, without a look at the GPU.
    """

    def __init__(self, worker: Any, budget_bytes: int) -> None:
        """``worker`` is an EAGLEWorkerV2 that is ready to serve; raises what an allocation raises."""
        import torch
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
        from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim
        from sglang.srt.utils.common import fast_topk

        self._torch = torch
        self._fast_topk = fast_topk
        self._forward_batch = ForwardBatch.init_new
        self._extend_input = EagleDraftExtendInput
        self._extend_mode = ForwardMode.DRAFT_EXTEND_V2
        self._topk = worker.topk
        self._draft = worker.draft_worker.draft_runner
        self._req_to_token = worker.req_to_token_pool.req_to_token
        self._device = worker.device
        standalone = self._draft.spec_algorithm.is_standalone()
        self._hidden_mode = CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL
        # From 0.5.18 or so on, a request's row and lengths are together in its ``kv``.
        prefix = "kv." if "req_pool_idx" in ReqKvInfo.__dataclass_fields__ else ""
        self.gaps = Gaps(attrgetter(f"{prefix}req_pool_idx"), attrgetter(f"{prefix}kv_committed_len"))
        rows, dtype = self._req_to_token.shape[0], self._draft.model_config.dtype
        width = None if standalone else get_draft_input_from_target_hidden_dim(self._draft)
        token_bytes, hidden_bytes = 8, 0 if width is None else width * dtype.itemsize
        positions = ring_positions(budget_bytes, rows, token_bytes + hidden_bytes)
        self.ring = Ring(rows, positions, width, dtype, self._device)

    def store(self, batch: Any, lengths: Any, hidden: Any, tokens: Any) -> None:
        """After a skip was launched: keep its row, and count it.

        ``lengths`` int64 [batch] are those before it; ``hidden`` [batch, width] may be a view of what the
        next replay overwrites; ``tokens`` [batch] are the sampled ones.
        """
        self.ring.store(batch.req_pool_indices, lengths, hidden, tokens)
        self.gaps.skipped(batch.reqs)

    def catch_up(self, batch: Any) -> None:
        """Before a draft: show the draft what it has missed, and give ``batch.spec_info`` what it hands on.

        ``batch.seq_lens`` int64 [batch] are the lengths now. Costs a look into a dict where nothing is missing.
        """
        found = self.gaps.close(batch.reqs, self.ring.positions)
        if not found:
            return
        passes = [self._extend(batch, chunk) for chunk in _chunks(found)]
        topk_p, topk_index, hidden = (self._joined(parts) for parts in zip(*passes, strict=True))
        info = batch.spec_info
        if len(found) < len(batch.reqs):
            # Rows without a gap keep what their own draft-extend gave.
            rows = self._on_device([index for index, _ in found])
            topk_p = info.topk_p.index_copy(0, rows, topk_p.to(info.topk_p.dtype))
            topk_index = info.topk_index.index_copy(0, rows, topk_index.to(info.topk_index.dtype))
            if hidden is not None:
                hidden = info.hidden_states.index_copy(0, rows, hidden.to(info.hidden_states.dtype))
        info.topk_p, info.topk_index = topk_p, topk_index
        if hidden is not None:
            info.hidden_states = hidden

    def _extend(self, batch: Any, found: Sequence[tuple[int, int]]) -> tuple[Any, Any, Any]:
        """Run the draft over the last positions of some requests.

        ``found``: (index in the batch, positions) of each. Returns topk_p and topk_index [n, topk] and the
        draft's hidden states [n, hidden size] or None, all of the newest position.
        """
        torch = self._torch
        indices = [index for index, _ in found]
        takes = [take for _, take in found]
        total = sum(takes)
        chosen, take = self._on_device([indices, takes])
        lengths, rows = batch.seq_lens[chosen], batch.req_pool_indices[chosen].to(torch.int64)
        ends = take.cumsum(0)
        owner = torch.arange(len(takes), device=self._device).repeat_interleave(take, output_size=total)
        positions = torch.arange(total, device=self._device) + (lengths - ends)[owner]
        owner = rows[owner]
        cells = self.ring.cells(owner, positions)

        part = copy.copy(batch)
        part.reqs = [batch.reqs[index] for index in indices]
        part.req_pool_indices, part.seq_lens = rows, lengths
        part.seq_lens_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu[indices]
        part.seq_lens_sum = None
        part.orig_seq_lens = lengths.to(torch.int32)
        part.input_ids = self.ring.tokens[cells]
        part.out_cache_loc = self._req_to_token[owner, positions].to(torch.int64)
        part.prefix_lens, part.extend_lens = (lengths - take).to(torch.int32), take.to(torch.int32)
        part.extend_num_tokens = total
        part.forward_mode = self._extend_mode
        # The draft samples nothing: no temperatures, grammars, log probabilities or images.
        part.sampling_info = part.top_logprobs_nums = part.token_ids_logprobs = part.multimodal_inputs = None
        part.return_logprob = part.has_grammar = False
        select = ends - 1
        part.spec_info = self._extend_input(
            hidden_states=None if self.ring.hidden is None else self.ring.hidden[cells],
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            select_index=select,
        )
        forward_batch = self._forward_batch(
            part, self._draft, capture_hidden_mode=self._hidden_mode, return_hidden_states_before_norm=False
        )
        # Attention backends size what they allocate by these; without them they ask the GPU, or take the most.
        forward_batch.extend_seq_lens_cpu = takes
        forward_batch.extend_prefix_lens_cpu = [req.kv.kv_allocated_len for req in part.reqs]
        output = self._draft.forward(forward_batch).logits_output
        if self._topk == 1:
            topk_index = output.next_token_logits.argmax(dim=-1, keepdim=True)
            topk_p = torch.ones_like(topk_index, dtype=torch.float32)
        else:
            topk_p, topk_index = self._fast_topk(output.next_token_logits.softmax(dim=-1), self._topk, dim=-1)
        return topk_p, topk_index, None if output.hidden_states is None else output.hidden_states[select]

    def _on_device(self, values: Any) -> Any:
        """Return nested ints as int64 on the GPU, without waiting for it."""
        pinned = str(self._device) != "cpu"
        tensor = self._torch.tensor(values, dtype=self._torch.int64, pin_memory=pinned)
        return tensor.to(self._device, non_blocking=True)

    def _joined(self, parts: Sequence[Any]) -> Any:
        return parts[0] if len(parts) == 1 or parts[0] is None else self._torch.cat(parts)


def _chunks(found: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Split requests so that each part has at most CHUNK_TOKENS positions; no request is split.

    >>> [len(part) for part in _chunks([(index, 1024) for index in range(6)])]
    [4, 2]
    """
    part: list[tuple[int, int]] = []
    total = 0
    for item in found:
        if part and total + item[1] > CHUNK_TOKENS:
            yield part
            part, total = [], 0
        part.append(item)
        total += item[1]
    yield part
