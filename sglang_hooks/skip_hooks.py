"""The hooks that make a step with K=0 a decode step (``skip.py``), and show the draft what it missed (``resume.py``).

``plugin.py`` lists what each of them is put on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from specpilot.sglang_hooks.installed import active_agent, installed, refuse
from specpilot.sglang_hooks.skip import DecodeSkip, is_out_of_memory, marker_class, unsupported_reason

logger = logging.getLogger(__name__)


def after_init_cuda_graphs(result: Any, worker: Any) -> None:  # noqa: ARG001
    """Capture the decode graphs of the skip when SGLang has captured its own; may end the start."""
    try:
        reason = unsupported_reason(worker)
    except AttributeError as error:  # of an SGLang that may be tried, but was not tested
        reason = str(error)
    if reason and worker.topk > 1:
        refuse(f"the tree of this server cannot be skipped by decode steps ({reason}): unset SPECPILOT_ENDPOINT")
    if reason:
        keep_sglangs_skip(reason)
        return
    try:
        installed.skip, memory = DecodeSkip.build(worker, active_agent().settings.skip_ring_mb << 20)
    except Exception as error:
        if not is_out_of_memory(error):
            logger.exception("specpilot: capturing the decode graphs for K=0 failed")
            refuse("capturing the decode graphs for K=0 failed, see above; SPECPILOT_SKIP=verify does without them")
        refuse(
            f"no GPU memory left for the decode graphs of K=0 ({str(error).splitlines()[0]}): lower "
            "--mem-fraction-static, --cuda-graph-max-bs or SPECPILOT_SKIP_RING_MB, or set SPECPILOT_SKIP=verify "
            "to do without them"
        )
    logger.info(
        "specpilot: K=0 is a plain decode step; its graphs and buffers took %.2f GB (%.2f GB left) and %.1f s, "
        "%.2f GB of it for the newest %d skipped positions of each request",
        *memory,
    )


def keep_sglangs_skip(reason: str) -> None:
    """Say why a step with K=0 is SGLang's verify of width 1 on this server."""
    logger.warning("specpilot: K=0 stays SGLang's own verify of width 1 on this server: %s", reason)


def around_build_trivial_verify_input(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    """Begin a skip; where SGLang's own K=0 runs, give it its token ids as int64, as K>0 has them.

    Without overlap scheduling SGLang hands on the int32 of ``fill_bonus_tokens``; its greedy
    verify kernel takes int64 only, so the first K=0 step ends the server (seen on 0.5.17, the
    code is the same up to 0.5.23). Under overlap they are int64 already and this does nothing.
    """
    if installed.skip is not None and (marker := installed.skip.begin(batch)) is not None:
        return marker
    agent = active_agent()
    if agent.ready and agent.settings.skip == "decode" and not batch.forward_mode.is_idle():
        agent.skipped_by_verify()
    verify_input = original(worker, batch)
    if verify_input.draft_token is not None:
        verify_input.draft_token = verify_input.draft_token.long()
    return verify_input


def around_verify(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a skip as a decode step: SGLang's choice of K and the order of its stages stay as they are."""
    if isinstance(batch.spec_info, marker_class()):
        assert installed.skip is not None  # it made the marker, in this very step
        return installed.skip.decode(batch, kwargs.get("grammar_barrier"))
    return original(worker, batch, *args, **kwargs)


def around_draft_extend(
    original: Callable[..., Any], owner: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """Leave the draft model out after a skip, whichever of SGLang's two ways it would have gone."""
    if installed.skip is not None and installed.skip.finish(result):
        return None
    return original(owner, batch, result, *args, **kwargs)


def around_draft(original: Callable[..., Any], draft_worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Show the draft first what it missed: the first moment at which that matters, with the lengths as they are."""
    if installed.skip is not None and not batch.forward_mode.is_idle():
        installed.skip.resume.catch_up(batch)
    return original(draft_worker, batch, *args, **kwargs)


def after_draft_prefill(result: Any, draft_worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
    """End the gaps of these requests: the draft has seen all of them."""
    if installed.skip is not None:
        installed.skip.resume.gaps.prefilled(batch.reqs)


def before_row_free(pool: Any, req: Any) -> None:  # noqa: ARG001
    """End the gaps of a request that gives back its row."""
    if installed.skip is not None:
        installed.skip.resume.gaps.released(req)


def after_owned_length(result: int, req: Any) -> int | None:
    """Keep positions without draft KV out of the prefix cache: a later request would draft from them.

    On ``Req.owned_kv_len``, which up to 0.5.20 is ``effective_kv_committed_len``: SGLang caches that much of an
    ended request and frees the rest, as it does with the slots it had reserved ahead.
    """
    if installed.skip is None:
        return None
    whole = installed.skip.resume.gaps.whole_length(req)
    return None if whole is None else min(result, whole)
