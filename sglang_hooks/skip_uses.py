"""What of SGLang a K=0 that is a decode step takes (``skip.py``, ``resume.py``), beyond what ``uses.py`` lists."""

from __future__ import annotations

from specpilot.sglang_hooks.contract import Use, applies
from specpilot.sglang_hooks.uses import (
    BATCH,
    EAGLE,
    EAGLE_DRAFT,
    FIELDS,
    FORWARD,
    GRAPHS,
    KV,
    OWNED_LENGTH,
    REQ,
    RESULT,
    ROW_POOL,
    RUNNER,
    SRT,
    WORKER,
)

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
    Use(f"{SRT}.speculative.eagle_utils.get_draft_input_from_target_hidden_dim", "resume.py", ("model_runner",)),
    Use(f"{SRT}.speculative.eagle_utils.get_draft_recurrent_hidden_state_spec", "skip.py", ("model_runner",)),
    Use(
        f"{SRT}.speculative.spec_utils.record_stream_for_v2_verify",
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
    Use(f"{SRT}.utils.common.fast_topk", "resume.py", ("values topk dim",)),
    Use(ROW_POOL, "skip.py resume.py", has="req_to_token"),
    Use(f"{ROW_POOL}.free", "plugin.py", ("self req",)),
    Use(OWNED_LENGTH[1], "skip_hooks.py", ("self",), until="0.5.20"),
    Use(OWNED_LENGTH[0], "skip_hooks.py", ("self",), since="0.5.21"),
    Use(
        f"{SRT}.mem_cache.common.release_kv_cache",
        "skip_hooks.py",
        does=("req.effective_kv_committed_len()", "tree_cache.req_to_token_pool.free(req)"),
        until="0.5.20",
    ),
    Use(
        f"{SRT}.mem_cache.common.release_kv_cache",
        "skip_hooks.py",
        does=("req.owned_kv_len()", "tree_cache.req_to_token_pool.free(req)"),
        since="0.5.21",
    ),
    Use(REQ, "gaps.py resume.py", has="rid kv"),
    Use(REQ, "resume.py", has="req_pool_idx kv_committed_len", until="0.5.17"),
    Use(KV, "resume.py", has="kv_allocated_len"),
    Use(KV, "resume.py", has="req_pool_idx kv_committed_len", since="0.5.20"),
    Use(
        f"{GRAPHS}.__init__",
        "skip.py",
        (
            "self model_runner attn_backend speculative_num_steps speculative_num_draft_tokens",
            "self model_runner attn_backend speculative_num_steps speculative_num_draft_tokens record_nolora_graph",
        ),
    ),
    Use(f"{GRAPHS}.get_spec_info", "skip.py", ("self num_tokens",)),
    Use(GRAPHS, "skip.py", has="capture_forward_mode return_hidden_states_mode"),
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
        f"{SRT}.configs.model_config.ModelConfig",
        "skip.py resume.py",
        has="is_encoder_decoder model_is_mrope dtype",
    ),
    Use(f"{SRT}.mem_cache.memory_pool.HybridReqToTokenPool", "skip.py"),
    Use(f"{SRT}.layers.attention.triton_backend.TritonAttnBackend", "skip.py"),
    Use(f"{SRT}.layers.attention.flashattention_backend.FlashAttentionBackend", "skip.py"),
    Use(f"{SRT}.speculative.spec_info.SpeculativeAlgorithm", "skip.py resume.py", has="is_eagle is_standalone"),
    Use(
        f"{SRT}.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "skip.py",
        (
            "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode",
            "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode "
            "return_kv_loc_plan",
        ),
    ),
    Use(
        f"{FORWARD}.ForwardBatch.init_new",
        "skip.py resume.py",
        (
            "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm",
            "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm extend_position_info "
            "spec_mrope_positions kv_loc_plan write_cols",
        ),
    ),
    Use(f"{FORWARD}.ForwardBatch", "resume.py", has="extend_seq_lens_cpu extend_prefix_lens_cpu"),
    Use(f"{FORWARD}.ForwardMode", "skip.py resume.py", has="DECODE DRAFT_EXTEND_V2"),
    Use(f"{FORWARD}.CaptureHiddenMode", "skip.py resume.py", has="NULL FULL"),
    Use(f"{SRT}.model_executor.forward_context.has_forward_context", "skip.py", ("",)),
    Use(f"{SRT}.runtime_context.get_spec", "skip.py", ("",)),
    Use(f"{SRT}.runtime_context.ParallelContext", "skip.py", has="pp_size", until="0.5.17"),
    Use(f"{FIELDS}.parallel.Parallel", "skip.py", has="pp_size", since="0.5.20"),
    Use(f"{SRT}.runtime_context.ParallelContext", "skip.py", has="tp_group", until="0.5.20"),
    Use(f"{FIELDS}.parallel.Parallel", "skip.py", has="tp_group", since="0.5.21"),
    Use(f"{SRT}.environ.Envs", "skip.py", has="SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE"),
    Use(
        RESULT,
        "skip.py",
        has="logits_output next_token_ids accept_lens new_seq_lens next_draft_input speculative_num_draft_tokens "
        "can_run_cuda_graph extra_keep_alive_refs routed_experts_output indexer_topk_output "
        "expert_distribution_metrics",
    ),
    Use(
        f"{SRT}.layers.logits_processor.LogitsProcessorOutput",
        "skip.py resume.py",
        has="next_token_logits next_token_logprobs hidden_states",
    ),
    Use(f"{EAGLE}.EagleDraftInput", "skip.py resume.py", has="topk_p topk_index hidden_states bonus_tokens"),
    Use(
        f"{EAGLE}.EagleVerifyInput",
        "skip.py",
        has="draft_token custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling "
        "retrieve_cum_len spec_steps topk draft_token_num capture_hidden_mode seq_lens_sum seq_lens_cpu",
    ),
    Use(f"{EAGLE}.EagleVerifyInput", "skip.py", has="kv_loc_plan", since="0.5.22"),
    Use(
        f"{EAGLE}.EagleDraftExtendInput",
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
    Use(f"{SRT}.sampling.sampling_batch_info.SamplingBatchInfo", "skip.py", has="is_all_greedy"),
)
"""Without any of these K=0 stays SGLang's own, and a tree of draft tokens is refused."""


def owned_length() -> str:
    """Return the method of this SGLang that says how much of an ended request the prefix cache may keep."""
    import sglang

    return next(use.target for use in SKIP if use.target in OWNED_LENGTH and applies(use, sglang.__version__))
