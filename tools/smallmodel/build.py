"""Builds the small model into a directory: the whole conversion, a layer at a time.

Owns the order of the steps and the progress lines. Layers are converted on the hidden states that the already
converted ones produce, so that each makes up for some of what those before it lost.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import numpy as np

from smallmodel.calibration import calibration_rows
from smallmodel.checkpoint import CheckpointWriter
from smallmodel.forward import add_attention, ffn_output, rms_norm
from smallmodel.layout import (
    EMBEDDING,
    FINAL_NORM,
    N_DENSE_LAYERS,
    FeedForward,
    FloatArray,
    Layer,
    config_json,
    layer_tensors,
)
from smallmodel.source import DenseSource
from smallmodel.tokenizer import write_json, write_tokenizer
from smallmodel.upcycle import upcycle

SEED = 1


def report(text: str) -> None:
    """A line of progress. On stderr: stdout carries the result alone."""
    print(text, file=sys.stderr, flush=True)


def build(gguf: Path, directory: Path) -> None:
    """Write the checkpoint made from `gguf` into the existing, empty `directory`.

    The bytes depend on the GGUF, this package, its calibration text, this Python's documentation and the
    arithmetic of this machine's BLAS, on nothing else. About 200 MB of memory per 10000 calibration tokens.
    """
    started = time.monotonic()
    source = DenseSource(gguf)
    tokenizer = write_tokenizer(source.tokenizer(), directory)
    write_json(directory / "config.json", config_json(source.shape))
    embedding = source.embedding()
    rows = calibration_rows(tokenizer)
    hidden = embedding[rows]
    report(f"{rows.size} calibration tokens in {rows.shape[0]} rows ({time.monotonic() - started:.0f} s)")
    rng = np.random.Generator(np.random.PCG64(SEED))
    with CheckpointWriter(directory, source.shape) as writer:
        writer.put(EMBEDDING, embedding)
        writer.put(FINAL_NORM, source.final_norm())
        layers_started = time.monotonic()
        for i in range(source.shape.n_layers):
            layer, what = convert_layer(source, i, hidden, rng)
            writer.put_layer(i, layer_tensors(layer))
            spent = time.monotonic() - layers_started
            left = spent / (i + 1) * (source.shape.n_layers - i - 1)
            report(f"layer {i + 1:2d} of {source.shape.n_layers}  {what}  {spent:3.0f} s, {left:3.0f} s to go")
        writer.finish()
    report(f"{writer.n_parameters / 1e6:.1f}M parameters in {time.monotonic() - started:.0f} s")


def convert_layer(source: DenseSource, index: int, hidden: FloatArray, rng: np.random.Generator) -> tuple[Layer, str]:
    """Convert layer `index` and run it over `hidden` [n_rows, n_positions, hidden] in place.

    Returns the layer and a few words on how well it came out."""
    dense = source.layer(index)
    assert isinstance(dense.ffn, FeedForward)
    add_attention(dense, hidden, source.shape)
    x = rms_norm(hidden, dense.ffn_norm, source.shape.rms_norm_eps).reshape(-1, source.shape.hidden_size)
    if index < N_DENSE_LAYERS:
        hidden += ffn_output(dense.ffn, x).reshape(hidden.shape)
        return dense, "stays dense                  "
    moe, output, fit = upcycle(dense.ffn, x, rng)
    hidden += output.reshape(hidden.shape)
    layer = Layer(dense.attention_norm, dense.attention, dense.ffn_norm, moe)
    return layer, f"error {fit.error_cut:.3f}, refitted {fit.error_refit:.3f}"


def room_needed_bytes() -> int:
    """Disk space that a finished checkpoint takes, with some to spare."""
    return 700 << 20


def check_room(directory: Path) -> None:
    """Raise OSError if the file system of `directory` has too little free space for a checkpoint."""
    free = shutil.disk_usage(directory).free
    if free < room_needed_bytes():
        raise OSError(f"{directory}: {free >> 20} MiB free, the small model needs {room_needed_bytes() >> 20} MiB")
