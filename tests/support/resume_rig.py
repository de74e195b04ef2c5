"""A server for tests of resuming: requests that join, leave, are skipped and speculate, with draft and target faked.

Real: EAGLEWorkerV2.forward_batch_generation with all hooks of the skip, ForwardBatch.init_new of the
catch-up, ScheduleBatch, Req. Fake: the target (skip_rig.py), and the draft, which remembers for each KV
slot what it was made of.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_info import EagleDraftInput

from specpilot.sglang_hooks import resume, skip
from specpilot.sglang_hooks.installed import installed
from tests.support import sglang_rig as rig
from tests.support import skip_rig
from tests.support.skip_rig import CONTEXT, HIDDEN, ROWS, SkipWorker

Fact = tuple[int, int, int, int]
"""What the draft made a slot's KV of: row, position, token after it, position that the hidden state tells."""


def token_after(position: int) -> int:
    """The model's token after ``position``."""
    return int(skip_rig.next_token(torch.tensor(position + 1)))


def signature(*names: str) -> inspect.Signature:
    """What the hooks check of SGLang's method that a fake stands for."""
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


class DraftKV:
    """The draft model: remembers for each slot what its KV was made of, as target and draft share slots."""

    def __init__(self) -> None:
        self.slots: dict[int, Fact] = {}
        self.batches: list[Any] = []

    def write(self, row: int, position: int, token: int, hidden: Any) -> None:
        slot = row * CONTEXT + position
        self.slots[slot] = (int(hidden[1]), position, token, int(hidden[0]))

    def forward(self, forward_batch: Any) -> Any:
        """A draft-extend over positions of any number of requests: logits of the selected rows."""
        self.batches.append(forward_batch)
        info = forward_batch.spec_info
        for slot, position, token, hidden in zip(
            forward_batch.out_cache_loc.tolist(), forward_batch.positions.tolist(), forward_batch.input_ids.tolist(),
            info.hidden_states, strict=True,
        ):  # fmt: skip
            assert slot % CONTEXT == position
            self.write(slot // CONTEXT, position, token, hidden)
        logits = torch.nn.functional.one_hot(forward_batch.input_ids[info.select_index], skip_rig.VOCABULARY).float()
        hidden = forward_batch.positions[:, None].repeat(1, HIDDEN).to(torch.bfloat16)
        return SimpleNamespace(logits_output=LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden))


