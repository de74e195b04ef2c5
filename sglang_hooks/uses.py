"""What of SGLang steering a server takes: the paths of all classes that the hooks touch, and ENTRY and HOOKS.

What the decode-mode skip takes in addition is in ``skip_uses.py``; ``contract.py`` holds all of it against
SGLang's source.
"""

from __future__ import annotations

from specpilot.sglang_hooks.contract import Use

SRT = "sglang.srt"
SCHEDULER = f"{SRT}.managers.scheduler.Scheduler"
BATCH = f"{SRT}.managers.schedule_batch.ScheduleBatch"
REQ = f"{SRT}.managers.schedule_batch.Req"
RESULT = f"{SRT}.managers.utils.GenerationBatchResult"
RECEIVER = f"{SRT}.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
PROCESSOR = f"{SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
POLICY_CLASS = f"{SRT}.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
WORKER_MODULE = f"{SRT}.speculative.eagle_worker_v2"
WORKER = f"{WORKER_MODULE}.EAGLEWorkerV2"
EAGLE_DRAFT = f"{WORKER_MODULE}.EagleDraftWorker"
DRAFT_WORKER = f"{SRT}.speculative.base_spec_worker.EagleDraftWorkerBase"
RUNNER = f"{SRT}.model_executor.model_runner.ModelRunner"
ROW_POOL = f"{SRT}.mem_cache.memory_pool.ReqToTokenPool"
OWNED_LENGTH = f"{REQ}.owned_kv_len", f"{REQ}.effective_kv_committed_len"
CONTROLLER = f"{SRT}.speculative.adaptive_runtime_state.AdaptiveController"
KV = f"{SRT}.managers.schedule_batch.ReqKvInfo"
REGISTRY = f"{SRT}.plugins.hook_registry"
FORWARD = f"{SRT}.model_executor.forward_batch_info"
GRAPHS = f"{SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
EAGLE = f"{SRT}.speculative.eagle_info"
FIELDS = f"{SRT}.arg_groups.fields"
PARALLEL = "tp_rank tp_size dp_rank"

