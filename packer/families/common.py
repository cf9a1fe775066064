"""What every family file builds on: the definition of a family, and the parts of a config that they all share.

Owns the reading of trunk, attention and expert keys into a ModelSpec. Refuses what no family supports: an activation
other than silu, a sliding window shorter than the context, quantised weights. The differences between families are in
their own files, one each; turning a spec into tensors is tensors'.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from colibri.packer.families.config_reader import ConfigReader
from colibri.packer.families.names import MoeNames
from colibri.packer.families.rope import read_rope
from colibri.packer.families.tensors import Biases
from colibri.v1 import manifest_pb2 as pb

MAX_LAYERS = 4096
MAX_EXPERTS = 65536

# Keys that change nothing about the model's arithmetic, and why. Families add their own.
COMMON_IGNORED: Mapping[str, str] = {
    "_name_or_path": "where the checkpoint was loaded from",
    "name_or_path": "where the checkpoint was loaded from",
    "_attn_implementation_autoset": "how transformers picked its attention kernel",
    "_commit_hash": "where the checkpoint was loaded from",
    "transformers_version": "who wrote the config",
    "initializer_range": "training only",
    "attention_dropout": "training only",
    "output_router_logits": "training only",
    "router_aux_loss_coef": "training only",
    "pretraining_tp": "how the training was spread over devices",
    "unsloth_fixed": "mark of a fine-tuning tool",
    "unsloth_version": "mark of a fine-tuning tool",
    "use_cache": "the daemon always keeps keys and values",
    "bos_token_id": "read from the bundled files when serving",
    "eos_token_id": "read from the bundled files when serving",
    "pad_token_id": "sequences are never padded",
    "output_attentions": "what transformers returns",
    "output_hidden_states": "what transformers returns",
    "return_dict": "what transformers returns",
    "id2label": "for classification heads, which no supported architecture has",
    "label2id": "for classification heads, which no supported architecture has",
}


@dataclass(frozen=True)
class Architecture:
    """A config, understood: the spec, and what the spec does not say about the tensors."""

    spec: pb.ModelSpec
    biases: Biases
    mtp_layers: int = 0


@dataclass(frozen=True)
class Family:
    """One model_type: `read` turns its config into an Architecture, `names` finds its tensors."""

    model_type: str
    architecture: str
    names: MoeNames
    read: Callable[[ConfigReader], Architecture]
    ignored: Mapping[str, str]


def read_trunk(config: ConfigReader, model_type: str) -> tuple[pb.ModelSpec, int]:
    """Return a ModelSpec without layers and ropes, and the number of layers."""
    config.text("dtype", "torch_dtype", default="")  # informative: every tensor states its own
    config.only("hidden_act", "silu", default="silu")
    config.only("is_encoder_decoder", False, default=False)
    spec = pb.ModelSpec(
        family=model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        max_positions=config.size("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        embedding_scale=1,
        residual_scale=1,
        logits_divisor=1,
        tied_embeddings=config.flag("tie_word_embeddings", default=False),  # PreTrainedConfig's default
    )
    return spec, config.size("num_hidden_layers", maximum=MAX_LAYERS)


def read_attention(
    config: ConfigReader,
    spec: pb.ModelSpec,
    *,
    qk_norm: pb.GqaSpec.QkNorm = pb.GqaSpec.QK_NORM_UNSPECIFIED,
    kv_heads_default: int | None = None,
    partial_rotary_default: float | None = None,
) -> pb.GqaSpec:
    """Return the attention that all layers share, and append its rope table to `spec`.

    head_dim defaults to hidden_size // num_attention_heads, as in every modeling file of the supported families.
    """
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=kv_heads_default)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = config.size("head_dim", default=max(1, spec.hidden_size // heads))
    spec.ropes.append(read_rope(config, head_dim, partial_rotary_default))
    return pb.GqaSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, qk_norm=qk_norm, rope=0)


def read_experts(config: ConfigReader, width_key: str) -> pb.MoeFfnSpec:
    """Return count, top_k and width of the routed experts, without groups, bias, scale and shared expert."""
    experts = config.size("num_local_experts", "num_experts", "n_routed_experts", maximum=MAX_EXPERTS)
    return pb.MoeFfnSpec(
        experts=experts,
        top_k=config.size("num_experts_per_tok", maximum=experts),
        intermediate_size=config.size(width_key),
        groups=1,
        top_groups=1,
        routed_scale=1,
    )


def softmax_router(moe: pb.MoeFfnSpec, *, renormalize: bool) -> None:
    """Make `moe` weigh experts by softmax over all; `renormalize` divides by the sum over the chosen ones."""
    moe.score = pb.MoeFfnSpec.SCORE_SOFTMAX
    moe.renormalize = pb.MoeFfnSpec.RENORMALIZE_SUM if renormalize else pb.MoeFfnSpec.RENORMALIZE_UNSPECIFIED


def sparse_layers(config: ConfigReader, n_layers: int) -> list[bool]:
    """Return for each layer whether it has experts, by decoder_sparse_step and mlp_only_layers (Qwen's rule)."""
    step = config.size("decoder_sparse_step", default=1)
    dense = config.sizes("mlp_only_layers", default=[])
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers)]


def refuse_window(config: ConfigReader, context: int, *, active: bool = True) -> None:
    """Read sliding_window; refuse one that is in use and shorter than the context: it would change the logits."""
    window = config.value("sliding_window")
    if active and window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < context):
        config.refuse("sliding_window", f"{window!r} is shorter than the context of {context}: not supported")


def append_layers(
    spec: pb.ModelSpec, gqa: pb.GqaSpec, moe: pb.MoeFfnSpec, dense_width: int, sparse: list[bool]
) -> None:
    """Append a layer to `spec` for every entry of `sparse`: with experts where it is true, else a dense FFN."""
    for has_experts in sparse:
        if has_experts:
            spec.layers.append(pb.LayerSpec(gqa=gqa, moe=moe))
        else:
            spec.layers.append(pb.LayerSpec(gqa=gqa, dense=pb.DenseFfnSpec(intermediate_size=dense_width)))
