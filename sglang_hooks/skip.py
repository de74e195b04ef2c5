"""K=0 as an ordinary decode step of the target model, so that skipping costs what not speculating costs.

SGLang's own K=0 is a verify of width 1: the attention kernel of prefills with one query, the verify
sampler, and a pass of the draft model behind it. Here a skipped step takes the path of a server
without speculation, and only its result is dressed as a verify that accepted nothing:

    forward_batch_generation      SGLang's, unchanged: chooses K, publishes lengths, keeps its order
      _build_trivial_verify_input    begin():  a marker instead of the one-node tree
      verify                         decode(): decode attention, the decode CUDA graphs, the sampler
      draft-extend, or its stub      left out: finish() says whether this result needs it
      draft, after skips             resume.py first shows the draft what it has missed

Decode graphs need an attention backend of their own: what a backend allocates for graphs, the verify
graphs captured earlier point into. Both are put in place for the time of one forward and taken back.
All of it runs on the forward stream, in the launching thread, without a look at the GPU.

SGLang's versions differ here in little: names that are looked up once, in ``DecodeSkip``. What is
known of them is written down in ``skip_uses.py``.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any, NamedTuple

from specpilot.sglang_hooks.contract import installed_moved
from specpilot.sglang_hooks.resume import Resume
from specpilot.sglang_hooks.skip_uses import SKIP

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("TritonAttnBackend", "FlashAttentionBackend")
"""Classes whose decode path is known to be right when ``spec_info`` is None, and was tested so."""


# -- what a server must be for it --


def version_reason() -> str:
    """Return why this SGLang's code is not what this module was written for, or ""."""
    return "; ".join(installed_moved(SKIP))


def unsupported_reason(worker: Any) -> str:
    """Return why this server's K=0 stays SGLang's own, or "" if it can be a decode step.

    ``worker`` is an EAGLEWorkerV2 whose target has its attention backend. Whatever would take part
    in a decode step and has not been tested with it is a reason. (Attention data parallelism, two-batch
    overlap and PD multiplexing SGLang itself does not let adapt.)
    """
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel, get_spec

    runner = worker.target_worker.model_runner
    config, algorithm = runner.model_config, runner.spec_algorithm
    backend = type(runner.attn_backend).__name__
    checks = (
        (runner.device != "cuda", f"the device is {runner.device}, not cuda"),
        (not (algorithm.is_eagle() or algorithm.is_standalone()), "only EAGLE, EAGLE3 and STANDALONE drafts are known"),
        (worker.topk > 1 and worker.page_size > 1, "a tree with --page-size above 1"),
        (backend not in ATTENTION_BACKENDS, f"attention is {backend}, not one of {', '.join(ATTENTION_BACKENDS)}"),
        (runner.use_mla_backend, "the model uses MLA attention"),
        (runner.is_hybrid_swa, "the model has sliding-window layers with a KV pool of their own"),
        (type(runner.req_to_token_pool).__name__ == "HybridReqToTokenPool", "the model has Mamba or linear attention"),
        (config.is_encoder_decoder, "the model is an encoder-decoder"),
        (config.model_is_mrope, "the model uses multimodal rotary positions"),
        (runner.ngram_embedding_manager.enabled, "the model uses n-gram embeddings"),
        (getattr(runner, "hisparse_coordinator", None) is not None, "--enable-hisparse is on"),
        (getattr(runner, "canary_manager", None) is not None, "--kv-canary is on"),
        (getattr(runner, "watermark_state", None) is not None, "watermarking is on"),
        (getattr(runner, "lora_manager", None) is not None, "--enable-lora is on"),
        (get_parallel().pp_size > 1, "--pipeline-parallel-size is above 1"),
        (bool(get_spec().speculative_use_rejection_sampling), "speculative rejection sampling is on"),
        (envs.SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE.get(), "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE is set"),
    )
    return next((reason for applies, reason in checks if applies), "")


# -- SGLang's classes, extended --


class _Constant:
    """A data descriptor: a value that the constructor of a base class cannot overwrite."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.value

    def __set__(self, instance: Any, value: Any) -> None:
        """Ignore what the base class would set."""


@functools.cache
def decode_runner_class(hidden_states: bool) -> type:
    """Return a DecodeCudaGraphRunner that captures plain decodes though the server speculates.

    SGLang decides the mode of capture by the server's algorithm, and captures in its constructor.
    With ``hidden_states`` the graphs also give what the draft needs of each token, [batch, width].
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    class SkipDecodeRunner(DecodeCudaGraphRunner):  # type: ignore[misc]
        """Decode graphs of a target that SGLang thinks only verifies."""

        capture_forward_mode = _Constant(ForwardMode.DECODE)
        return_hidden_states_mode = _Constant(CaptureHiddenMode.FULL if hidden_states else CaptureHiddenMode.NULL)

        def get_spec_info(self, num_tokens: int) -> None:
            """Return None: attention backends take anything else for a draft's decode."""

    return SkipDecodeRunner


