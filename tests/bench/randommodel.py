"""Random checkpoints of real dimensions, for speed only: the numbers mean nothing, the shapes are those of the model.

Values are Gaussian (standard deviation 0.02), cut from one pool of random bf16 so that writing is as fast as the drive.
The checkpoint is packed into a container under the benchmark cache and deleted; later runs reuse the container.
"""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from report import cache_folder

from testkit.tiny_tokenizer import write_tokenizer

POOL_VALUES = 1 << 25


@dataclass(frozen=True)
class OlmoeShape:
    """The fields of an olmoe config that decide its size."""

    layers: int = 16
    hidden: int = 2048
    intermediate: int = 1024
    heads: int = 16
    experts: int = 64
    top_k: int = 8
    vocab: int = 50304
    positions: int = 8192

    @property
    def name(self) -> str:
        return f"olmoe-shaped-{self.layers}x{self.experts}-{self.hidden}"


def _pool(seed: int) -> np.ndarray:
    """[POOL_VALUES] u2: bf16 bits of Gaussian values."""
    values = np.random.default_rng(seed).standard_normal(POOL_VALUES, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _tensors(shape: OlmoeShape) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """One list of (name, shape) per shard."""
    yield [
        ("model.embed_tokens.weight", (shape.vocab, shape.hidden)),
        ("model.norm.weight", (shape.hidden,)),
        ("lm_head.weight", (shape.vocab, shape.hidden)),
    ]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        shard: list[tuple[str, tuple[int, ...]]] = [
            (f"{prefix}{norm}.weight", (shape.hidden,)) for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        shard += [(f"{prefix}self_attn.{norm}.weight", (shape.hidden,)) for norm in ("q_norm", "k_norm")]
        shard += [(f"{prefix}self_attn.{m}_proj.weight", (shape.hidden, shape.hidden)) for m in "qkvo"]
        shard.append((f"{prefix}mlp.gate.weight", (shape.experts, shape.hidden)))
        for expert in range(shape.experts):
            for matrix, size in (
                ("gate", (shape.intermediate, shape.hidden)),
                ("up", (shape.intermediate, shape.hidden)),
                ("down", (shape.hidden, shape.intermediate)),
            ):
                shard.append((f"{prefix}mlp.experts.{expert}.{matrix}_proj.weight", size))
        yield shard


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], pool: np.ndarray, start: int) -> int:
    """Write one safetensors file; returns the next start in the pool. Norm weights are 1."""
    header, offset = {}, 0
    for name, size in tensors:
        count = int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, offset + 2 * count]}
        offset += 2 * count
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in tensors:
            count = int(np.prod(size))
            if name.endswith("norm.weight"):
                file.write(np.full(count, 0x3F80, np.uint16).tobytes())
                continue
            while count:
                piece = pool[start : start + count]
                file.write(piece.tobytes())
                count -= len(piece)
                start = (start + len(piece) + 7) % (POOL_VALUES - 64)
    return start


def write_checkpoint(shape: OlmoeShape, folder: Path, seed: int = 1) -> int:
    """Write the checkpoint into `folder`; returns its bytes."""
    folder.mkdir(parents=True)
    pool, start, index = _pool(seed), 0, {}
    for number, tensors in enumerate(_tensors(shape)):
        file = f"shard-{number:05d}.safetensors"
        start = _write_shard(folder / file, tensors, pool, start)
        index.update({name: file for name, _ in tensors})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads, "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k, "norm_topk_prob": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": shape.positions, "tie_word_embeddings": False,
        "attention_bias": False, "clip_qkv": None, "eos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, vocab_size=300)
    return sum(path.stat().st_size for path in folder.iterdir())


def packed(shape: OlmoeShape) -> Path:
    """The container of a random checkpoint of this shape, made at the first call."""
    folder = cache_folder() / shape.name
    if (folder / "manifest.json").exists() and (folder / "shape.json").read_text() == json.dumps(asdict(shape)):
        return folder
    source = cache_folder() / f"{shape.name}-source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {shape.name} (once)", file=sys.stderr, flush=True)
    write_checkpoint(shape, source)
    subprocess.run([sys.executable, "-m", "colibri.packer.cli", str(source), "--out", str(folder)], check=True)
    shutil.rmtree(source)
    (folder / "shape.json").write_text(json.dumps(asdict(shape)))
    return folder
