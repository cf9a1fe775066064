"""Checkpoints for tests: the field reports' TQ and TD, and tiny random models of every family made by transformers.

TQ (softmax router, a Qwen3-MoE) and TD (sigmoid router, a GLM-4-MoE) are written tensor by tensor with the safetensors
library, so that a test can bend one thing. `tiny_checkpoint` goes through transformers' own save_pretrained: what it
writes is what the hub has.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from testkit.tiny_tokenizer import write_tokenizer

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

INDEX = "model.safetensors.index.json"

_BASE_CONFIG: Config = {
    "attention_bias": False,
    "bos_token_id": 123,
    "dtype": "bfloat16",
    "eos_token_id": 124,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}

TQ_CONFIG: Config = {
    **_BASE_CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
}

TD_CONFIG: Config = {
    **_BASE_CONFIG,
    "architectures": ["Glm4MoeForCausalLM"],
    "first_k_dense_replace": 1,
    "model_type": "glm4_moe",
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
    "use_qk_norm": False,
}


class _Filler:
    """Random tensors from one seed, in bf16 unless told otherwise."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).mul(0.1).to(dtype)


def tq_tensors(config: Mapping[str, Any] = TQ_CONFIG, seed: int = 1) -> Tensors:
    """The tensors of a Qwen3-MoE with `config`."""
    fill = _Filler(seed)
    tensors = _trunk(fill, config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= _attention(fill, config, prefix)
        tensors[f"{prefix}self_attn.q_norm.weight"] = fill(config["head_dim"])
        tensors[f"{prefix}self_attn.k_norm.weight"] = fill(config["head_dim"])
        tensors |= _experts(fill, config, prefix, config["num_experts"])
    return tensors


def td_tensors(config: Mapping[str, Any] = TD_CONFIG, seed: int = 2, layers: Sequence[int] = (0, 1)) -> Tensors:
    """The tensors of a GLM-4-MoE with `config`, for the given layers."""
    fill = _Filler(seed)
    hidden = config["hidden_size"]
    tensors = _trunk(fill, config)
    for layer in layers:
        prefix = f"model.layers.{layer}."
        tensors |= _attention(fill, config, prefix)
        if layer < config["first_k_dense_replace"]:
            tensors |= _gated(fill, f"{prefix}mlp.", hidden, config["intermediate_size"])
            continue
        tensors |= _experts(fill, config, prefix, config["n_routed_experts"])
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        tensors |= _gated(fill, f"{prefix}mlp.shared_experts.", hidden, shared)
        bias = fill(config["n_routed_experts"], dtype=torch.float32)
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = bias
    return tensors


def mtp_tensors(config: Mapping[str, Any] = TD_CONFIG, seed: int = 3) -> Tensors:
    """What GLM adds at layer num_hidden_layers for multi-token prediction, a whole decoder layer among it."""
    fill = _Filler(seed)
    hidden, vocab, layer = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    prefix = f"model.layers.{layer}."
    tensors = {
        name: tensor for name, tensor in td_tensors(config, seed, [layer]).items() if name.startswith("model.layers.")
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = fill(hidden)
    tensors[f"{prefix}eh_proj.weight"] = fill(hidden, 2 * hidden)
    tensors[f"{prefix}embed_tokens.weight"] = fill(vocab, hidden)
    tensors[f"{prefix}shared_head.head.weight"] = fill(vocab, hidden)
    return tensors


def fused(tensors: Tensors) -> Tensors:
    """The same model with gate_up_proj and down_proj fused over the experts of each layer (transformers' own form)."""
    result = dict(tensors)
    blocks = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
    for block in blocks:
        experts = sorted(
            {int(name.split(".experts.")[1].split(".")[0]) for name in tensors if name.startswith(block + ".ex")}
        )
        parts = [
            [result.pop(f"{block}.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in experts
        ]
        result[f"{block}.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts])
        result[f"{block}.experts.down_proj"] = torch.stack([down for _, _, down in parts])
    return result


def _trunk(fill: _Filler, config: Mapping[str, Any]) -> Tensors:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    return {
        "model.embed_tokens.weight": fill(vocab, hidden),
        "model.norm.weight": fill(hidden),
        "lm_head.weight": fill(vocab, hidden),
    }


def _attention(fill: _Filler, config: Mapping[str, Any], prefix: str) -> Tensors:
    hidden = config["hidden_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{prefix}input_layernorm.weight": fill(hidden),
        f"{prefix}post_attention_layernorm.weight": fill(hidden),
        f"{prefix}self_attn.q_proj.weight": fill(q_rows, hidden),
        f"{prefix}self_attn.k_proj.weight": fill(kv_rows, hidden),
        f"{prefix}self_attn.v_proj.weight": fill(kv_rows, hidden),
        f"{prefix}self_attn.o_proj.weight": fill(hidden, q_rows),
    }


def _gated(fill: _Filler, prefix: str, hidden: int, width: int) -> Tensors:
    return {
        f"{prefix}gate_proj.weight": fill(width, hidden),
        f"{prefix}up_proj.weight": fill(width, hidden),
        f"{prefix}down_proj.weight": fill(hidden, width),
    }


def _experts(fill: _Filler, config: Mapping[str, Any], prefix: str, experts: int) -> Tensors:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    tensors = {f"{prefix}mlp.gate.weight": fill(experts, hidden)}
    for expert in range(experts):
        tensors |= _gated(fill, f"{prefix}mlp.experts.{expert}.", hidden, width)
    return tensors


def split(tensors: Tensors, shards: int) -> list[Tensors]:
    """Deal the tensors out over `shards` files, in name order, round robin."""
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[shard::shards]} for shard in range(shards)]


def shard_name(number: int, shards: int) -> str:
    """The hub's usual name of shard `number`, counted from 0."""
    return f"model-{number + 1:05d}-of-{shards:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index that places each tensor in a file."""
    content = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (folder / INDEX).write_text(json.dumps(content))


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, *, shards: int = 2, tokenizer: bool = True
) -> Path:
    """Write a checkpoint of `shards` files with index, or one file without if `shards` is 1; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if tokenizer:
        write_tokenizer(folder, 128)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for number, part in enumerate(split(tensors, shards)):
        save_file(part, folder / shard_name(number, shards), metadata={"format": "pt"})
        weight_map |= {name: shard_name(number, shards) for name in part}
    write_index(folder, weight_map)
    return folder


def write_tq(folder: Path, **config: Any) -> Path:
    """Write TQ with config keys replaced."""
    merged = {**TQ_CONFIG, **config}
    return write_checkpoint(folder, merged, tq_tensors(merged))


def write_td(folder: Path, **config: Any) -> Path:
    """Write TD with config keys replaced."""
    merged = {**TD_CONFIG, **config}
    return write_checkpoint(folder, merged, td_tensors(merged))


# ---- tiny models by transformers -------------------------------------------------------------------------------------

TINY_TOKENIZER_SIZE = 137
TINY_VOCAB_SIZE = 139  # two rows without a string

_TINY_COMMON: Config = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "pad_token_id": None,
    "bos_token_id": 132,
    "eos_token_id": 133,
}

# Odd sizes, none of them equal by accident; every option that a family has is switched on.
TINY_CONFIGS: dict[str, Config] = {
    "mixtral": {
        **_TINY_COMMON,
        "head_dim": 14,
        "intermediate_size": 44,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "qwen2_moe": {
        **_TINY_COMMON,
        "head_dim": 14,
        "intermediate_size": 92,
        "moe_intermediate_size": 44,
        "shared_expert_intermediate_size": 52,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_moe": {
        **_TINY_COMMON,
        "head_dim": 14,
        "intermediate_size": 92,
        "moe_intermediate_size": 44,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmoe": {
        **_TINY_COMMON,
        "intermediate_size": 44,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "clip_qkv": 1.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4_moe": {
        **_TINY_COMMON,
        "head_dim": 12,
        "intermediate_size": 92,
        "moe_intermediate_size": 44,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.75,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
TINY_FAMILIES = tuple(TINY_CONFIGS)

GREEDY_TOKENS = 32
MIN_DISTINCT = 6


def tiny_checkpoint(family: str, folder: Path, seed: int = 0, *, dtype: str = "float32", **overrides: Any) -> Path:
    """Write a tiny random model of `family` with a tokenizer, as transformers saves it, over several shards.

    `overrides` replace config keys. Raises ValueError if the model's greedy output is (nearly) one repeated token: such
    a model would let a broken forward pass through.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**TINY_CONFIGS[family], **overrides})
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    _randomise(model, seed)
    _round(model, getattr(torch, dtype))
    distinct = len(set(greedy_tokens(model, config.vocab_size)))
    if distinct < MIN_DISTINCT:
        raise ValueError(
            f"{family} seed {seed}: {GREEDY_TOKENS} greedy tokens with {distinct} distinct ones; take another"
        )
    _store_as(model, getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="120KB")
    write_tokenizer(folder, TINY_TOKENIZER_SIZE)
    return folder


