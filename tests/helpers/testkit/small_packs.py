"""The small real model as a container: packed in the default formats, once per session and number of stripes."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it imports torch, and every session loads this plugin
    from testkit.models import Tiny

STRIPE_WEIGHTS = {1: (1,), 2: (1, 1), 3: (3, 2, 1)}


@pytest.fixture(scope="session")
def small_pack(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Callable[[int], Tiny]]":
    """A maker of the container over so many stripes."""
    from testkit.models import packed

    folder = tmp_path_factory.mktemp("small-packs")
    made: dict[int, Tiny] = {}

    def make(stripes: int) -> "Tiny":
        if stripes not in made:
            made[stripes] = packed(small_model, folder / str(stripes), "", STRIPE_WEIGHTS[stripes])
        return made[stripes]

    yield make
    shutil.rmtree(folder)  # hundreds of MB that pytest would keep for three sessions
