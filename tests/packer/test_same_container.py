"""However a checkpoint is laid out and spelled, one model becomes one container. Reports A01, A03, A06, A08 to A10."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from colibri.packer.cli import main
from testkit.checkpoints import (
    INDEX,
    TD_CONFIG,
    TQ_CONFIG,
    Tensors,
    fused,
    mtp_tensors,
    td_tensors,
    tq_tensors,
    write_checkpoint,
    write_index,
)

DOWN_0 = "model.layers.0.mlp.experts.0.down_proj.weight"


def packed(source: Path, *options: str) -> dict[str, bytes]:
    """Pack `source` and return what depends on the model alone, so not the headers, which hold the pack's UUID."""
    out = source.parent / f"{source.name}-packed"
    assert main([str(source), "--out", str(out), "--group-size", "32", *options]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    dense = (out / "dense.safetensors").read_bytes()
    return {
        "content_id": manifest["content_id"].encode(),
        "records": (out / "stripe-000.colibri").read_bytes()[4096:],
        "dense": dense[8 + int.from_bytes(dense[:8], "little") :],
        "spec": json.dumps(manifest["spec"]).encode(),
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return packed(write_checkpoint(tmp_path_factory.mktemp("plain") / "tq", TQ_CONFIG, tq_tensors()))


def test_another_model_is_another_container(tmp_path: Path, plain: dict[str, bytes]) -> None:
    other = packed(write_checkpoint(tmp_path / "tq", TQ_CONFIG, tq_tensors(seed=7)))
    assert all(other[key] != plain[key] for key in ("content_id", "records", "dense"))
    assert other["spec"] == plain["spec"]


def test_a01_a_tensor_in_a_shard_of_another_name(tmp_path: Path, plain: dict[str, bytes]) -> None:
    source = write_checkpoint(tmp_path / "tq", TQ_CONFIG, tq_tensors())
    places = json.loads((source / INDEX).read_text())["weight_map"]
    holder = source / places[DOWN_0]
    tensors = load_file(holder)
    save_file({DOWN_0: tensors.pop(DOWN_0)}, source / "mtp.safetensors")
    save_file(tensors, holder)
    write_index(source, {**places, DOWN_0: "mtp.safetensors"})
    assert packed(source) == plain


def test_a03_a_superseded_copy(tmp_path: Path, plain: dict[str, bytes]) -> None:
    source = write_checkpoint(tmp_path / "tq", TQ_CONFIG, tq_tensors())
    places = json.loads((source / INDEX).read_text())["weight_map"]
    other = next(source / name for name in set(places.values()) if name != places[DOWN_0])
    save_file({**load_file(other), DOWN_0: torch.zeros(64, 96, dtype=torch.bfloat16)}, other)
    assert packed(source) == plain


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {"rope_scaling": {"type": "default"}},
        {"num_experts": None, "num_local_experts": 4},
        {"dtype": None, "torch_dtype": "bfloat16"},
    ],
)
def test_a08_spellings_of_the_config(tmp_path: Path, plain: dict[str, bytes], spelling: dict[str, Any]) -> None:
    assert packed(write_checkpoint(tmp_path / "tq", {**TQ_CONFIG, **spelling}, tq_tensors())) == plain


def test_one_file_or_many(tmp_path: Path, plain: dict[str, bytes]) -> None:
    for shards in (1, 5, 70):
        assert packed(write_checkpoint(tmp_path / str(shards), TQ_CONFIG, tq_tensors(), shards=shards)) == plain


def test_a09_fused_experts(tmp_path: Path, plain: dict[str, bytes]) -> None:
    assert packed(write_checkpoint(tmp_path / "fused", TQ_CONFIG, fused(tq_tensors()))) == plain


def test_a06_with_and_without_an_mtp_layer(tmp_path: Path) -> None:
    absent = packed(write_checkpoint(tmp_path / "absent", TD_CONFIG, td_tensors()))
    tensors = fused(td_tensors()) | mtp_tensors()
    present = packed(write_checkpoint(tmp_path / "present", {**TD_CONFIG, "num_nextn_predict_layers": 1}, tensors))
    assert present == absent
    manifest = json.loads((tmp_path / "present-packed" / "manifest.json").read_text())
    (skipped,) = manifest["skipped"]
    assert skipped["rule"] == "mtp_layer"
    assert set(skipped["names"]) == set(mtp_tensors())


@pytest.mark.parametrize("sizes", [{"moe_intermediate_size": 80}, {"hidden_size": 60}, {"moe_intermediate_size": 7}])
def test_a10_odd_sizes_survive_the_round_trip(tmp_path: Path, sizes: dict[str, int]) -> None:
    config = {**TQ_CONFIG, **sizes}
    tensors = tq_tensors(config)
    packed(write_checkpoint(tmp_path / "odd", config, tensors), "--precision", "all=int8")
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "odd-packed"), "--out", str(exported)]) == 0
    back: Tensors = {}
    for shard in exported.glob("*.safetensors"):
        back |= load_file(shard)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        error = (back[name] - tensor.float()).norm() / tensor.float().norm()
        assert error < 0.01, name
