"""Where Specpilot enters SGLang: the entry point of ``sglang.srt.plugins``, and every hook.

SGLang calls ``activate`` in each of its processes. Without SPECPILOT_ENDPOINT it returns at
once. With it, it checks SGLang's version and code (see contract.py), and replaces
``AdaptiveSpeculativeParams``, the policy class of ``--speculative-adaptive``. SGLang builds that
class only in scheduler processes that adapt, so its constructor is where the other hooks are put
in place: they touch modules that the tokenizer and the detokenizer should not import.

    target                                            what the hook does
    AdaptiveSpeculativeParams                         is replaced by SglangTablePolicy
    Scheduler.maybe_init_draft_worker                 puts a policy over a tree, where SGLang has none
    Scheduler.init_model_worker                       refuses a server that silently stopped adapting
    Scheduler.init_request_dispatcher                 starts the agent, routes PolicyUpdate to it
    SchedulerRequestReceiver._pull_raw_reqs           rank 0: adds a PolicyUpdate to the broadcast
    EAGLEWorkerV2.forward_batch_generation            context before, facts after a launch
    SchedulerBatchResultProcessor.process_batch_result_decode      makes the StepRecord
    EAGLEWorkerV2.apply_runtime_state                 drops what switching would leave behind
    EagleDraftWorkerBase._rebuild_topk1_chain_buffers keeps one pair of buffers per K
    EAGLEWorkerV2._build_trivial_verify_input         begins a skip, mends K=0 without overlap scheduling

where K=0 is a candidate and SPECPILOT_SKIP is "decode" (see skip.py), also

    EAGLEWorkerV2.init_cuda_graphs                    captures the decode graphs of the skip
    EAGLEWorkerV2.verify                              runs a skip as a decode
    EagleDraftWorker._draft_extend_for_decode         is left out after one,
    EAGLEWorkerV2._stub_skipped_draft_extend          as is this
    EagleDraftWorker.draft                            shows the draft first what it missed (see resume.py)
    EagleDraftWorker._draft_extend_for_prefill        it has seen all of these requests
    ReqToTokenPool.free                               a request's gaps end with it
    Req.owned_kv_len, effective_kv_committed_len      ends what is cached of a request before its first hole

SGLang only logs what a plugin raises, and a server that runs unhooked looks healthy.
So whatever goes wrong here ends the start: SystemExit passes SGLang's handler.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from specpilot.sglang_hooks.agent import Agent
from specpilot.sglang_hooks.broadcast import PolicyUpdate
from specpilot.sglang_hooks.connection import EndpointError
from specpilot.sglang_hooks.contract import (
    BATCH,
    DRAFT_WORKER,
    EAGLE_DRAFT,
    ENTRY,
    HOOKS,
    POLICY_CLASS,
    PROCESSOR,
    RECEIVER,
    RIG_VERSION,
    ROW_POOL,
    SCHEDULER,
    SKIP,
    TESTED_VERSIONS,
    WORKER,
    WORKER_MODULE,
    Use,
    installed_moved,
    owned_length,
)
from specpilot.sglang_hooks.patches import Hook, Patch, PatchError, apply, revert
from specpilot.sglang_hooks.server_facts import load_of, server_facts
from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.skip import DecodeSkip, is_out_of_memory, marker_class, unsupported_reason, version_reason
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.tree import TreeController, drafts_a_tree

logger = logging.getLogger(__name__)

_RESTORE = "adaptive_spec.restore"
"""The name under which SGLang logs each switch in its list of overrides."""


@dataclass
class _Installed:
    """What this process has of Specpilot in it."""

    settings: Settings | None = None
    agent: Agent | None = None
    skip: DecodeSkip | None = None
    """Set once its graphs are captured; None where K=0 is SGLang's own."""
    patches: list[Patch] = field(default_factory=list)


_installed = _Installed()


def activate() -> None:
    """Entry point of ``sglang.srt.plugins``; inert without SPECPILOT_ENDPOINT."""
    if not os.environ.get("SPECPILOT_ENDPOINT", "").strip():
        return
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as error:
        _refuse(str(error))
    _check_version(settings)
    _installed.settings = settings

    from sglang.srt.plugins.hook_registry import HookType

    _check(ENTRY)
    hooks: list[Hook] = [(POLICY_CLASS, _policy_class(), HookType.REPLACE)]
    if "sglang.srt.managers.scheduler" in sys.modules:  # a scheduler process, or the one that starts them
        hooks.append((f"{SCHEDULER}.maybe_init_draft_worker", _after_init_draft_worker, HookType.AFTER))
        hooks.append((f"{SCHEDULER}.init_model_worker", _after_init_model_worker, HookType.AFTER))
    _install(hooks)


