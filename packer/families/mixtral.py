"""Mixtral: the config of transformers' models/mixtral -> ModelSpec.

Softmax router, always renormalised over the chosen experts; every layer has experts; no biases, no shared expert.
`intermediate_size` is an expert's width. A sliding window that the context exceeds is refused.
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


def read(config: ConfigReader) -> Architecture:
    """Read a MixtralConfig."""
    spec, n_layers = read_trunk(config, "mixtral")
    gqa = read_attention(config, spec)
    refuse_window(config, spec.max_positions)
    moe = read_experts(config, "intermediate_size")
    softmax_router(moe, renormalize=True)
    append_layers(spec, gqa, moe, 0, [True] * n_layers)
    return Architecture(spec, Biases(qkv=False, output=False))


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=MoeNames(prefixes=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2"),
    read=read,
    ignored={**COMMON_IGNORED, "router_jitter_noise": "training only"},
)
