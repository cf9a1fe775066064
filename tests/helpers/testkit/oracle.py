"""What transformers says about a checkpoint, and how far our logits are from it."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colibri.core.core import Row
from testkit.models import F32, GREEDY, Tiny, opened, run, step_rows

CLEAR_SHARE = 0.9  # of positions must have a top-2 gap that exceeds the error, or the argmax says little


def reference_model(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return model.eval()


def logits_by(model: Any, tokens: Sequence[int]) -> F32:
    """The logits [n, vocab] of a transformers model."""
    with torch.inference_mode():
        logits: F32 = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
    return logits


def greedy_by(model: Any, prompt: Sequence[int], count: int, eos: Collection[int] = ()) -> list[int]:
    """What a transformers model continues `prompt` with: `count` ids, or fewer with one of `eos` as the last."""
    tokens, given, cache = list(prompt), list(prompt), None
    with torch.inference_mode():
        while len(tokens) < len(prompt) + count:
            output = model(torch.tensor([given]), cache=cache, use_cache=True)
            given, cache = [int(output.logits[0, -1].argmax())], output.past_key_values
            tokens += given
            if given[0] in eos:
                break
    return tokens[len(prompt) :]


def greedy_by_core(
    tiny: Tiny, prompt: Sequence[int], count: int, eos: Collection[int] = (), **changes: Any
) -> list[int]:
    """The same by our core, opened with `changes`."""
    with opened(tiny, **changes) as model:
        seq = model.sequence()
        tokens = [run(model, model.prefill(seq, prompt, GREEDY)).next_token]
        while len(tokens) < count and tokens[-1] not in eos:
            tokens.append(step_rows(model, [Row(seq, tokens[-1], GREEDY)])[0].next_token)
    return tokens


def relative_errors(logits: F32, expected: F32) -> F32:
    """Per position: RMS of the difference over the RMS of all reference logits."""
    errors: F32 = np.sqrt(((logits - expected) ** 2).mean(axis=1) / (expected**2).mean())
    return errors


def check_argmax(logits: F32, expected: F32) -> None:
    """Where the reference's top-2 gap exceeds the error, the argmax is equal; and that is nearly everywhere."""
    top = np.sort(expected, axis=1)
    clear = top[:, -1] - top[:, -2] > np.abs(logits - expected).max(axis=1)
    assert (logits.argmax(axis=1) == expected.argmax(axis=1))[clear].all()
    assert clear.mean() >= CLEAR_SHARE
