"""Hugging Face names of the tensors that the supported families share, by role.

Owns the table between TensorRole and names, in both directions of the road: tensors finds sources by it, the exporter
writes a container back by it. Names are those that transformers' save_pretrained writes. Part of families.
"""

from dataclasses import dataclass

from colibri.v1 import manifest_pb2 as pb

KIND_GATE, KIND_UP, KIND_DOWN = pb.RecordPart.KIND_GATE, pb.RecordPart.KIND_UP, pb.RecordPart.KIND_DOWN

_GLOBAL_NAMES = {
    pb.TENSOR_ROLE_EMBEDDING: "model.embed_tokens.weight",
    pb.TENSOR_ROLE_HEAD: "lm_head.weight",
    pb.TENSOR_ROLE_FINAL_NORM: "model.norm.weight",
    pb.TENSOR_ROLE_HEAD_BIAS: "lm_head.bias",
}

# Below `model.layers.N.`.
_LAYER_NAMES = {
    pb.TENSOR_ROLE_ATTENTION_NORM: "input_layernorm.weight",
    pb.TENSOR_ROLE_Q: "self_attn.q_proj.weight",
    pb.TENSOR_ROLE_K: "self_attn.k_proj.weight",
    pb.TENSOR_ROLE_V: "self_attn.v_proj.weight",
    pb.TENSOR_ROLE_O: "self_attn.o_proj.weight",
    pb.TENSOR_ROLE_Q_BIAS: "self_attn.q_proj.bias",
    pb.TENSOR_ROLE_K_BIAS: "self_attn.k_proj.bias",
    pb.TENSOR_ROLE_V_BIAS: "self_attn.v_proj.bias",
    pb.TENSOR_ROLE_O_BIAS: "self_attn.o_proj.bias",
    pb.TENSOR_ROLE_Q_NORM: "self_attn.q_norm.weight",
    pb.TENSOR_ROLE_K_NORM: "self_attn.k_norm.weight",
    pb.TENSOR_ROLE_FFN_NORM: "post_attention_layernorm.weight",
    pb.TENSOR_ROLE_FFN_GATE: "mlp.gate_proj.weight",
    pb.TENSOR_ROLE_FFN_UP: "mlp.up_proj.weight",
    pb.TENSOR_ROLE_FFN_DOWN: "mlp.down_proj.weight",
}

# Below the MoE block, for instance `model.layers.N.mlp.`; {shared} and {shared_gate} are the family's.
_MOE_NAMES = {
    pb.TENSOR_ROLE_ROUTER: "gate.weight",
    pb.TENSOR_ROLE_ROUTER_SELECT_BIAS: "gate.e_score_correction_bias",
    pb.TENSOR_ROLE_SHARED_GATE: "{shared}.gate_proj.weight",
    pb.TENSOR_ROLE_SHARED_UP: "{shared}.up_proj.weight",
    pb.TENSOR_ROLE_SHARED_DOWN: "{shared}.down_proj.weight",
    pb.TENSOR_ROLE_SHARED_OUTPUT_GATE: "{shared_gate}.weight",
}


@dataclass(frozen=True)
class MoeNames:
    """How a family names the parts of an MoE layer, below `model.layers.N.`."""

    prefixes: tuple[str, ...]  # of the block; the first is what transformers writes
    gate: str
    up: str
    down: str
    shared: str = ""
    shared_gate: str = ""

    def matrix(self, kind: pb.RecordPart.Kind) -> str:
        """Return the name of a matrix of a routed expert."""
        return {KIND_GATE: self.gate, KIND_UP: self.up, KIND_DOWN: self.down}[kind]

    def block_tensor(self, role: pb.TensorRole) -> str:
        """Return the name of a dense tensor of the MoE block, below the block."""
        return _MOE_NAMES[role].format(shared=self.shared, shared_gate=self.shared_gate)


def layer_tensor(role: pb.TensorRole) -> str:
    """Return the name of an attention or dense FFN tensor, below its layer."""
    return _LAYER_NAMES[role]


def dense_name(names: MoeNames, role: pb.TensorRole, layer: int) -> str:
    """Return the full name of a dense tensor as transformers writes it; `layer` is -1 for the model's own."""
    if layer < 0:
        return _GLOBAL_NAMES[role]
    below = f"{names.prefixes[0]}.{names.block_tensor(role)}" if role in _MOE_NAMES else _LAYER_NAMES[role]
    return f"model.layers.{layer}.{below}"


def expert_name(names: MoeNames, layer: int, expert: int, kind: pb.RecordPart.Kind) -> str:
    """Return the full name of a matrix of a routed expert as transformers writes it."""
    return f"model.layers.{layer}.{names.prefixes[0]}.experts.{expert}.{names.matrix(kind)}.weight"
