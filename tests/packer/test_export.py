"""export gives back a checkpoint that transformers loads whole, with the weights that the container stands for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from colibri.core.container import ContainerError, open_container
from colibri.packer.errors import FolderError
from colibri.packer.export import Dtype, export, exported_bytes
from colibri.packer.progress import Silent
from testkit.checkpoints import (
    TD_CONFIG,
    TINY_FAMILIES,
    mtp_tensors,
    td_tensors,
    tiny_checkpoint,
    tq_tensors,
    write_checkpoint,
    write_tq,
)
from testkit.packing import pack_folder


def exported(container: Path, out: Path, dtype: Dtype = "f32", shard_bytes: int = 2 << 30) -> dict[str, torch.Tensor]:
    with open_container(container) as opened:
        names = export(opened, out, Silent(), dtype=dtype, shard_bytes=shard_bytes)
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        with safe_open(out / name, "pt") as shard:
            for key in shard.keys():  # noqa: SIM118
                assert key not in tensors
                tensors[key] = shard.get_tensor(key)
    return tensors


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def test_f32_comes_back_bit_for_bit(tmp_path: Path) -> None:
    pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"], precision="all=f32")
    back = exported(tmp_path / "out", tmp_path / "back")
    source = tq_tensors()
    assert set(back) == set(source)
    for name, tensor in source.items():
        assert back[name].dtype == torch.float32
        assert torch.equal(back[name], tensor.float()), name


def test_bf16_weights_come_back_from_a_bf16_export(tmp_path: Path) -> None:
    pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"], precision="all=bf16")
    back = exported(tmp_path / "out", tmp_path / "back", "bf16")
    for name, tensor in tq_tensors().items():
        assert back[name].dtype == torch.bfloat16
        assert torch.equal(back[name], tensor), name


def test_bf16_rounds_to_nearest_even(tmp_path: Path) -> None:
    config = {**TD_CONFIG, "dtype": "float32"}
    tensors = {name: tensor.float() for name, tensor in td_tensors().items()}
    torch.manual_seed(3)
    tensors["model.norm.weight"] = torch.randn(64)
    tensors["model.norm.weight"][:2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # ties
    pack_folder(write_checkpoint(tmp_path / "td", config, tensors), [tmp_path / "out"])
    back = exported(tmp_path / "out", tmp_path / "back", "bf16")
    assert torch.equal(back["model.norm.weight"], tensors["model.norm.weight"].to(torch.bfloat16))


def test_quantised_weights_are_close_and_those_of_the_report(tmp_path: Path) -> None:
    manifest = pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"])
    back = exported(tmp_path / "out", tmp_path / "back")
    source = tq_tensors()
    report = {entry.tensor_class: entry for entry in manifest.report}
    for tensor_class, part in (("experts", ".experts."), ("attention", "_proj"), ("head", "lm_head")):
        names = [n for n in source if part in n and (part != "_proj" or "self_attn" in n)]
        error = sum(float((back[n].double() - source[n].double()).square().sum()) for n in names)
        total = sum(float(source[n].double().square().sum()) for n in names)
        assert report[tensor_class].relative_rms == pytest.approx((error / total) ** 0.5, rel=1e-6)
        assert report[tensor_class].values == sum(source[n].numel() for n in names)
    assert 0.05 < report["experts"].relative_rms < 0.09
    assert report["attention"].relative_rms < 0.01
    assert torch.equal(back["model.layers.0.mlp.gate.weight"], source["model.layers.0.mlp.gate.weight"].float())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_transformers_loads_it_without_a_word(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_checkpoint(family, tmp_path / "source")
    pack_folder(source, [tmp_path / "out"], precision="all=f32")
    exported(tmp_path / "out", tmp_path / "back", shard_bytes=100_000)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    model, notes = loaded
    assert {key: list(value) for key, value in notes.items()} == {key: [] for key in notes}
    original = AutoModelForCausalLM.from_pretrained(source)
    state: dict[str, Any] = model.state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert json.loads((tmp_path / "back" / "tokenizer.json").read_text())


def test_shards_are_bounded_and_the_index_names_all(tmp_path: Path) -> None:
    pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"])
    tensors = exported(tmp_path / "out", tmp_path / "back", shard_bytes=100_000)
    shards = sorted((tmp_path / "back").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 100_000 + 10_000 for shard in shards)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    with open_container(tmp_path / "out") as container:
        assert index["metadata"]["total_size"] == exported_bytes(container.manifest, "f32")


def test_a_skipped_mtp_layer_is_not_promised(tmp_path: Path) -> None:
    config = {**TD_CONFIG, "num_nextn_predict_layers": 1}
    source = write_checkpoint(tmp_path / "td", config, td_tensors() | mtp_tensors())
    pack_folder(source, [tmp_path / "out"])
    exported(tmp_path / "out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_damaged_bytes_are_not_exported(tmp_path: Path) -> None:
    pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"])
    for name, match in (("stripe-000.colibri", "layer 1, expert 3"), ("dense.safetensors", "tensor layers.1.")):
        path = tmp_path / "out" / name
        data = path.read_bytes()
        path.write_bytes(data[:-4000] + bytes([data[-4000] ^ 1]) + data[-3999:])
        with open_container(tmp_path / "out") as opened, pytest.raises(ContainerError, match=rf"{match}.*CRC-32C is"):
            export(opened, tmp_path / name, Silent())
        assert not (tmp_path / name / "model.safetensors.index.json").exists()
        assert not list((tmp_path / name).glob("*.safetensors"))
        path.write_bytes(data)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"])
    with open_container(tmp_path / "out") as opened, pytest.raises(FolderError, match="tq is not empty"):
        export(opened, tmp_path / "tq", Silent())


def test_a_folder_inside_the_container_is_refused(tmp_path: Path) -> None:
    pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"])
    inside = tmp_path / "out" / "sub"
    with open_container(tmp_path / "out") as opened, pytest.raises(FolderError, match=r"sub lies inside .*out, which"):
        export(opened, inside, Silent())
    assert not inside.exists()


def test_the_dense_file_is_readable_by_other_tools(tmp_path: Path) -> None:
    manifest = pack_folder(write_tq(tmp_path / "tq"), [tmp_path / "out"], precision="head=int4,embedding=bf16")
    with safe_open(tmp_path / "out" / "dense.safetensors", "pt") as file:
        q = next(tensor for tensor in manifest.dense if tensor.name == "layers.0.q")
        codes, scales = file.get_tensor("layers.0.q.codes"), file.get_tensor("layers.0.q.scales")
        assert (codes.dtype, codes.shape) == (torch.int8, (q.rows, q.cols))
        assert (scales.dtype, scales.shape) == (torch.float16, (q.rows, 1))
        wanted = tq_tensors()["model.layers.0.self_attn.q_proj.weight"]
        assert relative_error(codes.float() * scales.float(), wanted) < 0.01
        packed = file.get_tensor("head.codes").numpy()
        grid = np.stack([packed & 15, packed >> 4], axis=-1).reshape(128, 64)
        head = grid * file.get_tensor("head.scales").float().numpy() + file.get_tensor("head.mins").float().numpy()
        assert relative_error(torch.from_numpy(head), tq_tensors()["lm_head.weight"]) < 0.12
        assert torch.equal(file.get_tensor("embedding"), tq_tensors()["model.embed_tokens.weight"])
        assert file.get_tensor("final_norm").shape == (64,)