ENTRY = (
    # -- how plugins are hooked in --
    Use(f"{REGISTRY}.HookRegistry", "patches.py", has="_hooks _patched"),
    Use(f"{REGISTRY}.HookRegistry.register", "patches.py", ("cls target hook hook_type source",)),
    Use(f"{REGISTRY}.HookRegistry.apply_hooks", "patches.py", ("cls",)),
    Use(f"{REGISTRY}.HookSource", "patches.py", has="plugin_name dist_name"),
    Use(f"{REGISTRY}.HookType", "patches.py", has="BEFORE AFTER AROUND REPLACE"),
    Use(f"{REGISTRY}._propagate_patch", "patches.py", ("original wrapped source_module",)),
    # -- the class that is replaced --
    Use(POLICY_CLASS, "plugin.py"),
    Use(f"{POLICY_CLASS}.__init__", "plugin.py", ("self initial_steps cfg_path",)),
    Use(f"{SRT}.speculative.adaptive_spec_params.resolve_candidate_steps_from_config", "plugin.py", ("cfg_path",)),
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
        f"{CONTROLLER}.__init__",
        "plugin.py",
        does=("AdaptiveSpeculativeParams(..., initial_steps=worker.speculative_num_steps)",),
        until="0.5.17",
    ),
    Use(CONTROLLER, "plugin.py tree.py", has="params worker"),
    Use(f"{CONTROLLER}.register", "tree.py", ("self state steps",)),
    Use(
        f"{CONTROLLER}.init_states",
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
        f"{CONTROLLER}.activate_step_by_batch",
        "table_policy.py tree.py",
        ("self batch_size",),
        does=("self.params.get_steps_for_batch(batch_size)", "self._activate(target)"),
    ),
    Use(
        f"{CONTROLLER}.on_verify_complete",
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
        "plugin.py step_hooks.py server_facts.py",
        has="draft_worker tp_worker server_args max_running_requests max_total_num_tokens enable_overlap "
        "running_batch waiting_queue token_to_kv_pool_allocator tree_cache tp_group model_config _request_dispatcher",
    ),
    Use(SCHEDULER, "step_hooks.py", has="ps", until="0.5.20"),
    Use(f"{SCHEDULER}.maybe_init_draft_worker", "plugin.py", ("self",)),
    Use(f"{SCHEDULER}.init_model_worker", "plugin.py", ("self",), does=("self.maybe_init_draft_worker()",)),
    Use(f"{SCHEDULER}.init_request_dispatcher", "plugin.py", ("self",), does=("self._request_dispatcher =",)),
    Use(f"{SCHEDULER}.process_input_requests", "plugin.py", does=("self._request_dispatcher(recv_req)",)),
    Use(f"{SCHEDULER}.run_batch", "context.py recorder.py", does=("batch.forward_iter =", "batch.launch_ts =")),
    Use("sglang.utils.TypeBasedDispatcher", "step_hooks.py", has="__iadd__"),
    Use("sglang.utils.TypeBasedDispatcher.__init__", "step_hooks.py", ("self mapping",)),
    Use(
        f"{SRT}.server_args.ServerArgs",
        "server_facts.py",
        has="model_path speculative_draft_model_path speculative_algorithm host port dp_size",
        until="0.5.17",
    ),
    Use(f"{FIELDS}.model.Model", "server_facts.py", has="model_path", since="0.5.20"),
    Use(
        f"{FIELDS}.spec.Spec",
        "server_facts.py",
        has="speculative_draft_model_path speculative_algorithm",
        since="0.5.20",
    ),
    Use(f"{FIELDS}.serving.Serving", "server_facts.py", has="host port", since="0.5.20"),
    Use(f"{FIELDS}.parallel.Parallel", "server_facts.py", has="dp_size", since="0.5.20"),
    Use(f"{SRT}.configs.model_config.ModelConfig", "server_facts.py", has="context_len"),
    Use(
        f"{SRT}.distributed.parallel_state_wrapper.ParallelState",
        "step_hooks.py server_facts.py",
        has=PARALLEL,
        until="0.5.20",
    ),
    Use(f"{FIELDS}.parallel.Parallel", "step_hooks.py server_facts.py", has=PARALLEL, since="0.5.21"),
    Use(f"{SRT}.distributed.parallel_state.GroupCoordinator.all_gather_object", "step_hooks.py", ("self obj",)),
    Use(f"{SRT}.runtime_context.get_parallel", "step_hooks.py", ("",)),
    Use(f"{SRT}.runtime_context.get_context", "step_hooks.py", ("",)),
    Use(f"{SRT}.runtime_context.RuntimeContext", "step_hooks.py", has="_overrides_log override"),
    Use(f"{SRT}.utils.common.get_device_name", "server_facts.py", ("device_id",)),
    Use(f"{SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator", "server_facts.py", has="available_size"),
    Use(f"{SRT}.mem_cache.base_prefix_cache.BasePrefixCache", "server_facts.py", has="evictable_size"),
    Use(GRAPHS, "server_facts.py", has="capture_bs"),
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
        "plugin.py step_hooks.py skip_hooks.py server_facts.py tree.py",
        has="adaptive_controller topk speculative_num_steps speculative_num_draft_tokens activate_step_by_batch",
    ),
    Use(f"{WORKER}._build_trivial_verify_input", "plugin.py", ("self batch",)),
    Use(f"{EAGLE}.EagleVerifyInput", "skip_hooks.py", has="draft_token"),
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
    Use(DRAFT_WORKER, "step_hooks.py", has="_topk1_parents_prealloc _topk1_score_indices_prealloc"),
    Use(EAGLE_DRAFT, "step_hooks.py", has="topk speculative_num_steps speculative_num_draft_tokens"),
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
        "step_hooks.py skip_hooks.py agent.py context.py recorder.py",
        has="reqs spec_info forward_mode forward_iter launch_ts has_grammar extend_num_tokens",
    ),
    Use(BATCH, "recorder.py", has="after_idle_gap", since="0.5.20"),
    Use(f"{BATCH}.retract_decode", "plugin.py", ("self", "self server_args")),
    Use(REQ, "context.py recorder.py", has="seqlen finished_reason is_retracted output_ids finished_len"),
    Use(
        RESULT,
        "step_hooks.py agent.py recorder.py",
        has="num_correct_drafts_per_req_cpu speculative_num_draft_tokens copy_done can_run_cuda_graph",
    ),
    Use(
        f"{FORWARD}.ForwardMode",
        "step_hooks.py skip_hooks.py context.py recorder.py",
        has="is_decode is_extend is_mixed is_idle",
    ),
)
"""Without any of these the server cannot be steered, and does not start with the plugin."""
