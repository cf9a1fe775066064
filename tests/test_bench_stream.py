"""The streaming benchmarks' parts at a few megabytes: runs in processes of their own, the floor, the peer's file."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from testkit.loop_drives import cached_bytes, drop_cached
from testkit.repository import ROOT


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Imports modules of tests/bench, whose names are not on the path of the other tests."""
    sys.path[:0] = [str(ROOT / "tests" / "bench")]
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "tests" / "bench"))


@pytest.fixture(scope="module")
def folders(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    base = tmp_path_factory.mktemp("slice")
    paths = [base / "a", base / "b"]
    giant = bench("giant")
    giant.write_giant(giant.SMALL, paths, weights=(2, 1))
    return [str(path) for path in paths]


@pytest.fixture(autouse=True)
def _children_find_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "helpers"))


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_decode_run_counts_what_it_reads(bench: Any, folders: list[str], backend: str) -> None:
    slicerun = bench("slicerun")
    job = slicerun.Job(folders, slots=8, io_backend=backend, tokens=6, warm_tokens=2)
    seen = slicerun.run("decode", job, None)
    record = 56 << 10
    assert (len(seen["seconds"]), len(seen["warm_seconds"])) == (6, 2)
    assert seen["hits"] + seen["loads"] == 6 * 2 * 4  # tokens, layers, top_k
    assert seen["read_bytes"] >= seen["needed_bytes"] >= seen["loads"] * record
    assert seen["backend"] == backend
    assert seen["io_cpu_us"] > 0


def test_a_prefill_run_reads_every_expert_once_and_then_none(bench: Any, folders: list[str]) -> None:
    slicerun = bench("slicerun")
    seen = slicerun.run("prefill", slicerun.Job(folders, tokens=96, rounds=2), None)
    assert 0 < seen["rounds"][0]["missed_bytes"] <= seen["expert_bytes"]
    assert seen["rounds"][1]["missed_bytes"] == 0


def test_the_ceilings_are_those_of_every_drive(bench: Any, folders: list[str]) -> None:
    slicerun = bench("slicerun")
    seen = slicerun.run("ceilings", slicerun.Job(folders), None)
    assert len(seen["drive_rates"]) == 2
    assert min(*seen["drive_rates"], seen["ram_rate"]) > 0


def test_a_run_that_fails_says_why(bench: Any, tmp_path: Path) -> None:
    slicerun = bench("slicerun")
    with pytest.raises(slicerun.RunError, match="manifest"):
        slicerun.run("decode", slicerun.Job([str(tmp_path)]), None)


def test_the_slots_fit_the_limit(bench: Any, folders: list[str]) -> None:
    slicerun = bench("slicerun")
    wide = slicerun.run("decode", slicerun.Job(folders, memory_bytes=1 << 30, tokens=1, warm_tokens=0), None)
    assert wide["slots"] == 32
    with pytest.raises(slicerun.RunError, match="no room"):
        slicerun.run("decode", slicerun.Job(folders, memory_bytes=1 << 20, tokens=1, warm_tokens=0), None)


def test_the_floor_is_the_slower_of_drives_and_memory(bench: Any) -> None:
    run = {
        "seconds": [0.5, 1.5], "hits": 6, "loads": 2, "needed_bytes": 600, "touched_bytes": 4000, "wait_us": 1,
        "compute_us": 4, "io_cpu_us": 50, "read_bytes": 1000,
    }  # fmt: skip
    ceilings = [{"drive_rates": [200, 300], "ram_rate": 10000}, {"drive_rates": [200, 300], "ram_rate": 10000}]
    judged = bench("slicerig").judge(run, ceilings)
    assert judged.seconds == 1.0
    assert judged.floor == pytest.approx(0.6)  # 300 bytes a token at 500 a second
    assert judged.serial_floor == pytest.approx(1.0)
    assert (judged.share, judged.hit_share, judged.waited_share) == (pytest.approx(0.6), 0.75, 0.25)
    assert judged.cpu_per_gb == pytest.approx(50.0)


def test_the_peer_reads_the_same_slice(bench: Any, tmp_path: Path) -> None:
    giant, weights = bench("giant"), bench("giant_weights")
    shape = giant.replace(giant.PEER, hidden=128, experts=8, intermediate=64, moe_layers=2, heads=2, kv_heads=1,
                          head_dim=64, vocab=300)  # fmt: skip
    bench("peer_gguf").write_gguf(shape, tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    router = tensors["blk.1.ffn_gate_inp.weight"].data.reshape(8, 128)
    assert np.array_equal(router, weights.router_rows(shape, 1, 1))
    embedding = dequantize(tensors["token_embd.weight"].data, tensors["token_embd.weight"].tensor_type)
    assert np.abs(embedding[:256] - weights.embedding_rows(shape, 1, 0, 256)).max() < 0.05
    down = tensors["blk.0.ffn_down_exps.weight"]
    values = dequantize(down.data, down.tensor_type).reshape(8, 128, 64)
    wanted = weights.output_gain(2) / np.sqrt(64)
    assert values.std() == pytest.approx(wanted, rel=0.05)


def test_only_a_shape_that_both_engines_know_becomes_gguf(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only Qwen3-MoE"):
        bench("peer_gguf").write_gguf(bench("giant").SMALL, tmp_path / "m.gguf")


def test_a_file_can_be_made_cold() -> None:
    path = ROOT / "build" / "cold.bin"  # the temporary folder may be in memory
    path.parent.mkdir(exist_ok=True)
    try:
        path.write_bytes(bytes(1 << 20))
        assert cached_bytes(path) == 1 << 20
        drop_cached(path)
        assert cached_bytes(path) == 0
    finally:
        path.unlink()


def test_jobs_are_plain_json(bench: Any) -> None:
    job = bench("slicerun").Job(["a"])
    assert bench("slicerun").Job(**json.loads(json.dumps(job.__dict__))) == job