@functools.cache
def marker_class() -> type:
    """Return a verify input that only says: this step is a decode of ``draft_token``, int64 [batch]."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    class SkipInput(EagleVerifyInput):  # type: ignore[misc]
        """Stands where SGLang expects the tree to verify."""

    return SkipInput


class SkipMemory(NamedTuple):
    """What the decode graphs, their attention backend and the ring took at start."""

    gigabytes: float
    free_gigabytes: float
    seconds: float
    ring_gigabytes: float
    ring_positions: int


class DecodeSkip:
    """The decode graphs of one scheduler process, and the steps that run on them."""

    def __init__(self, worker: Any, backend: Any, graphs: Any, resume: Resume) -> None:
        """``backend``: attention backend of the decode; ``graphs``: its runner, None if the server has none."""
        import torch
        from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.model_executor.forward_context import has_forward_context
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.speculative.eagle_info import EagleDraftInput
        from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
        from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

        # Looked up once: an import statement costs a microsecond each time it runs.
        self._slots_of_next_token = assign_extend_cache_locs_uniform_func
        self._record_stream = record_stream_for_v2_verify
        self._current_stream = torch.get_device_module(worker.device).current_stream
        self._forward_batch = ForwardBatch.init_new
        self._has_forward_context = has_forward_context
        self._make_result, self._make_draft_input = GenerationBatchResult, EagleDraftInput
        self._int64, self._int32 = torch.int64, torch.int32
        self._worker = worker
        self._target = worker.target_worker.model_runner
        self._draft = worker.draft_worker.draft_runner
        self._tp_group = get_parallel().tp_group
        self._backend = backend
        self._graphs = graphs
        self.resume = resume
        # The event that the scheduler waits for before it writes what a forward reads.
        self._read_done = (
            "shared_read_done_event"
            if hasattr(self._draft, "shared_read_done_event")
            else "war_fastpath_read_done_event"
        )
        standalone = self._target.spec_algorithm.is_standalone()
        self._hidden_mode = CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL
        self._finished: Any = None
        # Read-only stand-ins for what a draft-extend hands on, sliced to each batch.
        rows, device = worker.req_to_token_pool.req_to_token.shape[0], worker.device
        hidden_size, dtype = get_draft_recurrent_hidden_state_spec(self._draft)
        self._ones = torch.ones(rows, dtype=torch.int32, device=device)
        self._topk_p = torch.zeros((rows, worker.topk), dtype=torch.float32, device=device)
        self._topk_index = torch.zeros((rows, worker.topk), dtype=torch.int64, device=device)
        self._hidden = None if hidden_size is None else torch.zeros((rows, hidden_size), dtype=dtype, device=device)

    @staticmethod
    def build(worker: Any, ring_bytes: int) -> tuple[DecodeSkip, SkipMemory]:
        """Capture the decode graphs of ``worker``, an EAGLEWorkerV2 that is ready to serve.

        ``ring_bytes``: GPU memory that the ring of skipped positions may take.
        Raises what SGLang's capture raises; ``is_out_of_memory`` tells one kind from the others.
        """
        begun, (before, _) = time.perf_counter(), _memory()
        target = worker.target_worker.model_runner
        # Backends and runners read the widths of speculation from the server's settings.
        with worker._override_worker_state(0, 1):
            kept = target.init_new_workspace
            try:
                backend = target._get_attention_backend(init_new_workspace=True)
            finally:
                target.init_new_workspace = kept
            graphs = None
            if target.decode_cuda_graph_runner is not None:
                runner_class = decode_runner_class(not target.spec_algorithm.is_standalone())
                graphs = runner_class(
                    target, attn_backend=backend, speculative_num_steps=0, speculative_num_draft_tokens=1
                )
        if getattr(backend, "_verify_mask", None) is not None:
            backend._verify_mask = None  # as large as the context times the batch, and only for verifying
        skip = DecodeSkip(worker, backend, graphs, Resume(worker, ring_bytes))
        after, _ = _memory()
        ring = skip.resume.ring
        seconds = time.perf_counter() - begun
        return skip, SkipMemory((before - after) / 1e9, after / 1e9, seconds, ring.nbytes / 1e9, ring.positions)

    def begin(self, batch: Any) -> Any:
        """Return the marker for this batch's decode, or None if SGLang must verify it.

        ``batch.spec_info.bonus_tokens``: the newest token of each request, [batch].
        """
        tokens = batch.spec_info.bonus_tokens
        if batch.forward_mode.is_idle() or tokens is None:
            return None
        return marker_class()(
            draft_token=tokens,
            custom_mask=None,
            positions=None,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=0,
            topk=1,
            draft_token_num=1,
            capture_hidden_mode=self._hidden_mode,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    def decode(self, batch: Any, grammar_barrier: Any = None) -> Any:
        """Run one decode step and return it as the GenerationBatchResult of a verify that accepted no draft.

        Everything set on ``batch`` is put back by the scheduler when the forward has been launched.
        ``grammar_barrier`` lets the grammars see the previous step's tokens; called after the launch.
        """
        worker, marker = self._worker, batch.spec_info
        rows = len(batch.seq_lens)
        # These tensors come from the scheduler's stream, which may free them while we still read.
        self._record_stream(batch, marker, self._current_stream())

        # Under speculation a length does not count the newest token yet; in a decode it does.
        before, lengths = batch.seq_lens, batch.seq_lens + 1
        batch.input_ids = marker.draft_token.to(self._int64)
        batch.out_cache_loc = self._slots_of_next_token(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=worker.req_to_token_pool.req_to_token,
            start_offset=before,
            batch_size=rows,
            draft_token_num=1,
            device=batch.device,
        )
        batch.seq_lens = batch.orig_seq_lens = lengths
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = None
        batch.spec_info = None
        forward_batch = self._forward_batch(
            batch, self._target, capture_hidden_mode=self._hidden_mode, return_hidden_states_before_norm=False
        )
        output = self._forward(forward_batch)
        if batch.has_grammar and grammar_barrier is not None:
            grammar_barrier()
        tokens = self._target.sample(output.logits_output, forward_batch)
        if self._tp_group.world_size > 1 and not batch.sampling_info.is_all_greedy:
            # As after a sampled verify: ranks that drew differently would part for good.
            self._tp_group.broadcast(tokens, src=0)
        self.resume.store(batch, before, output.logits_output.hidden_states, tokens)
        self._finished = self._result(batch, output, tokens, lengths, forward_batch)
        return self._finished

    def finish(self, result: Any) -> bool:
        """Return whether ``result`` was made by ``decode`` and needs no draft-extend."""
        finished, self._finished = self._finished, None
        return result is finished

    def _forward(self, forward_batch: Any) -> Any:
        """Run the target on the decode graphs; returns its GenerationBatchResult, not sampled yet."""
        assert not self._has_forward_context()  # it would win over the backend put in place below
        target, name = self._target, self._read_done
        # An event left over from an earlier step would let the scheduler write too soon.
        setattr(target, name, None)
        setattr(self._draft, name, None)
        kept = target.attn_backend, target.decode_cuda_graph_runner
        target.attn_backend, target.decode_cuda_graph_runner = self._backend, self._graphs
        try:
            output = self._worker.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True
            )
        finally:
            target.attn_backend, target.decode_cuda_graph_runner = kept
        # The scheduler looks for it where a speculative step ends, on the draft's runner; without
        # it, it would wait for the whole forward before it prepares the next step.
        setattr(self._draft, name, getattr(target, name))
        setattr(target, name, None)
        return output

    def _result(self, batch: Any, output: Any, tokens: Any, lengths: Any, forward_batch: Any) -> Any:
        """Dress a decode's output as a verify's: ``tokens`` and ``lengths`` [batch], one token each."""
        rows, logits = len(tokens), output.logits_output
        if logits.next_token_logprobs is not None:
            logits.next_token_logprobs = logits.next_token_logprobs.view(rows, 1)
        if logits.hidden_states is not None:
            # A view of what the next replay writes; the scheduler copies it out only for requests that ask.
            logits.hidden_states = logits.hidden_states.clone() if batch.return_hidden_states else None
        return self._make_result(
            logits_output=logits,
            next_token_ids=tokens,
            accept_lens=self._ones[:rows],
            new_seq_lens=lengths,
            speculative_num_draft_tokens=1,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=self._make_draft_input(
                bonus_tokens=tokens.to(self._int32),
                topk_p=self._topk_p[:rows],
                topk_index=self._topk_index[:rows],
                hidden_states=None if self._hidden is None else self._hidden[:rows],
            ),
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
            expert_distribution_metrics=output.expert_distribution_metrics,
            extra_keep_alive_refs=[forward_batch],
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether SGLang's capture failed for lack of GPU memory; it wraps the error in a plain one."""
    return "out of memory" in str(error).lower()


def _memory() -> tuple[int, int]:
    """Free and total bytes of this process's GPU, with what PyTorch holds unused given back first."""
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return free, total