def greedy_tokens(model: Any, vocab_size: int, count: int = GREEDY_TOKENS) -> list[int]:
    """The `count` ids that `model` continues a fixed prompt of nine tokens with."""
    tokens = [(7 * index + 3) % vocab_size for index in range(9)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread costs more than it gives at these sizes
    try:
        with torch.inference_mode():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    finally:
        torch.set_num_threads(threads)
    return tokens[-count:]


def _randomise(model: Any, seed: int) -> None:
    """Weights at which every part of the model matters: norms differ from 1, routers decide, biases bite."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "embed_tokens" in name:
                tensor.copy_(noise)
            elif tensor.ndim == 1:
                tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
            else:
                gain = 2.0 if "lm_head" in name or name.endswith("mlp.gate.weight") else 1.2
                tensor.copy_(noise * (gain / math.sqrt(tensor.shape[-1])))


def _kept_in_f32(name: str) -> bool:
    return "inv_freq" in name or "e_score_correction_bias" in name  # as the hub's checkpoints have it


def _round(model: Any, dtype: torch.dtype) -> None:
    """Round the weights to `dtype`; they stay f32, in which transformers can run any size."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not _kept_in_f32(name):
                tensor.copy_(tensor.to(dtype))


def _store_as(model: Any, dtype: torch.dtype) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _kept_in_f32(name):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
