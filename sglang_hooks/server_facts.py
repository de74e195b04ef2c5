"""What a server is, and how busy, as its scheduler knows it."""

from __future__ import annotations

import logging
from typing import Any

from specpilot.sglang_hooks.agent import ServerFacts, default_server_id

logger = logging.getLogger(__name__)


def server_facts(scheduler: Any, ranks: Any, server_id: str, decode_skip: bool) -> ServerFacts:
    """Read them off a scheduler that is ready to serve.

    ``ranks`` has its parallel ranks and sizes; ``server_id`` may be empty; ``decode_skip``: K=0 is a decode step.
    """
    import sglang

    args = scheduler.server_args
    runner = scheduler.tp_worker.model_runner
    graphs = runner.decode_cuda_graph_runner
    return ServerFacts(
        server_id=server_id or default_server_id(_host(args.host), args.port),
        model=args.model_path,
        draft_model=args.speculative_draft_model_path or "",
        algorithm=args.speculative_algorithm,
        topk=scheduler.draft_worker.topk,
        tree_tokens=scheduler.draft_worker.speculative_num_draft_tokens if scheduler.draft_worker.topk > 1 else 0,
        captured_batch_sizes=tuple(graphs.capture_bs) if graphs is not None else (),
        max_running_requests=scheduler.max_running_requests,
        kv_tokens=scheduler.max_total_num_tokens,
        overlap=scheduler.enable_overlap,
        rank=ranks.tp_rank,
        tp_size=ranks.tp_size,
        dp_size=args.dp_size,
        dp_rank=ranks.dp_rank or 0,
        gpu=_gpu_name(),
        sglang_version=sglang.__version__,
        context_length=scheduler.model_config.context_len,
        skip="decode" if decode_skip else "verify",
    )


def _host(host: str | None) -> str:
    """A name that tells servers of different machines apart: loopback and any-address do not."""
    return "" if host in (None, "", "127.0.0.1", "localhost", "0.0.0.0", "::", "::1") else str(host)  # noqa: S104


def _gpu_name() -> str:
    from sglang.srt.utils import get_device_name

    try:
        return str(get_device_name())
    except Exception:  # the name is for people and fingerprints; a driver without one is no reason to stop
        logger.warning("specpilot: the accelerator did not tell its name", exc_info=True)
        return "unknown"


def load_of(scheduler: Any) -> tuple[int, int, int]:
    """Return running and queued requests, and KV tokens used, now."""
    used = scheduler.max_total_num_tokens - (
        scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    )
    return len(scheduler.running_batch.reqs), len(scheduler.waiting_queue), used