class Server:
    """Requests that join, leave, are skipped and speculate, through SGLang's own forward_batch_generation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fakes what SGLang's classes would run on a GPU; call before the hooks are put in place."""
        self.kv = DraftKV()
        self.worker: SkipWorker
        self.reqs: list[Req] = []
        self.lengths: dict[str, int] = {}
        self.accepted = 1
        self.drafted_from: list[tuple[int, int]] = []
        self.born = 0
        self.free = list(range(2, ROWS))
        drafts = eagle_worker_v2.EagleDraftWorker
        monkeypatch.setattr(eagle_worker_v2.EAGLEWorkerV2, "verify", self._verify())
        monkeypatch.setattr(drafts, "draft", self._draft())
        monkeypatch.setattr(drafts, "_draft_extend_for_decode", self._extend())
        monkeypatch.setattr(drafts, "_draft_extend_for_prefill", self._prefill())

    def serve(self, worker: SkipWorker, positions: int) -> None:
        """Put ``worker`` to work, with a ring of so many positions; the hooks must be in place."""
        self.worker = worker
        worker._draft_worker.draft_runner.forward = self.kv.forward
        install(worker, positions)

    def _draft(self) -> Any:
        def draft(worker: Any, batch: Any, *, with_topology: bool = False) -> Any:
            info = batch.spec_info
            self.drafted_from = [
                (int(i), int(h[0])) for i, h in zip(info.topk_index[:, 0], info.hidden_states, strict=True)
            ]
            self.drafted_width = tuple(info.topk_p.shape), tuple(info.topk_index.shape)
            return SimpleNamespace(is_verify_input=lambda: True, kv_loc_plan=None)

        draft.__signature__ = signature("self", "batch", "with_topology")
        return draft

    def _verify(self) -> Any:
        def verify(worker: Any, batch: Any, pp_proxy_tensors: Any = None, grammar_barrier: Any = None) -> Any:
            accepted = torch.full((len(batch.reqs),), self.accepted)
            return GenerationBatchResult(
                next_draft_input=EagleDraftInput(), accept_lens=accepted, new_seq_lens=batch.seq_lens + accepted,
                speculative_num_draft_tokens=worker.speculative_num_draft_tokens,
            )  # fmt: skip

        verify.__signature__ = signature("self", "batch", "pp_proxy_tensors", "grammar_barrier")
        return verify

    def _extend(self) -> Any:
        def extend(worker: Any, batch: Any, batch_result: Any, *, kv_loc_plan: Any = None) -> None:
            for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
                for position in range(length, length + self.accepted):
                    self.kv.write(row, position, token_after(position), (position, row))

        extend.__signature__ = signature("self", "batch", "batch_result", "kv_loc_plan")
        return extend

    def _prefill(self) -> Any:
        def prefill(worker: Any, batch: Any, hidden: Any, tokens: Any, embeds: Any = None, plan: Any = None) -> None:
            for req, length in zip(batch.reqs, batch.lengths, strict=True):
                for position in range(length):
                    row = req.kv.req_pool_idx
                    self.kv.write(row, position, token_after(position), (position, row))

        prefill.__signature__ = signature(
            "self", "batch", "target_hidden_states", "next_token_ids", "mm_input_embeds", "kv_loc_plan"
        )
        return prefill

    def join(self, prompt: int, rid: str | None = None) -> Req:
        self.born += 1
        req = rig.request(rid or f"r{self.born}", prompt, 1000)
        req.kv.req_pool_idx = self.free.pop(0)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = prompt
        batch = SimpleNamespace(reqs=[req], forward_mode=ForwardMode.EXTEND, lengths=[prompt])
        self.worker._draft_worker._draft_extend_for_prefill(batch, None, None)
        self.lengths[req.rid] = prompt
        self.reqs = [*self.reqs, req]
        return req

    def leave(self, req: Req) -> None:
        self.free.append(req.kv.req_pool_idx)
        pool = SimpleNamespace(free_rows=lambda rows: None)
        ReqToTokenPool.free(pool, req)
        self.reqs = [other for other in self.reqs if other is not req]

    def step(self, steps: int) -> Any:
        worker = self.worker
        if worker.topk == 1:
            worker.speculative_num_steps, worker.speculative_num_draft_tokens = steps, steps + 1
        lengths = torch.tensor([self.lengths[req.rid] for req in self.reqs])
        batch = ScheduleBatch(reqs=self.reqs)
        batch.forward_mode = ForwardMode.DECODE
        batch.spec_algorithm = worker.speculative_algorithm
        batch.device, batch.forward_iter = "cpu", self.born
        batch.seq_lens, batch.seq_lens_cpu = lengths, None
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in self.reqs])
        batch.sampling_info = skip_rig.sampling_info(len(self.reqs))
        rows = len(self.reqs)
        batch.spec_info = EagleDraftInput(
            bonus_tokens=skip_rig.next_token(lengths), topk_p=torch.zeros(rows, worker.topk),
            topk_index=torch.full((rows, worker.topk), 7),
            hidden_states=torch.zeros(rows, HIDDEN, dtype=torch.bfloat16),
        )  # fmt: skip
        before = batch.seq_lens
        with Scheduler._forward_isolation(SimpleNamespace(), batch, overlap=False):
            result = worker.forward_batch_generation(batch)
        assert batch.seq_lens is before
        for req, length in zip(self.reqs, result.new_seq_lens.tolist(), strict=True):
            self.lengths[req.rid] = length
            req.kv.kv_committed_len = req.kv.kv_allocated_len = length
        return result

    def missing(self, req: Req) -> list[int]:
        """Positions whose KV is not what uninterrupted draft-extends would have written."""
        row, length = req.kv.req_pool_idx, self.lengths[req.rid]
        tokens = skip_rig.next_token(torch.arange(1, length + 1)).tolist()
        return [
            position for position in range(length)
            if self.kv.slots.get(row * CONTEXT + position) != (row, position, tokens[position], position)
        ]  # fmt: skip


def install(worker: SkipWorker, positions: int) -> resume.Resume:
    made = resume.Resume(worker, ROWS * positions * (3 * HIDDEN * 2 + 8))
    assert made.ring.positions == positions
    installed.skip = skip.DecodeSkip(worker, "decode-backend", "decode-graphs", made)
    return made
