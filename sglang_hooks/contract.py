"""Everything of SGLang that the hooks touch, written down once, and the check that it is still so.

The check reads SGLang's source (``source.py``) and imports nothing of it. At start it decides
whether this server can be hooked at all (ENTRY, HOOKS) and whether K=0 can be a decode step (SKIP, for
``skip.py`` and ``resume.py``); ``tests/contract`` holds it against every supported version.

What moved is named with the module here that uses it, as in

    EAGLEWorkerV2.verify: parameter pp_proxy_tensors is gone in SGLang 0.5.24, used by sglang_hooks/skip.py
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specpilot.sglang_hooks.source import Function, Source, parameters, places

TESTED_VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
RIG_VERSION = "0.5.17"
"""Runs on the GPU rig of this project only; its adaptive mode must start at the widest step."""


@dataclass(frozen=True)
class Use:
    """One function or class of SGLang, and what the hooks take for granted about it."""

    target: str
    """Dotted path of the function, method or class."""
    by: str
    """Modules of this package that use it."""
    forms: tuple[str, ...] = ()
    """Of a function: its parameters in every form that was read; empty if only its name is used."""
    does: tuple[str, ...] = ()
    """Of a function: calls and assignments of its body, each once and in this order (see ``source.places``)."""
    has: str = ""
    """Of a class: attributes, separated by spaces."""
    since: str = ""
    """First version that has it; older ones are not asked for it."""
    until: str = ""
    """Last version that has it."""


_SRT = "sglang.srt"
SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
BATCH = f"{_SRT}.managers.schedule_batch.ScheduleBatch"
REQ = f"{_SRT}.managers.schedule_batch.Req"
RESULT = f"{_SRT}.managers.utils.GenerationBatchResult"
RECEIVER = f"{_SRT}.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
PROCESSOR = f"{_SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
POLICY_CLASS = f"{_SRT}.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
WORKER_MODULE = f"{_SRT}.speculative.eagle_worker_v2"
WORKER = f"{WORKER_MODULE}.EAGLEWorkerV2"
EAGLE_DRAFT = f"{WORKER_MODULE}.EagleDraftWorker"
DRAFT_WORKER = f"{_SRT}.speculative.base_spec_worker.EagleDraftWorkerBase"
RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
ROW_POOL = f"{_SRT}.mem_cache.memory_pool.ReqToTokenPool"
_OWNED_LENGTH = f"{REQ}.owned_kv_len", f"{REQ}.effective_kv_committed_len"
_CONTROLLER = f"{_SRT}.speculative.adaptive_runtime_state.AdaptiveController"
_KV = f"{_SRT}.managers.schedule_batch.ReqKvInfo"
_REGISTRY = f"{_SRT}.plugins.hook_registry"
_FORWARD = f"{_SRT}.model_executor.forward_batch_info"
_GRAPHS = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_EAGLE = f"{_SRT}.speculative.eagle_info"
_FIELDS = f"{_SRT}.arg_groups.fields"
_PARALLEL = "tp_rank tp_size dp_rank"

ENTRY = (
    # -- how plugins are hooked in --
    Use(f"{_REGISTRY}.HookRegistry", "patches.py", has="_hooks _patched"),
    Use(f"{_REGISTRY}.HookRegistry.register", "patches.py", ("cls target hook hook_type source",)),
    Use(f"{_REGISTRY}.HookRegistry.apply_hooks", "patches.py", ("cls",)),
    Use(f"{_REGISTRY}.HookSource", "patches.py", has="plugin_name dist_name"),
    Use(f"{_REGISTRY}.HookType", "plugin.py", has="BEFORE AFTER AROUND REPLACE"),
    Use(f"{_REGISTRY}._propagate_patch", "patches.py", ("original wrapped source_module",)),
    # -- the class that is replaced --
    Use(POLICY_CLASS, "plugin.py"),
    Use(f"{POLICY_CLASS}.__init__", "plugin.py", ("self initial_steps cfg_path",)),
    Use(f"{_SRT}.speculative.adaptive_spec_params.resolve_candidate_steps_from_config", "plugin.py", ("cfg_path",)),
)
"""What the entry point itself needs, in every process that SGLang starts."""

HOOKS = (
    # -- the policy, asked once for every decode before anything of it runs --
    Use(
        f"{WORKER}.__init__",
        "plugin.py",
        does=("AdaptiveSpeculativeParams(..., initial_steps=self.speculative_num_steps)",),
        since="0.5.20",
    ),
    Use(
        f"{_CONTROLLER}.__init__",
        "plugin.py",
        does=("AdaptiveSpeculativeParams(..., initial_steps=worker.speculative_num_steps)",),
        until="0.5.17",
    ),
    Use(_CONTROLLER, "plugin.py tree.py", has="params worker"),
    Use(f"{_CONTROLLER}.register", "tree.py", ("self state steps",)),
    Use(
        f"{_CONTROLLER}.init_states",
        "table_policy.py tree.py",
        ("self cuda_graph_bs",),
        does=(
            "self.params.set_cuda_graph_bs(cuda_graph_bs)",
            "self.params.cuda_graph_bs_for_step(steps)",
            "self.worker.build_adaptive_runtime_state(speculative_num_steps=steps, "
            "speculative_num_draft_tokens=steps + 1, cuda_graph_bs=pruned_bs)",
        ),
    ),
    Use(
        f"{_CONTROLLER}.activate_step_by_batch",
        "table_policy.py tree.py",
        ("self batch_size",),
        does=("self.params.get_steps_for_batch(batch_size)", "self._activate(target)"),
    ),
    Use(
        f"{_CONTROLLER}.on_verify_complete",
        "table_policy.py tree.py",
        ("self num_correct_drafts_per_req batch_size",),
        does=("self.params.on_verify_complete(num_correct_drafts_per_req, batch_size)",),
    ),
    Use(
        f"{WORKER}.on_verify_complete_cpu",
        "table_policy.py",
        ("self num_correct_drafts_per_req batch_size",),
        does=("self.adaptive_controller.on_verify_complete(num_correct_drafts_per_req, batch_size=batch_size)",),
    ),
    # -- the scheduler --
    Use(
        SCHEDULER,
        "plugin.py server_facts.py",
        has="draft_worker tp_worker server_args max_running_requests max_total_num_tokens enable_overlap "
        "running_batch waiting_queue token_to_kv_pool_allocator tree_cache tp_group model_config _request_dispatcher",
    ),
    Use(SCHEDULER, "plugin.py", has="ps", until="0.5.20"),
    Use(f"{SCHEDULER}.maybe_init_draft_worker", "plugin.py", ("self",)),
    Use(f"{SCHEDULER}.init_model_worker", "plugin.py", ("self",), does=("self.maybe_init_draft_worker()",)),
    Use(f"{SCHEDULER}.init_request_dispatcher", "plugin.py", ("self",), does=("self._request_dispatcher =",)),
    Use(f"{SCHEDULER}.process_input_requests", "plugin.py", does=("self._request_dispatcher(recv_req)",)),
    Use(f"{SCHEDULER}.run_batch", "context.py recorder.py", does=("batch.forward_iter =", "batch.launch_ts =")),
    Use("sglang.utils.TypeBasedDispatcher", "plugin.py", has="__iadd__"),
    Use("sglang.utils.TypeBasedDispatcher.__init__", "plugin.py", ("self mapping",)),
    Use(
        f"{_SRT}.server_args.ServerArgs",
        "server_facts.py",
        has="model_path speculative_draft_model_path speculative_algorithm host port dp_size",
        until="0.5.17",
    ),
    Use(f"{_FIELDS}.model.Model", "server_facts.py", has="model_path", since="0.5.20"),
    Use(
        f"{_FIELDS}.spec.Spec",
        "server_facts.py",
        has="speculative_draft_model_path speculative_algorithm",
        since="0.5.20",
    ),
    Use(f"{_FIELDS}.serving.Serving", "server_facts.py", has="host port", since="0.5.20"),
    Use(f"{_FIELDS}.parallel.Parallel", "server_facts.py", has="dp_size", since="0.5.20"),
    Use(f"{_SRT}.configs.model_config.ModelConfig", "server_facts.py", has="context_len"),
    Use(
        f"{_SRT}.distributed.parallel_state_wrapper.ParallelState",
        "plugin.py server_facts.py",
        has=_PARALLEL,
        until="0.5.20",
    ),
    Use(f"{_FIELDS}.parallel.Parallel", "plugin.py server_facts.py", has=_PARALLEL, since="0.5.21"),
    Use(f"{_SRT}.distributed.parallel_state.GroupCoordinator.all_gather_object", "plugin.py", ("self obj",)),
    Use(f"{_SRT}.runtime_context.get_parallel", "plugin.py", ("",)),
    Use(f"{_SRT}.runtime_context.get_context", "plugin.py", ("",)),
    Use(f"{_SRT}.runtime_context.RuntimeContext", "plugin.py", has="_overrides_log override"),
    Use(f"{_SRT}.utils.common.get_device_name", "server_facts.py", ("device_id",)),
    Use(f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator", "server_facts.py", has="available_size"),
    Use(f"{_SRT}.mem_cache.base_prefix_cache.BasePrefixCache", "server_facts.py", has="evictable_size"),
    Use(_GRAPHS, "server_facts.py", has="capture_bs"),
    Use(RUNNER, "server_facts.py", has="decode_cuda_graph_runner"),
    # -- receiving: what is appended to the pulled requests reaches every rank in the same pass --
    Use(f"{RECEIVER}._pull_raw_reqs", "plugin.py", ("self",)),
    Use(
        f"{RECEIVER}.recv_requests",
        "plugin.py broadcast.py",
        does=("self._pull_raw_reqs()", "self._broadcast_reqs_across_ranks(recv_reqs, ...)"),
    ),
    # -- a step, from its launch to its result --
    Use(
        f"{WORKER}.forward_batch_generation",
        "plugin.py",
        (
            "self batch on_publish grammar_barrier",
            "self batch on_publish grammar_barrier pp_proxy_tensors",
        ),
        does=(
            "self.activate_step_by_batch(batch.seq_lens.shape[0])",
            "self._build_trivial_verify_input(batch)",
            "self.draft_worker.draft(batch)",
            "self.verify(batch, ..., grammar_barrier=grammar_barrier)",
            "self._stub_skipped_draft_extend(batch, batch_output)",
            "self.draft_worker._draft_extend_for_decode(batch, batch_output, ...)",
        ),
    ),
    Use(
        WORKER,
        "plugin.py server_facts.py tree.py",
        has="adaptive_controller topk speculative_num_steps speculative_num_draft_tokens activate_step_by_batch",
    ),
    Use(f"{WORKER}._build_trivial_verify_input", "plugin.py", ("self batch",)),
    Use(f"{_EAGLE}.EagleVerifyInput", "plugin.py", has="draft_token"),
    Use(
        f"{WORKER}.apply_runtime_state",
        "plugin.py",
        ("self state",),
        does=(
            "dw._rebuild_topk1_chain_buffers()",
            "get_context().override('adaptive_spec.restore', ...)",
        ),
    ),
    Use(
        f"{DRAFT_WORKER}._rebuild_topk1_chain_buffers",
        "plugin.py",
        ("self",),
        does=("self._topk1_parents_prealloc =", "self._topk1_score_indices_prealloc ="),
    ),
    Use(DRAFT_WORKER, "plugin.py", has="_topk1_parents_prealloc _topk1_score_indices_prealloc"),
    Use(EAGLE_DRAFT, "plugin.py", has="topk speculative_num_steps speculative_num_draft_tokens"),
    Use(
        f"{PROCESSOR}.process_batch_result_decode",
        "plugin.py",
        ("self batch result",),
        does=("result.copy_done.synchronize()", "self._normalize_decode_outputs(..., batch=batch, result=result)"),
    ),
    Use(
        f"{PROCESSOR}._resolve_spec_v2_tokens",
        "table_policy.py recorder.py",
        does=(
            "result.num_correct_drafts_per_req_cpu =",
            "self.model_worker.on_verify_complete_cpu("
            "result.num_correct_drafts_per_req_cpu, batch_size=len(batch.reqs))",
        ),
    ),
    Use(
        BATCH,
        "plugin.py agent.py context.py recorder.py",
        has="reqs spec_info forward_mode forward_iter launch_ts has_grammar extend_num_tokens",
    ),
    Use(BATCH, "recorder.py", has="after_idle_gap", since="0.5.20"),
    Use(f"{BATCH}.retract_decode", "plugin.py", ("self", "self server_args")),
    Use(REQ, "context.py recorder.py", has="seqlen finished_reason is_retracted output_ids finished_len"),
    Use(
        RESULT,
        "plugin.py agent.py recorder.py",
        has="num_correct_drafts_per_req_cpu speculative_num_draft_tokens copy_done can_run_cuda_graph",
    ),
    Use(f"{_FORWARD}.ForwardMode", "plugin.py context.py recorder.py", has="is_decode is_extend is_mixed is_idle"),
)
"""Without any of these the server cannot be steered, and does not start with the plugin."""

SKIP = (
    Use(
        WORKER,
        "skip.py resume.py",
        has="target_worker draft_worker req_to_token_pool topk device page_size speculative_num_steps",
    ),
    Use(f"{WORKER}.init_cuda_graphs", "plugin.py", ("self",)),
    Use(
        f"{WORKER}.verify",
        "plugin.py skip.py",
        ("self batch grammar_barrier", "self batch pp_proxy_tensors grammar_barrier"),
    ),
    Use(f"{WORKER}._stub_skipped_draft_extend", "plugin.py", ("self batch batch_output",)),
    Use(
        f"{WORKER}._override_worker_state",
        "skip.py",
        ("self speculative_num_steps speculative_num_draft_tokens cuda_graph_bs",),
    ),
    Use(EAGLE_DRAFT, "skip.py resume.py", has="draft_runner"),
    Use(
        f"{EAGLE_DRAFT}._draft_extend_for_decode",
        "plugin.py",
        ("self batch batch_result", "self batch batch_result kv_loc_plan"),
    ),
    Use(f"{EAGLE_DRAFT}.draft", "plugin.py", ("self batch", "self batch with_topology")),
    Use(
        f"{EAGLE_DRAFT}._draft_extend_for_prefill",
        "plugin.py",
        (
            "self batch target_hidden_states next_token_ids mm_input_embeds",
            "self batch target_hidden_states next_token_ids mm_input_embeds kv_loc_plan",
        ),
    ),
    Use(f"{_SRT}.speculative.eagle_utils.get_draft_input_from_target_hidden_dim", "resume.py", ("model_runner",)),
    Use(f"{_SRT}.speculative.eagle_utils.get_draft_recurrent_hidden_state_spec", "skip.py", ("model_runner",)),
    Use(
        f"{_SRT}.speculative.spec_utils.record_stream_for_v2_verify",
        "skip.py",
        ("batch verify_input fwd_stream",),
    ),
    Use(
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_uniform_func",
        "skip.py",
        (
            "req_pool_indices req_to_token start_offset batch_size draft_token_num device",
            "req_pool_indices req_to_token start_offset batch_size draft_token_num device "
            "full_v2p swa_v2p full_out swa_out page_size positions_out anchor_src anchor_out",
        ),
    ),
    Use(f"{_SRT}.utils.common.fast_topk", "resume.py", ("values topk dim",)),
    Use(ROW_POOL, "skip.py resume.py", has="req_to_token"),
    Use(f"{ROW_POOL}.free", "plugin.py", ("self req",)),
    Use(_OWNED_LENGTH[1], "plugin.py", ("self",), until="0.5.20"),
    Use(_OWNED_LENGTH[0], "plugin.py", ("self",), since="0.5.21"),
    Use(
        f"{_SRT}.mem_cache.common.release_kv_cache",
        "plugin.py",
        does=("req.effective_kv_committed_len()", "tree_cache.req_to_token_pool.free(req)"),
        until="0.5.20",
    ),
    Use(
        f"{_SRT}.mem_cache.common.release_kv_cache",
        "plugin.py",
        does=("req.owned_kv_len()", "tree_cache.req_to_token_pool.free(req)"),
        since="0.5.21",
    ),
    Use(REQ, "gaps.py resume.py", has="rid kv"),
    Use(REQ, "resume.py", has="req_pool_idx kv_committed_len", until="0.5.17"),
    Use(_KV, "resume.py", has="kv_allocated_len"),
    Use(_KV, "resume.py", has="req_pool_idx kv_committed_len", since="0.5.20"),
    Use(
        f"{_GRAPHS}.__init__",
        "skip.py",
        (
            "self model_runner attn_backend speculative_num_steps speculative_num_draft_tokens",
            "self model_runner attn_backend speculative_num_steps speculative_num_draft_tokens record_nolora_graph",
        ),
    ),
    Use(f"{_GRAPHS}.get_spec_info", "skip.py", ("self num_tokens",)),
    Use(_GRAPHS, "skip.py", has="capture_forward_mode return_hidden_states_mode"),
    Use(f"{RUNNER}.sample", "skip.py", ("self logits_output forward_batch",)),
    Use(f"{RUNNER}._get_attention_backend", "skip.py", ("self init_new_workspace",)),
    Use(
        f"{RUNNER}.forward",
        "resume.py",
        ("self forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend split_forward_count",),
    ),
    Use(
        RUNNER,
        "skip.py resume.py",
        has="attn_backend decode_cuda_graph_runner init_new_workspace device model_config spec_algorithm "
        "req_to_token_pool use_mla_backend is_hybrid_swa ngram_embedding_manager hisparse_coordinator "
        "canary_manager lora_manager",
    ),
    Use(RUNNER, "skip.py", has="watermark_state", since="0.5.22"),
    Use(RUNNER, "skip.py", has="war_fastpath_read_done_event", until="0.5.17"),
    Use(RUNNER, "skip.py", has="shared_read_done_event", since="0.5.20"),
    Use(
        f"{_SRT}.configs.model_config.ModelConfig",
        "skip.py resume.py",
        has="is_encoder_decoder model_is_mrope dtype",
    ),
    Use(f"{_SRT}.mem_cache.memory_pool.HybridReqToTokenPool", "skip.py"),
    Use(f"{_SRT}.layers.attention.triton_backend.TritonAttnBackend", "skip.py"),
    Use(f"{_SRT}.layers.attention.flashattention_backend.FlashAttentionBackend", "skip.py"),
    Use(f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm", "skip.py resume.py", has="is_eagle is_standalone"),
    Use(
        f"{_SRT}.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "skip.py",
        (
            "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode",
            "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode "
            "return_kv_loc_plan",
        ),
    ),
    Use(
        f"{_FORWARD}.ForwardBatch.init_new",
        "skip.py resume.py",
        (
            "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm",
            "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm extend_position_info "
            "spec_mrope_positions kv_loc_plan write_cols",
        ),
    ),
    Use(f"{_FORWARD}.ForwardBatch", "resume.py", has="extend_seq_lens_cpu extend_prefix_lens_cpu"),
    Use(f"{_FORWARD}.ForwardMode", "skip.py resume.py", has="DECODE DRAFT_EXTEND_V2"),
    Use(f"{_FORWARD}.CaptureHiddenMode", "skip.py resume.py", has="NULL FULL"),
    Use(f"{_SRT}.model_executor.forward_context.has_forward_context", "skip.py", ("",)),
    Use(f"{_SRT}.runtime_context.get_spec", "skip.py", ("",)),
    Use(f"{_SRT}.runtime_context.ParallelContext", "skip.py", has="pp_size", until="0.5.17"),
    Use(f"{_FIELDS}.parallel.Parallel", "skip.py", has="pp_size", since="0.5.20"),
    Use(f"{_SRT}.runtime_context.ParallelContext", "skip.py", has="tp_group", until="0.5.20"),
    Use(f"{_FIELDS}.parallel.Parallel", "skip.py", has="tp_group", since="0.5.21"),
    Use(f"{_SRT}.environ.Envs", "skip.py", has="SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE"),
    Use(
        RESULT,
        "skip.py",
        has="logits_output next_token_ids accept_lens new_seq_lens next_draft_input speculative_num_draft_tokens "
        "can_run_cuda_graph extra_keep_alive_refs routed_experts_output indexer_topk_output "
        "expert_distribution_metrics",
    ),
    Use(
        f"{_SRT}.layers.logits_processor.LogitsProcessorOutput",
        "skip.py resume.py",
        has="next_token_logits next_token_logprobs hidden_states",
    ),
    Use(f"{_EAGLE}.EagleDraftInput", "skip.py resume.py", has="topk_p topk_index hidden_states bonus_tokens"),
    Use(
        f"{_EAGLE}.EagleVerifyInput",
        "skip.py",
        has="draft_token custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling "
        "retrieve_cum_len spec_steps topk draft_token_num capture_hidden_mode seq_lens_sum seq_lens_cpu",
    ),
    Use(f"{_EAGLE}.EagleVerifyInput", "skip.py", has="kv_loc_plan", since="0.5.22"),
    Use(
        f"{_EAGLE}.EagleDraftExtendInput",
        "resume.py",
        has="hidden_states num_tokens_per_req num_tokens_for_logprob_per_req select_index",
    ),
    Use(
        BATCH,
        "skip.py resume.py",
        has="seq_lens seq_lens_cpu seq_lens_sum orig_seq_lens input_ids out_cache_loc spec_info req_pool_indices "
        "sampling_info return_logprob return_hidden_states has_grammar reqs prefix_lens extend_lens "
        "extend_num_tokens top_logprobs_nums token_ids_logprobs multimodal_inputs forward_mode device",
    ),
    Use(f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo", "skip.py", has="is_all_greedy"),
)
"""Without any of these K=0 stays SGLang's own, and a tree of draft tokens is refused."""


