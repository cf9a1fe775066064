"""Every tensor is used once, skipped by a named rule, or refused. Field reports A06, A07, A09, A10, A13 to A15, A23."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from colibri.core.errors import NonFiniteError
from colibri.core.tensors import Format, dequantize_tiles, quantize_tiles
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError
from colibri.packer.families import resolve
from colibri.packer.model_source import ModelSource, read_matrix
from colibri.v1 import manifest_pb2 as pb
from testkit.checkpoints import (
    INDEX,
    TD_CONFIG,
    TQ_CONFIG,
    Tensors,
    fused,
    mtp_tensors,
    shard_name,
    td_tensors,
    tq_tensors,
    write_checkpoint,
    write_index,
)

GATE, UP, DOWN = pb.RecordPart.KIND_GATE, pb.RecordPart.KIND_UP, pb.RecordPart.KIND_DOWN
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXPERTS_0 = "model.layers.0.mlp.experts"


def resolved(folder: Path, tensors: Tensors, config: dict[str, Any] = TQ_CONFIG, **changes: Any) -> ModelSource:
    write_checkpoint(folder, {**config, **changes}, tensors)
    with Checkpoint.open(folder) as checkpoint:
        return resolve(checkpoint)


def refusal(folder: Path, tensors: Tensors, config: dict[str, Any] = TQ_CONFIG, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolved(folder, tensors, config, **changes)
    return str(caught.value)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def dense_bytes(folder: Path, model: ModelSource) -> dict[str, bytes]:
    with Checkpoint.open(folder) as checkpoint:
        return {dense.name: bytes(read_matrix(checkpoint, dense.source, 0, dense.rows).buffer) for dense in model.dense}


def expert_bytes(folder: Path, model: ModelSource) -> dict[tuple[int, int, pb.RecordPart.Kind], bytes]:
    """The bytes of every expert matrix by (layer, expert, kind)."""
    result = {}
    with Checkpoint.open(folder) as checkpoint:
        for layer in model.expert_layers:
            for expert in range(layer.experts):
                for kind in (GATE, UP, DOWN):
                    rows = layer.hidden if kind == DOWN else layer.intermediate
                    block = read_matrix(checkpoint, layer.matrices(expert, kind), 0, rows)
                    result[layer.layer, expert, kind] = bytes(block.buffer)
    return result


class TestA06Mtp:
    PREFIX = "model.layers.2."

    def test_a_whole_mtp_layer_is_skipped_and_listed(self, tmp_path: Path) -> None:
        plain = resolved(tmp_path / "plain", td_tensors(), TD_CONFIG)
        extra = mtp_tensors()
        model = resolved(tmp_path / "mtp", td_tensors() | extra, TD_CONFIG, num_nextn_predict_layers=1)
        (skipped,) = model.skipped
        assert skipped.rule == "mtp_layer"
        assert set(skipped.names) == set(extra)
        assert (model.spec, model.dense, model.expert_layers) == (plain.spec, plain.dense, plain.expert_layers)

    def test_half_of_one_is_skipped_too(self, tmp_path: Path) -> None:
        extra = without(mtp_tensors(), f"{self.PREFIX}embed_tokens.weight", f"{self.PREFIX}shared_head.head.weight")
        model = resolved(tmp_path, td_tensors() | extra, TD_CONFIG, num_nextn_predict_layers=1)
        assert set(model.skipped[0].names) == set(extra)

    def test_absence_is_no_error(self, tmp_path: Path) -> None:
        assert resolved(tmp_path, td_tensors(), TD_CONFIG, num_nextn_predict_layers=1).skipped == ()

    def test_the_config_decides_not_the_name(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, td_tensors() | mtp_tensors(), TD_CONFIG, num_nextn_predict_layers=0)
        assert f"'{self.PREFIX}" in text

    def test_only_as_many_layers_as_the_config_says(self, tmp_path: Path) -> None:
        beyond = {"model.layers.3.enorm.weight": torch.ones(64)}
        text = refusal(tmp_path, td_tensors() | mtp_tensors() | beyond, TD_CONFIG, num_nextn_predict_layers=1)
        assert "1 tensor that" in text
        assert "model.layers.3.enorm.weight" in text

    def test_the_other_spelling(self, tmp_path: Path) -> None:
        config = {key: value for key, value in TD_CONFIG.items() if key != "num_nextn_predict_layers"}
        assert resolved(tmp_path, td_tensors() | mtp_tensors(), config, num_mtp_layers=1).skipped


class TestA07TiedEmbeddings:
    @pytest.fixture(params=["flag", "nested"])
    def tied(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        if request.param == "flag":
            return {"tie_word_embeddings": True}
        return {"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}

    def equal(self) -> Tensors:
        tensors = tq_tensors()
        return {**tensors, HEAD: tensors[EMBEDDING].clone()}

    def test_absent_and_tied(self, tmp_path: Path, tied: dict[str, Any]) -> None:
        model = resolved(tmp_path, without(tq_tensors(), HEAD), **tied)
        assert model.spec.tied_embeddings
        assert "head" not in [dense.name for dense in model.dense]
        assert model.skipped == ()

    def test_absent_and_not_tied_is_refused(self, tmp_path: Path) -> None:
        assert HEAD in refusal(tmp_path, without(tq_tensors(), HEAD))

    def test_equal_and_tied(self, tmp_path: Path, tied: dict[str, Any]) -> None:
        model = resolved(tmp_path, self.equal(), **tied)
        assert model.spec.tied_embeddings
        assert [(skipped.rule, skipped.names) for skipped in model.skipped] == [("tied_head_copy", (HEAD,))]
        assert model.warnings == ()

    def test_equal_and_not_tied(self, tmp_path: Path) -> None:
        model = resolved(tmp_path, self.equal())
        assert not model.spec.tied_embeddings
        assert model.dense[1].name == "head"

    def test_different_and_tied_is_used_with_a_warning(self, tmp_path: Path, tied: dict[str, Any]) -> None:
        model = resolved(tmp_path, tq_tensors(), **tied)
        assert not model.spec.tied_embeddings
        assert model.dense[1].source_names == (HEAD,)
        (warning,) = model.warnings
        assert HEAD in warning
        assert "not tied" in warning

    def test_different_in_the_last_value_only(self, tmp_path: Path) -> None:
        tensors = self.equal()
        tensors[HEAD][-1, -1] += 1
        assert not resolved(tmp_path, tensors, tie_word_embeddings=True).spec.tied_embeddings

    def test_different_and_not_tied(self, tmp_path: Path) -> None:
        model = resolved(tmp_path, tq_tensors())
        assert not model.spec.tied_embeddings
        assert model.warnings == ()

    @pytest.mark.parametrize("head", ["absent", "equal", "different"])
    def test_the_bias_of_a_head_is_kept(self, tmp_path: Path, head: str) -> None:
        bias = torch.zeros(128)
        bias[77] = 100.0
        tensors = {"absent": without(tq_tensors(), HEAD), "equal": self.equal(), "different": tq_tensors()}[head]
        model = resolved(tmp_path, {**tensors, "lm_head.bias": bias}, tie_word_embeddings=True)
        assert dense_bytes(tmp_path, model)["head_bias"] == bias.numpy().tobytes()


class TestA09FusedExperts:
    def place(self, folder: Path, tensors: Tensors, config: dict[str, Any], third: Tensors) -> None:
        """gate_up in shard 1, down in shard 2, everything else in shard 1, `third` in shard 3."""
        write_checkpoint(folder, config, tensors, shards=1)
        (folder / "model.safetensors").unlink()
        parts = [
            {name: tensor for name, tensor in tensors.items() if not name.endswith("experts.down_proj")},
            {name: tensor for name, tensor in tensors.items() if name.endswith("experts.down_proj")},
            third,
        ]
        places: dict[str, str] = {}
        for number, part in enumerate(parts):
            if part:
                save_file(part, folder / shard_name(number, 3))
                places |= {name: shard_name(number, 3) for name in part}
        write_index(folder, places)

    @pytest.mark.parametrize("family", ["TQ", "TD"])
    def test_fused_and_separate_give_the_same_model(self, tmp_path: Path, family: str) -> None:
        tensors, config = (tq_tensors(), TQ_CONFIG) if family == "TQ" else (td_tensors(), TD_CONFIG)
        plain = resolved(tmp_path / "plain", tensors, config)
        self.place(tmp_path / "fused", fused(tensors), config, {})
        with Checkpoint.open(tmp_path / "fused") as checkpoint:
            model = resolve(checkpoint)
        assert model.spec == plain.spec
        assert model.dense == plain.dense
        assert expert_bytes(tmp_path / "fused", model) == expert_bytes(tmp_path / "plain", plain)
        assert len(set(expert_bytes(tmp_path / "plain", plain).values())) == sum(
            3 * layer.experts for layer in plain.expert_layers
        )

    def test_biases_of_experts_are_refused_by_name(self, tmp_path: Path) -> None:
        name = f"{EXPERTS_0}.gate_up_proj_bias"
        self.place(tmp_path, fused(tq_tensors()), TQ_CONFIG, {name: torch.ones(4, 192)})
        with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="gate_up_proj_bias"):
            resolve(checkpoint)

    def test_fewer_experts_than_the_config_says(self, tmp_path: Path) -> None:
        tensors = fused(tq_tensors())
        tensors[f"{EXPERTS_0}.down_proj"] = tensors[f"{EXPERTS_0}.down_proj"][:3].clone()
        text = refusal(tmp_path, tensors)
        assert f"{EXPERTS_0}.down_proj" in text
        assert "[3, 64, 96]" in text
        assert "[4, 64, 96]" in text

    @pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
    def test_half_of_a_fused_layer(self, tmp_path: Path, part: str) -> None:
        assert f"{EXPERTS_0}.{part}" in refusal(tmp_path, without(fused(tq_tensors()), f"{EXPERTS_0}.{part}"))

    @pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
    def test_a_separate_matrix_missing(self, tmp_path: Path, part: str) -> None:
        name = f"{EXPERTS_0}.3.{part}.weight"
        assert name in refusal(tmp_path, without(tq_tensors(), name))

    def test_both_layouts_at_once_are_refused(self, tmp_path: Path) -> None:
        assert "tensors that this model family does not have" in refusal(tmp_path, fused(tq_tensors()) | tq_tensors())

    def test_an_expert_spread_over_shards(self, tmp_path: Path) -> None:
        tensors = tq_tensors()
        model = resolved(tmp_path, tensors)  # round robin over two shards
        with Checkpoint.open(tmp_path) as checkpoint:
            files = {
                checkpoint.tensors[model.expert_layers[0].matrices(0, kind).tensor].file for kind in (GATE, UP, DOWN)
            }
        assert len(files) == 2

    def test_mixtral_under_transformers_own_names(self, tmp_path: Path) -> None:
        config = {
            **{
                key: value for key, value in TQ_CONFIG.items() if key not in ("moe_intermediate_size", "norm_topk_prob")
            },
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": 96,
            "attention_bias": None,
        }
        tensors = {name: tensor for name, tensor in tq_tensors().items() if "_norm.weight" not in name}
        parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        hub = {}
        for name, tensor in tensors.items():
            new = name.replace(".mlp.", ".block_sparse_moe.")
            for old, short in parts.items():
                new = new.replace(old, short) if ".experts." in new else new
            hub[new] = tensor
        as_hub = resolved(tmp_path / "hub", hub, config)
        as_memory = resolved(tmp_path / "memory", fused(tensors), config)
        assert as_hub.spec == as_memory.spec
        assert expert_bytes(tmp_path / "hub", as_hub) == expert_bytes(tmp_path / "memory", as_memory)
        assert dense_bytes(tmp_path / "hub", as_hub) == dense_bytes(tmp_path / "memory", as_memory)


class TestA10OddSizes:
    @pytest.mark.parametrize(
        "sizes", [{"moe_intermediate_size": 80}, {"hidden_size": 60}, {"moe_intermediate_size": 7}]
    )
    def test_sizes_that_no_group_divides(self, tmp_path: Path, sizes: dict[str, int]) -> None:
        config = {**TQ_CONFIG, **sizes}
        model = resolved(tmp_path, tq_tensors(config), config)
        (first, _) = model.expert_layers
        assert (first.intermediate, first.hidden) == (config["moe_intermediate_size"], config["hidden_size"])


class TestA13SpecialValues:
    FORM = Format.int4(32)

    def quantised(self, folder: Path, tensors: Tensors, expert: int) -> np.ndarray[Any, Any]:
        model = resolved(folder, tensors)
        layer = model.expert_layers[0]
        with Checkpoint.open(folder) as checkpoint:
            block = read_matrix(checkpoint, layer.matrices(expert, UP), 0, 96)
        tiles, _ = quantize_tiles(self.FORM, block.buffer, "bf16", 96, 64, row_stride=block.row_stride)
        return np.asarray(dequantize_tiles(self.FORM, tiles, 96, 64))

    def test_an_expert_of_zeros_is_legal(self, tmp_path: Path) -> None:
        tensors = tq_tensors()
        for part in ("gate", "up", "down"):
            tensors[f"{EXPERTS_0}.2.{part}_proj.weight"].zero_()
        assert not self.quantised(tmp_path, tensors, 2).any()

    def test_a_group_of_zeros_stays_exactly_zero(self, tmp_path: Path) -> None:
        tensors = tq_tensors()
        tensors[f"{EXPERTS_0}.1.up_proj.weight"][5, 32:] = 0
        values = self.quantised(tmp_path, tensors, 1)
        assert not values[5, 32:].any()
        assert values[5, :32].any()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_is_found_by_row_and_column(self, tmp_path: Path, value: float) -> None:
        tensors = tq_tensors()
        tensors[f"{EXPERTS_0}.3.up_proj.weight"][41, 17] = value
        with pytest.raises(NonFiniteError) as caught:
            self.quantised(tmp_path, tensors, 3)
        assert (caught.value.row, caught.value.col) == (41, 17)


class TestA14Vocabulary:
    def write(self, folder: Path, added: dict[str, int]) -> None:
        """TQ with TOK's first 120 tokens and `added` ones."""
        write_checkpoint(folder, TQ_CONFIG, tq_tensors())
        content = json.loads((folder / "tokenizer.json").read_text())
        words = [word for word, _ in sorted(content["model"]["vocab"].items(), key=lambda item: item[1])][:120]
        content["model"]["vocab"] = {word: number for number, word in enumerate(words)}
        content["model"]["merges"] = []
        template = content["added_tokens"][0]
        content["added_tokens"] = [{**template, "content": token, "id": number} for token, number in added.items()]
        (folder / "tokenizer.json").write_text(json.dumps(content))

    def resolve(self, folder: Path) -> ModelSource:
        with Checkpoint.open(folder) as checkpoint:
            return resolve(checkpoint)

    def test_ids_below_the_rows_may_have_gaps(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"<a>": 120, "<b>": 121, "<c>": 125})
        model = self.resolve(tmp_path)
        assert model.spec.vocab_size == 128
        # The tokenizers library, and transformers with it, numbers added tokens without a gap. Not in silence.
        (warning,) = model.warnings
        assert "gives '<c>' the id 125" in warning
        assert "gives it 122" in warning

    def test_without_gaps_there_is_nothing_to_say(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"<a>": 120, "<b>": 121, "<c>": 122})
        assert self.resolve(tmp_path).warnings == ()

    def test_one_id_beyond_the_rows_is_refused_though_the_library_renumbers_it(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"<a>": 120, "<b>": 130})
        with pytest.raises(CheckpointError, match=r"1 token has no row in the embedding, which has 128: '<b>'"):
            self.resolve(tmp_path)

    def test_an_id_at_or_beyond_the_rows_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, {f"<{number}>": number for number in range(120, 131)})
        with pytest.raises(CheckpointError, match=r"3 tokens have no row in the embedding, which has 128: '<128>'"):
            self.resolve(tmp_path)

    def test_the_rows_rule_over_vocab_size(self, tmp_path: Path) -> None:
        model = resolved(tmp_path, tq_tensors(), vocab_size=125)
        assert model.spec.vocab_size == 128
        assert any("vocab_size 125" in warning and "128 rows" in warning for warning in model.warnings)

    def test_embedding_and_head_must_agree(self, tmp_path: Path) -> None:
        tensors = tq_tensors()
        tensors[HEAD] = torch.cat((tensors[HEAD], tensors[HEAD][:1]))
        assert HEAD in refusal(tmp_path, tensors)


