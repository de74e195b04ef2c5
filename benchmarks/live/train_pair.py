"""Trains a small target model and drafts for it, so that acceptance and identity mean something. Needs a GPU.

    python benchmarks/live/train_pair.py OUT [--seconds 170]

Random weights give near-ties and accept nothing. This trains, on the Python sources found on the
machine, byte by byte: a Llama of some six million parameters, an EAGLE3 draft of one layer, and a
STANDALONE draft of two narrow layers, both taught the target's own distribution. Plain PyTorch, no
tokenizer: token ids are bytes. OUT gets ``target``, ``eagle3`` and ``standalone`` as SGLang loads
them (config.json, model.safetensors in bf16), ``prompts.json`` (token ids of unseen text) and
``train.json`` (losses in bits per byte, agreement of the drafts). --seconds is shared among the
three; the learning rate follows the clock, so more time is a better model, not another schedule.

    python benchmarks/live/train_pair.py OUT --check triton

serves a trained pair with SGLang, EAGLE3 at K=3, and writes ``check.json``: the acceptance length.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 512
"""256 bytes; the rest keeps kernels on even sizes and is never seen."""
TARGET = {"layers": 8, "hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 768}
STANDALONE = {"layers": 2, "hidden": 128, "heads": 2, "kv_heads": 1, "intermediate": 384}
HEAD_DIM = 64
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
AUX_LAYERS = (2, TARGET["layers"] // 2, TARGET["layers"] - 3)
"""Layers whose input an EAGLE3 draft sees; SGLang's choice for a model that names none."""
UNROLL = 3
"""Draft steps that the EAGLE3 draft is trained to take on its own hidden states."""
MAX_TEXT_BYTES = 96 << 20
SHARES = {"target": 0.58, "eagle3": 0.3, "standalone": 0.12}


# -- text --


def gather_text(seed: int) -> np.ndarray:
    """Python sources of the standard library and of what is on the path, shuffled by file, as uint8."""
    roots = {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], *sys.path}
    files = sorted({f for root in roots if root and Path(root).is_dir() for f in Path(root).rglob("*.py")})
    random.Random(seed).shuffle(files)
    parts, total = [], 0
    for file in files:
        try:
            data = file.read_bytes()
        except OSError:
            continue
        if not 200 < len(data) < 200_000:
            continue
        parts.append(data + b"\n\n")
        total += len(data) + 2
        if total > MAX_TEXT_BYTES:
            break
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def windows(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows of the text as token ids, [batch, length]."""
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator, device=text.device)
    return text[starts[:, None] + torch.arange(length, device=text.device)].long()


# -- models, with the weight names of their checkpoints --


class Norm(nn.Module):
    """RMSNorm, computed in float."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), NORM_EPS).to(x.dtype)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, length, HEAD_DIM] at ``positions`` [length], halves paired as in Llama."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=x.device).float() / HEAD_DIM)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; ``inputs`` wide at its entrance."""

    def __init__(self, inputs: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(inputs, heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(heads * HEAD_DIM, hidden, bias=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [batch, heads, length, HEAD_DIM] each, keys repeated for every head."""
        batch, length, _ = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, length, heads, HEAD_DIM).transpose(1, 2)

        repeat = self.heads // self.kv_heads
        q = rotate(split(self.q_proj(x), self.heads), positions)
        k = rotate(split(self.k_proj(x), self.kv_heads), positions).repeat_interleave(repeat, dim=1)
        v = split(self.v_proj(x), self.kv_heads).repeat_interleave(repeat, dim=1)
        return q, k, v

    def merge(self, y: Tensor) -> Tensor:
        batch, _, length, _ = y.shape
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """Gated SiLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        hidden = shape["hidden"]
        self.self_attn = Attention(hidden, hidden, shape["heads"], shape["kv_heads"])
        self.mlp = Mlp(hidden, shape["intermediate"])
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        x = x + self.self_attn.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and last norm, under the names of their checkpoint."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, shape["hidden"])
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape["layers"]))
        self.norm = Norm(shape["hidden"])


class Llama(nn.Module):
    """LlamaForCausalLM; its forward also gives what an EAGLE3 draft reads, [batch, length, 3 * hidden]."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.model = Backbone(shape)
        self.lm_head = nn.Linear(shape["hidden"], VOCABULARY, bias=False)
        initialise(self, shape["layers"])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.model.embed_tokens(tokens)
        aux = []
        for number, layer in enumerate(self.model.layers):
            if number in AUX_LAYERS:
                aux.append(x)
            x = layer(x, positions)
        return self.lm_head(self.model.norm(x)), torch.cat(aux, dim=-1) if aux else x


