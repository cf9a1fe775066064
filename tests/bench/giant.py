"""Giant slices: containers with a large model's true dimensions and few of its layers, written without a checkpoint.

`python giant.py FOLDER [--stripe FOLDER --weight N ...]` makes one by hand. Owns shapes, the places of every byte (by
the packer's own rules) and the checksums, so that a slice opens, verifies and serves like any container; the numbers
are giant_weights.py's. Memory is bounded by one record and one dense tensor, whatever the number of layers. Refuses
shapes whose groups are not all whole.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import numpy as np
from giant_weights import OUTPUT_ROLES, TilePool, embedding_rows, output_gain, random_rows, router_rows
from google.protobuf import json_format

from colibri.core.container import MANIFEST_NAME, canonical_name
from colibri.core.container_check import VECTOR_ROLES, check_manifest, table_counts
from colibri.core.container_files import FORMAT_VERSION, TABLE_HEADER_BYTES, pack_table
from colibri.core.container_survey import EXTENTS_NAME, RECORDS_NAME
from colibri.core.striping import layer_extents
from colibri.core.tensors import Format, crc32c, quantize_rows
from colibri.packer.disk import Disk
from colibri.packer.families import glm4_moe, qwen3_moe
from colibri.packer.families.config_reader import ConfigReader
from colibri.packer.finish import finished_manifest
from colibri.packer.folders import lock_folders, make_folders, require_empty
from colibri.packer.journal import Done, DoneDense, DoneRecord, UnitReport
from colibri.packer.layout import MIN_EXTENT_BYTES, place_dense, place_experts, record_parts
from colibri.packer.model_source import ModelSource
from colibri.packer.outputs import PARTIAL, Outputs
from colibri.packer.plan import PackPlan
from colibri.packer.precision import parse_precision
from colibri.v1 import manifest_pb2 as pb
from testkit.tiny_tokenizer import write_tokenizer

EMBEDDING_BLOCK = 256  # tokens whose embeddings are made at once


@dataclass(frozen=True)
class Shape:
    """What decides a slice's size. `family` is a model_type of the packer; only its own fields count."""

    name: str
    family: str
    hidden: int
    experts: int
    intermediate: int
    top_k: int
    moe_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dense_layers: int = 0
    dense_intermediate: int = 64
    shared_experts: int = 0
    positions: int = 8192
    precision: str = "all=int4"

    def config(self) -> dict[str, object]:
        """A config.json of this family."""
        config: dict[str, object] = {
            "model_type": self.family, "vocab_size": self.vocab, "hidden_size": self.hidden, "hidden_act": "silu",
            "max_position_embeddings": self.positions, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_hidden_layers": self.dense_layers + self.moe_layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate, "intermediate_size": self.dense_intermediate,
            "norm_topk_prob": True, "tie_word_embeddings": False,
        }  # fmt: skip
        if self.family == "glm4_moe":
            config |= {
                "n_routed_experts": self.experts, "n_shared_experts": self.shared_experts, "n_group": 1,
                "topk_group": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
                "first_k_dense_replace": self.dense_layers,
            }  # fmt: skip
        else:
            config |= {"num_experts": self.experts, "mlp_only_layers": list(range(self.dense_layers))}
        return config

    def spec(self) -> pb.ModelSpec:
        """The model's spec, read by the packer's own family file."""
        family = {"glm4_moe": glm4_moe.FAMILY, "qwen3_moe": qwen3_moe.FAMILY}[self.family]
        return family.read(ConfigReader(self.config(), Path("config.json"))).spec


# GLM-5.2 with grouped-query attention in place of its own. Dense matrices are int4 like the experts: a slice has one
# dense layer per MoE layer where the model has one per 25, so at int8 they would weigh more than they do in the model.
GIANT = Shape(
    name="glm-5.2-slice", family="glm4_moe", hidden=6144, experts=256, intermediate=2048, top_k=8, moe_layers=1,
    heads=64, kv_heads=8, head_dim=128, vocab=4096, dense_layers=1, dense_intermediate=12288, shared_experts=1,
)  # fmt: skip
# The same at a size for tests: a few megabytes, everything else as above.
SMALL = replace(
    GIANT, name="small-slice", hidden=256, experts=16, intermediate=128, top_k=4, moe_layers=2, heads=4, kv_heads=2,
    head_dim=64, vocab=512, dense_intermediate=256,
)  # fmt: skip
# Of Qwen3-30B-A3B's layers, some, for the comparison with a peer: experts at 4.5, the rest at 8.25 bits per weight.
PEER = Shape(
    name="qwen3-moe-slice", family="qwen3_moe", hidden=2048, experts=128, intermediate=768, top_k=8, moe_layers=6,
    heads=32, kv_heads=4, head_dim=128, vocab=4096, precision="",
)  # fmt: skip


