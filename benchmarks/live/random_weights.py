"""Inside an SGLang process: random weights with which attention and the order of tokens matter.

SGLang fills ``load_format="dummy"`` with numbers up to 1e-3, norms too: attention then adds less than bf16
rounds off, answers depend on the newest token alone, and a server whose attention is wrong gives right
answers. Here norms are one, matrices keep the size of what they multiply, and attention looks at few
positions. The next of token t is one of two in its block of eight, which of them the context decides: so
the two best logits are seldom as near as bf16 rounds, and answers part at an error rather than at noise.
Every tensor is drawn by its name, so that two servers of one model have the same.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

ENABLE = "LIVE_RANDOM_WEIGHTS"
"""Environment variable that has ``install`` do something."""
SIZES = {
    ("qkv_proj", "q_proj", "k_proj", "q_b_proj", "kv_b_proj"): 1.8,
    ("o_proj", "down_proj", "w2_weight"): 0.35,
    ("lm_head",): 1.5,
}
"""By parts of their names, how much larger than their input the outputs of matrices are; others are as large."""
NEAR, FAR, BLOCK = 1, 3, 8
"""The two tokens that may follow are so much further, in a block of so many."""
PULL = 14.0
"""How much larger the logits of these two are, times how much of the token's embedding is in the last state."""


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
        size *= next((times for parts, times in SIZES.items() if any(part in name for part in parts)), 1.0)
        tensor.normal_(0.0, size, generator=generator)
    tensors = model.state_dict()
    embedding, head = (tensors.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if embedding is not None and head is not None and embedding.shape == head.shape:
        ids = torch.arange(len(head), device=head.device)
        for further in (NEAR, FAR):
            following = ids // BLOCK * BLOCK + (ids + further) % BLOCK
            head.index_add_(0, following, embedding * (PULL / head.shape[1]))
