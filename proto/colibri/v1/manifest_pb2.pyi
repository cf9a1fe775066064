from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_ROLE_UNSPECIFIED: _ClassVar[TensorRole]
    TENSOR_ROLE_EMBEDDING: _ClassVar[TensorRole]
    TENSOR_ROLE_HEAD: _ClassVar[TensorRole]
    TENSOR_ROLE_FINAL_NORM: _ClassVar[TensorRole]
    TENSOR_ROLE_HEAD_BIAS: _ClassVar[TensorRole]
    TENSOR_ROLE_ATTENTION_NORM: _ClassVar[TensorRole]
    TENSOR_ROLE_Q: _ClassVar[TensorRole]
    TENSOR_ROLE_K: _ClassVar[TensorRole]
    TENSOR_ROLE_V: _ClassVar[TensorRole]
    TENSOR_ROLE_O: _ClassVar[TensorRole]
    TENSOR_ROLE_Q_BIAS: _ClassVar[TensorRole]
    TENSOR_ROLE_K_BIAS: _ClassVar[TensorRole]
    TENSOR_ROLE_V_BIAS: _ClassVar[TensorRole]
    TENSOR_ROLE_O_BIAS: _ClassVar[TensorRole]
    TENSOR_ROLE_Q_NORM: _ClassVar[TensorRole]
    TENSOR_ROLE_K_NORM: _ClassVar[TensorRole]
    TENSOR_ROLE_FFN_NORM: _ClassVar[TensorRole]
    TENSOR_ROLE_FFN_GATE: _ClassVar[TensorRole]
    TENSOR_ROLE_FFN_UP: _ClassVar[TensorRole]
    TENSOR_ROLE_FFN_DOWN: _ClassVar[TensorRole]
    TENSOR_ROLE_ROUTER: _ClassVar[TensorRole]
    TENSOR_ROLE_ROUTER_SELECT_BIAS: _ClassVar[TensorRole]
    TENSOR_ROLE_SHARED_GATE: _ClassVar[TensorRole]
    TENSOR_ROLE_SHARED_UP: _ClassVar[TensorRole]
    TENSOR_ROLE_SHARED_DOWN: _ClassVar[TensorRole]
    TENSOR_ROLE_SHARED_OUTPUT_GATE: _ClassVar[TensorRole]
TENSOR_ROLE_UNSPECIFIED: TensorRole
TENSOR_ROLE_EMBEDDING: TensorRole
TENSOR_ROLE_HEAD: TensorRole
TENSOR_ROLE_FINAL_NORM: TensorRole
TENSOR_ROLE_HEAD_BIAS: TensorRole
TENSOR_ROLE_ATTENTION_NORM: TensorRole
TENSOR_ROLE_Q: TensorRole
TENSOR_ROLE_K: TensorRole
TENSOR_ROLE_V: TensorRole
TENSOR_ROLE_O: TensorRole
TENSOR_ROLE_Q_BIAS: TensorRole
TENSOR_ROLE_K_BIAS: TensorRole
TENSOR_ROLE_V_BIAS: TensorRole
TENSOR_ROLE_O_BIAS: TensorRole
TENSOR_ROLE_Q_NORM: TensorRole
TENSOR_ROLE_K_NORM: TensorRole
TENSOR_ROLE_FFN_NORM: TensorRole
TENSOR_ROLE_FFN_GATE: TensorRole
TENSOR_ROLE_FFN_UP: TensorRole
TENSOR_ROLE_FFN_DOWN: TensorRole
TENSOR_ROLE_ROUTER: TensorRole
TENSOR_ROLE_ROUTER_SELECT_BIAS: TensorRole
TENSOR_ROLE_SHARED_GATE: TensorRole
TENSOR_ROLE_SHARED_UP: TensorRole
TENSOR_ROLE_SHARED_DOWN: TensorRole
TENSOR_ROLE_SHARED_OUTPUT_GATE: TensorRole