def dense_shapes(spec: pb.ModelSpec) -> Iterator[tuple[pb.TensorRole, int, str, int, int]]:
    """(role, layer, class, rows, cols) of every dense tensor of a spec, in the container's order."""
    hidden, exact = spec.hidden_size, "exact"
    yield pb.TENSOR_ROLE_EMBEDDING, -1, "embedding", spec.vocab_size, hidden
    yield pb.TENSOR_ROLE_HEAD, -1, "head", spec.vocab_size, hidden
    yield pb.TENSOR_ROLE_FINAL_NORM, -1, exact, 1, hidden
    for index, layer in enumerate(spec.layers):
        gqa = layer.gqa
        q_rows, kv_rows = gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim
        yield pb.TENSOR_ROLE_ATTENTION_NORM, index, exact, 1, hidden
        yield pb.TENSOR_ROLE_Q, index, "attention", q_rows, hidden
        yield pb.TENSOR_ROLE_K, index, "attention", kv_rows, hidden
        yield pb.TENSOR_ROLE_V, index, "attention", kv_rows, hidden
        yield pb.TENSOR_ROLE_O, index, "attention", hidden, q_rows
        if gqa.qk_norm:
            yield pb.TENSOR_ROLE_Q_NORM, index, exact, 1, gqa.head_dim
            yield pb.TENSOR_ROLE_K_NORM, index, exact, 1, gqa.head_dim
        yield pb.TENSOR_ROLE_FFN_NORM, index, exact, 1, hidden
        if layer.HasField("dense"):
            yield pb.TENSOR_ROLE_FFN_GATE, index, "ffn", layer.dense.intermediate_size, hidden
            yield pb.TENSOR_ROLE_FFN_UP, index, "ffn", layer.dense.intermediate_size, hidden
            yield pb.TENSOR_ROLE_FFN_DOWN, index, "ffn", hidden, layer.dense.intermediate_size
            continue
        yield pb.TENSOR_ROLE_ROUTER, index, exact, layer.moe.experts, hidden
        if layer.moe.select_bias:
            yield pb.TENSOR_ROLE_ROUTER_SELECT_BIAS, index, exact, 1, layer.moe.experts
        if width := layer.moe.shared_intermediate_size:
            yield pb.TENSOR_ROLE_SHARED_GATE, index, "shared", width, hidden
            yield pb.TENSOR_ROLE_SHARED_UP, index, "shared", width, hidden
            yield pb.TENSOR_ROLE_SHARED_DOWN, index, "shared", hidden, width


def plan_slice(shape: Shape, weights: Sequence[int]) -> PackPlan:
    """What the slice will be on drives of these weights; folder_bytes is what each will hold, small files apart."""
    spec, precision = shape.spec(), parse_precision(shape.precision)
    manifest = pb.Manifest(format_version=FORMAT_VERSION, spec=spec)
    for role, layer, name, rows, cols in dense_shapes(spec):
        form = precision.format_of(name)
        manifest.dense.add(role=role, layer=layer, name=canonical_name(role, layer), tensor_class=name, format=form,
                           rows=rows, cols=cols)  # fmt: skip
    header_bytes, dense_bytes = place_dense(manifest.dense)
    parts, record_bytes = record_parts(precision.format_of("experts"), shape.hidden, shape.intermediate)
    for index, layer_spec in enumerate(spec.layers):
        if layer_spec.HasField("moe"):
            manifest.expert_layers.add(layer=index, experts=shape.experts, record_bytes=record_bytes, parts=parts)
    placement = place_experts(manifest.expert_layers, weights)
    for layer_message, striping in zip(manifest.expert_layers, placement.striping, strict=True):
        layer_message.striping.CopyFrom(striping)
    for number, (weight, size) in enumerate(zip(weights, placement.stripe_bytes, strict=True)):
        manifest.layout.stripes.add(number=number, weight=weight, bytes=size)
    extents, records = table_counts(manifest)
    manifest.layout.min_extent_bytes = MIN_EXTENT_BYTES
    manifest.layout.extent_checksums.MergeFrom(pb.Blob(offset=TABLE_HEADER_BYTES, bytes=4 * extents))
    manifest.layout.record_digests.MergeFrom(pb.Blob(offset=TABLE_HEADER_BYTES, bytes=32 * records))
    manifest.source.model_type, manifest.source.name = shape.family, shape.name
    model = ModelSource(spec, (), (), (), ())
    sizes = [size + (dense_bytes if number == 0 else 0) for number, size in enumerate(placement.stripe_bytes)]
    return PackPlan(model, manifest, header_bytes, dense_bytes, tuple(sizes), 0, "")


