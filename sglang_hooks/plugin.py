"""Where Specpilot enters SGLang: the entry point of ``sglang.srt.plugins``, and the list of every hook.

SGLang calls ``activate`` in each of its processes. Without SPECPILOT_ENDPOINT it returns at
once. With it, it checks SGLang's version and code (see contract.py), and replaces
``AdaptiveSpeculativeParams``, the policy class of ``--speculative-adaptive``. SGLang builds that
class only in scheduler processes that adapt, so its constructor is where the other hooks are put
in place: they touch modules that the tokenizer and the detokenizer should not import.

SGLang only logs what a plugin raises, and a server that runs unhooked looks healthy.
So whatever goes wrong here ends the start: SystemExit passes SGLang's handler.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from specpilot.sglang_hooks import skip_hooks, step_hooks
from specpilot.sglang_hooks.agent import Agent
from specpilot.sglang_hooks.contract import RIG_VERSION, TESTED_VERSIONS, Use, installed_moved
from specpilot.sglang_hooks.installed import installed, refuse
from specpilot.sglang_hooks.patches import Hook, PatchError, apply, revert
from specpilot.sglang_hooks.settings import Settings, SettingsError
from specpilot.sglang_hooks.skip import version_reason
from specpilot.sglang_hooks.skip_uses import SKIP, owned_length
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.tree import TreeController, drafts_a_tree
from specpilot.sglang_hooks.uses import (
    BATCH,
    DRAFT_WORKER,
    EAGLE_DRAFT,
    ENTRY,
    HOOKS,
    POLICY_CLASS,
    PROCESSOR,
    RECEIVER,
    ROW_POOL,
    SCHEDULER,
    WORKER,
    WORKER_MODULE,
)


def activate() -> None:
    """Entry point of ``sglang.srt.plugins``; inert without SPECPILOT_ENDPOINT."""
    if not os.environ.get("SPECPILOT_ENDPOINT", "").strip():
        return
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as error:
        refuse(str(error))
    _check_version(settings)
    installed.settings = settings
    _check(ENTRY)
    # A scheduler process, or the one that starts them, has the scheduler's module already.
    in_scheduler = "sglang.srt.managers.scheduler" in sys.modules
    install([*policy_hooks(), *(start_hooks() if in_scheduler else ())])


def uninstall() -> None:
    """Take every hook out and leave SGLang's classes as they were; stops the agent."""
    revert(installed.patches)
    logging.getLogger(WORKER_MODULE).removeFilter(_not_a_switch)
    if installed.agent is not None:
        installed.agent.stop()
    installed.clear()


# -- every hook: target, what it does there, and how SGLang's registry puts it on --


def policy_hooks() -> list[Hook]:
    """Return what is replaced in every process that SGLang starts."""
    return [(POLICY_CLASS, _policy_class(), "REPLACE")]


def start_hooks() -> list[Hook]:
    """Return what is put, beside it, into every scheduler process when plugins are loaded."""
    return [
        (f"{SCHEDULER}.maybe_init_draft_worker", _after_init_draft_worker, "AFTER"),
        (f"{SCHEDULER}.init_model_worker", _after_init_model_worker, "AFTER"),
    ]


def scheduler_hooks() -> list[Hook]:
    """Return what is put into a scheduler process whose policy was built: recording and steering."""
    return [
        (f"{SCHEDULER}.init_request_dispatcher", step_hooks.after_init_request_dispatcher, "AFTER"),
        (f"{BATCH}.retract_decode", step_hooks.after_retract_decode, "AFTER"),
        (f"{RECEIVER}._pull_raw_reqs", step_hooks.after_pull_raw_reqs, "AFTER"),
        (f"{WORKER}.forward_batch_generation", step_hooks.around_forward, "AROUND"),
        (f"{PROCESSOR}.process_batch_result_decode", step_hooks.around_decode_result, "AROUND"),
        (f"{WORKER}.apply_runtime_state", step_hooks.around_apply_runtime_state, "AROUND"),
        (f"{DRAFT_WORKER}._rebuild_topk1_chain_buffers", step_hooks.around_rebuild_chain_buffers, "AROUND"),
        (f"{WORKER}._build_trivial_verify_input", skip_hooks.around_build_trivial_verify_input, "AROUND"),
    ]


def decode_skip_hooks() -> list[Hook]:
    """Return what is added where K=0 is a candidate and SPECPILOT_SKIP is "decode"."""
    return [
        (f"{WORKER}.init_cuda_graphs", skip_hooks.after_init_cuda_graphs, "AFTER"),
        (f"{WORKER}.verify", skip_hooks.around_verify, "AROUND"),
        (f"{EAGLE_DRAFT}._draft_extend_for_decode", skip_hooks.around_draft_extend, "AROUND"),
        (f"{WORKER}._stub_skipped_draft_extend", skip_hooks.around_draft_extend, "AROUND"),
        (f"{EAGLE_DRAFT}.draft", skip_hooks.around_draft, "AROUND"),
        (f"{EAGLE_DRAFT}._draft_extend_for_prefill", skip_hooks.after_draft_prefill, "AFTER"),
        (f"{ROW_POOL}.free", skip_hooks.before_row_free, "BEFORE"),
        (owned_length(), skip_hooks.after_owned_length, "AFTER"),
    ]


