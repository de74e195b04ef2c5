"""The hooks around every step: what SGLang's loop calls, and the agent that it is passed on to.

``plugin.py`` lists what each of them is put on. What they cost is measured by `specpilot bench hook`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from specpilot.sglang_hooks.broadcast import PolicyUpdate
from specpilot.sglang_hooks.connection import EndpointError
from specpilot.sglang_hooks.installed import active_agent, installed, refuse
from specpilot.sglang_hooks.server_facts import load_of, server_facts

logger = logging.getLogger(__name__)

_RESTORE = "adaptive_spec.restore"
"""The name under which SGLang logs each switch in its list of overrides."""


def after_init_request_dispatcher(result: Any, scheduler: Any) -> None:  # noqa: ARG001
    """Start the agent, and route what rank 0 broadcasts to it."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.utils import TypeBasedDispatcher

    agent = active_agent()
    scheduler._request_dispatcher += TypeBasedDispatcher([(PolicyUpdate, agent.apply)])
    ranks = getattr(scheduler, "ps", None) or get_parallel()
    try:
        agent.start(
            server_facts(scheduler, ranks, agent.settings.server_id, installed.skip is not None),
            load=lambda: load_of(scheduler),
            all_gather=scheduler.tp_group.all_gather_object if ranks.tp_size > 1 else lambda value: [value],
        )
    except EndpointError as error:
        refuse(str(error))
    logger.info(
        "specpilot: plugin active on rank %d (%s, candidate steps %s, %s)",
        ranks.tp_rank,
        agent.settings.mode,
        agent.policy.candidate_steps,
        agent.settings.endpoint,
    )


def after_pull_raw_reqs(received: list[Any] | None, receiver: Any) -> None:  # noqa: ARG001
    """Rank 0: add a change of the policy to the requests that are about to be broadcast."""
    active_agent().pull(received)


def after_retract_decode(retracted: Any, batch: Any, *args: Any) -> None:  # noqa: ARG001
    """Count the requests that lost their place, for the next record."""
    active_agent().retracted(len(retracted[0]))


def around_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the agent the mean context before a forward, and what was launched after it."""
    agent = active_agent()
    if not agent.ready:  # warm-up passes while SGLang starts
        return original(worker, batch, *args, **kwargs)
    decode = batch.forward_mode.is_decode()
    agent.launching(batch)
    result = original(worker, batch, *args, **kwargs)
    agent.launched(batch, decode)
    return result


def around_decode_result(original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> Any:
    """Make the record of a step whose completion SGLang has just waited for."""
    agent = active_agent()
    ended = agent.settling(batch)
    quarantined: list[int] = []
    if installed.skip is not None and (result.speculative_num_draft_tokens or 0) > 1:
        # A request that ends with this result gives its row back, and is not known after it.
        quarantined = installed.skip.resume.gaps.holed(batch.reqs)
    value = original(processor, batch, result)
    agent.settled(batch, result, ended, quarantined)
    return value


def around_apply_runtime_state(original: Callable[..., Any], worker: Any, state: Any) -> Any:
    """Keep one entry of SGLang's override log for all switches: it is never trimmed there."""
    from sglang.srt.runtime_context import get_context

    log = get_context()._overrides_log
    last = len(log) - 1
    value = original(worker, state)
    if last >= 0 and len(log) > last + 1 and log[last][0] == _RESTORE and log[-1][0] == _RESTORE:
        del log[last]
    return value


def around_rebuild_chain_buffers(original: Callable[..., Any], draft_worker: Any) -> Any:
    """Build each K's two read-only index buffers once; SGLang allocates them again at every switch."""
    if not active_agent().ready:
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
