"""Writes config-only models, to be served with load_format="dummy" (random weights).

python benchmarks/live/models.py DIR   ->   DIR/target-8b and DIR/eagle3-8b, an EAGLE3 draft for it
"""

import json
import pathlib
import sys

TARGET = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFT = TARGET | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}

for name, config in {"target-8b": TARGET, "eagle3-8b": DRAFT}.items():
    folder = pathlib.Path(sys.argv[1]) / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
