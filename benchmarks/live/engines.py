"""Options of the engines that the scripts beside this measure; each adds what is its own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NO_REFUSALS = "LIVE_NO_REFUSALS"
"""Environment variable that has ``lift_refusals`` do something."""

QUIET = {
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
    "disable_radix_cache": True,
    "random_seed": 1,
    "log_level": "info",
}
"""Nothing is compiled or cached that is not measured."""


def lift_refusals() -> None:
    """Have the plugin skip by decode steps even where it would not; call at import in ``__mp_main__``."""
    if os.environ.get(NO_REFUSALS):
        from specpilot.sglang_hooks import skip_hooks

        skip_hooks.unsupported_reason = lambda worker: ""  # noqa: ARG005


def target(models: Path | str, attention: str, name: str = "target-8b") -> dict[str, Any]:
    """A model of models.py, by default the 8B-shaped one, with random weights."""
    return {"model_path": f"{models}/{name}", "load_format": "dummy", "attention_backend": attention, **QUIET}


def captured(batch_sizes: Sequence[int]) -> dict[str, Any]:
    """CUDA graphs for these batch sizes, and no larger batch."""
    return {"cuda_graph_bs_decode": batch_sizes, "max_running_requests": max(batch_sizes)}


def drafter(draft: Path | str) -> dict[str, Any]:
    """An EAGLE3 draft, or, if none is named, the target's own."""
    if not draft:
        return {"speculative_algorithm": "EAGLE"}
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(draft)}


def tree(draft: Path | str, steps: int = 2, topk: int = 4, draft_tokens: int = 16) -> dict[str, Any]:
    """A tree of drafts, by default the one of (2, 4, 16)."""
    return {
        **drafter(draft),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": draft_tokens,
    }


def adaptive(draft: Path | str, candidates: Sequence[int], folder: Path) -> dict[str, Any]:
    """A chain of drafts whose K can be any of ``candidates``; the file that SGLang wants is written to ``folder``.

    Without a ``draft`` the target brings its own, as DeepSeek's models do.
    """
    config = folder / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": candidates}}))
    return {
        **drafter(draft),
        "speculative_num_steps": max(candidates),
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": max(candidates) + 1,
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(config),
    }