def _report(values: int, name: str) -> UnitReport:
    """What quantising cost: nothing, the codes were there first."""
    return UnitReport(values, values, 0, float(values), 0.0, 0.0, name)


class _Writer:
    """Fills the files of one slice, tensor by tensor and record by record."""

    def __init__(self, shape: Shape, plan: PackPlan, outputs: Outputs, seed: int) -> None:
        self._shape, self._outputs, self._seed = shape, outputs, seed
        self._manifest = plan.manifest
        self._layers = len(plan.manifest.spec.layers)

    def dense(self, number: int) -> DoneDense:
        """Make and write dense tensor `number`."""
        tensor = self._manifest.dense[number]
        blobs = (tensor.codes, tensor.scales, tensor.mins)
        digest, crcs = hashlib.sha256(), [0, 0, 0]
        for index, (blob, data) in enumerate(zip(blobs, self._dense_data(tensor, number), strict=True)):
            if blob.bytes:
                self._outputs.dense.write(blob.offset, data)
                crcs[index] = crc32c(data)
                digest.update(data)
        return DoneDense(
            (crcs[0], crcs[1], crcs[2]), digest.hexdigest(), _report(tensor.rows * tensor.cols, tensor.name)
        )

    def _dense_data(self, tensor: pb.DenseTensor, number: int) -> tuple[memoryview, memoryview, memoryview]:
        form, nothing = Format.from_proto(tensor.format), memoryview(b"")
        rng = np.random.default_rng([self._seed, 5, number])
        if tensor.role == pb.TENSOR_ROLE_EMBEDDING:
            return self._embedding(form)
        if tensor.role == pb.TENSOR_ROLE_ROUTER:
            moe_index = [layer.layer for layer in self._manifest.expert_layers].index(tensor.layer)
            return _f32_bytes(router_rows(self._shape, self._seed, moe_index)), nothing, nothing
        if tensor.role == pb.TENSOR_ROLE_ROUTER_SELECT_BIAS:
            return _f32_bytes(rng.standard_normal(tensor.cols, np.float32) * np.float32(0.01)), nothing, nothing
        if tensor.role in VECTOR_ROLES:
            return _f32_bytes(np.ones(tensor.cols, np.float32)), nothing, nothing
        gain = output_gain(self._layers) if tensor.role in OUTPUT_ROLES else 1.0
        return random_rows(form, tensor.rows, tensor.cols, gain, rng)

    def _embedding(self, form: Format) -> tuple[memoryview, memoryview, memoryview]:
        parts: list[tuple[bytes, bytes, bytes]] = []
        for first in range(0, self._shape.vocab, EMBEDDING_BLOCK):
            count = min(EMBEDDING_BLOCK, self._shape.vocab - first)
            rows = embedding_rows(self._shape, self._seed, first, count)
            codes, scales, mins, _ = quantize_rows(form, rows, "f32", count, self._shape.hidden)
            parts.append((codes.tobytes(), scales.tobytes(), mins.tobytes()))
        whole = [memoryview(b"".join(pieces)) for pieces in zip(*parts, strict=True)]
        return whole[0], whole[1], whole[2]

    def records(self) -> Iterator[DoneRecord]:
        """Make and write every expert record, in logical order."""
        rng = np.random.default_rng([self._seed, 6])
        gain = output_gain(self._layers)
        for layer in self._manifest.expert_layers:
            pools = [
                TilePool(Format.from_proto(part.format), part.cols,
                         gain if part.kind == pb.RecordPart.KIND_DOWN else 1.0, part.rows * part.cols, rng)
                for part in layer.parts
            ]  # fmt: skip
            record, values = bytearray(layer.record_bytes), sum(part.rows * part.cols for part in layer.parts)
            view = memoryview(record)
            for expert, extents in enumerate(layer_extents(layer)):
                for part, pool in zip(layer.parts, pools, strict=True):
                    view[part.offset : part.offset + part.bytes] = pool.part(part.rows, part.cols, rng)
                crcs = []
                for extent in extents:
                    begin = int(extent["record_offset"])
                    piece = view[begin : begin + int(extent["bytes"])]
                    self._outputs.write(int(extent["stripe"]), int(extent["file_offset"]), piece)
                    crcs.append(crc32c(piece))
                name = f"layers.{layer.layer}.experts.{expert}"
                yield DoneRecord(tuple(crcs), hashlib.sha256(record).hexdigest(), _report(values, name))


