"""A slice as GGUF: the same shape, the same routing and the same bits per class of tensor as giant.py's container.

Experts are Q4_0 (4.5 bits per weight, as int4 in groups of 64 with scale and minimum), the rest Q8_0, norms and router
F32. Owns the file only; what the numbers are comes from giant_weights.py, the sizes of blocks from the gguf package.
Only the qwen3moe architecture, which both engines run alike. Memory is bounded by one layer's stacked matrix.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from giant import Shape, dense_shapes
from giant_weights import OUTPUT_ROLES, embedding_rows, output_gain, router_rows

from colibri.v1 import manifest_pb2 as pb

U8 = npt.NDArray[np.uint8]
Q4, Q8, PLAIN = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
_CODE_STD = {Q4: float(np.sqrt(255 / 12)), Q8: float(np.sqrt(255**2 / 12))}

NAMES = {
    pb.TENSOR_ROLE_EMBEDDING: "token_embd.weight",
    pb.TENSOR_ROLE_HEAD: "output.weight",
    pb.TENSOR_ROLE_FINAL_NORM: "output_norm.weight",
    pb.TENSOR_ROLE_ATTENTION_NORM: "blk.{layer}.attn_norm.weight",
    pb.TENSOR_ROLE_Q: "blk.{layer}.attn_q.weight",
    pb.TENSOR_ROLE_K: "blk.{layer}.attn_k.weight",
    pb.TENSOR_ROLE_V: "blk.{layer}.attn_v.weight",
    pb.TENSOR_ROLE_O: "blk.{layer}.attn_output.weight",
    pb.TENSOR_ROLE_Q_NORM: "blk.{layer}.attn_q_norm.weight",
    pb.TENSOR_ROLE_K_NORM: "blk.{layer}.attn_k_norm.weight",
    pb.TENSOR_ROLE_FFN_NORM: "blk.{layer}.ffn_norm.weight",
    pb.TENSOR_ROLE_ROUTER: "blk.{layer}.ffn_gate_inp.weight",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file: its name, type, shape (outermost first) and the function that makes its bytes."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    make: Callable[[], npt.NDArray[np.generic]]


def _byte_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    block, size = GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // block * size)


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, gain: float, rng: np.random.Generator) -> U8:
    """Random blocks of Q4_0 or Q8_0 whose weights have standard deviation gain / sqrt(inputs)."""
    _, size = GGML_QUANT_SIZES[kind]
    data = np.frombuffer(rng.bytes(int(np.prod(_byte_shape(shape, kind)))), np.uint8).reshape(-1, size).copy()
    scale = np.float16(gain / np.sqrt(shape[-1]) / _CODE_STD[kind])
    data[:, :2] = np.array([scale], "<f2").view(np.uint8)
    return data.reshape(_byte_shape(shape, kind))


def _tensors(shape: Shape, seed: int) -> Iterator[Tensor]:
    spec = shape.spec()
    gain = output_gain(len(spec.layers))
    rng = np.random.default_rng([seed, 8])

    def blocks(size: tuple[int, ...], kind: GGMLQuantizationType, by: float) -> Callable[[], npt.NDArray[np.generic]]:
        return lambda: random_blocks(size, kind, by, rng)

    for role, layer, name, rows, cols in dense_shapes(spec):
        title = NAMES[role].format(layer=layer)
        if role == pb.TENSOR_ROLE_EMBEDDING:
            yield Tensor(title, Q8, (rows, cols), partial(_embedding, shape, seed))
        elif role == pb.TENSOR_ROLE_ROUTER:
            yield Tensor(title, PLAIN, (rows, cols), partial(router_rows, shape, seed, layer))
        elif name == "exact":
            yield Tensor(title, PLAIN, (cols,), partial(np.ones, cols, np.float32))
        else:
            yield Tensor(title, Q8, (rows, cols), blocks((rows, cols), Q8, gain if role in OUTPUT_ROLES else 1.0))
    for layer in range(len(spec.layers)):
        for matrix, rows, cols, by in (
            ("gate", shape.intermediate, shape.hidden, 1.0),
            ("up", shape.intermediate, shape.hidden, 1.0),
            ("down", shape.hidden, shape.intermediate, gain),
        ):
            size = (shape.experts, rows, cols)
            yield Tensor(f"blk.{layer}.ffn_{matrix}_exps.weight", Q4, size, blocks(size, Q4, by))


def _embedding(shape: Shape, seed: int) -> npt.NDArray[np.generic]:
    parts = []
    for first in range(0, shape.vocab, 256):
        parts.append(quantize(embedding_rows(shape, seed, first, min(256, shape.vocab - first)), Q8))
    whole: U8 = np.concatenate(parts)
    return whole


def write_gguf(shape: Shape, path: Path, seed: int = 1) -> None:
    """Write the slice to `path`. Raises ValueError for a shape that is not Qwen3-MoE's or has dense layers."""
    if shape.family != "qwen3_moe" or shape.dense_layers:
        raise ValueError(f"{shape.name}: only Qwen3-MoE without dense layers is written as GGUF")
    print(f"making {shape.name} as GGUF (once)", file=sys.stderr, flush=True)
    unfinished = path.with_name(path.name + ".partial")
    writer = GGUFWriter(unfinished, "qwen3moe")
    writer.add_name(shape.name)
    writer.add_block_count(shape.moe_layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.dense_intermediate)
    writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")  # the benchmark feeds token ids
    tensors = list(_tensors(shape, seed))
    for tensor in tensors:
        byte_shape = _byte_shape(tensor.shape, tensor.kind)
        if tensor.kind == PLAIN:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), 4 * int(np.prod(tensor.shape)))
        else:
            writer.add_tensor_info(tensor.name, byte_shape, np.dtype(np.uint8), int(np.prod(byte_shape)), tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
    writer.close()
    unfinished.rename(path)
