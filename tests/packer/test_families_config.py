"""Strict configs: what is missing, unknown, contradictory or not built is refused by key. Field report A08."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError
from colibri.packer.families import FAMILIES, resolve
from colibri.packer.families.config_reader import ConfigReader
from colibri.packer.families.rope import read_rope
from colibri.v1 import manifest_pb2 as pb
from testkit.checkpoints import TD_CONFIG, TINY_CONFIGS, TQ_CONFIG, td_tensors, tq_tensors, write_checkpoint

MISSING = object()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One copy of TQ and TD whose config.json each test replaces."""
    root = tmp_path_factory.mktemp("configs")
    return {
        "TQ": write_checkpoint(root / "tq", TQ_CONFIG, tq_tensors()),
        "TD": write_checkpoint(root / "td", TD_CONFIG, td_tensors()),
    }


def spec_of(folder: Path, base: dict[str, Any], changes: dict[str, Any]) -> pb.ModelSpec:
    merged = {key: value for key, value in {**base, **changes}.items() if value is not MISSING}
    (folder / "config.json").write_text(json.dumps(merged))
    with Checkpoint.open(folder) as checkpoint:
        return resolve(checkpoint).spec


def tq(folders: dict[str, Path], **changes: Any) -> pb.ModelSpec:
    return spec_of(folders["TQ"], TQ_CONFIG, changes)


def td(folders: dict[str, Path], **changes: Any) -> pb.ModelSpec:
    return spec_of(folders["TD"], TD_CONFIG, changes)


def refusal(folders: dict[str, Path], model: Any = tq, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        model(folders, **changes)
    return str(caught.value)


NESTED_ROPE = {"rope_theta": MISSING, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}


class TestA08Rope:
    def test_both_spellings_give_the_same_spec(self, folders: dict[str, Path]) -> None:
        old, new = tq(folders), tq(folders, **NESTED_ROPE)
        assert old.SerializeToString(deterministic=True) == new.SerializeToString(deterministic=True)
        assert tq(folders, rope_theta=10000.0) != old

    @pytest.mark.parametrize(
        "spelling",
        [
            {"rope_scaling": None},
            {"rope_scaling": {}},
            {"rope_scaling": {"rope_type": "default"}},
            {"rope_scaling": {"type": "default"}},
            {"rope_theta": 1000000},
            {"rope_parameters": {"rope_type": "default", "type": "default", "rope_theta": 1e6}},
        ],
    )
    def test_more_ways_to_say_it(self, folders: dict[str, Path], spelling: dict[str, Any]) -> None:
        assert tq(folders, **spelling) == tq(folders)

    def test_absent_is_refused(self, folders: dict[str, Path]) -> None:
        assert "rope_theta" in refusal(folders, rope_theta=MISSING)
        assert "rope_theta" in refusal(folders, rope_theta=MISSING, rope_parameters={"rope_type": "default"})

    @pytest.mark.parametrize("kind", ["spiral", "dynamic", "longrope", "mrope"])
    @pytest.mark.parametrize("key", ["rope_type", "type"])
    def test_an_unsupported_type_is_named(self, folders: dict[str, Path], kind: str, key: str) -> None:
        assert repr(kind) in refusal(folders, rope_scaling={key: kind, "factor": 2.0})

    def test_two_values_are_refused(self, folders: dict[str, Path]) -> None:
        text = refusal(folders, rope_parameters={"rope_theta": 10000.0})
        assert "1000000.0" in text
        assert "10000.0" in text
        assert "rope_type" in refusal(folders, rope_scaling={"rope_type": "default", "type": "linear"})

    def test_unknown_keys_are_refused(self, folders: dict[str, Path]) -> None:
        assert "mrope_section" in refusal(folders, rope_scaling={"mrope_section": [1, 2]})

    @pytest.mark.parametrize("theta", [0, -1.0, "x", True, float("1e999")])
    def test_a_theta_that_is_none(self, folders: dict[str, Path], theta: object) -> None:
        with pytest.raises(CheckpointError):
            tq(folders, rope_theta=theta)

    def test_partial_rotation_is_glm_s(self, folders: dict[str, Path]) -> None:
        half = td(folders)
        assert half.ropes[0].dims == 8
        nested = {"rope_theta": 1000000.0, "partial_rotary_factor": 0.5}
        assert td(folders, partial_rotary_factor=MISSING, rope_theta=MISSING, rope_parameters=nested) == half
        assert td(folders, partial_rotary_factor=MISSING) == half  # Glm4MoeConfig's default
        assert td(folders, partial_rotary_factor=1.0).ropes[0].dims == 16
        assert "partial_rotary_factor" in refusal(folders, td, partial_rotary_factor=0.45)
        assert "partial_rotary_factor" in refusal(folders, td, partial_rotary_factor=1.5)
        assert "partial_rotary_factor" in refusal(folders, partial_rotary_factor=0.5)
        assert tq(folders, partial_rotary_factor=1.0) == tq(folders)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn, all options": {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, own attention factor": {**YARN, "attention_factor": 1.25},
}


