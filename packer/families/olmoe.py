"""OLMoE: the config of transformers' models/olmoe -> ModelSpec.

An RMSNorm over the whole of q and of k; q, k and v clamped to +-clip_qkv after it; softmax router, renormalised only if
norm_topk_prob; every layer has experts; no shared expert. `intermediate_size` is an expert's width.
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
)
from colibri.packer.families.config_reader import ConfigReader
from colibri.packer.families.names import MoeNames
from colibri.packer.families.tensors import Biases
from colibri.v1 import manifest_pb2 as pb


def read(config: ConfigReader) -> Architecture:
    """Read an OlmoeConfig; defaults are that class's."""
    spec, n_layers = read_trunk(config, "olmoe")
    heads = config.size("num_attention_heads")
    gqa = read_attention(config, spec, qk_norm=pb.GqaSpec.QK_NORM_FULL, kv_heads_default=heads)
    if gqa.heads * gqa.head_dim != spec.hidden_size:
        # The reference sizes the q norm by hidden_size, not by the projection.
        config.refuse("head_dim", f"{heads} heads of {gqa.head_dim} are not hidden_size {spec.hidden_size}")
    if config.has("clip_qkv"):
        gqa.clip_qkv = config.number("clip_qkv")
    refuse_window(config, spec.max_positions)
    moe = read_experts(config, "intermediate_size")
    softmax_router(moe, renormalize=config.flag("norm_topk_prob", default=False))
    append_layers(spec, gqa, moe, 0, [True] * n_layers)
    bias = config.flag("attention_bias", default=False)
    return Architecture(spec, Biases(qkv=bias, output=bias))


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names=MoeNames(prefixes=("mlp",), gate="gate_proj", up="up_proj", down="down_proj"),
    read=read,
    ignored=COMMON_IGNORED,
)
