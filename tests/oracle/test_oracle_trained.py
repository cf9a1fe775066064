"""A tiny qwen3_moe that was trained end to end, where one is at hand: its routing is real, so a wrong expert shows.

The model lies outside the repository, for its training text has licences of its own; see allowed_skips.txt.
"""

import re
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from colibri.daemon.chat import TextModel
from testkit.models import F32, Tiny, opened, packed, prefill
from testkit.oracle import logits_by, reference_model
from testkit.repository import ROOT

CHECKPOINT = ROOT.parent / "shared" / "models" / "tiny-qwen3-moe"
EXPERTS, LAYERS = 32, 6
WINDOWS, LENGTH = 4, 200
CLOSE = 0.03  # int4 experts and int8 dense weights cost well under a percent of perplexity
WRONG = 3.0  # so many times the perplexity at least, when each expert is taken for its neighbour

pytestmark = pytest.mark.skipif(not CHECKPOINT.exists(), reason="the trained model is not at hand")


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    """Pieces of Python's documentation, each behind a <bos> as in training."""
    text = TextModel.open(CHECKPOINT, vocab_rows=4096)
    tokens = text.encode("\n".join(topics[name] for name in sorted(topics)[::9]), add_bos=False)
    return [[0, *tokens[LENGTH * number : LENGTH * (number + 1)]] for number in range(WINDOWS)]


def perplexity(windows: list[list[int]], logits: list[F32]) -> float:
    losses = []
    for window, rows in zip(windows, logits, strict=True):
        exact = torch.log_softmax(torch.from_numpy(rows[:-1]).double(), dim=1)
        losses.append(-exact[torch.arange(len(window) - 1), torch.tensor(window[1:])].numpy())
    return float(np.exp(np.concatenate(losses).mean()))


def perplexity_of(tiny: Tiny, windows: list[list[int]]) -> float:
    logits = []
    with opened(tiny, expert_slots=EXPERTS * LAYERS // 4) as model:
        for window in windows:
            seq = model.sequence()
            logits.append(prefill(model, seq, window, cut=128))
            seq.close()
        assert model.stats().expert_loads > EXPERTS * LAYERS  # read again and again
    return perplexity(windows, logits)


def shift_experts(source: Path, target: Path) -> Path:
    """Copy the checkpoint with every expert under its neighbour's number; return `target`."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            shifted = {_shifted(name): tensor for name, tensor in load_file(path).items()}
            save_file(shifted, target / path.name, metadata={"format": "pt"})
        elif path.name.endswith(".index.json"):
            (target / path.name).write_text(_shifted(path.read_text()))
        else:
            shutil.copyfile(path, target / path.name)
    return target


def _shifted(text: str) -> str:
    return re.sub(r"\.experts\.(\d+)\.", lambda found: f".experts.{(int(found[1]) + 1) % EXPERTS}.", text)


@pytest.fixture(scope="module")
def expected(windows: list[list[int]]) -> float:
    """The perplexity by transformers in bf16, as the model was stored."""
    model = reference_model(CHECKPOINT, torch.bfloat16)
    return perplexity(windows, [logits_by(model, window) for window in windows])


def test_int4_costs_hardly_any_perplexity(windows: list[list[int]], expected: float, tmp_path: Path) -> None:
    found = perplexity_of(packed(CHECKPOINT, tmp_path / "container", "", (2, 1)), windows)
    assert found == pytest.approx(expected, rel=CLOSE)


def test_a_wrong_expert_shows(windows: list[list[int]], expected: float, tmp_path: Path) -> None:
    """What the test above would see if an expert's number were mistaken anywhere between checkpoint and product."""
    wrong = shift_experts(CHECKPOINT, tmp_path / "checkpoint")
    assert perplexity_of(packed(wrong, tmp_path / "container", ""), windows) > WRONG * expected
