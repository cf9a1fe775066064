"""From an open checkpoint to a ModelSource: choose the family, read its config, find every tensor, check the tokenizer.

Owns what holds for all families: nested and quantised configs, tied embeddings, the number of vocabulary rows. Refuses
a model_type or architecture that has no family file, a model without routed experts, and whatever the parts refuse. The
entry of families; the writer takes it from here.
"""

from collections.abc import Mapping

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError, UnsupportedCheckpointError
from colibri.packer.families import glm4_moe, mixtral, olmoe, qwen2_moe, qwen3_moe
from colibri.packer.families.common import Architecture, Family
from colibri.packer.families.config_reader import ConfigReader
from colibri.packer.families.tensors import (
    Account,
    DenseCollector,
    collect_attention,
    collect_dense_ffn,
    collect_moe,
    find_root,
)
from colibri.packer.model_source import ExpertLayerSource, ModelSource
from colibri.packer.tokenizer_check import check_tokenizer
from colibri.v1 import manifest_pb2 as pb

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (glm4_moe, mixtral, olmoe, qwen2_moe, qwen3_moe)
}
_COMPARE_BYTES = 4 << 20


def resolve(checkpoint: Checkpoint) -> ModelSource:
    """Understand `checkpoint`: what the model computes and where each of its matrices lies.

    Raises CheckpointError for what is broken and UnsupportedCheckpointError for what is not built, naming config key or
    tensor. Reads no tensor bytes, except to compare a head with the embedding that it is said to be tied to.
    """
    config, family = _choose(checkpoint)
    architecture = family.read(config)
    config.finish(family.ignored)
    spec = architecture.spec
    account = Account(checkpoint)
    dense = DenseCollector(account)
    warnings = list(checkpoint.warnings)
    trunk, head = find_root(checkpoint)
    _collect_vocabulary(account, dense, spec, (trunk, head), warnings)
    experts = _collect_layers(account, dense, architecture, family, trunk)
    if not experts:
        raise UnsupportedCheckpointError(f"{checkpoint.folder}: no layer has routed experts: 0 experts to stream")
    account.skip_by_rule(trunk, len(spec.layers), architecture.mtp_layers)
    skipped = account.finish()
    warnings += check_tokenizer(checkpoint, spec.vocab_size)
    return ModelSource(spec, dense.sorted(), tuple(experts), skipped, tuple(warnings))


def _choose(checkpoint: Checkpoint) -> tuple[ConfigReader, Family]:
    file = checkpoint.folder / "config.json"
    config = ConfigReader(_flattened(checkpoint.config, ConfigReader(checkpoint.config, file)), file)
    model_type = config.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        config.refuse("model_type", f"{model_type!r} is not supported, only {', '.join(sorted(FAMILIES))}")
    architectures = config.texts("architectures")
    if architectures != [family.architecture]:
        config.refuse("architectures", f"{architectures!r} is not supported, only [{family.architecture!r}]")
    quantization = config.value("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        config.refuse(
            "quantization_config", f"weights quantised by {method!r} are not supported, only bf16, f16 and f32"
        )
    return config, family


def _flattened(config: Mapping[str, object], reader: ConfigReader) -> Mapping[str, object]:
    """The config with the keys of text_config beside its own; a key with two values is refused."""
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return config
    flat = {key: value for key, value in config.items() if key != "text_config"}
    for key, value in nested.items():
        if flat.get(key) is not None and value is not None and flat[key] != value:
            reader.refuse(f"text_config.{key}", f"{value!r} contradicts {key} {flat[key]!r}")
        if flat.get(key) is None:
            flat[key] = value
    return flat


def _collect_layers(
    account: Account, dense: DenseCollector, architecture: Architecture, family: Family, trunk: str
) -> list[ExpertLayerSource]:
    spec = architecture.spec
    experts = []
    for layer, layer_spec in enumerate(spec.layers):
        prefix = f"{trunk}layers.{layer}."
        collect_attention(dense, prefix, layer, spec.hidden_size, layer_spec.gqa, architecture.biases)
        if layer_spec.HasField("dense"):
            collect_dense_ffn(dense, prefix, layer, spec.hidden_size, layer_spec.dense)
        else:
            moe = layer_spec.moe
            experts.append(collect_moe(account, dense, prefix, layer, spec.hidden_size, moe, family.names))
    return experts


def _collect_vocabulary(
    account: Account, dense: DenseCollector, spec: pb.ModelSpec, prefixes: tuple[str, str], warnings: list[str]
) -> None:
    """Embedding, final norm and head. The embedding's rows are the vocabulary, whatever vocab_size says."""
    trunk, head_prefix = prefixes
    embedding = f"{trunk}embed_tokens.weight"
    info = account.checkpoint.tensors.get(embedding)
    rows = info.shape[0] if info is not None and len(info.shape) == 2 else spec.vocab_size
    if not 0 < rows < 1 << 31:
        raise CheckpointError(f"{account.checkpoint.folder}: tensor {embedding!r} has {rows} rows")
    if rows != spec.vocab_size:
        warnings.append(f"config.json says vocab_size {spec.vocab_size}, {embedding} has {rows} rows: {rows} it is")
        spec.vocab_size = rows
    shape = (rows, spec.hidden_size)
    dense.add(pb.TENSOR_ROLE_EMBEDDING, -1, "embedding", embedding, shape)
    dense.add(pb.TENSOR_ROLE_FINAL_NORM, -1, "exact", f"{trunk}norm.weight", (spec.hidden_size,))
    _collect_head(account, dense, spec, (f"{head_prefix}lm_head.weight", embedding), warnings)
    if account.has(f"{head_prefix}lm_head.bias"):
        dense.add(pb.TENSOR_ROLE_HEAD_BIAS, -1, "exact", f"{head_prefix}lm_head.bias", (rows,))


def _collect_head(
    account: Account, dense: DenseCollector, spec: pb.ModelSpec, names: tuple[str, str], warnings: list[str]
) -> None:
    """Absent and tied: the embedding serves. Present: used, unless tied and equal to the embedding."""
    head, embedding = names
    if not account.has(head) and spec.tied_embeddings:
        return
    if spec.tied_embeddings:
        if _equal(account.checkpoint, head, embedding):
            account.skip("tied_head_copy", f"equal to {embedding}, which serves as the head", head)
            return
        warnings.append(f"config.json says tie_word_embeddings, but {head} differs from {embedding}: not tied")
        spec.tied_embeddings = False
    dense.add(pb.TENSOR_ROLE_HEAD, -1, "head", head, (spec.vocab_size, spec.hidden_size))


def _equal(checkpoint: Checkpoint, left: str, right: str) -> bool:
    a, b = checkpoint.tensors[left], checkpoint.tensors[right]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = max(1, _COMPARE_BYTES * a.shape[0] // max(1, a.bytes))
    pieces = (slice(row, row + step) for row in range(0, a.shape[0], step))
    return all(checkpoint.read(left, piece) == checkpoint.read(right, piece) for piece in pieces)
