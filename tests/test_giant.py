"""The giant slice generator: what it writes is a container like any other, and its tokens decide the routing."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from colibri.core.container import Container, open_container
from colibri.core.core import Model, ModelOptions, Row, Sampling
from colibri.packer.errors import FolderError
from colibri.packer.progress import Silent
from colibri.packer.verify import verify
from testkit.repository import ROOT

BENCH = ROOT / "tests" / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Imports modules of tests/bench, whose names are not on the path of the other tests."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def giant(bench: Any) -> ModuleType:
    module: ModuleType = bench("giant")
    return module


@pytest.fixture(scope="module")
def folders(giant: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("slice")
    folders = [base / "a", base / "b"]
    giant.write_giant(giant.SMALL, folders, weights=(2, 1))
    return folders


def counts_of(container: Container, slots: int, tokens: list[int]) -> list[Any]:
    """Decode `tokens` one by one; returns each step's counts after checking that its logits are finite."""
    counts = []
    options = ModelOptions(expert_slots=slots, kv_pages=4, max_context=128, pass_tokens=8)
    with Model(container, options) as model:
        model.load()
        with closing(model.sequence()) as seq:
            for token in tokens:
                row = Row(seq, token, Sampling(), want_logits=True)
                model.step([row], [])
                assert row.error is None
                assert row.logits is not None
                assert np.isfinite(row.logits).all()
                assert 0.1 < row.logits.std() < 10
                counts.append(row.counts)
    return counts


def test_a_slice_is_a_container_in_order(folders: list[Path]) -> None:
    assert verify(folders[0], folders[1:], Silent()).faults == []
    with open_container(folders[0], folders[1:]) as container:
        sizes = [stripe.bytes for stripe in container.manifest.layout.stripes]
    assert 1.8 < sizes[0] / sizes[1] < 2.2


def test_the_giant_has_the_dimensions_of_the_model(giant: ModuleType) -> None:
    spec = giant.GIANT.spec()
    dense, moe = spec.layers[0], spec.layers[-1].moe
    assert spec.hidden_size == 6144
    assert dense.HasField("dense")
    assert (moe.experts, moe.intermediate_size, moe.top_k, moe.shared_intermediate_size) == (256, 2048, 8, 2048)


def test_the_same_seed_gives_the_same_model_on_other_drives(
    giant: ModuleType, folders: list[Path], tmp_path: Path
) -> None:
    first = verify(folders[0], folders[1:], Silent()).manifest.content_id
    assert giant.write_giant(giant.SMALL, [tmp_path / "one"]).content_id == first
    assert giant.write_giant(giant.SMALL, [tmp_path / "two"], seed=2).content_id != first


def test_any_number_of_layers_stays_bounded(giant: ModuleType, tmp_path: Path) -> None:
    giant.write_giant(giant.replace(giant.SMALL, moe_layers=24), [tmp_path / "deep"])
    with open_container(tmp_path / "deep") as container:
        counts_of(container, 64, [3, 5, 8])


def test_a_token_that_comes_again_finds_its_experts(giant: ModuleType, folders: list[Path]) -> None:
    with open_container(folders[0], folders[1:]) as container:
        slots = giant.SMALL.moe_layers * giant.SMALL.experts
        counts = counts_of(container, slots, [7, 7, 7, 300, 300, 7])
    assert counts[0].loads > 0
    for again in (1, 2, 4, 5):
        assert counts[again].hits >= 7, f"step {again}: {counts[again]}"
    assert counts[3].loads > 0


def test_the_routing_is_the_one_that_was_meant(bench: Any, giant: ModuleType) -> None:
    weights, shape = bench("giant_weights"), giant.SMALL
    states = weights.embedding_rows(shape, 1, 0, 64)
    for layer in range(shape.moe_layers):
        logits = states @ weights.router_rows(shape, 1, layer).T
        chosen = np.argsort(-logits, axis=1)[:, : shape.top_k]
        meant = weights.own_experts(shape, 1, layer, 0, 64)
        agreed = np.mean([len(set(a) & set(b)) for a, b in zip(chosen, meant, strict=True)]) / shape.top_k
        assert agreed > 0.95


def test_hot_tokens_are_hot_for_a_while_only(bench: Any) -> None:
    stream = bench("giant_weights").token_stream(512, seed=3)
    early, _, late = (list(islice(stream, 2000)) for _ in range(3))
    hot = np.argsort(-np.bincount(early, minlength=512))[:16]
    share = [np.isin(part, hot).mean() for part in (early, late)]
    assert share[0] > 0.4
    assert share[1] < share[0] - 0.1


def test_other_files_are_not_written_over(giant: ModuleType, folders: list[Path]) -> None:
    with pytest.raises(FolderError):
        giant.write_giant(giant.SMALL, folders, weights=(2, 1))


def test_the_command_writes_what_it_says(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{BENCH}{os.pathsep}{ROOT / 'tests' / 'helpers'}"}
    command = [sys.executable, str(BENCH / "giant.py"), str(tmp_path / "a"), "--shape", "peer", "--layers", "1",
               "--experts", "8"]  # fmt: skip
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    with open_container(tmp_path / "a") as container:
        assert f"content_id {container.content_id}" in ended.stdout
        assert container.manifest.spec.family == "qwen3_moe"