class TestRopeScaling:
    @pytest.mark.parametrize("head_dim", [16, 64, 128])
    @pytest.mark.parametrize("theta", [10000.0, 1000000.0])
    @pytest.mark.parametrize("name", SCALINGS)
    def test_tables_equal_the_reference_s(self, name: str, theta: float, head_dim: int) -> None:
        parameters = {**SCALINGS[name], "rope_theta": theta}
        config = AutoConfig.for_model(
            "qwen3_moe", head_dim=head_dim, max_position_embeddings=4096, rope_parameters=dict(parameters)
        )
        reference, factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config)
        table = read_rope(ConfigReader({"rope_parameters": parameters}, Path("config.json")), head_dim)
        # Both are float32; the reference's pow, and every step after it, may be off by one unit in the last place.
        torch.testing.assert_close(torch.tensor(list(table.inv_freq)), reference, rtol=6e-7, atol=0)
        assert table.attention_factor == pytest.approx(factor, rel=1e-12)

    @pytest.mark.parametrize("head_dim", [10, 16, 64, 128, 256])
    @pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0, 5000000.0])
    def test_the_plain_table_is_off_by_one_unit_at_most(self, theta: float, head_dim: int) -> None:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

        config: Any = AutoConfig.for_model("qwen3_moe", head_dim=head_dim, rope_parameters={"rope_theta": theta})
        reference, _ = Qwen3MoeRotaryEmbedding.compute_default_rope_parameters(config)
        table = read_rope(ConfigReader({"rope_theta": theta}, Path("config.json")), head_dim)
        torch.testing.assert_close(torch.tensor(list(table.inv_freq)), reference, rtol=1.3e-7, atol=0)

    @pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
    def test_a_missing_parameter_is_named(self, folders: dict[str, Path], name: str) -> None:
        for key in SCALINGS[name]:
            if key != "rope_type":
                scaling = {other: value for other, value in SCALINGS[name].items() if other != key}
                assert key in refusal(folders, rope_scaling=scaling)

    def test_head_dim_must_be_even(self) -> None:
        with pytest.raises(CheckpointError, match="15 dimensions, not even"):
            read_rope(ConfigReader({"rope_theta": 10000.0}, Path("config.json")), 15)


class TestAliases:
    def test_every_spelling_of_the_number_of_experts(self, folders: dict[str, Path]) -> None:
        plain = tq(folders)
        for key in ("num_local_experts", "n_routed_experts"):
            assert tq(folders, num_experts=MISSING, **{key: 4}) == plain
            assert tq(folders, **{key: 4}) == plain
            text = refusal(folders, **{key: 5})
            assert key in text or "num_experts" in text
            assert "contradicts" in text

    def test_dtype_and_torch_dtype(self, folders: dict[str, Path]) -> None:
        assert tq(folders, torch_dtype="bfloat16") == tq(folders, dtype=MISSING) == tq(folders)
        assert "contradicts" in refusal(folders, torch_dtype="float16")


