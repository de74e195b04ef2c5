"""Inside an SGLang process: random weights of a size with which attention and order of tokens matter.

SGLang fills ``load_format="dummy"`` with numbers up to 1e-3, norms too: attention then adds less than bf16
rounds off, answers depend on the newest token alone, and a server whose attention is wrong gives right
answers. Here norms are one, matrices keep the size of what they multiply, and attention looks at few
positions. Every tensor is drawn by its name, so that two servers of one model have the same.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

ENABLE = "LIVE_RANDOM_WEIGHTS"
"""Environment variable that has ``install`` do something."""
SHARPER = ("qkv_proj", "q_proj", "q_b_proj", "kv_b_proj")
"""Parts of the names of matrices whose outputs are half as large again: scores of attention spread."""


def install() -> None:
    """Have SGLang's plugin loader set this up in the process; call at import in ``__mp_main__``."""
    if not os.environ.get(ENABLE):
        return
    from specpilot.sglang_hooks import plugin

    original = plugin.activate

    def activate() -> None:
        if "sglang.srt.managers.scheduler" in sys.modules:
            from sglang.srt.model_loader import loader

            loader.initialize_dummy_weights = fill
        original()

    plugin.activate = activate


def fill(model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001 - what SGLang would pass on
    """Fill a model's floating-point tensors; stands in for SGLang's ``initialize_dummy_weights``."""
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor):
            continue
        if tensor.dim() < 2:
            tensor.fill_(1.0 if "norm" in name else 0.0)
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        generator = torch.Generator(device=tensor.device).manual_seed(seed)
        size = 1.0 if "embed_tokens" in name else tensor.shape[-1] ** -0.5
        if any(part in name for part in SHARPER):
            size *= 1.5
        if "lm_head" in name:
            size *= 4.0
        tensor.normal_(0.0, size, generator=generator)
