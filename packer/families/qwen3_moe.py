"""Qwen3-MoE: the config of transformers' models/qwen3_moe -> ModelSpec.

An RMSNorm on every head of q and k; softmax router, renormalised only if norm_topk_prob; no shared expert; layers
without experts by decoder_sparse_step and mlp_only_layers. A sliding window in use and shorter than the context is
refused.
"""

from colibri.packer.families.common import (
    COMMON_IGNORED,
    Architecture,
    Family,
    append_layers,
    read_attention,
    read_experts,
    read_trunk,
    refuse_window,
    softmax_router,
    sparse_layers,
)
from colibri.packer.families.config_reader import ConfigReader
from colibri.packer.families.names import MoeNames
from colibri.packer.families.tensors import Biases
from colibri.v1 import manifest_pb2 as pb


def read(config: ConfigReader) -> Architecture:
    """Read a Qwen3MoeConfig; defaults are that class's."""
    spec, n_layers = read_trunk(config, "qwen3_moe")
    gqa = read_attention(config, spec, qk_norm=pb.GqaSpec.QK_NORM_HEAD)
    refuse_window(config, spec.max_positions, active=config.flag("use_sliding_window", default=False))
    moe = read_experts(config, "moe_intermediate_size")
    softmax_router(moe, renormalize=config.flag("norm_topk_prob", default=False))
    append_layers(spec, gqa, moe, config.size("intermediate_size"), sparse_layers(config, n_layers))
    # Keys of Qwen3-Coder's configs that the reference does not read: true to them with these values only.
    config.only("qkv_bias", False, default=False)
    config.only("use_qk_norm", True, default=True)
    config.only("shared_expert_intermediate_size", 0, default=0)
    bias = config.flag("attention_bias", default=False)
    return Architecture(spec, Biases(qkv=bias, output=bias))


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=MoeNames(prefixes=("mlp",), gate="gate_proj", up="up_proj", down="down_proj"),
    read=read,
    ignored={**COMMON_IGNORED, "max_window_layers": "without effect: the window is the same for all layers"},
)
