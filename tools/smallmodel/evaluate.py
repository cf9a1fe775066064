"""Perplexity of a finished small model on text that its conversion did not see.

Owns the measure that the tests hold the conversion to. Works a layer at a time, in f32 from the bf16 weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from smallmodel.calibration import licence_text, pydoc_text
from smallmodel.checkpoint import CheckpointReader
from smallmodel.forward import apply_layer, rms_norm
from smallmodel.layout import FINAL_NORM, N_EXPERTS, FloatArray, IntArray

CONTEXT = 512
SHUFFLE_SEED = 7


def evaluate(directory: Path, n_tokens: int, shuffle_experts: bool) -> dict[str, float]:
    """Perplexity per held-out text ("pydoc"; "licence" where Python's licence is installed).

    Uses the first `n_tokens` of each text, whole contexts only. With `shuffle_experts` each layer's tokens go to
    the wrong experts. Raises ValueError if a text has less than one context."""
    checkpoint = CheckpointReader(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = {"pydoc": pydoc_text(held_out=True), "licence": licence_text()}
    rows = {name: held_out_rows(tokenizer, name, text, n_tokens) for name, text in texts.items() if text}
    losses = token_losses(checkpoint, np.concatenate(list(rows.values())), shuffle_experts)
    ends = np.cumsum([len(r) for r in rows.values()])
    return {
        name: float(np.exp(losses[end - len(r) : end].mean()))
        for (name, r), end in zip(rows.items(), ends, strict=True)
    }


def held_out_rows(tokenizer: Tokenizer, name: str, text: str, n_tokens: int) -> IntArray:
    """The text's first tokens as rows [n_rows, CONTEXT]."""
    # No token is longer than 8 characters on average; encoding all of a long text would be wasted.
    ids = np.array(tokenizer.encode(text[: n_tokens * 8]).ids[:n_tokens], dtype=np.int64)
    if len(ids) < CONTEXT:
        raise ValueError(f"{len(ids)} tokens of the text {name!r} asked for; one context has {CONTEXT}")
    return ids[: len(ids) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)


def token_losses(checkpoint: CheckpointReader, rows: IntArray, shuffle_experts: bool) -> FloatArray:
    """-log p(next token) at every position but the last of each row: [n_rows, CONTEXT - 1]."""
    embedding, shape = checkpoint.embedding(), checkpoint.shape
    hidden = embedding[rows]
    rng = np.random.Generator(np.random.PCG64(SHUFFLE_SEED))
    for i in range(shape.n_layers):
        order = wrong_experts(rng) if shuffle_experts else None
        apply_layer(checkpoint.layer(i), hidden, shape, order)
    hidden = rms_norm(hidden, checkpoint.tensor(FINAL_NORM), shape.rms_norm_eps)
    return np.stack([row_losses(states[:-1] @ embedding.T, ids[1:]) for states, ids in zip(hidden, rows, strict=True)])


def row_losses(logits: FloatArray, next_ids: IntArray) -> FloatArray:
    """-log softmax(logits)[next_ids]: [n_positions]."""
    top = logits.max(axis=1)
    log_sum = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    return np.asarray(log_sum - logits[np.arange(len(next_ids)), next_ids], dtype=np.float32)


def wrong_experts(rng: np.random.Generator) -> IntArray:
    """A random permutation of the experts that leaves none in its place (a cyclic one)."""
    cycle = rng.permutation(N_EXPERTS)
    order = np.empty(N_EXPERTS, dtype=np.int64)
    order[cycle] = np.roll(cycle, 1)
    return order
