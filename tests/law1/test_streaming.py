"""Law 1 over everything that part of the way from drive to memory: a covering array on two tiny models.

Containers as packed, moved and repaired; mirrors, also as the only copy that is right; both back ends; checksums;
lookahead; learned heat; with them slots, threads, prompt pieces and company. The models are those of the full matrix:
one whose records stay whole and one whose records are cut over all stripes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from colibri.core.drives import probe
from colibri.core.errors import UnsupportedError
from testkit.law1 import Text, case_of
from testkit.law1_streaming import DIMENSIONS, Streamed, Way, Weights, learned_heat, make_containers, run_way
from testkit.models import make_tiny, some_tokens
from testkit.pairwise import covering_array, missing_pairs

TEXT = Text(some_tokens(60), prompt=45, restart=40, companions=(3, 20, 41))
ROWS = covering_array(DIMENSIONS)
MODELS = ("whole-records", "cut-records")
FAMILIES = {"whole-records": "glm4_moe", "cut-records": "qwen3_moe"}
PRECISION = {"whole-records": "", "cut-records": "all=f32"}
WEIGHTS = {
    "whole-records": Weights((2, 1), (2, 3, 4)),
    "cut-records": Weights((1, 1), (12, 10, 11)),  # each piece must reach 128 KiB
}
SIZES: dict[str, dict[str, object]] = {
    "whole-records": {},
    "cut-records": {
        "moe_intermediate_size": 604,
        "num_hidden_layers": 2,
        "mlp_only_layers": [],
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
}

StreamedOf = Callable[[str], Streamed]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> StreamedOf:
    """A model with its containers, made once, and what must come out of it."""
    made: dict[str, Streamed] = {}

    def make(name: str) -> Streamed:
        if name not in made:
            made[name] = _make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def _make(name: str, folder: Path) -> Streamed:
    plain = make_tiny(FAMILIES[name], folder, PRECISION[name], (1,), **SIZES[name])
    case = case_of({1: plain}, TEXT)
    packs = make_containers(plain.checkpoint, folder / "containers", PRECISION[name], WEIGHTS[name])
    return Streamed(packs, case, learned_heat(plain, case))


def ways(backend: str) -> list[Way]:
    return [Way.of(row) for row in ROWS if row["backend"] == backend]


def test_the_rows_hold_every_pair() -> None:
    assert missing_pairs(DIMENSIONS, ROWS) == []


@pytest.mark.parametrize("way", ways("threads"), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_threads(streamed: StreamedOf, name: str, way: Way, tmp_path: Path) -> None:
    run_way(way, streamed(name), tmp_path / "copy")


@pytest.fixture(scope="module")
def io_uring(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where the kernel refuses io_uring."""
    path = tmp_path_factory.mktemp("probe") / "file"
    path.write_bytes(bytes(1 << 20))
    try:
        probe(path, request_bytes=4096, size_bytes=4096, backend="io_uring")
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("io_uring")
@pytest.mark.parametrize("way", ways("io_uring"), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_io_uring(streamed: StreamedOf, name: str, way: Way, tmp_path: Path) -> None:
    run_way(way, streamed(name), tmp_path / "copy")