class TestA15UnknownTokenizer:
    def test_a_newer_schema_is_refused_with_its_version(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, TQ_CONFIG, tq_tensors())
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content |= {"version": "9.7", "model": {"type": "Quantum", "vocab": {}}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"version '9\.7'"):
            resolve(checkpoint)

    def test_none_at_all_is_a_warning(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, TQ_CONFIG, tq_tensors(), tokenizer=False)
        with Checkpoint.open(tmp_path) as checkpoint:
            assert "no tokenizer.json" in resolve(checkpoint).warnings[0]


class TestA23PrefixesAndZeroExperts:
    @pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
    def test_a_nested_language_model_gives_the_same_model(self, tmp_path: Path, prefix: str) -> None:
        plain = resolved(tmp_path / "plain", tq_tensors())
        if prefix == "language_model.":
            nested = {prefix + name: tensor for name, tensor in tq_tensors().items()}
        else:
            nested = {name.replace("model.", prefix, 1): tensor for name, tensor in tq_tensors().items()}
        vision = {"visual.blocks.0.weight": torch.ones(3), "model.vision_tower.a": torch.ones(2)}
        model = resolved(tmp_path / "nested", nested | vision)
        assert model.spec == plain.spec
        assert [(layer.layer, layer.experts) for layer in model.expert_layers] == [(0, 4), (1, 4)]
        assert expert_bytes(tmp_path / "nested", model) == expert_bytes(tmp_path / "plain", plain)
        assert dense_bytes(tmp_path / "nested", model) == dense_bytes(tmp_path / "plain", plain)
        assert [(skipped.rule, set(skipped.names)) for skipped in model.skipped] == [("vision_tower", set(vision))]

    def test_an_unknown_prefix_is_refused_with_what_is_there(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, {f"thinker.{name}": tensor for name, tensor in tq_tensors().items()})
        assert "'thinker.model.embed_tokens.weight'" in text

    def test_a_model_without_experts_is_refused(self, tmp_path: Path) -> None:
        config = {**TD_CONFIG, "first_k_dense_replace": 2}
        assert "0 experts" in refusal(tmp_path, td_tensors(config), config)


