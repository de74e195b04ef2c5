"""A server for tests of the decode-mode skip: SGLang's classes, with the GPU's forward passes faked.

Real: EAGLEWorkerV2.forward_batch_generation and verify's and draft-extend's hooks, ForwardBatch,
EagleDraftInput, GenerationBatchResult, ScheduleBatch in Scheduler._forward_isolation, the sampler's
greedy path and the result processor. Fake: the model (the next token of a request is a function of
its length), the attention backend and the graphs, and the kernel that looks up a KV slot.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VOCABULARY = 1000
HIDDEN = 8
ROWS, CONTEXT = 16, 64


def next_token(lengths: torch.Tensor) -> torch.Tensor:
    """The model: the token after ``lengths`` tokens, [batch]."""
    return (lengths * 7 + 3) % VOCABULARY


def hidden_states(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The model's hidden states for the draft, [n, 3 * HIDDEN]: they tell the position and the row."""
    columns = torch.stack([positions, rows], dim=1).to(torch.bfloat16)
    return columns.repeat(1, 3 * HIDDEN // 2)


SINGLE = SimpleNamespace(world_size=1)
"""The group of a single tensor-parallel rank."""


class Runner:
    """A target's or draft's ModelRunner, as far as a decode step looks at it."""

    def __init__(self) -> None:
        self.device = "cpu"
        self.spec_algorithm = SpeculativeAlgorithm.from_string("EAGLE3")
        self.is_draft_worker = False
        self.server_args = SimpleNamespace()
        self.model_config = SimpleNamespace(
            spec_hidden_size=HIDDEN, hidden_size=HIDDEN, dtype=torch.bfloat16, model_is_mrope=False,
            is_encoder_decoder=False, hf_config=SimpleNamespace(), is_multimodal=False,
            requires_mm_token_modalities=False,
        )  # fmt: skip
        self.prefill_attention_backend_str = "torch_native"
        self.attn_backend: Any = "verify-backend"
        self.decode_cuda_graph_runner: Any = "verify-graphs"
        self.shared_read_done_event: Any = None
        self.ngram_embedding_manager = SimpleNamespace(enabled=False)
        self.lora_manager = None
        self.use_mla_backend = self.is_hybrid_swa = False
        pool = torch.arange(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT)
        self.req_to_token_pool = SimpleNamespace(req_to_token=pool)
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=pool, token_to_kv_pool_allocator=None, token_to_kv_pool=None, page_size=1, device="cpu"
        )

    def sample(self, logits: LogitsProcessorOutput, forward_batch: Any) -> torch.Tensor:
        tokens = torch.argmax(logits.next_token_logits, dim=-1)
        if forward_batch.return_logprob:
            logprobs = torch.log_softmax(logits.next_token_logits, dim=-1)
            logits.next_token_logprobs = logprobs.gather(-1, tokens[:, None]).view(-1)
        return tokens


class SkipDraftWorker(EagleDraftWorker):
    """Drafts and extends nothing, but through the methods that the hooks are on."""

    def __init__(self) -> None:
        self.draft_runner = Runner()
        self.draft_runner.is_draft_worker = True
        self.topk = 1
        self.device = "cpu"
        self.speculative_num_steps, self.speculative_num_draft_tokens = 3, 4
        self.parallel_layout = SimpleNamespace(tp_group=None, disable_cp=False)


class SkipWorker(EAGLEWorkerV2):
    """EAGLEWorkerV2 at K=0 around a faked target."""

    def __init__(self) -> None:
        self._draft_worker = SkipDraftWorker()
        self.runner = Runner()
        self._target_worker = SimpleNamespace(
            model_runner=self.runner,
            forward_batch_generation=self.forward_target,
            model_config=self.runner.model_config,
        )
        self.topk = self.page_size = 1
        self.device = "cpu"
        self.speculative_num_steps, self.speculative_num_draft_tokens = 0, 1
        self.speculative_algorithm = self.runner.spec_algorithm
        self.enable_dp_spec_prefill_coordination = False
        self._hosts_draft = True
        self.adaptive_controller = None
        self.req_to_token_pool = self.runner.req_to_token_pool
        self.seen: list[Any] = []
        self.installed: list[tuple[Any, Any]] = []
        self.read_done: Any = "read-done"
        self.fail: Exception | None = None
        # A graph writes its outputs where the replay before wrote them.
        self.hidden_output = torch.zeros(ROWS, 3 * HIDDEN, dtype=torch.bfloat16)
        self.graph = True

    def forward_target(self, *, batch: Any, forward_batch: Any, is_verify: bool) -> GenerationBatchResult:
        """TpModelWorker.forward_batch_generation without sampling."""
        assert batch is None
        assert is_verify
        runner = self.runner
        self.seen.append(forward_batch)
        self.installed.append((runner.attn_backend, runner.decode_cuda_graph_runner))
        if self.fail is not None:
            raise self.fail
        if self.graph:
            runner.shared_read_done_event = self.read_done
        logits = torch.nn.functional.one_hot(next_token(forward_batch.seq_lens), VOCABULARY).float() * 10
        hidden = self.hidden_output[: len(logits)]
        hidden.copy_(hidden_states(forward_batch.req_pool_indices, forward_batch.positions))
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
        return GenerationBatchResult(logits_output=output, can_run_cuda_graph=self.graph)


def slots_of_next_token(
    *, req_pool_indices: Any, req_to_token: Any, start_offset: Any, batch_size: int, draft_token_num: int, device: Any
) -> torch.Tensor:
    """What the kernel of this name gives, for one token a request: int64 [batch]."""
    assert draft_token_num == 1
    assert len(start_offset) == batch_size
    return req_to_token[req_pool_indices, start_offset].to(torch.int64)


def sampling_info(rows: int) -> SamplingBatchInfo:
    """All greedy, nothing else asked."""
    return SamplingBatchInfo(
        temperatures=torch.ones(rows, 1), top_ps=torch.ones(rows), top_ks=torch.ones(rows, dtype=torch.int32),
        min_ps=torch.zeros(rows), is_all_greedy=True, is_any_greedy=True, need_top_p_sampling=False,
        need_top_k_sampling=False, need_min_p_sampling=False, vocab_size=VOCABULARY, device="cpu",
        penalizer_orchestrator=SimpleNamespace(is_required=False),
    )  # fmt: skip
