"""Shapes of the dense source and of the MoE made from it, and the checkpoint's tensor names.

Owns every number that defines the small model. Refuses a source whose shape is not the expected one. Everything
else in this package takes its shapes from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

N_EXPERTS = 16
TOP_K = 4
EXPERT_WIDTH = 256
"""Neurons of one routed expert (`moe_intermediate_size`)."""
N_SHARED_EXPERTS = 3
SHARED_WIDTH = N_SHARED_EXPERTS * EXPERT_WIDTH
N_DENSE_LAYERS = 1
"""Leading layers that keep the dense FFN (`first_k_dense_replace`)."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of the dense model; attention and embeddings of the MoE are the same."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float

    def check(self) -> None:
        """Raise ValueError unless the neurons suffice for the shared expert plus one routed expert."""
        if self.ffn_size < SHARED_WIDTH + EXPERT_WIDTH:
            raise ValueError(f"ffn_size {self.ffn_size} is less than shared {SHARED_WIDTH} + expert {EXPERT_WIDTH}")
        if self.n_layers <= N_DENSE_LAYERS or self.n_heads % self.n_kv_heads or self.head_dim % 2:
            raise ValueError(f"the source model has a shape that this tool does not convert: {self}")


@dataclass(frozen=True)
class FeedForward:
    """A gated FFN: down @ (silu(gate @ x) * (up @ x)). gate, up [width, hidden]; down [hidden, width]; f32."""

    gate: FloatArray
    up: FloatArray
    down: FloatArray


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention without biases. q [n_heads*head_dim, hidden], k, v [n_kv_heads*head_dim, hidden],
    o [hidden, n_heads*head_dim]; f32; q and k in the half-split rotary layout of Hugging Face."""

    q: FloatArray
    k: FloatArray
    v: FloatArray
    o: FloatArray


@dataclass(frozen=True)
class Router:
    """weight [n_experts, hidden] and score-correction bias [n_experts], f32."""

    weight: FloatArray
    bias: FloatArray


@dataclass(frozen=True)
class Moe:
    """One shared expert of SHARED_WIDTH neurons and N_EXPERTS routed ones of EXPERT_WIDTH."""

    router: Router
    shared: FeedForward
    experts: tuple[FeedForward, ...]


@dataclass(frozen=True)
class Layer:
    """One transformer layer; norms are [hidden] f32."""

    attention_norm: FloatArray
    attention: Attention
    ffn_norm: FloatArray
    ffn: FeedForward | Moe


def layer_prefix(layer_index: int) -> str:
    """Name prefix of a layer's tensors, with the trailing dot."""
    return f"model.layers.{layer_index}."


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the MoE checkpoint in the order it is stored, with its shape."""
    yield EMBEDDING, (shape.vocab_size, shape.hidden_size)
    for i in range(shape.n_layers):
        for name, dims in _layer_shapes(shape, i):
            yield layer_prefix(i) + name, dims
    yield FINAL_NORM, (shape.hidden_size,)


def _layer_shapes(shape: Shape, layer_index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, q, kv = shape.hidden_size, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, dims in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
        yield f"self_attn.{name}_proj.weight", dims
    yield "post_attention_layernorm.weight", (hidden,)
    if layer_index < N_DENSE_LAYERS:
        yield from _ffn_shapes("mlp.", hidden, shape.ffn_size)
        return
    yield "mlp.gate.weight", (N_EXPERTS, hidden)
    yield "mlp.gate.e_score_correction_bias", (N_EXPERTS,)
    yield from _ffn_shapes("mlp.shared_experts.", hidden, SHARED_WIDTH)
    for e in range(N_EXPERTS):
        yield from _ffn_shapes(f"mlp.experts.{e}.", hidden, EXPERT_WIDTH)


def _ffn_shapes(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in PROJECTIONS:
        yield f"{prefix}{name}_proj.weight", (hidden, width) if name == "down" else (width, hidden)


def layer_tensors(layer: Layer) -> Iterator[tuple[str, FloatArray]]:
    """A layer's tensors under their names without the layer prefix, in stored order."""
    yield "input_layernorm.weight", layer.attention_norm
    for name in "qkvo":
        yield f"self_attn.{name}_proj.weight", getattr(layer.attention, name)
    yield "post_attention_layernorm.weight", layer.ffn_norm
    if isinstance(layer.ffn, FeedForward):
        yield from _ffn_tensors("mlp.", layer.ffn)
        return
    yield "mlp.gate.weight", layer.ffn.router.weight
    yield "mlp.gate.e_score_correction_bias", layer.ffn.router.bias
    yield from _ffn_tensors("mlp.shared_experts.", layer.ffn.shared)
    for e, expert in enumerate(layer.ffn.experts):
        yield from _ffn_tensors(f"mlp.experts.{e}.", expert)


def _ffn_tensors(prefix: str, ffn: FeedForward) -> Iterator[tuple[str, FloatArray]]:
    for name in PROJECTIONS:
        yield f"{prefix}{name}_proj.weight", getattr(ffn, name)


def config_json(shape: Shape) -> dict[str, object]:
    """config.json of the MoE checkpoint, in the keys that GLM-4.5 checkpoints use."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_qk_norm": False,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_routed_experts": N_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": N_SHARED_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": N_DENSE_LAYERS,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