def uninstall() -> None:
    """Take every hook out and leave SGLang's classes as they were; stops the agent."""
    global _installed
    revert(_installed.patches)
    logging.getLogger(WORKER_MODULE).removeFilter(_not_a_switch)
    if _installed.agent is not None:
        _installed.agent.stop()
    _installed = _Installed()


# -- start-up checks --


def _refuse(text: str) -> NoReturn:
    logger.error("specpilot: %s", text)
    raise SystemExit(f"specpilot: {text}")


def _check_version(settings: Settings) -> None:
    import sglang

    version = sglang.__version__
    if version in (*TESTED_VERSIONS, RIG_VERSION) or settings.allow_untested:
        return
    moved = installed_moved(ENTRY + HOOKS + SKIP)
    differs = f"its code differs: {'; '.join(moved)}" if moved else "its code has all that the hooks use"
    _refuse(
        f"SGLang {version} is not one of the tested versions {', '.join(TESTED_VERSIONS)}: install one of them, "
        f"unset SPECPILOT_ENDPOINT, or set SPECPILOT_ALLOW_UNTESTED=1 to try ({differs})"
    )


def _check(uses: tuple[Use, ...]) -> None:
    if moved := installed_moved(uses):
        _moved("; ".join(moved))


def _moved(what: str) -> NoReturn:
    _refuse(
        f"this SGLang is not what this release of specpilot knows ({what}): "
        f"install one of {', '.join(TESTED_VERSIONS)}, or unset SPECPILOT_ENDPOINT"
    )


def _install(hooks: Sequence[Hook]) -> None:
    try:
        apply(hooks, _installed.patches)
    except PatchError as error:
        _moved(str(error))


def _not_a_switch(record: logging.LogRecord) -> bool:
    """Filter out SGLang's line for every switch; the records and the metrics tell it better."""
    return not str(record.msg).startswith("Switch adaptive runtime state")


# -- the policy class, and what its constructor installs --


@functools.cache
def _policy_class() -> type:
    """Make the replacement class; SGLang builds it once in every scheduler that adapts."""
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    class SglangTablePolicy(TablePolicy):
        """``AdaptiveSpeculativeParams`` that answers from the controller's table."""

        def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
            settings = _installed.settings
            assert settings is not None
            try:
                super().__init__(settings, resolve_candidate_steps_from_config(cfg_path), initial_steps)
            except SettingsError as error:
                _refuse(str(error))
            _check_rig(self.candidate_steps, initial_steps)
            _installed.agent = Agent(settings, self)
            _install_scheduler_hooks()
            if settings.skip == "decode" and 0 in self.candidate_steps:
                _install_skip_hooks()

    return SglangTablePolicy


def _check_rig(candidates: Sequence[int], initial_steps: int) -> None:
    import sglang

    if sglang.__version__ == RIG_VERSION and initial_steps != max(candidates):
        _refuse(
            f"SGLang {RIG_VERSION} must start at its widest candidate: set --speculative-num-steps {max(candidates)}"
        )


def _install_scheduler_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    _check(HOOKS)
    _install(
        [
            (f"{SCHEDULER}.init_request_dispatcher", _after_init_request_dispatcher, HookType.AFTER),
            (f"{RECEIVER}._pull_raw_reqs", _after_pull_raw_reqs, HookType.AFTER),
            (f"{BATCH}.retract_decode", _after_retract_decode, HookType.AFTER),
            (f"{WORKER}.forward_batch_generation", _around_forward, HookType.AROUND),
            (f"{PROCESSOR}.process_batch_result_decode", _around_decode_result, HookType.AROUND),
            (f"{WORKER}.apply_runtime_state", _around_apply_runtime_state, HookType.AROUND),
            (f"{DRAFT_WORKER}._rebuild_topk1_chain_buffers", _around_rebuild_chain_buffers, HookType.AROUND),
            (f"{WORKER}._build_trivial_verify_input", _around_build_trivial_verify_input, HookType.AROUND),
        ]
    )
    logging.getLogger(WORKER_MODULE).addFilter(_not_a_switch)


def _install_skip_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    if reason := version_reason():
        _skip_stays_sglangs(reason)
        return
    _install(
        [
            (f"{WORKER}.init_cuda_graphs", _after_init_cuda_graphs, HookType.AFTER),
            (f"{WORKER}.verify", _around_verify, HookType.AROUND),
            (f"{WORKER}._stub_skipped_draft_extend", _around_draft_extend, HookType.AROUND),
            (f"{EAGLE_DRAFT}._draft_extend_for_decode", _around_draft_extend, HookType.AROUND),
            (f"{EAGLE_DRAFT}.draft", _around_draft, HookType.AROUND),
            (f"{EAGLE_DRAFT}._draft_extend_for_prefill", _after_draft_prefill, HookType.AFTER),
            (f"{ROW_POOL}.free", _before_row_free, HookType.BEFORE),
            (owned_length(), _after_owned_length, HookType.AFTER),
        ]
    )