class TestLaw3:
    def test_inv_freq_is_skipped_and_counted(self, tmp_path: Path) -> None:
        extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
        model = resolved(tmp_path, tq_tensors() | extra)
        assert [(skipped.rule, set(skipped.names)) for skipped in model.skipped] == [("rope_inv_freq", set(extra))]

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.2.input_layernorm.weight",
            f"{EXPERTS_0}.4.up_proj.weight",
            f"{EXPERTS_0}.0.up_proj.weight_scale_inv",
            f"{EXPERTS_0}.0.up_proj.bias",
            "model.layers.0.mlp.shared_expert.up_proj.weight",
            "transformer.h.0.weight",
        ],
    )
    def test_a_tensor_that_nobody_wants_is_refused_by_name(self, tmp_path: Path, name: str) -> None:
        text = refusal(tmp_path, tq_tensors() | {name: torch.ones(3)})
        assert f"1 tensor that this model family does not have: {name!r}" in text

    def test_a_tensor_that_is_missing_is_named_whichever_it_is(self, tmp_path: Path) -> None:
        for number, name in enumerate(tq_tensors()):
            assert repr(name) in refusal(tmp_path / str(number), without(tq_tensors(), name))

    @pytest.mark.parametrize(
        ("shape", "shown"), [((), "[]"), ((0,), "[0]"), ((64, 1), "[64, 1]"), ((63,), "[63]"), ((1, 64), "[1, 64]")]
    )
    def test_a_wrong_shape_is_refused(self, tmp_path: Path, shape: tuple[int, ...], shown: str) -> None:
        text = refusal(tmp_path, tq_tensors() | {"model.norm.weight": torch.ones(shape)})
        assert f"'model.norm.weight' is {shown}, the config makes it [64]" in text

    @pytest.mark.parametrize("shape", [(), (0,), (0, 4)])
    def test_scalars_and_empty_tensors_that_nobody_wants(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        assert "'model.scale'" in refusal(tmp_path, tq_tensors() | {"model.scale": torch.ones(shape)})

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.int8, torch.float64])
    def test_a_dtype_that_cannot_be_packed(self, tmp_path: Path, dtype: torch.dtype) -> None:
        tensors = tq_tensors()
        name = f"{EXPERTS_0}.0.up_proj.weight"
        tensors[name] = tensors[name].float().to(dtype)
        text = refusal(tmp_path, tensors)
        assert name in text
        assert "F32, BF16, F16" in text

    def test_dtypes_may_differ_from_tensor_to_tensor(self, tmp_path: Path) -> None:
        tensors = tq_tensors()
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        tensors[HEAD] = tensors[HEAD].half()
        assert len(resolved(tmp_path, tensors).dense) == 3 + 2 * 9

    def test_the_folder_s_path_is_in_no_warning(self, tmp_path: Path) -> None:
        """Warnings go into the manifest, which must not depend on where the source lay."""
        write_checkpoint(tmp_path, {**TQ_CONFIG, "vocab_size": 99}, tq_tensors(), tokenizer=False)
        save_file({"stray": torch.ones(1)}, tmp_path / "stray.safetensors")
        places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        save_file(tq_tensors() | {"unlisted": torch.ones(1)}, tmp_path / places[HEAD])
        with Checkpoint.open(tmp_path) as checkpoint:
            warnings = resolve(checkpoint).warnings
        assert len(warnings) == 5
        assert not any(str(tmp_path) in warning for warning in warnings)
