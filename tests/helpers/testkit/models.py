"""Tiny models in memory for tests: pack a checkpoint, open it in the core, run tokens through it in many ways.

`Tiny` is a packed model with its checkpoint; `opened` gives a loaded core model; `prefill`, `decode` and `logits_of`
return logits so that tests can compare their bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from colibri.core.container import open_container
from colibri.core.core import Model, ModelOptions, Prefill, Row, Sampling
from colibri.core.core import Sequence as CoreSequence
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.families import resolve
from colibri.packer.plan import make_plan
from colibri.packer.precision import parse_precision
from colibri.packer.writer import pack
from testkit.checkpoints import tiny_checkpoint

F32 = npt.NDArray[np.float32]
GREEDY = Sampling()
OPTIONS = ModelOptions(expert_slots=4, kv_pages=24, max_context=300, pass_tokens=128, max_rows=4, max_prefills=2)


@dataclass(frozen=True)
class Tiny:
    """A packed tiny model: its checkpoint and the folders of its container, the primary first."""

    checkpoint: Path
    folders: tuple[Path, ...]


def make_tiny(
    family: str, folder: Path, precision: str = "all=f32", weights: Sequence[int] = (1,), **overrides: Any
) -> Tiny:
    """Make a tiny checkpoint of `family` below `folder` and pack it onto len(weights) stripes."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        _first_usable_seed(family, checkpoint, overrides)
    return packed(checkpoint, folder / "container", precision, weights)


def _first_usable_seed(family: str, checkpoint: Path, overrides: dict[str, Any]) -> None:
    for seed in range(8):
        try:
            tiny_checkpoint(family, checkpoint, seed, **overrides)
        except ValueError:
            continue
        return
    raise ValueError(f"no seed gives a usable {family}")


def packed(
    checkpoint: Path, folder: Path, precision: str, weights: Sequence[int] = (1,), *, mirror: bool = False
) -> Tiny:
    """Pack `checkpoint` onto len(weights) folders below `folder`."""
    folder.mkdir()
    folders = tuple(folder / f"drive{number}" for number in range(len(weights)))
    with Checkpoint.open(checkpoint) as source:
        pack(source, make_plan(source, resolve(source), parse_precision(precision), weights, mirror=mirror), folders)
    return Tiny(checkpoint, folders)


@contextmanager
def opened(tiny: Tiny, **changes: Any) -> Iterator[Model]:
    """A loaded model with OPTIONS but for `changes`."""
    with (
        open_container(tiny.folders[0], tiny.folders[1:]) as container,
        Model(container, replace(OPTIONS, **changes)) as model,
    ):
        model.load()
        yield model


def some_tokens(count: int, vocab_size: int = 139, start: int = 3) -> list[int]:
    """`count` token ids without a pattern that a model could hide behind."""
    return [(7 * index * index + 11 * index + start) % vocab_size for index in range(count)]


def reference_logits(tiny: Tiny, tokens: Sequence[int]) -> F32:
    """The logits [n, vocab] of transformers in f32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny.checkpoint, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        logits: F32 = model(torch.tensor([list(tokens)])).logits[0].numpy()
    return logits


def run(model: Model, prefill: Prefill, budget_us: int | None = None) -> Prefill:
    """Step until `prefill` is done, close it; raises its error if it has one."""
    while not prefill.done:
        model.step([], [prefill], budget_us)
        if prefill.error is not None:
            raise prefill.error
    prefill.close()
    return prefill


def prefill(
    model: Model, seq: CoreSequence, tokens: Sequence[int], cut: int | None = None, budget_us: int | None = None
) -> F32:
    """Append `tokens` in pieces of `cut`; return the logits of all of them, [n, vocab]."""
    pieces = []
    for start in range(0, len(tokens), cut or len(tokens)):
        cursor = model.prefill(seq, tokens[start : start + (cut or len(tokens))], GREEDY, all_logits=True)
        run(model, cursor, budget_us)
        assert cursor.logits is not None
        pieces.append(cursor.logits)
    return np.concatenate(pieces)


def step_rows(model: Model, rows: Sequence[Row]) -> Sequence[Row]:
    """Run the rows in one step; raises the error of the first that failed."""
    model.step(rows, [])
    for row in rows:
        if row.error is not None:
            raise row.error
    return rows


def decode(model: Model, seq: CoreSequence, tokens: Sequence[int]) -> F32:
    """Append `tokens` one step at a time; return the logits of all of them, [n, vocab]."""
    rows = [step_rows(model, [Row(seq, token, GREEDY, want_logits=True)])[0] for token in tokens]
    return np.stack([row.logits for row in rows if row.logits is not None])


def same_bits(a: F32, b: F32) -> bool:
    """Whether two logit arrays are equal byte by byte."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
