"""Fills cl_model_options: from a container's manifest and the caller's ModelOptions to the plain structs of colibri.h.

Owns the translation of ModelSpec, dense tensors, expert layers and extents, field by field; checks nothing that the
core checks itself. Everything that the structs point to is kept alive by the returned object until the call is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from colibri.core._core import ffi
from colibri.core.container import Container
from colibri.core.errors import InvalidError
from colibri.v1 import manifest_pb2

CData = Any  # a cffi struct

KV_DTYPES: dict[str, int] = {"f16": 1, "f32": 2}
ACTIVATIONS: dict[str, int] = {"i8": 1, "i16": 2}
DIRECT: dict[str, int] = {"auto": 0, "on": 1, "off": 2}
VERIFY: dict[str, int] = {"always": 0, "first": 1, "never": 2}


IoBackend = Literal["auto", "io_uring", "threads"]
Verify = Literal["always", "first", "never"]
Switch = Literal["auto", "on", "off"]
SWITCHES: dict[Switch, int] = {"auto": 0, "on": 1, "off": 2}
IO_BACKENDS: dict[IoBackend, int] = {"auto": 0, "io_uring": 1, "threads": 2}


@dataclass(frozen=True)
class ModelOptions:
    """How a model is held in memory and run; the fields of cl_model_options that are not the container's.

    expert_slots: experts kept in memory. kv_pages: pages of 64 positions for all sequences. ring_slots: read ring
    beside the cache. max_rows: decode rows in one step. max_prefills, pass_tokens: prefill cursors alive at once, and
    the longest pass of each. threads: 0 for all cores that the process may use. io_backend: "auto" is io_uring where
    the kernel allows it. io_threads: per stripe where threads read, io_depth: requests in flight per stripe where
    io_uring reads, 0 for the defaults. verify: checksums of experts on every read, on the first of each, or never.
    lookahead: read experts before their router has chosen them; auto: decoding where it is measured to win, prompts
    where most will be wanted. banned_tokens: ids that are never sampled. heat_half_life: decode steps after which a use
    of an expert counts half in the heat that outlives the process, 0 for the default, 512.
    """

    expert_slots: int
    kv_pages: int
    ring_slots: int = 4
    kv_dtype: Literal["f16", "f32"] = "f16"
    max_rows: int = 8
    max_prefills: int = 1
    pass_tokens: int = 512
    max_context: int = 4096
    activation: Literal["i8", "i16"] = "i16"
    isa: str = "auto"
    threads: int = 0
    io_backend: IoBackend = "auto"
    io_threads: int = 0
    io_depth: int = 0
    direct: Literal["auto", "on", "off"] = "auto"
    verify: Verify = "always"
    lookahead: Switch = "auto"
    banned_tokens: tuple[int, ...] = ()
    heat_half_life: float = 0


class COptions:
    """A filled `cl_model_options` in `.c`, with everything that it points to."""

    def __init__(self, container: Container, options: ModelOptions) -> None:
        """Raises InvalidError for an option or a field of the manifest that does not fit its C type."""
        self._kept: list[Any] = []
        self.c = ffi.new("cl_model_options *")
        try:
            self._fill_container(container)
            self._fill_options(options)
        except (OverflowError, TypeError) as error:
            raise InvalidError(f"a number of the manifest or the options does not fit its field: {error}") from error

    def _keep(self, cdecl: str, init: object) -> CData:
        kept = ffi.new(cdecl, init)
        self._kept.append(kept)
        return kept

    def _fill_container(self, container: Container) -> None:
        manifest, c = container.manifest, self.c
        c.spec = self._spec(manifest.spec)
        c.dense_path = self._keep("char[]", bytes(container.dense_path))
        c.dense = dense = self._keep("cl_dense_tensor[]", len(manifest.dense))
        c.n_dense = len(manifest.dense)
        for target, tensor in zip(dense, manifest.dense, strict=True):
            _fill_dense(target, tensor)
        c.expert_layers = layers = self._keep("cl_expert_layer[]", len(manifest.expert_layers))
        c.n_expert_layers = len(manifest.expert_layers)
        for index, (target, layer) in enumerate(zip(layers, manifest.expert_layers, strict=True)):
            self._fill_expert_layer(target, layer, container, index)
        c.n_stripes = len(container.stripe_paths)
        c.stripes = self._keep("cl_stripe[]", c.n_stripes)
        for number, (path, mirror) in enumerate(zip(container.stripe_paths, container.mirror_paths, strict=True)):
            c.stripes[number].path = self._keep("char[]", bytes(path))
            c.stripes[number].mirror_path = ffi.NULL if mirror is None else self._keep("char[]", bytes(mirror))
            c.stripes[number].bytes = manifest.layout.stripes[number].bytes

    def _spec(self, spec: manifest_pb2.ModelSpec) -> CData:
        c = self._keep("cl_spec *", None)
        for name in ("vocab_size", "hidden_size", "max_positions", "norm_eps", "norm_weight_offset"):
            setattr(c, name, getattr(spec, name))
        for name in ("embedding_scale", "residual_scale", "logits_divisor", "tied_embeddings"):
            setattr(c, name, getattr(spec, name))
        c.layers = layers = self._keep("cl_layer_spec[]", len(spec.layers))
        c.ropes = ropes = self._keep("cl_rope_spec[]", len(spec.ropes))
        c.n_layers, c.n_ropes = len(spec.layers), len(spec.ropes)
        for index, (target, layer) in enumerate(zip(layers, spec.layers, strict=True)):
            _fill_layer(target, layer, index)
        for rope_target, rope in zip(ropes, spec.ropes, strict=True):
            if len(rope.inv_freq) != rope.dims // 2:
                raise InvalidError(f"spec: a rope of {rope.dims} dims has {len(rope.inv_freq)} frequencies")
            rope_target.style, rope_target.dims = int(rope.style), rope.dims
            rope_target.attention_factor = rope.attention_factor
            rope_target.inv_freq = self._keep("float[]", list(rope.inv_freq))
        return c

    def _fill_expert_layer(self, c: CData, layer: manifest_pb2.ExpertLayer, container: Container, index: int) -> None:
        kinds = [int(part.kind) for part in layer.parts]
        if kinds != [1, 2, 3]:
            raise InvalidError(f"layer {layer.layer} experts: parts are {kinds}, this build reads gate, up, down")
        c.layer, c.experts, c.record_bytes = layer.layer, layer.experts, layer.record_bytes
        for target, part in zip(c.parts, layer.parts, strict=True):
            _fill_format(target.format, part.format)
            target.rows, target.cols = part.rows, part.cols
            target.offset, target.bytes = part.offset, part.bytes
        extents = np.ascontiguousarray(container.extents(index))
        c.extents_per_record = extents.shape[1]
        if extents.shape[0] != layer.experts or extents.itemsize != ffi.sizeof("cl_extent"):
            raise InvalidError(f"layer {layer.layer} experts: {extents.shape[0]} extents of {extents.itemsize} bytes")
        kept = ffi.from_buffer("cl_extent[]", extents)
        self._kept.append(kept)
        c.extents = kept

    def _fill_options(self, options: ModelOptions) -> None:
        c = self.c
        for name in ("expert_slots", "ring_slots", "kv_pages", "max_rows", "max_prefills", "pass_tokens"):
            setattr(c, name, getattr(options, name))
        for name in ("max_context", "threads", "io_threads", "io_depth", "heat_half_life"):
            setattr(c, name, getattr(options, name))
        c.kv_dtype = choice("kv_dtype", KV_DTYPES, options.kv_dtype)
        c.activation = choice("activation", ACTIVATIONS, options.activation)
        c.io_backend = choice("io_backend", IO_BACKENDS, options.io_backend)
        c.direct = choice("direct", DIRECT, options.direct)
        c.verify = choice("verify", VERIFY, options.verify)
        c.lookahead = choice("lookahead", SWITCHES, options.lookahead)
        c.isa = self._keep("char[]", options.isa.encode())
        c.banned_tokens = self._keep("int32_t[]", list(options.banned_tokens))
        c.n_banned_tokens = len(options.banned_tokens)


def choice(name: str, values: Mapping[Any, int], value: str) -> int:
    """Return the core's number for a named choice; raises InvalidError with what can be chosen."""
    if value not in values:
        raise InvalidError(f"option {name} is {value!r}, must be one of {', '.join(values)}")
    return values[value]