def _f32_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array, "<f4").view(np.uint8).reshape(-1).data


def write_giant(shape: Shape, folders: Sequence[Path], weights: Sequence[int] = (1,), seed: int = 1) -> pb.Manifest:
    """Write the slice of `shape` into empty `folders`, the primary first, by the drives' `weights`.

    The same seed gives the same weights. Raises ValueError for a shape that does not fit its formats, FolderError for
    folders that hold something, DriveError for what a drive refuses.
    """
    disk, folders = Disk(), list(folders)
    make_folders(folders)
    locks = lock_folders(folders)
    try:
        with TemporaryDirectory() as temporary:
            tokenizer = Path(temporary)
            write_tokenizer(tokenizer, vocab_size=shape.vocab)
            require_empty(folders)
            plan = plan_slice(shape, weights)
            for path in sorted(tokenizer.iterdir()):
                content = path.read_bytes()
                digest = hashlib.sha256(content).hexdigest()
                plan.manifest.files.add(name=path.name, bytes=len(content), sha256=digest)
            return _write(disk, shape, plan, folders, tokenizer, seed)
    finally:
        for lock in locks:
            lock.close()


def _write(disk: Disk, shape: Shape, plan: PackPlan, folders: list[Path], tokenizer: Path, seed: int) -> pb.Manifest:
    uuid = uuid4()
    outputs = Outputs(disk, folders, plan, uuid)
    try:
        outputs.create()
        writer, done = _Writer(shape, plan, outputs, seed), Done()
        done.dense = [writer.dense(number) for number in range(len(plan.manifest.dense))]
        done.records = list(writer.records())
        manifest = finished_manifest(plan.manifest, uuid, done)
        check_manifest(manifest)
        outputs.seal(manifest.content_id)
        outputs.publish()
    finally:
        outputs.close()
    crcs = b"".join(np.array(record.crcs, "<u4").tobytes() for record in done.records)
    digests = b"".join(bytes.fromhex(record.sha256) for record in done.records)
    (folders[0] / EXTENTS_NAME).write_bytes(pack_table(uuid, 4, crcs))
    (folders[0] / RECORDS_NAME).write_bytes(pack_table(uuid, 32, digests))
    for file in manifest.files:
        (folders[0] / file.name).write_bytes((tokenizer / file.name).read_bytes())
    partial = folders[0] / (MANIFEST_NAME + PARTIAL)
    partial.write_text(json_format.MessageToJson(manifest, preserving_proto_field_name=True, indent=1) + "\n")
    partial.rename(folders[0] / MANIFEST_NAME)
    return manifest


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="giant.py", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stripe", type=Path, action="append", default=[])
    parser.add_argument("--weight", type=int, action="append", default=[], help="one per folder, the primary's first")
    parser.add_argument("--shape", choices=["giant", "small", "peer"], default="giant")
    parser.add_argument("--layers", type=int, help="layers with experts")
    parser.add_argument("--experts", type=int, help="experts of each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    shape = {"giant": GIANT, "small": SMALL, "peer": PEER}[options.shape]
    shape = replace(shape, moe_layers=options.layers or shape.moe_layers, experts=options.experts or shape.experts)
    folders = [options.folder, *options.stripe]
    manifest = write_giant(shape, folders, options.weight or [1] * len(folders), options.seed)
    print(f"{options.folder}: {shape.name}, content_id {manifest.content_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
