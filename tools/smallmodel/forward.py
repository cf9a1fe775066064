"""The forward pass in f32 numpy: what the conversion looks at and what the evaluation measures.

Owns norm, rotary embedding, causal attention, gated FFN and the glm4_moe routing rule. Refuses nothing: shapes
were checked when the weights were read. Hidden states are [n_rows, n_positions, hidden]; rows are independent
sequences that start at position 0, so that a layer at a time can be applied to all of them.
"""

from __future__ import annotations

import numpy as np

from smallmodel.layout import TOP_K, Attention, FeedForward, FloatArray, IntArray, Layer, Moe, Router, Shape


def rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """x * weight / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich 2019)."""
    scale = 1.0 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    return np.asarray(x * scale * weight, dtype=np.float32)


def rotary_tables(n_positions: int, shape: Shape) -> tuple[FloatArray, FloatArray]:
    """cos and sin, each [n_positions, head_dim/2], of the rotary embedding (Su et al. 2021)."""
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    angles = np.outer(np.arange(n_positions, dtype=np.float64), shape.rope_theta**-exponents)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: FloatArray, tables: tuple[FloatArray, FloatArray]) -> FloatArray:
    """Rotary embedding of x [n_rows, n_positions, n_heads, head_dim] whose pairs are (i, i + head_dim/2)."""
    low, high = np.split(x, 2, axis=-1)
    cos, sin = (table[:, None, :] for table in tables)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attention_output(weights: Attention, x: FloatArray, shape: Shape) -> FloatArray:
    """Causal grouped-query attention of x [n_rows, n_positions, hidden] -> the same shape."""
    n_rows, n_positions = x.shape[:2]

    def heads(weight: FloatArray) -> FloatArray:
        return (x @ weight.T).reshape(n_rows, n_positions, -1, shape.head_dim)

    tables = rotary_tables(n_positions, shape)
    q, k, v = rotate(heads(weights.q), tables), rotate(heads(weights.k), tables), heads(weights.v)
    future = np.triu(np.full((n_positions, n_positions), -np.inf, dtype=np.float32), 1)
    mixed = np.empty_like(q)
    for row in range(n_rows):
        mixed[row] = _attend_row(q[row], k[row], v[row], future)
    return np.asarray(mixed.reshape(n_rows, n_positions, -1) @ weights.o.T, dtype=np.float32)


def _attend_row(q: FloatArray, k: FloatArray, v: FloatArray, future: FloatArray) -> FloatArray:
    """softmax(q k^T / sqrt(head_dim) + future) v per head; [n_positions, n_heads or n_kv_heads, head_dim].

    The query heads that share a key head are stacked into one matrix: fewer and larger products."""
    n_positions, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    stacked = q.transpose(1, 0, 2).reshape(n_kv_heads, -1, head_dim)
    scores = np.matmul(stacked, k.transpose(1, 2, 0)) * np.float32(head_dim**-0.5)
    scores = scores.reshape(n_heads, n_positions, n_positions) + future
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = np.matmul(scores.reshape(n_kv_heads, -1, n_positions), v.transpose(1, 0, 2))
    return np.asarray(mixed.reshape(n_heads, n_positions, head_dim).transpose(1, 0, 2), dtype=np.float32)


def add_attention(layer: Layer, hidden: FloatArray, shape: Shape) -> None:
    """Add the layer's attention output to `hidden` [n_rows, n_positions, hidden] in place."""
    hidden += attention_output(layer.attention, rms_norm(hidden, layer.attention_norm, shape.rms_norm_eps), shape)


def ffn_activations(ffn: FeedForward, x: FloatArray) -> FloatArray:
    """silu(gate @ x) * (up @ x) for x [n_tokens, hidden] -> [n_tokens, width]."""
    gate = x @ ffn.gate.T
    # exp overflows to infinity for very negative inputs, and gate / inf is the right answer, -0.
    with np.errstate(over="ignore"):
        gate /= 1.0 + np.exp(-gate)
    gate *= x @ ffn.up.T
    return gate


def ffn_output(ffn: FeedForward, x: FloatArray) -> FloatArray:
    """The FFN's output for x [n_tokens, hidden] -> the same shape."""
    return ffn_activations(ffn, x) @ ffn.down.T


def router_scores(router: Router, x: FloatArray) -> FloatArray:
    """sigmoid(weight @ x): [n_tokens, n_experts]."""
    return np.asarray(1.0 / (1.0 + np.exp(-(x @ router.weight.T))), dtype=np.float32)


def routing_weights(scores: FloatArray, bias: FloatArray) -> FloatArray:
    """[n_tokens, n_experts] weights, 0 where an expert is not among the token's TOP_K.

    The rule of DeepSeek-V3 (2024, section 2.1.2) with one group, as glm4_moe uses it: the bias takes part in the
    choice only; the weights are the chosen scores divided by their sum plus 1e-20.
    """
    chosen = top_experts(scores + bias)
    picked = np.take_along_axis(scores, chosen, axis=1)
    picked = picked / (picked.sum(axis=1, keepdims=True) + np.float32(1e-20))
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, picked, axis=1)
    return weights


def top_experts(scores: FloatArray) -> IntArray:
    """Indexes of the TOP_K greatest scores of each row, in no particular order: [n_tokens, TOP_K]."""
    return np.argpartition(scores, -TOP_K, axis=1)[:, -TOP_K:]


def moe_output(moe: Moe, x: FloatArray, expert_order: IntArray | None = None) -> FloatArray:
    """shared(x) + sum of weight * expert(x) over the chosen experts, for x [n_tokens, hidden].

    `expert_order`, a permutation, sends the tokens of expert e to expert expert_order[e]: a deliberately wrong
    routing with the right load, by which the evaluation shows that the routing matters.
    """
    weights = routing_weights(router_scores(moe.router, x), moe.router.bias)
    out = ffn_output(moe.shared, x)
    for e in range(len(moe.experts)):
        tokens = np.flatnonzero(weights[:, e])
        expert = moe.experts[e if expert_order is None else int(expert_order[e])]
        out[tokens] += weights[tokens, e : e + 1] * ffn_output(expert, x[tokens])
    return out


def apply_layer(layer: Layer, hidden: FloatArray, shape: Shape, expert_order: IntArray | None = None) -> None:
    """Run one layer over `hidden` [n_rows, n_positions, hidden] in place."""
    add_attention(layer, hidden, shape)
    x = rms_norm(hidden, layer.ffn_norm, shape.rms_norm_eps).reshape(-1, shape.hidden_size)
    out = ffn_output(layer.ffn, x) if isinstance(layer.ffn, FeedForward) else moe_output(layer.ffn, x, expert_order)
    hidden += out.reshape(hidden.shape)