class DraftLayer(Layer):
    """The one layer of an EAGLE3 draft: attention over an embedding and a hidden state side by side."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__(shape)
        hidden = shape["hidden"]
        self.self_attn = Attention(2 * hidden, hidden, shape["heads"], shape["kv_heads"])
        self.hidden_norm = Norm(hidden)


class Eagle3(nn.Module):
    """LlamaForCausalLMEagle3 of one layer, with the target's embedding and a head of its own.

    Row p takes the hidden states of token p and the embedding of token p + 1, at position p, and
    predicts token p + 2. While drafting, the next row takes the last row's output instead.
    """

    def __init__(self, shape: dict[str, int], embedding: nn.Embedding) -> None:
        super().__init__()
        hidden = shape["hidden"]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = Norm(hidden)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)
        initialise(self, 1)
        self.embed: Callable[[Tensor], Tensor] = lambda tokens: embedding(tokens).detach()

    def forward(self, tokens: Tensor, aux: Tensor) -> list[Tensor]:
        """Logits of each draft step, UNROLL of [batch, rows, VOCABULARY]; row p of step j predicts token p + 2 + j.

        Rows of a later step attend to the first step's rows up to their own start, which saw the
        target's hidden states, and to the earlier steps of their own chain: as when serving.
        """
        rows = tokens.shape[1] - 1 - UNROLL
        layer, attention = self.midlayer, self.midlayer.self_attn
        hidden = self.fc(aux[:, :rows])
        first = torch.arange(rows, device=tokens.device)
        hides = torch.ones(rows, rows, dtype=torch.bool, device=tokens.device).triu(1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(UNROLL):
            embedded = self.embed(tokens[:, 1 + step : 1 + step + rows])
            x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
            q, k, v = attention.project(x, first + step)
            keys.append(k)
            values.append(v)
            scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(hides, float("-inf"))
            own = [(q * keys[i]).sum(-1, keepdim=True).float() for i in range(1, step + 1)]
            weights = (torch.cat([scores, *own], dim=-1) * HEAD_DIM**-0.5).softmax(-1).to(v.dtype)
            y = weights[..., :rows] @ values[0]
            for i in range(1, step + 1):
                y = y + weights[..., rows + i - 1, None] * values[i]
            hidden = hidden + attention.merge(y)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def initialise(model: nn.Module, layers: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 0.02 / math.sqrt(2 * layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            nn.init.normal_(parameter, std=scale)


# -- training --


def train(
    name: str, model: nn.Module, loss_of: Callable[[], Tensor], seconds: float, rate: float, say_every: float = 10.0
) -> dict[str, Any]:
    """Minimise ``loss_of()`` for ``seconds``; returns steps, seconds and the last losses in bits."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
        ],
        lr=rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda,
    )  # fmt: skip
    begun = said = time.monotonic()
    steps, losses = 0, []
    while (elapsed := time.monotonic() - begun) < seconds or steps < 3:
        progress = min(elapsed / seconds, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate * min((steps + 1) / 100, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        loss = loss_of()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        steps += 1
        if steps % 20 == 0 or steps < 3:
            losses.append(loss.item() / math.log(2))
            if time.monotonic() - said > say_every:
                said = time.monotonic()
                print(f"{name}: {elapsed:.0f} s, step {steps}, {np.mean(losses[-5:]):.3f} bits", flush=True)
    return {
        "steps": steps,
        "seconds": round(time.monotonic() - begun, 1),
        "bits": round(float(np.mean(losses[-10:])), 4),
    }


def against(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy in nats of ``logits`` to the distribution of ``teacher`` logits, mean over all rows."""
    return -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
def evaluate(target: Llama, eagle: Eagle3, standalone: Llama, batches: Iterator[Tensor], cast: Any) -> dict[str, Any]:
    """Bits per byte of the target and how often the drafts' first choice is the target's, on unseen text."""
    bits, agree, alone = [], [], []
    for tokens in batches:
        with cast():
            logits, aux = target(tokens)
            steps = eagle(tokens, aux)
            other, _ = standalone(tokens)
        bits.append(F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()).item() / math.log(2))
        best = logits.argmax(-1)
        rows = steps[0].shape[1]
        agree.append(
            [(s.argmax(-1) == best[:, 1 + j : 1 + j + rows]).float().mean().item() for j, s in enumerate(steps)]
        )
        alone.append((other.argmax(-1) == best).float().mean().item())
    return {
        "bits_per_byte": round(float(np.mean(bits)), 4),
        "eagle3_agreement_by_step": [round(float(x), 4) for x in np.mean(agree, axis=0)],
        "standalone_agreement": round(float(np.mean(alone)), 4),
    }


# -- checkpoints --


def config_of(shape: dict[str, int], architecture: str) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": [architecture], "hidden_act": "silu", "vocab_size": VOCABULARY,
        "hidden_size": shape["hidden"], "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "head_dim": HEAD_DIM, "max_position_embeddings": 8192,
        "rope_theta": ROPE_THETA, "rms_norm_eps": NORM_EPS, "initializer_range": 0.02, "torch_dtype": "bfloat16",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 510,
        "eos_token_id": 511,
    }  # fmt: skip


def save(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Write config.json and model.safetensors, every tensor in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, tensor in model.state_dict().items():
        data = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


# -- does SGLang take it? --


def check(folder: Path, attention: str) -> int:
    """Serve target and EAGLE3 draft, 64 greedy prompts of unseen text; write the acceptance length."""
    import sglang

    prompts = json.loads((folder / "prompts.json").read_text())[:64]
    engine = sglang.Engine(
        model_path=str(folder / "target"), load_format="safetensors", skip_tokenizer_init=True,
        attention_backend=attention, sampling_backend="pytorch", grammar_backend="none",
        disable_prefill_cuda_graph=True, cuda_graph_bs_decode=[1, 16, 64], max_running_requests=64,
        mem_fraction_static=0.3, disable_radix_cache=True, random_seed=1, log_level="warning",
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(folder / "eagle3"),
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4,
    )  # fmt: skip
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in answers]
    found = {"attention": attention, "sglang": sglang.__version__, "steps": 3, "prompts": len(prompts),
             "accept_length": round(float(np.mean(lengths)), 3), "least": min(lengths), "most": max(lengths),
             "prompt": bytes(prompts[0]).decode(errors="replace"),
             "answer": bytes(t for t in answers[0]["output_ids"] if t < 256).decode(errors="replace")}  # fmt: skip
    (folder / "check.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)
    engine.shutdown()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=170.0, help="training time of all three together")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", metavar="ATTENTION", help="serve the pair in OUT instead of training it")
    args = parser.parse_args()
    if args.check:
        return check(args.out, args.check)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device).manual_seed(args.seed)
    begun = time.monotonic()
    data = gather_text(args.seed)
    cut = int(len(data) * 0.98)
    seen, unseen = (torch.from_numpy(part.copy()).to(device) for part in (data[:cut], data[cut:]))
    print(f"{len(data) / 1e6:.0f} MB of text after {time.monotonic() - begun:.0f} s, on {device}", flush=True)

    def cast() -> Any:
        return torch.autocast(device, torch.bfloat16)

    target = Llama(TARGET).to(device)
    report: dict[str, Any] = {"text_megabytes": round(len(data) / 1e6, 1), "device": device,
                              "parameters": sum(p.numel() for p in target.parameters())}  # fmt: skip

    def target_loss() -> Tensor:
        tokens = windows(seen, args.batch, args.length, generator)
        with cast():
            logits, _ = target(tokens)
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())

    report["target"] = train("target", target, target_loss, args.seconds * SHARES["target"], 3e-3)
    target.to(torch.bfloat16).float()  # the drafts learn from the weights that will be served
    for parameter in target.parameters():
        parameter.requires_grad_(False)
    save(args.out / "target", target, config_of(TARGET, "LlamaForCausalLM"))

    eagle = Eagle3(TARGET, target.model.embed_tokens).to(device)

    def eagle_loss() -> Tensor:
        tokens = windows(seen, max(args.batch // 2, 1), args.length // 2, generator)
        with cast():
            with torch.no_grad():
                teacher, aux = target(tokens)
            steps = eagle(tokens, aux)
        rows = steps[0].shape[1]
        weights = [0.8**j for j in range(UNROLL)]
        losses = [
            w * against(s, teacher[:, 1 + j : 1 + j + rows])
            for j, (w, s) in enumerate(zip(weights, steps, strict=True))
        ]
        return torch.stack(losses).sum() / sum(weights)

    report["eagle3"] = train("eagle3", eagle, eagle_loss, args.seconds * SHARES["eagle3"], 2e-3)
    draft = config_of(TARGET, "LlamaForCausalLMEagle3") | {"num_hidden_layers": 1, "draft_vocab_size": VOCABULARY}
    save(args.out / "eagle3", eagle, draft)

    standalone = Llama(STANDALONE).to(device)

    def standalone_loss() -> Tensor:
        tokens = windows(seen, args.batch, args.length // 2, generator)
        with cast():
            with torch.no_grad():
                teacher, _ = target(tokens)
            logits, _ = standalone(tokens)
        return against(logits, teacher)

    report["standalone"] = train("standalone", standalone, standalone_loss, args.seconds * SHARES["standalone"], 3e-3)
    save(args.out / "standalone", standalone, config_of(STANDALONE, "LlamaForCausalLM"))

    held_out = (windows(unseen, max(args.batch // 4, 1), args.length // 2, generator) for _ in range(8))
    report["unseen"] = evaluate(target, eagle, standalone, held_out, cast)
    choose = random.Random(args.seed)
    lengths = [choose.randrange(16, 400) for _ in range(600)]
    starts = [choose.randrange(0, len(unseen) - 400) for _ in lengths]
    text = unseen.cpu().numpy()
    prompts = [text[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
    (args.out / "prompts.json").write_text(json.dumps(prompts))
    report["seconds"] = round(time.monotonic() - begun, 1)
    (args.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
