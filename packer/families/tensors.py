"""The tensors that an architecture needs, found in a checkpoint: each used once, skipped by a rule, or refused.

Owns the names that the supported families share, the layouts of routed experts (one tensor per matrix, or fused over
all experts of a layer) and the account of what was used. Refuses a missing tensor, a wrong shape or dtype and a tensor
that nobody wants, by name. Part of families; what the numbers mean is in the ModelSpec that it is given.
"""

import re
from dataclasses import dataclass

from colibri.core.container import canonical_name
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError, UnsupportedCheckpointError
from colibri.packer.families.names import (
    KIND_DOWN,
    KIND_GATE,
    KIND_UP,
    MoeNames,
    layer_tensor,
)
from colibri.packer.model_source import SOURCE_TYPES, DenseSource, ExpertLayerSource, Skipped, SourceSlice, TensorClass
from colibri.packer.wording import counted
from colibri.v1 import manifest_pb2 as pb

SHOWN_NAMES = 5

# Where the language model may sit: (prefix of its trunk, prefix of its head).
ROOTS = (("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""))

_VISION = re.compile(r"^(model\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mm_projector)\.")
_INV_FREQ = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Biases:
    """Which projections of the attention carry a bias."""

    qkv: bool
    output: bool


@dataclass(frozen=True)
class PerExpertMatrices:
    """Layout: a tensor for every matrix of every expert."""

    prefix: str
    names: MoeNames

    def __call__(self, expert: int, kind: pb.RecordPart.Kind) -> SourceSlice:
        return SourceSlice(f"{self.prefix}{expert}.{self.names.matrix(kind)}.weight", None, None)


@dataclass(frozen=True)
class FusedMatrices:
    """Layout: gate_up_proj [experts, 2 * width, hidden], gate first, and down_proj [experts, hidden, width]."""

    prefix: str
    width: int

    def __call__(self, expert: int, kind: pb.RecordPart.Kind) -> SourceSlice:
        if kind == KIND_DOWN:
            return SourceSlice(f"{self.prefix}down_proj", None, expert)
        begin = 0 if kind == KIND_GATE else self.width
        return SourceSlice(f"{self.prefix}gate_up_proj", (begin, begin + self.width), expert)


class Account:
    """Which tensors of a checkpoint have been used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._used: set[str] = set()
        self._skipped: dict[str, tuple[str, list[str]]] = {}

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name`."""
        return name in self.checkpoint.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> None:
        """Use tensor `name`, which must have `shape` and a dtype that can be packed, and not have been used before."""
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(self._missing(name))
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} is {list(info.shape)}, the config makes it {list(shape)}"
            )
        if info.dtype not in SOURCE_TYPES:
            supported = ", ".join(SOURCE_TYPES)
            raise UnsupportedCheckpointError(
                f"{info.file}: tensor {name!r} is {info.dtype}, only {supported} can be packed"
            )
        if name in self._used:
            raise CheckpointError(f"{info.file}: tensor {name!r} would be used twice")
        self._used.add(name)

    def _missing(self, name: str) -> str:
        checkpoint = self.checkpoint
        if name in checkpoint.unindexed:
            return f"{checkpoint.unindexed[name]}: tensor {name!r} is needed and here, but the index does not list it"
        similar = next((other for other in checkpoint.tensors if other.endswith(f".{name}")), None)
        hint = f"; there is {similar!r}" if similar else ""
        return f"{checkpoint.folder}: tensor {name!r} is missing{hint}"

    def skip(self, rule: str, reason: str, name: str) -> None:
        """Leave tensor `name` out by a named rule."""
        self._used.add(name)
        self._skipped.setdefault(rule, (reason, []))[1].append(name)

    def finish(self) -> tuple[Skipped, ...]:
        """Return what was skipped. Raises UnsupportedCheckpointError if a tensor was neither used nor skipped."""
        left = sorted(self.checkpoint.tensors.keys() - self._used)
        if left:
            shown = ", ".join(map(repr, left[:SHOWN_NAMES])) + (", ..." if len(left) > SHOWN_NAMES else "")
            tensors = counted(len(left), "tensor")
            raise UnsupportedCheckpointError(
                f"{self.checkpoint.folder}: {tensors} that this model family does not have: {shown}"
            )
        return tuple(
            Skipped(rule, reason, tuple(sorted(names))) for rule, (reason, names) in sorted(self._skipped.items())
        )

    def skip_by_rule(self, root: str, n_layers: int, mtp_layers: int) -> None:
        """Apply the rules to everything not used so far.

        A layer beyond the model's own belongs to multi-token prediction by its number, whatever its tensors are called.
        """
        layer = re.compile(re.escape(root) + r"layers\.(\d{1,9})\.")
        for name in sorted(self.checkpoint.tensors.keys() - self._used):
            match = layer.match(name)
            if match and n_layers <= int(match[1]) < n_layers + mtp_layers:
                self.skip("mtp_layer", f"multi-token prediction, layers from {n_layers}", name)
            elif name.endswith(_INV_FREQ):
                self.skip("rope_inv_freq", "a buffer that follows from the config", name)
            elif _VISION.match(name):
                self.skip("vision_tower", "only the language model is packed", name)


