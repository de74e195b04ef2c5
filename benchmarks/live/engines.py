"""Options of the engines that the scripts beside this measure; each adds what is its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def target(models: Path | str, attention: str) -> dict[str, Any]:
    """The 8B-shaped model of models.py, with random weights."""
    return {"model_path": f"{models}/target-8b", "load_format": "dummy", "attention_backend": attention, **QUIET}


def captured(batch_sizes: Sequence[int]) -> dict[str, Any]:
    """CUDA graphs for these batch sizes, and no larger batch."""
    return {"cuda_graph_bs_decode": batch_sizes, "max_running_requests": max(batch_sizes)}


def adaptive(draft: Path | str, candidates: Sequence[int], folder: Path) -> dict[str, Any]:
    """A chain of drafts whose K can be any of ``candidates``; the file that SGLang wants is written to ``folder``."""
    config = folder / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": candidates}}))
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": max(candidates),
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": max(candidates) + 1,
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(config),
    }
