"""Compiles, all at once, the kernels that the models of models.py would otherwise compile one by one.

python benchmarks/live/warm_kernels.py [NAME...]: SGLang's JIT kernels, and FlashInfer's attention for GQA and MLA;
only those whose names begin with a NAME. Each is compiled in a process of its own; a failure is only printed.
"""

import subprocess
import sys
import time
from typing import Any


def sglang_kernels() -> dict[str, Any]:
    import torch
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import clamp_position, rope
    from sglang.kernels.ops.kvcache import kvcache
    from sglang.kernels.ops.layernorm import norm
    from sglang.kernels.ops.speculative import sampling, tree

    bf16 = torch.bfloat16
    return {
        "tree": lambda: tree._jit_tree_module(),
        "sampling": lambda: sampling._jit_sampling_module(4, True),
        "kvcache": lambda: kvcache._jit_kvcache_module(2048, 2048, 0),
        "rmsnorm": lambda: norm._jit_rmsnorm_module(4096, bf16),
        "rmsnorm-2048": lambda: norm._jit_rmsnorm_module(2048, bf16),
        "fused-add": lambda: norm._jit_fused_add_rmsnorm_module(bf16, False),
        "activation": lambda: activation.activation_module(bf16),
        "rope": lambda: rope._jit_fused_rope_module(True, 128, bf16, bf16),
        "rotary": lambda: rope._jit_rotary_embedding_module(),
        "clamp-position": lambda: clamp_position._jit_clamp_position_module(torch.int64),
    }


def flashinfer_kernels() -> dict[str, Any]:
    import flashinfer
    import torch

    def tensor(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def workspace() -> Any:
        return torch.empty(128 << 20, dtype=torch.uint8, device="cuda")

    bf16 = torch.bfloat16

    def paged() -> None:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="fa2")
        wrapper.plan(tensor(0, 1), tensor(0, 1), tensor(0), tensor(1), 32, 8, 128, 1,
                     q_data_type=bf16, kv_data_type=bf16)  # fmt: skip

    def decode() -> None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", backend="fa2", use_tensor_cores=True
        )
        wrapper.plan(tensor(0, 1), tensor(0), tensor(1), 32, 8, 128, 1, q_data_type=bf16, kv_data_type=bf16)

    def ragged(query: int, value: int) -> None:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend="auto")
        wrapper.plan(tensor(0, 1), tensor(0, 1), 16, 16, query, head_dim_vo=value, causal=True, q_data_type=bf16)

    def mla() -> None:
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), backend="auto")
        wrapper.plan(tensor(0, 1), tensor(0, 1), tensor(0), tensor(1), 16, 512, 64, 1, False, 0.07, bf16, bf16)

    return {
        "flashinfer-paged": paged,
        "flashinfer-decode": decode,
        "flashinfer-ragged-128": lambda: ragged(128, 128),
        "flashinfer-ragged-192": lambda: ragged(192, 128),
        "flashinfer-mla": mla,
    }


NAMES = [
    "flashinfer-mla", "flashinfer-ragged-192", "flashinfer-ragged-128", "flashinfer-paged", "flashinfer-decode",
    "tree", "sampling", "kvcache", "rmsnorm", "rmsnorm-2048", "fused-add", "activation", "rope", "rotary",
    "clamp-position",
]  # fmt: skip


def build(name: str) -> None:
    from sglang.srt.environ import redirect_third_party_caches

    redirect_third_party_caches()  # before FlashInfer is imported, as a server does
    import torch

    torch.cuda.init()
    kernels = flashinfer_kernels() if name.startswith("flashinfer") else sglang_kernels()
    begun = time.time()
    try:
        kernels[name]()
    except Exception as error:
        cause = error.__cause__
        said = f"{error} {cause or ''} {getattr(cause, 'stdout', '') or ''} {getattr(cause, 'stderr', '') or ''}"
        print(f"kernel {name}: FAILED {said[-700:]}".replace("\n", " | "), flush=True)
        raise SystemExit(1) from error
    print(f"kernel {name}: {time.time() - begun:.1f} s", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--build"]:
        build(sys.argv[2])
        return 0
    names = [name for name in NAMES if not sys.argv[1:] or name.startswith(tuple(sys.argv[1:]))]
    running = [subprocess.Popen([sys.executable, __file__, "--build", name]) for name in names]
    return sum(process.wait() != 0 for process in running)


if __name__ == "__main__":
    raise SystemExit(main())