def _agent() -> Agent:
    agent = _installed.agent
    assert agent is not None  # hooks run only where the policy was built
    return agent


# -- hooks at start --


def _after_init_draft_worker(result: Any, scheduler: Any) -> None:  # noqa: ARG001
    worker, settings = scheduler.draft_worker, _installed.settings
    if not drafts_a_tree(worker):
        return
    assert settings is not None
    if settings.skip != "decode":
        _refuse("a tree of draft tokens can only be skipped by decode steps: unset SPECPILOT_SKIP")
    if reason := version_reason():
        _refuse(f"a tree of draft tokens cannot be skipped by this SGLang ({reason}): use a tested one")
    steps = worker.speculative_num_steps
    try:
        policy = TablePolicy(settings, [0, steps], steps)
    except SettingsError as error:
        _refuse(str(error))
    _installed.agent = Agent(settings, policy)
    worker.adaptive_controller = TreeController(worker, policy)
    _install_scheduler_hooks()
    _install_skip_hooks()


def _after_init_model_worker(result: Any, scheduler: Any) -> None:  # noqa: ARG001
    worker = scheduler.draft_worker
    controller = getattr(worker, "adaptive_controller", None)
    if controller is None or _installed.agent is None or controller.params is not _installed.agent.policy:
        _refuse(
            "this server does not adapt its speculation, so nothing could be steered: start it with "
            "--speculative-algorithm EAGLE or EAGLE3 and, for --speculative-eagle-topk 1, --speculative-adaptive "
            "(SGLang's own warning 'speculative_adaptive disabled' names what it did not accept), "
            "or unset SPECPILOT_ENDPOINT"
        )


def _after_init_cuda_graphs(result: Any, worker: Any) -> None:  # noqa: ARG001
    try:
        reason = unsupported_reason(worker)
    except AttributeError as error:  # of an SGLang that may be tried, but was not tested
        reason = str(error)
    if reason and worker.topk > 1:
        _refuse(f"the tree of this server cannot be skipped by decode steps ({reason}): unset SPECPILOT_ENDPOINT")
    if reason:
        _skip_stays_sglangs(reason)
        return
    try:
        _installed.skip, memory = DecodeSkip.build(worker, _agent().settings.skip_ring_mb << 20)
    except Exception as error:
        if not is_out_of_memory(error):
            logger.exception("specpilot: capturing the decode graphs for K=0 failed")
            _refuse("capturing the decode graphs for K=0 failed, see above; SPECPILOT_SKIP=verify does without them")
        _refuse(
            f"no GPU memory left for the decode graphs of K=0 ({str(error).splitlines()[0]}): lower "
            "--mem-fraction-static, --cuda-graph-max-bs or SPECPILOT_SKIP_RING_MB, or set SPECPILOT_SKIP=verify "
            "to do without them"
        )
    logger.info(
        "specpilot: K=0 is a plain decode step; its graphs and buffers took %.2f GB (%.2f GB left) and %.1f s, "
        "%.2f GB of it for the newest %d skipped positions of each request",
        *memory,
    )


def _skip_stays_sglangs(reason: str) -> None:
    logger.warning("specpilot: K=0 stays SGLang's own verify of width 1 on this server: %s", reason)


def _after_init_request_dispatcher(result: Any, scheduler: Any) -> None:  # noqa: ARG001
    from sglang.srt.runtime_context import get_parallel
    from sglang.utils import TypeBasedDispatcher

    agent = _agent()
    scheduler._request_dispatcher += TypeBasedDispatcher([(PolicyUpdate, agent.apply)])
    ranks = getattr(scheduler, "ps", None) or get_parallel()
    try:
        agent.start(
            server_facts(scheduler, ranks, agent.settings.server_id, _installed.skip is not None),
            load=lambda: load_of(scheduler),
            all_gather=scheduler.tp_group.all_gather_object if ranks.tp_size > 1 else lambda value: [value],
        )
    except EndpointError as error:
        _refuse(str(error))
    logger.info(
        "specpilot: in place on rank %d (%s, candidate steps %s, %s)",
        ranks.tp_rank,
        agent.settings.mode,
        agent.policy.candidate_steps,
        agent.settings.endpoint,
    )


# -- hooks of the loop; what they cost is measured by `specpilot bench hook` --


