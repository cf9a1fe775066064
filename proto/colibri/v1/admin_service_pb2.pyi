import datetime

from colibri.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "architecture", "content_id", "vocab_size", "max_context", "eos_token_ids", "chat_renderer", "default_sampling", "capabilities", "boot_id", "kv_bytes_per_token", "degraded")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_RENDERER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    architecture: str
    content_id: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    chat_renderer: str
    default_sampling: _types_pb2.SamplingParams
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    boot_id: str
    kv_bytes_per_token: int
    degraded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., content_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., chat_renderer: _Optional[str] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ..., boot_id: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., degraded: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchStatsRequest(_message.Message):
    __slots__ = ("interval", "expert_heat")
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HEAT_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    expert_heat: bool
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expert_heat: bool = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("state", "detail", "load_fraction", "queued", "running", "decode_tokens_per_second", "prefill_tokens_per_second", "expert_hit_ratio", "devices", "resident_bytes", "session_bytes", "session_quota_bytes", "expert_heat", "generations", "degraded", "expert_hits", "expert_loads", "expert_read_bytes", "planned_bytes", "experts", "expert_slots", "warming", "scrub_fraction", "lookahead", "expert_demand_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Stats.State]
        STATE_LOADING: _ClassVar[Stats.State]
        STATE_READY: _ClassVar[Stats.State]
        STATE_DRAINING: _ClassVar[Stats.State]
        STATE_DEGRADED: _ClassVar[Stats.State]
    STATE_UNSPECIFIED: Stats.State
    STATE_LOADING: Stats.State
    STATE_READY: Stats.State
    STATE_DRAINING: Stats.State
    STATE_DEGRADED: Stats.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FRACTION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HEAT_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HITS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOADS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FRACTION_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    EXPERT_DEMAND_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: Stats.State
    detail: str
    load_fraction: float
    queued: int
    running: int
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    expert_hit_ratio: float
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    resident_bytes: int
    session_bytes: int
    session_quota_bytes: int
    expert_heat: bytes
    generations: _containers.RepeatedCompositeFieldContainer[_types_pb2.Generation]
    degraded: _containers.RepeatedScalarFieldContainer[str]
    expert_hits: int
    expert_loads: int
    expert_read_bytes: int
    planned_bytes: int
    experts: int
    expert_slots: int
    warming: bool
    scrub_fraction: float
    lookahead: Lookahead
    expert_demand_bytes: int
    def __init__(self, state: _Optional[_Union[Stats.State, str]] = ..., detail: _Optional[str] = ..., load_fraction: _Optional[float] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., decode_tokens_per_second: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ..., expert_hit_ratio: _Optional[float] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., resident_bytes: _Optional[int] = ..., session_bytes: _Optional[int] = ..., session_quota_bytes: _Optional[int] = ..., expert_heat: _Optional[bytes] = ..., generations: _Optional[_Iterable[_Union[_types_pb2.Generation, _Mapping]]] = ..., degraded: _Optional[_Iterable[str]] = ..., expert_hits: _Optional[int] = ..., expert_loads: _Optional[int] = ..., expert_read_bytes: _Optional[int] = ..., planned_bytes: _Optional[int] = ..., experts: _Optional[int] = ..., expert_slots: _Optional[int] = ..., warming: bool = ..., scrub_fraction: _Optional[float] = ..., lookahead: _Optional[_Union[Lookahead, _Mapping]] = ..., expert_demand_bytes: _Optional[int] = ...) -> None: ...

class Lookahead(_message.Message):
    __slots__ = ("state", "predicted", "right", "loads", "read_bytes", "wasted_bytes", "late", "saved_seconds", "spent_seconds")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Lookahead.State]
        STATE_OFF: _ClassVar[Lookahead.State]
        STATE_ON: _ClassVar[Lookahead.State]
        STATE_TRYING: _ClassVar[Lookahead.State]
        STATE_WINNING: _ClassVar[Lookahead.State]
        STATE_LOSING: _ClassVar[Lookahead.State]
    STATE_UNSPECIFIED: Lookahead.State
    STATE_OFF: Lookahead.State
    STATE_ON: Lookahead.State
    STATE_TRYING: Lookahead.State
    STATE_WINNING: Lookahead.State
    STATE_LOSING: Lookahead.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WASTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: Lookahead.State
    predicted: int
    right: int
    loads: int
    read_bytes: int
    wasted_bytes: int
    late: int
    saved_seconds: float
    spent_seconds: float
    def __init__(self, state: _Optional[_Union[Lookahead.State, str]] = ..., predicted: _Optional[int] = ..., right: _Optional[int] = ..., loads: _Optional[int] = ..., read_bytes: _Optional[int] = ..., wasted_bytes: _Optional[int] = ..., late: _Optional[int] = ..., saved_seconds: _Optional[float] = ..., spent_seconds: _Optional[float] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("path", "read_bytes", "read_mib_per_second", "latency_ms_p99", "stripe", "state", "reads", "retries", "errors", "checksum_errors", "mirror_reads", "last_error", "backend", "direct", "has_mirror", "note", "latency_ms_p50", "busy_seconds", "cpu_seconds", "mirror_path", "mirror_error")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Device.State]
        STATE_OK: _ClassVar[Device.State]
        STATE_DEGRADED: _ClassVar[Device.State]
    STATE_UNSPECIFIED: Device.State
    STATE_OK: Device.State
    STATE_DEGRADED: Device.State
    PATH_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_MIB_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_P99_FIELD_NUMBER: _ClassVar[int]
    STRIPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    MIRROR_READS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    HAS_MIRROR_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_P50_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIRROR_PATH_FIELD_NUMBER: _ClassVar[int]
    MIRROR_ERROR_FIELD_NUMBER: _ClassVar[int]
    path: str
    read_bytes: int
    read_mib_per_second: float
    latency_ms_p99: float
    stripe: int
    state: Device.State
    reads: int
    retries: int
    errors: int
    checksum_errors: int
    mirror_reads: int
    last_error: str
    backend: str
    direct: bool
    has_mirror: bool
    note: str
    latency_ms_p50: float
    busy_seconds: float
    cpu_seconds: float
    mirror_path: str
    mirror_error: str
    def __init__(self, path: _Optional[str] = ..., read_bytes: _Optional[int] = ..., read_mib_per_second: _Optional[float] = ..., latency_ms_p99: _Optional[float] = ..., stripe: _Optional[int] = ..., state: _Optional[_Union[Device.State, str]] = ..., reads: _Optional[int] = ..., retries: _Optional[int] = ..., errors: _Optional[int] = ..., checksum_errors: _Optional[int] = ..., mirror_reads: _Optional[int] = ..., last_error: _Optional[str] = ..., backend: _Optional[str] = ..., direct: bool = ..., has_mirror: bool = ..., note: _Optional[str] = ..., latency_ms_p50: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., cpu_seconds: _Optional[float] = ..., mirror_path: _Optional[str] = ..., mirror_error: _Optional[str] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
