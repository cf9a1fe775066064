"""The text that the conversion looks at, and the text that it must not look at.

Owns the choice of calibration tokens (committed text that the dense model wrote, plus a part of Python's own
documentation) and of held-out text for the evaluation (another part of it, and Python's licence).
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer

from smallmodel.layout import IntArray

SEPARATOR = "<|endoftext|>"
SELF_WRITTEN = Path(__file__).parent.parent / "calibration.txt"
ROW_LENGTH = 256
"""Positions of one calibration row; attention does not look further back than its row."""
N_TOKENS = 9984
N_PYDOC_PIECES = 32
HELD_OUT_EVERY = 5


def pydoc_text(held_out: bool) -> str:
    """The documentation topics of this Python: every fifth one if `held_out`, else the others."""
    chosen = [k for i, k in enumerate(sorted(topics)) if (i % HELD_OUT_EVERY == 0) == held_out]
    text = "\n".join(topics[k] for k in chosen)
    # Underlines and emphasis marks are layout, not language.
    return re.sub(r"\n{3,}", "\n\n", re.sub(r'[*"]{3,}', "", text))


def licence_text() -> str:
    """Python's licence, or "" where the distribution does not install it with the standard library."""
    path = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def calibration_rows(tokenizer: Tokenizer) -> IntArray:
    """Token ids [N_TOKENS / ROW_LENGTH, ROW_LENGTH]: all of the self-written text, then evenly spaced pieces of
    the documentation. Raises ValueError if this Python's documentation is too short for that."""
    written = tokenizer.encode(SELF_WRITTEN.read_text(encoding="utf-8")).ids
    documentation = tokenizer.encode(pydoc_text(held_out=False)).ids
    piece_length = -(-(N_TOKENS - len(written)) // N_PYDOC_PIECES)
    step = len(documentation) // N_PYDOC_PIECES
    if step < piece_length:
        raise ValueError(f"pydoc_data.topics has {len(documentation)} tokens, too few for {N_TOKENS} of calibration")
    pieces = [documentation[i * step : i * step + piece_length] for i in range(N_PYDOC_PIECES)]
    ids = np.array(written + [token for piece in pieces for token in piece], dtype=np.int64)
    return ids[:N_TOKENS].reshape(-1, ROW_LENGTH)