def find_root(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the prefixes of trunk and head, one of ROOTS."""
    for trunk, head in ROOTS:
        if f"{trunk}embed_tokens.weight" in checkpoint.tensors:
            return trunk, head
    return ROOTS[0]


class DenseCollector:
    """Takes dense tensors out of the account and lists them for the container."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._dense: list[DenseSource] = []

    def add(
        self, role: pb.TensorRole, layer: int, tensor_class: TensorClass, name: str, shape: tuple[int, ...]
    ) -> None:
        """Use tensor `name` of `shape`, a vector or a matrix."""
        self._account.take(name, shape)
        rows, cols = (1, *shape)[-2:]
        source = SourceSlice(name, None, None)
        canonical = canonical_name(role, layer)
        self._dense.append(DenseSource(role, layer, canonical, tensor_class, rows, cols, source, (name,)))

    def sorted(self) -> tuple[DenseSource, ...]:
        """Return what was added, in the order of the container."""
        return tuple(sorted(self._dense, key=lambda dense: (dense.layer, dense.role)))


def collect_attention(
    dense: DenseCollector, prefix: str, layer: int, hidden: int, spec: pb.GqaSpec, biases: Biases
) -> None:
    """Add norms, projections, biases and q/k norms of one layer, whose tensors begin with `prefix`."""

    def add(role: pb.TensorRole, tensor_class: TensorClass, *shape: int) -> None:
        dense.add(role, layer, tensor_class, prefix + layer_tensor(role), shape)

    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    add(pb.TENSOR_ROLE_ATTENTION_NORM, "exact", hidden)
    add(pb.TENSOR_ROLE_Q, "attention", q_rows, hidden)
    add(pb.TENSOR_ROLE_K, "attention", kv_rows, hidden)
    add(pb.TENSOR_ROLE_V, "attention", kv_rows, hidden)
    add(pb.TENSOR_ROLE_O, "attention", hidden, q_rows)
    if biases.qkv:
        add(pb.TENSOR_ROLE_Q_BIAS, "exact", q_rows)
        add(pb.TENSOR_ROLE_K_BIAS, "exact", kv_rows)
        add(pb.TENSOR_ROLE_V_BIAS, "exact", kv_rows)
    if biases.output:
        add(pb.TENSOR_ROLE_O_BIAS, "exact", hidden)
    if spec.qk_norm:
        full = spec.qk_norm == pb.GqaSpec.QK_NORM_FULL
        add(pb.TENSOR_ROLE_Q_NORM, "exact", q_rows if full else spec.head_dim)
        add(pb.TENSOR_ROLE_K_NORM, "exact", kv_rows if full else spec.head_dim)
    add(pb.TENSOR_ROLE_FFN_NORM, "exact", hidden)


def collect_dense_ffn(dense: DenseCollector, prefix: str, layer: int, hidden: int, spec: pb.DenseFfnSpec) -> None:
    """Add the three matrices of a layer without experts."""
    width = spec.intermediate_size
    for role, shape in (
        (pb.TENSOR_ROLE_FFN_GATE, (width, hidden)),
        (pb.TENSOR_ROLE_FFN_UP, (width, hidden)),
        (pb.TENSOR_ROLE_FFN_DOWN, (hidden, width)),
    ):
        dense.add(role, layer, "ffn", prefix + layer_tensor(role), shape)


def collect_moe(
    account: Account, dense: DenseCollector, prefix: str, layer: int, hidden: int, spec: pb.MoeFfnSpec, names: MoeNames
) -> ExpertLayerSource:
    """Add router and shared expert to `dense`, use the routed experts' tensors and return where they lie."""
    used = next((name for name in names.prefixes if account.has(f"{prefix}{name}.gate.weight")), names.prefixes[0])
    block = f"{prefix}{used}."

    def add(role: pb.TensorRole, tensor_class: TensorClass, *shape: int) -> None:
        dense.add(role, layer, tensor_class, block + names.block_tensor(role), shape)

    add(pb.TENSOR_ROLE_ROUTER, "exact", spec.experts, hidden)
    if spec.select_bias:
        add(pb.TENSOR_ROLE_ROUTER_SELECT_BIAS, "exact", spec.experts)
    if width := spec.shared_intermediate_size:
        add(pb.TENSOR_ROLE_SHARED_GATE, "shared", width, hidden)
        add(pb.TENSOR_ROLE_SHARED_UP, "shared", width, hidden)
        add(pb.TENSOR_ROLE_SHARED_DOWN, "shared", hidden, width)
    if spec.shared_output_gate:
        add(pb.TENSOR_ROLE_SHARED_OUTPUT_GATE, "exact", 1, hidden)
    return _collect_experts(account, f"{block}experts.", layer, hidden, spec, names)


def _collect_experts(
    account: Account, prefix: str, layer: int, hidden: int, spec: pb.MoeFfnSpec, names: MoeNames
) -> ExpertLayerSource:
    experts, width = spec.experts, spec.intermediate_size
    if account.has(f"{prefix}gate_up_proj") or account.has(f"{prefix}down_proj"):
        account.take(f"{prefix}gate_up_proj", (experts, 2 * width, hidden))
        account.take(f"{prefix}down_proj", (experts, hidden, width))
        fused = FusedMatrices(prefix, width)
        return ExpertLayerSource(layer, experts, width, hidden, fused, f"{prefix}{{matrix}}")
    matrices = PerExpertMatrices(prefix, names)
    for expert in range(experts):
        for kind, shape in ((KIND_GATE, (width, hidden)), (KIND_UP, (width, hidden)), (KIND_DOWN, (hidden, width))):
            account.take(matrices(expert, kind).tensor, shape)
    pattern = f"{prefix}{{expert}}.{{matrix}}.weight"
    return ExpertLayerSource(layer, experts, width, hidden, matrices, pattern)