def moved(uses: Iterable[Use], source: Source, version: str) -> list[str]:
    """Return a line for everything that is not as the hooks know it, naming what moved and who uses it."""
    return [
        f"{'.'.join(use.target.split('.')[-2:])}: {what} in SGLang {version}, used by "
        + ", ".join(f"sglang_hooks/{name}" for name in use.by.split())
        for use in sorted(uses, key=lambda use: use.target.split("."))
        if _applies(use, version)
        for what in _moved(use, source)
    ]


def _moved(use: Use, source: Source) -> Iterator[str]:
    node = source.find(use.target)
    if isinstance(node, str):
        yield f"{node} any more"
        return
    if use.has:
        attributes = source.attributes(use.target)
        for name in use.has.split():
            if name not in attributes:
                yield f"attribute {name} is gone"
        return
    if not (use.forms or use.does):
        return
    if not isinstance(node, Function):
        yield "it is no function"
        return
    found = parameters(node)
    if use.forms and " ".join(found) not in use.forms:
        yield from _differing(found, [tuple(form.split()) for form in use.forms])
    after = (0, 0)
    for pattern in use.does:
        at = places(node, pattern)
        if len(at) != 1:
            yield f"it does `{pattern}` {len(at)} times, not once"
        elif at[0] < after:
            yield f"it does `{pattern}` in another order"
        else:
            after = at[0]