class TestStrictness:
    @pytest.mark.parametrize("key", sorted(TQ_CONFIG.keys() - {"bos_token_id", "eos_token_id", "dtype"}))
    def test_a_key_is_needed_or_has_transformers_default(self, folders: dict[str, Path], key: str) -> None:
        defaults = {
            "attention_bias": False,
            "hidden_act": "silu",
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        }
        if key in defaults:
            assert tq(folders, **{key: MISSING}) == tq(folders, **{key: defaults[key]})
        elif key == "head_dim":  # 64 // 4, as the reference computes it
            assert tq(folders, head_dim=MISSING) == tq(folders)
        else:
            assert key in refusal(folders, **{key: MISSING})

    @pytest.mark.parametrize(
        "key",
        [
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "num_experts",
            "num_experts_per_tok",
            "vocab_size",
        ],
    )
    @pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, [4], 1 << 40])
    def test_sizes_that_are_none(self, folders: dict[str, Path], key: str, value: object) -> None:
        text = refusal(folders, **{key: value})
        assert key in text or (key == "num_experts" and "num_local_experts" in text)
        assert repr(value) in text

    def test_an_unknown_key_is_refused_with_its_value(self, folders: dict[str, Path]) -> None:
        text = refusal(folders, logit_softcap=30.0, attention_sinks=4)
        assert "logit_softcap = 30.0" in text
        assert "attention_sinks = 4" in text

    def test_an_unknown_key_without_value_is_fine(self, folders: dict[str, Path]) -> None:
        assert tq(folders, logit_softcap=None) == tq(folders)

    @pytest.mark.parametrize("key", ["initializer_range", "router_aux_loss_coef", "transformers_version", "use_cache"])
    def test_keys_of_training_are_ignored(self, folders: dict[str, Path], key: str) -> None:
        assert tq(folders, **{key: 0.123}) == tq(folders)

    @pytest.mark.parametrize(
        ("changes", "shown"),
        [
            ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
            ({"model_type": "llama"}, "model_type: 'llama'"),
            ({"model_type": 3}, "model_type"),
            ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "Qwen3MoeForSequenceClassification"),
            ({"architectures": []}, "architectures"),
            ({"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
            ({"num_experts_per_tok": 5}, "num_experts_per_tok: 5"),
            ({"num_key_value_heads": 3}, "num_key_value_heads: 3"),
            ({"use_sliding_window": True, "sliding_window": 511}, "sliding_window: 511"),
            ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
            ({"mlp_only_layers": [True]}, "mlp_only_layers"),
            ({"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
            ({"is_encoder_decoder": True}, "is_encoder_decoder"),
            ({"norm_topk_prob": 1}, "norm_topk_prob: 1"),
            ({"rms_norm_eps": 0}, "rms_norm_eps: 0"),
        ],
    )
    def test_values_that_are_not_built(self, folders: dict[str, Path], changes: dict[str, Any], shown: str) -> None:
        assert shown in refusal(folders, **changes)

    @pytest.mark.parametrize(
        ("changes", "shown"),
        [
            ({"n_group": 3}, "n_group: 3"),
            ({"n_group": 8, "topk_group": 2}, "n_group: 8"),
            ({"n_group": 4, "topk_group": 5}, "topk_group: 5"),
            ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok: 3"),
            ({"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
            ({"routed_scaling_factor": -1}, "routed_scaling_factor: -1"),
        ],
    )
    def test_values_of_glm_that_are_not_built(
        self, folders: dict[str, Path], changes: dict[str, Any], shown: str
    ) -> None:
        assert shown in refusal(folders, td, **changes)

    def test_a_window_that_cannot_matter_is_fine(self, folders: dict[str, Path]) -> None:
        assert tq(folders, use_sliding_window=True, sliding_window=512) == tq(folders)
        assert tq(folders, use_sliding_window=False, sliding_window=16, max_window_layers=1) == tq(folders)

    def test_a_text_config_may_repeat_but_not_contradict(self, folders: dict[str, Path]) -> None:
        nested = {key: value for key, value in TQ_CONFIG.items() if key not in ("architectures", "model_type")}
        absent = dict.fromkeys(nested, MISSING)
        assert tq(folders, **{**absent, "text_config": nested}) == tq(folders)
        assert tq(folders, text_config={"hidden_size": 64}) == tq(folders)
        assert "text_config.hidden_size" in refusal(folders, text_config={"hidden_size": 65})

    @pytest.mark.parametrize("text", ["", "[]", "nul", '{"a": 1, "a": 2}', '{"rms_norm_eps": Infinity}'])
    def test_a_config_that_is_no_object(self, folders: dict[str, Path], text: str) -> None:
        (folders["TQ"] / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            Checkpoint.open(folders["TQ"])


class TestWindowOfTheOthers:
    """The reference's rules: Mixtral's window is always on, Qwen2's for every second of the first layers."""

    def refuse(self, family: str, **changes: Any) -> str:
        """The refusal of a family's own file, empty if there is none."""
        reader = ConfigReader({**TINY_CONFIGS[family], "rms_norm_eps": 1e-6, **changes}, Path("config.json"))
        try:
            FAMILIES[family].read(reader)
        except CheckpointError as error:
            return str(error)
        return ""

    def test_mixtral(self) -> None:
        assert "sliding_window: 319" in self.refuse("mixtral", sliding_window=319)
        assert self.refuse("mixtral", sliding_window=320) == ""
        assert self.refuse("mixtral", sliding_window=None) == ""

    def test_qwen2(self) -> None:
        on = {"use_sliding_window": True, "sliding_window": 32}
        assert "sliding_window: 32" in self.refuse("qwen2_moe", **on, max_window_layers=1)
        assert self.refuse("qwen2_moe", **on, max_window_layers=0) == ""
        full = ["full_attention"] * 3
        assert self.refuse("qwen2_moe", **on, layer_types=full) == ""
        assert "layer_types" in self.refuse("qwen2_moe", layer_types=["chunked_attention", *full[1:]])