def _after_pull_raw_reqs(received: list[Any] | None, receiver: Any) -> None:  # noqa: ARG001
    _agent().pull(received)


def _after_retract_decode(retracted: Any, batch: Any, *args: Any) -> None:  # noqa: ARG001
    _agent().retracted(len(retracted[0]))


def _around_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    agent = _agent()
    if not agent.ready:  # warm-up passes while SGLang starts
        return original(worker, batch, *args, **kwargs)
    decode = batch.forward_mode.is_decode()
    agent.launching(batch)
    result = original(worker, batch, *args, **kwargs)
    agent.launched(batch, decode)
    return result


def _around_decode_result(original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> Any:
    agent = _agent()
    ended = agent.settling(batch)
    quarantined: list[int] = []
    if _installed.skip is not None and (result.speculative_num_draft_tokens or 0) > 1:
        # A request that ends with this result gives its row back, and is not known after it.
        quarantined = _installed.skip.resume.gaps.holed(batch.reqs)
    value = original(processor, batch, result)
    agent.settled(batch, result, ended, quarantined)
    return value


def _around_apply_runtime_state(original: Callable[..., Any], worker: Any, state: Any) -> Any:
    """Keep one entry of SGLang's override log for all switches: it is never trimmed there."""
    from sglang.srt.runtime_context import get_context

    log = get_context()._overrides_log
    last = len(log) - 1
    value = original(worker, state)
    if last >= 0 and len(log) > last + 1 and log[last][0] == _RESTORE and log[-1][0] == _RESTORE:
        del log[last]
    return value


def _around_rebuild_chain_buffers(original: Callable[..., Any], draft_worker: Any) -> Any:
    """Build each K's two read-only index buffers once; SGLang allocates them anew at every switch."""
    if not _agent().ready:
        return original(draft_worker)
    kept = draft_worker.__dict__.setdefault("_specpilot_chain_buffers", {})
    key = (draft_worker.topk, draft_worker.speculative_num_steps, draft_worker.speculative_num_draft_tokens)
    if key in kept:
        draft_worker._topk1_parents_prealloc, draft_worker._topk1_score_indices_prealloc = kept[key]
        return None
    value = original(draft_worker)
    if draft_worker.topk == 1:
        kept[key] = draft_worker._topk1_parents_prealloc, draft_worker._topk1_score_indices_prealloc
    return value


def _around_build_trivial_verify_input(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """Begin a skip; where SGLang's own K=0 runs, give it its token ids as int64, as K>0 has them.

    Without overlap scheduling SGLang hands on the int32 of ``fill_bonus_tokens``; its greedy
    verify kernel takes int64 only, so the first K=0 step ends the server (seen on 0.5.17, the
    code is the same up to 0.5.23). Under overlap they are int64 already and this does nothing.
    """
    if _installed.skip is not None and (marker := _installed.skip.begin(batch)) is not None:
        return marker
    agent = _agent()
    if agent.ready and agent.settings.skip == "decode" and not batch.forward_mode.is_idle():
        agent.skipped_by_verify()
    verify_input = original(worker, batch)
    if verify_input.draft_token is not None:
        verify_input.draft_token = verify_input.draft_token.long()
    return verify_input


def _around_verify(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(batch.spec_info, marker_class()):
        assert _installed.skip is not None  # it made the marker, in this very step
        return _installed.skip.decode(batch, kwargs.get("grammar_barrier"))
    return original(worker, batch, *args, **kwargs)


def _around_draft_extend(
    original: Callable[..., Any], owner: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """Leave the draft model out after a skip, whichever of SGLang's two ways it would have gone."""
    if _installed.skip is not None and _installed.skip.finish(result):
        return None
    return original(owner, batch, result, *args, **kwargs)


def _around_draft(original: Callable[..., Any], draft_worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if _installed.skip is not None and not batch.forward_mode.is_idle():
        _installed.skip.resume.catch_up(batch)
    return original(draft_worker, batch, *args, **kwargs)


def _after_draft_prefill(result: Any, draft_worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    if _installed.skip is not None:
        _installed.skip.resume.gaps.prefilled(batch.reqs)


def _before_row_free(pool: Any, req: Any) -> None:  # noqa: ARG001
    if _installed.skip is not None:
        _installed.skip.resume.gaps.released(req)


def _after_owned_length(result: int, req: Any) -> int | None:
    """Keep positions without draft KV out of the prefix cache: a later request would draft from them.

    SGLang frees what is not owned, as it does with the slots it had reserved ahead.
    """
    if _installed.skip is None:
        return None
    whole = _installed.skip.resume.gaps.whole_length(req)
    return None if whole is None else min(result, whole)