class Manifest(_message.Message):
    __slots__ = ("format_version", "required_features", "content_id", "layout", "spec", "dense", "expert_layers", "files", "skipped", "warnings", "report", "source", "manifest_sha256")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    required_features: _containers.RepeatedScalarFieldContainer[str]
    content_id: str
    layout: Layout
    spec: ModelSpec
    dense: _containers.RepeatedCompositeFieldContainer[DenseTensor]
    expert_layers: _containers.RepeatedCompositeFieldContainer[ExpertLayer]
    files: _containers.RepeatedCompositeFieldContainer[BundledFile]
    skipped: _containers.RepeatedCompositeFieldContainer[SkippedTensors]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    report: _containers.RepeatedCompositeFieldContainer[ClassReport]
    source: Source
    manifest_sha256: str
    def __init__(self, format_version: _Optional[int] = ..., required_features: _Optional[_Iterable[str]] = ..., content_id: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., dense: _Optional[_Iterable[_Union[DenseTensor, _Mapping]]] = ..., expert_layers: _Optional[_Iterable[_Union[ExpertLayer, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[BundledFile, _Mapping]]] = ..., skipped: _Optional[_Iterable[_Union[SkippedTensors, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., report: _Optional[_Iterable[_Union[ClassReport, _Mapping]]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("uuid", "stripes", "create_unix_seconds", "created_by", "min_extent_bytes", "extent_checksums", "record_digests")
    UUID_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    CREATE_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    MIN_EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    RECORD_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    stripes: _containers.RepeatedCompositeFieldContainer[Stripe]
    create_unix_seconds: int
    created_by: str
    min_extent_bytes: int
    extent_checksums: Blob
    record_digests: Blob
    def __init__(self, uuid: _Optional[str] = ..., stripes: _Optional[_Iterable[_Union[Stripe, _Mapping]]] = ..., create_unix_seconds: _Optional[int] = ..., created_by: _Optional[str] = ..., min_extent_bytes: _Optional[int] = ..., extent_checksums: _Optional[_Union[Blob, _Mapping]] = ..., record_digests: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class Stripe(_message.Message):
    __slots__ = ("number", "weight", "bytes", "mirrored")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    number: int
    weight: int
    bytes: int
    mirrored: bool
    def __init__(self, number: _Optional[int] = ..., weight: _Optional[int] = ..., bytes: _Optional[int] = ..., mirrored: bool = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("offset", "bytes", "crc32c")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    offset: int
    bytes: int
    crc32c: int
    def __init__(self, offset: _Optional[int] = ..., bytes: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class BundledFile(_message.Message):
    __slots__ = ("name", "bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class SkippedTensors(_message.Message):
    __slots__ = ("rule", "reason", "names")
    RULE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    rule: str
    reason: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rule: _Optional[str] = ..., reason: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class ClassReport(_message.Message):
    __slots__ = ("tensor_class", "format", "values", "relative_rms", "zeroed_share", "worst_relative_rms", "worst_tensor", "zero_experts")
    TENSOR_CLASS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_RMS_FIELD_NUMBER: _ClassVar[int]
    ZEROED_SHARE_FIELD_NUMBER: _ClassVar[int]
    WORST_RELATIVE_RMS_FIELD_NUMBER: _ClassVar[int]
    WORST_TENSOR_FIELD_NUMBER: _ClassVar[int]
    ZERO_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    tensor_class: str
    format: TensorFormat
    values: int
    relative_rms: float
    zeroed_share: float
    worst_relative_rms: float
    worst_tensor: str
    zero_experts: int
    def __init__(self, tensor_class: _Optional[str] = ..., format: _Optional[_Union[TensorFormat, _Mapping]] = ..., values: _Optional[int] = ..., relative_rms: _Optional[float] = ..., zeroed_share: _Optional[float] = ..., worst_relative_rms: _Optional[float] = ..., worst_tensor: _Optional[str] = ..., zero_experts: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("architecture", "model_type", "name", "files", "ignored_copies")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    IGNORED_COPIES_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    model_type: str
    name: str
    files: _containers.RepeatedCompositeFieldContainer[SourceFile]
    ignored_copies: int
    def __init__(self, architecture: _Optional[str] = ..., model_type: _Optional[str] = ..., name: _Optional[str] = ..., files: _Optional[_Iterable[_Union[SourceFile, _Mapping]]] = ..., ignored_copies: _Optional[int] = ...) -> None: ...

class SourceFile(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class TensorFormat(_message.Message):
    __slots__ = ("codes", "group_size", "asymmetric", "scale_format", "codebook")
    class Codes(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODES_UNSPECIFIED: _ClassVar[TensorFormat.Codes]
        CODES_F32: _ClassVar[TensorFormat.Codes]
        CODES_BF16: _ClassVar[TensorFormat.Codes]
        CODES_INT8: _ClassVar[TensorFormat.Codes]
        CODES_INT4: _ClassVar[TensorFormat.Codes]
    CODES_UNSPECIFIED: TensorFormat.Codes
    CODES_F32: TensorFormat.Codes
    CODES_BF16: TensorFormat.Codes
    CODES_INT8: TensorFormat.Codes
    CODES_INT4: TensorFormat.Codes
    class ScaleFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SCALE_FORMAT_UNSPECIFIED: _ClassVar[TensorFormat.ScaleFormat]
        SCALE_FORMAT_F16: _ClassVar[TensorFormat.ScaleFormat]
    SCALE_FORMAT_UNSPECIFIED: TensorFormat.ScaleFormat
    SCALE_FORMAT_F16: TensorFormat.ScaleFormat
    class Codebook(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODEBOOK_UNSPECIFIED: _ClassVar[TensorFormat.Codebook]
        CODEBOOK_UNIFORM: _ClassVar[TensorFormat.Codebook]
    CODEBOOK_UNSPECIFIED: TensorFormat.Codebook
    CODEBOOK_UNIFORM: TensorFormat.Codebook
    CODES_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ASYMMETRIC_FIELD_NUMBER: _ClassVar[int]
    SCALE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CODEBOOK_FIELD_NUMBER: _ClassVar[int]
    codes: TensorFormat.Codes
    group_size: int
    asymmetric: bool
    scale_format: TensorFormat.ScaleFormat
    codebook: TensorFormat.Codebook
    def __init__(self, codes: _Optional[_Union[TensorFormat.Codes, str]] = ..., group_size: _Optional[int] = ..., asymmetric: bool = ..., scale_format: _Optional[_Union[TensorFormat.ScaleFormat, str]] = ..., codebook: _Optional[_Union[TensorFormat.Codebook, str]] = ...) -> None: ...

class DenseTensor(_message.Message):
    __slots__ = ("role", "layer", "name", "tensor_class", "format", "rows", "cols", "codes", "scales", "mins", "sha256", "source_names")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_CLASS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    MINS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NAMES_FIELD_NUMBER: _ClassVar[int]
    role: TensorRole
    layer: int
    name: str
    tensor_class: str
    format: TensorFormat
    rows: int
    cols: int
    codes: Blob
    scales: Blob
    mins: Blob
    sha256: str
    source_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, role: _Optional[_Union[TensorRole, str]] = ..., layer: _Optional[int] = ..., name: _Optional[str] = ..., tensor_class: _Optional[str] = ..., format: _Optional[_Union[TensorFormat, _Mapping]] = ..., rows: _Optional[int] = ..., cols: _Optional[int] = ..., codes: _Optional[_Union[Blob, _Mapping]] = ..., scales: _Optional[_Union[Blob, _Mapping]] = ..., mins: _Optional[_Union[Blob, _Mapping]] = ..., sha256: _Optional[str] = ..., source_names: _Optional[_Iterable[str]] = ...) -> None: ...

class ExpertLayer(_message.Message):
    __slots__ = ("layer", "experts", "record_bytes", "parts", "striping", "source_pattern")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STRIPING_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: int
    record_bytes: int
    parts: _containers.RepeatedCompositeFieldContainer[RecordPart]
    striping: Striping
    source_pattern: str
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[int] = ..., record_bytes: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[RecordPart, _Mapping]]] = ..., striping: _Optional[_Union[Striping, _Mapping]] = ..., source_pattern: _Optional[str] = ...) -> None: ...

class RecordPart(_message.Message):
    __slots__ = ("kind", "format", "rows", "cols", "offset", "bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[RecordPart.Kind]
        KIND_GATE: _ClassVar[RecordPart.Kind]
        KIND_UP: _ClassVar[RecordPart.Kind]
        KIND_DOWN: _ClassVar[RecordPart.Kind]
        KIND_GATE_BIAS: _ClassVar[RecordPart.Kind]
        KIND_UP_BIAS: _ClassVar[RecordPart.Kind]
        KIND_DOWN_BIAS: _ClassVar[RecordPart.Kind]
    KIND_UNSPECIFIED: RecordPart.Kind
    KIND_GATE: RecordPart.Kind
    KIND_UP: RecordPart.Kind
    KIND_DOWN: RecordPart.Kind
    KIND_GATE_BIAS: RecordPart.Kind
    KIND_UP_BIAS: RecordPart.Kind
    KIND_DOWN_BIAS: RecordPart.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: RecordPart.Kind
    format: TensorFormat
    rows: int
    cols: int
    offset: int
    bytes: int
    def __init__(self, kind: _Optional[_Union[RecordPart.Kind, str]] = ..., format: _Optional[_Union[TensorFormat, _Mapping]] = ..., rows: _Optional[int] = ..., cols: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Striping(_message.Message):
    __slots__ = ("split", "whole")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    split: SplitRule
    whole: WholeRule
    def __init__(self, split: _Optional[_Union[SplitRule, _Mapping]] = ..., whole: _Optional[_Union[WholeRule, _Mapping]] = ...) -> None: ...

class SplitRule(_message.Message):
    __slots__ = ("pieces",)
    class Piece(_message.Message):
        __slots__ = ("stripe", "base", "bytes")
        STRIPE_FIELD_NUMBER: _ClassVar[int]
        BASE_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        stripe: int
        base: int
        bytes: int
        def __init__(self, stripe: _Optional[int] = ..., base: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
    PIECES_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[SplitRule.Piece]
    def __init__(self, pieces: _Optional[_Iterable[_Union[SplitRule.Piece, _Mapping]]] = ...) -> None: ...

class WholeRule(_message.Message):
    __slots__ = ("pattern", "base")
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    pattern: _containers.RepeatedScalarFieldContainer[int]
    base: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pattern: _Optional[_Iterable[int]] = ..., base: _Optional[_Iterable[int]] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("family", "vocab_size", "hidden_size", "max_positions", "norm_eps", "embedding_scale", "residual_scale", "logits_divisor", "tied_embeddings", "layers", "ropes", "norm_weight_offset")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NORM_EPS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SCALE_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_SCALE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIVISOR_FIELD_NUMBER: _ClassVar[int]
    TIED_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROPES_FIELD_NUMBER: _ClassVar[int]
    NORM_WEIGHT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    norm_eps: float
    embedding_scale: float
    residual_scale: float
    logits_divisor: float
    tied_embeddings: bool
    layers: _containers.RepeatedCompositeFieldContainer[LayerSpec]
    ropes: _containers.RepeatedCompositeFieldContainer[RopeTable]
    norm_weight_offset: float
    def __init__(self, family: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., max_positions: _Optional[int] = ..., norm_eps: _Optional[float] = ..., embedding_scale: _Optional[float] = ..., residual_scale: _Optional[float] = ..., logits_divisor: _Optional[float] = ..., tied_embeddings: bool = ..., layers: _Optional[_Iterable[_Union[LayerSpec, _Mapping]]] = ..., ropes: _Optional[_Iterable[_Union[RopeTable, _Mapping]]] = ..., norm_weight_offset: _Optional[float] = ...) -> None: ...

class RopeTable(_message.Message):
    __slots__ = ("style", "dims", "inv_freq", "attention_factor")
    class Style(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STYLE_UNSPECIFIED: _ClassVar[RopeTable.Style]
        STYLE_HALF: _ClassVar[RopeTable.Style]
    STYLE_UNSPECIFIED: RopeTable.Style
    STYLE_HALF: RopeTable.Style
    STYLE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    INV_FREQ_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    style: RopeTable.Style
    dims: int
    inv_freq: _containers.RepeatedScalarFieldContainer[float]
    attention_factor: float
    def __init__(self, style: _Optional[_Union[RopeTable.Style, str]] = ..., dims: _Optional[int] = ..., inv_freq: _Optional[_Iterable[float]] = ..., attention_factor: _Optional[float] = ...) -> None: ...

class LayerSpec(_message.Message):
    __slots__ = ("gqa", "dense", "moe")
    GQA_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    MOE_FIELD_NUMBER: _ClassVar[int]
    gqa: GqaSpec
    dense: DenseFfnSpec
    moe: MoeFfnSpec
    def __init__(self, gqa: _Optional[_Union[GqaSpec, _Mapping]] = ..., dense: _Optional[_Union[DenseFfnSpec, _Mapping]] = ..., moe: _Optional[_Union[MoeFfnSpec, _Mapping]] = ...) -> None: ...

class GqaSpec(_message.Message):
    __slots__ = ("heads", "kv_heads", "head_dim", "scale", "qk_norm", "clip_qkv", "rope")
    class QkNorm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        QK_NORM_UNSPECIFIED: _ClassVar[GqaSpec.QkNorm]
        QK_NORM_HEAD: _ClassVar[GqaSpec.QkNorm]
        QK_NORM_FULL: _ClassVar[GqaSpec.QkNorm]
    QK_NORM_UNSPECIFIED: GqaSpec.QkNorm
    QK_NORM_HEAD: GqaSpec.QkNorm
    QK_NORM_FULL: GqaSpec.QkNorm
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    QK_NORM_FIELD_NUMBER: _ClassVar[int]
    CLIP_QKV_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qk_norm: GqaSpec.QkNorm
    clip_qkv: float
    rope: int
    def __init__(self, heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., scale: _Optional[float] = ..., qk_norm: _Optional[_Union[GqaSpec.QkNorm, str]] = ..., clip_qkv: _Optional[float] = ..., rope: _Optional[int] = ...) -> None: ...

class DenseFfnSpec(_message.Message):
    __slots__ = ("intermediate_size",)
    INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    intermediate_size: int
    def __init__(self, intermediate_size: _Optional[int] = ...) -> None: ...

class MoeFfnSpec(_message.Message):
    __slots__ = ("experts", "top_k", "intermediate_size", "score", "select_bias", "groups", "top_groups", "renormalize", "routed_scale", "shared_intermediate_size", "shared_output_gate")
    class Score(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SCORE_UNSPECIFIED: _ClassVar[MoeFfnSpec.Score]
        SCORE_SOFTMAX: _ClassVar[MoeFfnSpec.Score]
        SCORE_SIGMOID: _ClassVar[MoeFfnSpec.Score]
    SCORE_UNSPECIFIED: MoeFfnSpec.Score
    SCORE_SOFTMAX: MoeFfnSpec.Score
    SCORE_SIGMOID: MoeFfnSpec.Score
    class Renormalize(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RENORMALIZE_UNSPECIFIED: _ClassVar[MoeFfnSpec.Renormalize]
        RENORMALIZE_SUM: _ClassVar[MoeFfnSpec.Renormalize]
        RENORMALIZE_SUM_EPSILON: _ClassVar[MoeFfnSpec.Renormalize]
    RENORMALIZE_UNSPECIFIED: MoeFfnSpec.Renormalize
    RENORMALIZE_SUM: MoeFfnSpec.Renormalize
    RENORMALIZE_SUM_EPSILON: MoeFfnSpec.Renormalize
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SELECT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOP_GROUPS_FIELD_NUMBER: _ClassVar[int]
    RENORMALIZE_FIELD_NUMBER: _ClassVar[int]
    ROUTED_SCALE_FIELD_NUMBER: _ClassVar[int]
    SHARED_INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARED_OUTPUT_GATE_FIELD_NUMBER: _ClassVar[int]
    experts: int
    top_k: int
    intermediate_size: int
    score: MoeFfnSpec.Score
    select_bias: bool
    groups: int
    top_groups: int
    renormalize: MoeFfnSpec.Renormalize
    routed_scale: float
    shared_intermediate_size: int
    shared_output_gate: bool
    def __init__(self, experts: _Optional[int] = ..., top_k: _Optional[int] = ..., intermediate_size: _Optional[int] = ..., score: _Optional[_Union[MoeFfnSpec.Score, str]] = ..., select_bias: bool = ..., groups: _Optional[int] = ..., top_groups: _Optional[int] = ..., renormalize: _Optional[_Union[MoeFfnSpec.Renormalize, str]] = ..., routed_scale: _Optional[float] = ..., shared_intermediate_size: _Optional[int] = ..., shared_output_gate: bool = ...) -> None: ...
