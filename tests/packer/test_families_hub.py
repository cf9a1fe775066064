"""The configs of the models that people pack, key by key as they were published: none may trip over strictness."""

from pathlib import Path
from typing import Any

import pytest

from colibri.packer.errors import CheckpointError
from colibri.packer.families import FAMILIES
from colibri.packer.families.common import Architecture
from colibri.packer.families.config_reader import ConfigReader
from colibri.v1 import manifest_pb2 as pb

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "decoder_sparse_step": 1,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

HUB: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B-Instruct-v0.1": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": {
        **_QWEN,
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
    },
    "Qwen3-30B-A3B": {
        **_QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "OLMoE-1B-7B-0924": {
        **_COMMON,
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "vocab_size": 50304,
    },
    "GLM-4.5-Air": {
        **_COMMON,
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
}
HUB["Qwen3-Coder-30B-A3B-Instruct"] = {
    **HUB["Qwen3-30B-A3B"],
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
HUB["Qwen3-30B-A3B with YaRN, as its card advises"] = {
    **HUB["Qwen3-30B-A3B"],
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


def read(config: dict[str, Any]) -> Architecture:
    family = FAMILIES[config["model_type"]]
    reader = ConfigReader(config, Path("config.json"))
    reader.text("model_type")
    reader.texts("architectures")
    architecture = family.read(reader)
    reader.finish(family.ignored)
    return architecture


@pytest.mark.parametrize("name", HUB)
def test_published_configs_are_understood(name: str) -> None:
    config = HUB[name]
    architecture = read(config)
    spec = architecture.spec
    assert len(spec.layers) == config["num_hidden_layers"]
    assert (spec.vocab_size, spec.hidden_size) == (config["vocab_size"], config["hidden_size"])
    assert spec.layers[-1].moe.top_k == config["num_experts_per_tok"]
    assert spec.layers[-1].gqa.clip_qkv == 0
    dims = 64 if config["model_type"] == "glm4_moe" else 128
    assert (spec.ropes[0].dims, len(spec.ropes[0].inv_freq)) == (dims, dims // 2)
    assert spec.ropes[0].attention_factor == pytest.approx(1.138629436 if "YaRN" in name else 1)


def test_glm_air_has_one_dense_layer_and_one_mtp_layer() -> None:
    architecture = read(HUB["GLM-4.5-Air"])
    kinds = [layer.WhichOneof("ffn") for layer in architecture.spec.layers]
    assert kinds == ["dense"] + ["moe"] * 45
    assert architecture.mtp_layers == 1
    assert architecture.biases.qkv
    assert not architecture.biases.output


def test_qwen2_has_biases_and_a_gated_shared_expert_that_is_not_renormalised() -> None:
    architecture = read(HUB["Qwen1.5-MoE-A2.7B"])
    moe = architecture.spec.layers[0].moe
    assert architecture.biases.qkv
    assert (moe.shared_intermediate_size, moe.shared_output_gate) == (5632, True)
    assert moe.renormalize == pb.MoeFfnSpec.RENORMALIZE_UNSPECIFIED


@pytest.mark.parametrize("name", HUB)
def test_one_more_key_is_one_too_many(name: str) -> None:
    with pytest.raises(CheckpointError, match="auto_map"):
        read({**HUB[name], "auto_map": {"AutoModel": "modeling.Own"}})


@pytest.mark.parametrize(
    "changes", [{"qkv_bias": True}, {"use_qk_norm": False}, {"shared_expert_intermediate_size": 512}]
)
def test_keys_that_the_reference_ignores_may_not_claim_otherwise(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        read({**HUB["Qwen3-Coder-30B-A3B-Instruct"], **changes})
