"""GLM-4.5 to 4.7: the config of transformers' models/glm4_moe -> ModelSpec.

Sigmoid router in f32 with a bias that chooses but does not weigh, groups, routed_scaling_factor; an ungated shared
expert; the first layers dense; rope on the first half of each head unless the config says otherwise; q/k norm per head
where use_qk_norm. Layers of multi-token prediction behind the model's own are skipped by number.
"""

from colibri.packer.families.common import (
    COMMON_IGNORED,
    MAX_LAYERS,
    Architecture,
    Family,
    append_layers,
    read_attention,
    read_experts,
    read_trunk,
)
from colibri.packer.families.config_reader import ConfigReader
from colibri.packer.families.names import MoeNames
from colibri.packer.families.tensors import Biases
from colibri.v1 import manifest_pb2 as pb


def read(config: ConfigReader) -> Architecture:
    """Read a Glm4MoeConfig; defaults are that class's."""
    spec, n_layers = read_trunk(config, "glm4_moe")
    norm = config.flag("use_qk_norm", default=False)
    qk_norm = pb.GqaSpec.QK_NORM_HEAD if norm else pb.GqaSpec.QK_NORM_UNSPECIFIED
    gqa = read_attention(config, spec, qk_norm=qk_norm, partial_rotary_default=0.5)
    moe = read_experts(config, "moe_intermediate_size")
    _read_router(config, moe)
    shared = config.size("n_shared_experts", default=1, minimum=0, maximum=1024)
    moe.shared_intermediate_size = shared * moe.intermediate_size
    first = config.size("first_k_dense_replace", default=1, minimum=0)
    append_layers(spec, gqa, moe, config.size("intermediate_size"), [layer >= first for layer in range(n_layers)])
    mtp = config.size("num_nextn_predict_layers", "num_mtp_layers", default=1, minimum=0, maximum=MAX_LAYERS)
    return Architecture(spec, Biases(qkv=config.flag("attention_bias", default=False), output=False), mtp)


def _read_router(config: ConfigReader, moe: pb.MoeFfnSpec) -> None:
    config.only("scoring_func", "sigmoid", default="sigmoid")
    config.only("topk_method", "noaux_tc", default="noaux_tc")
    moe.score = pb.MoeFfnSpec.SCORE_SIGMOID
    moe.select_bias = True
    moe.groups = config.size("n_group", default=1, maximum=moe.experts)
    moe.top_groups = config.size("topk_group", default=1, maximum=moe.groups)
    if moe.experts % moe.groups:
        config.refuse("n_group", f"{moe.groups} does not divide {moe.experts} experts")
    per_group = moe.experts // moe.groups
    if per_group < 2:
        config.refuse("n_group", f"{moe.groups} groups of {moe.experts} experts: a group is scored by its two best")
    if moe.top_k > moe.top_groups * per_group:
        config.refuse(
            "num_experts_per_tok", f"{moe.top_k} of the {moe.top_groups * per_group} experts in topk_group groups"
        )
    if config.flag("norm_topk_prob", default=True):
        moe.renormalize = pb.MoeFfnSpec.RENORMALIZE_SUM_EPSILON
    moe.routed_scale = config.number("routed_scaling_factor", default=1.0)


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    names=MoeNames(prefixes=("mlp",), gate="gate_proj", up="up_proj", down="down_proj", shared="shared_experts"),
    read=read,
    ignored=COMMON_IGNORED,
)