def _differing(found: tuple[str, ...], forms: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Say what is different from the form that is most like it."""
    known = min(forms, key=lambda form: len(set(form) ^ set(found)))
    gone, new = [one for one in known if one not in found], [one for one in found if one not in known]
    for name in gone:
        yield f"parameter {name} is gone"
    for name in new:
        yield f"parameter {name} is new"
    if not gone and not new:
        yield f"its parameters come in the order {', '.join(found)}"


def _applies(use: Use, version: str) -> bool:
    at = _numbers(version)
    return not ((use.since and at < _numbers(use.since)) or (use.until and at > _numbers(use.until)))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> _numbers("0.5.23.post1"), _numbers("0.5.24rc1")
    ((0, 5, 23), (0, 5, 24))
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def owned_length() -> str:
    """Return the method of this SGLang that says how much of an ended request the prefix cache may keep."""
    import sglang

    return next(use.target for use in SKIP if use.target in _OWNED_LENGTH and _applies(use, sglang.__version__))


@functools.cache
def installed() -> Source:
    """Return the source of the SGLang of this process."""
    import sglang

    assert sglang.__file__ is not None
    return Source(Path(sglang.__file__).parent.parent)


def installed_moved(uses: tuple[Use, ...]) -> tuple[str, ...]:
    """Return ``moved`` of the SGLang of this process: reads some sixty of its files once, in a second or two."""
    import sglang

    return _moved_once(uses, installed(), sglang.__version__)


@functools.cache
def _moved_once(uses: tuple[Use, ...], source: Source, version: str) -> tuple[str, ...]:
    return tuple(moved(uses, source, version))