def _fill_format(c: CData, message: manifest_pb2.TensorFormat) -> None:
    c.codes, c.scale_format, c.codebook = int(message.codes), int(message.scale_format), int(message.codebook)
    c.asymmetric, c.group_size = message.asymmetric, message.group_size


def _fill_blob(c: CData, blob: manifest_pb2.Blob) -> None:
    c.offset, c.bytes, c.crc32c = blob.offset, blob.bytes, blob.crc32c


def _fill_dense(c: CData, tensor: manifest_pb2.DenseTensor) -> None:
    c.role, c.layer, c.rows, c.cols = int(tensor.role), tensor.layer, tensor.rows, tensor.cols
    _fill_format(c.format, tensor.format)
    _fill_blob(c.codes, tensor.codes)
    _fill_blob(c.scales, tensor.scales)
    _fill_blob(c.mins, tensor.mins)


def _fill_layer(c: CData, layer: manifest_pb2.LayerSpec, index: int) -> None:
    if layer.WhichOneof("attention") != "gqa":
        raise InvalidError(f"spec: layer {index}: attention is not set to a kind that this build knows")
    gqa, ffn = layer.gqa, layer.WhichOneof("ffn")
    c.attention = 1
    for name in ("heads", "kv_heads", "head_dim", "clip_qkv", "rope"):
        setattr(c, name, getattr(gqa, name))
    c.attention_scale, c.qk_norm = gqa.scale, int(gqa.qk_norm)
    if ffn == "dense":
        c.ffn, c.intermediate_size = 1, layer.dense.intermediate_size
    elif ffn == "moe":
        _fill_moe(c, layer.moe)
    else:
        raise InvalidError(f"spec: layer {index}: ffn is not set to a kind that this build knows")


def _fill_moe(c: CData, moe: manifest_pb2.MoeFfnSpec) -> None:
    c.ffn, c.expert_intermediate_size = 2, moe.intermediate_size
    for name in ("experts", "top_k", "select_bias", "groups", "top_groups", "routed_scale"):
        setattr(c, name, getattr(moe, name))
    for name in ("shared_intermediate_size", "shared_output_gate"):
        setattr(c, name, getattr(moe, name))
    c.score, c.renormalize = int(moe.score), int(moe.renormalize)
