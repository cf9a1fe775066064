"""Qwen1.5-MoE and Qwen2-MoE: the config of transformers' models/qwen2_moe -> ModelSpec.

Biases on q, k and v; softmax router, renormalised only if norm_topk_prob; a shared expert behind a sigmoid gate; layers
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


def read(config: ConfigReader) -> Architecture:
    """Read a Qwen2MoeConfig; defaults are that class's."""
    spec, n_layers = read_trunk(config, "qwen2_moe")
    gqa = read_attention(config, spec)
    refuse_window(config, spec.max_positions, active=_has_window_layers(config, n_layers))
    moe = read_experts(config, "moe_intermediate_size")
    softmax_router(moe, renormalize=config.flag("norm_topk_prob", default=False))
    moe.shared_intermediate_size = config.size("shared_expert_intermediate_size")
    moe.shared_output_gate = True
    append_layers(spec, gqa, moe, config.size("intermediate_size"), sparse_layers(config, n_layers))
    return Architecture(spec, Biases(qkv=config.flag("qkv_bias", default=True), output=False))


def _has_window_layers(config: ConfigReader, n_layers: int) -> bool:
    """Whether a layer attends through the window: layer_types says so, else every second of the first ones."""
    enabled = config.flag("use_sliding_window", default=False)
    first = config.size("max_window_layers", default=28, minimum=0)
    default = ["sliding_attention" if enabled and layer < first and layer % 2 == 0 else "full_attention"
               for layer in range(n_layers)]  # fmt: skip
    types = config.texts("layer_types", default=default)
    if len(types) != n_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        config.refuse(
            "layer_types", f"{types!r} is not full_attention or sliding_attention for each of {n_layers} layers"
        )
    if "sliding_attention" in types and not enabled:
        config.refuse("layer_types", "sliding_attention without use_sliding_window")
    return "sliding_attention" in types


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    names=MoeNames(
        prefixes=("mlp",),
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    ),
    read=read,
    ignored=COMMON_IGNORED,
)
