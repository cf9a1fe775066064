"""Buffers that Python lends to the core, when a call fails and its frames end up in a cycle."""

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from colibri.core.errors import NonFiniteError
from colibri.core.tensors import Format, quantize_rows, quantize_tiles

# In a process of its own: what is tested against is a crash of the interpreter.
CYCLE = """
import gc
import numpy as np
from colibri.core.errors import NonFiniteError
from colibri.core.tensors import Format, quantize_tiles
for _ in range(3):
    source = memoryview(bytearray(np.full(96 * 64, np.nan, np.float32).tobytes()))
    try:
        quantize_tiles(Format.int4(32), source, "f32", 96, 64)
    except NonFiniteError as error:
        kept = error
        kept.cycle = kept
    del kept, source
    gc.collect()
print("alive")
"""


def test_a_lent_memoryview_survives_the_collector() -> None:
    run = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "alive\n", "")


@pytest.mark.parametrize("call", [quantize_tiles, quantize_rows])
def test_a_failed_call_lets_go_of_its_buffers_at_once(call: Callable[..., object]) -> None:
    source = np.full((8, 64), np.inf, np.float32)
    alive = weakref.ref(source)
    gc.disable()
    try:
        with contextlib.suppress(NonFiniteError):
            call(Format.int8(64), source, "f32", 8, 64)
        del source
        assert alive() is None
    finally:
        gc.enable()