def targets() -> list[str]:
    """Return the dotted path of everything that is hooked, in the order in which it happens."""
    parts = policy_hooks(), start_hooks(), scheduler_hooks(), decode_skip_hooks()
    return [target for hooks in parts for target, _, _ in hooks]


def install(hooks: Sequence[Hook]) -> None:
    """Put ``hooks`` in place and remember what they replaced; ends the start where one cannot be."""
    try:
        apply(hooks, installed.patches)
    except PatchError as error:
        _refuse_moved(str(error))


def _install_scheduler_hooks() -> None:
    _check(HOOKS)
    install(scheduler_hooks())
    logging.getLogger(WORKER_MODULE).addFilter(_not_a_switch)


def _install_skip_hooks() -> None:
    if reason := version_reason():
        skip_hooks.keep_sglangs_skip(reason)
    else:
        install(decode_skip_hooks())


def _not_a_switch(record: logging.LogRecord) -> bool:
    """Filter out SGLang's line for every switch; the records and the metrics tell it better."""
    return not str(record.msg).startswith("Switch adaptive runtime state")


# -- checks of the start --


def _check_version(settings: Settings) -> None:
    import sglang

    version = sglang.__version__
    if version in (*TESTED_VERSIONS, RIG_VERSION) or settings.allow_untested:
        return
    moved = installed_moved(ENTRY + HOOKS + SKIP)
    differs = f"its code differs: {'; '.join(moved)}" if moved else "its code has all that the hooks use"
    refuse(
        f"SGLang {version} is not one of the tested versions {', '.join(TESTED_VERSIONS)}: install one of them, "
        f"unset SPECPILOT_ENDPOINT, or set SPECPILOT_ALLOW_UNTESTED=1 to try ({differs})"
    )


def _check(uses: tuple[Use, ...]) -> None:
    if moved := installed_moved(uses):
        _refuse_moved("; ".join(moved))


def _refuse_moved(what: str) -> NoReturn:
    refuse(
        f"this SGLang is not what this release of specpilot knows ({what}): "
        f"install one of {', '.join(TESTED_VERSIONS)}, or unset SPECPILOT_ENDPOINT"
    )


def _check_rig(candidates: Sequence[int], initial_steps: int) -> None:
    import sglang

    if sglang.__version__ == RIG_VERSION and initial_steps != max(candidates):
        refuse(
            f"SGLang {RIG_VERSION} must start at its widest candidate: set --speculative-num-steps {max(candidates)}"
        )


# -- the policy: of a chain through SGLang's own class, of a tree beside it --


@functools.cache
def _policy_class() -> type:
    """Make the replacement class; SGLang builds it once in every scheduler that adapts."""
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    class SglangTablePolicy(TablePolicy):
        """``AdaptiveSpeculativeParams`` that answers from the controller's table."""

        def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
            settings = installed.settings
            assert settings is not None
            try:
                super().__init__(settings, resolve_candidate_steps_from_config(cfg_path), initial_steps)
            except SettingsError as error:
                refuse(str(error))
            _check_rig(self.candidate_steps, initial_steps)
            installed.agent = Agent(settings, self)
            _install_scheduler_hooks()
            if settings.skip == "decode" and 0 in self.candidate_steps:
                _install_skip_hooks()

    return SglangTablePolicy


def _after_init_draft_worker(result: Any, scheduler: Any) -> None:  # noqa: ARG001
    worker, settings = scheduler.draft_worker, installed.settings
    if not drafts_a_tree(worker):
        return
    assert settings is not None
    if settings.skip != "decode":
        refuse("a tree of draft tokens can only be skipped by decode steps: unset SPECPILOT_SKIP")
    if reason := version_reason():
        refuse(f"a tree of draft tokens cannot be skipped by this SGLang ({reason}): use a tested one")
    steps = worker.speculative_num_steps
    try:
        policy = TablePolicy(settings, [0, steps], steps)
    except SettingsError as error:
        refuse(str(error))
    installed.agent = Agent(settings, policy)
    worker.adaptive_controller = TreeController(worker, policy)
    _install_scheduler_hooks()
    _install_skip_hooks()


def _after_init_model_worker(result: Any, scheduler: Any) -> None:  # noqa: ARG001
    worker = scheduler.draft_worker
    controller = getattr(worker, "adaptive_controller", None)
    if controller is None or installed.agent is None or controller.params is not installed.agent.policy:
        refuse(
            "this server does not adapt its speculation, so nothing could be steered: start it with "
            "--speculative-algorithm EAGLE or EAGLE3 and, for --speculative-eagle-topk 1, --speculative-adaptive "
            "(SGLang's own warning 'speculative_adaptive disabled' names what it did not accept), "
            "or unset SPECPILOT_ENDPOINT"
        )
