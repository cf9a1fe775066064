import datetime

from colibri.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DisconnectPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISCONNECT_POLICY_UNSPECIFIED: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_CANCEL: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_CONTINUE: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_PAUSE: _ClassVar[DisconnectPolicy]
DISCONNECT_POLICY_UNSPECIFIED: DisconnectPolicy
DISCONNECT_POLICY_CANCEL: DisconnectPolicy
DISCONNECT_POLICY_CONTINUE: DisconnectPolicy
DISCONNECT_POLICY_PAUSE: DisconnectPolicy

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "session", "expected_position", "input", "sampling", "stop", "constraint", "output", "on_disconnect", "detached_timeout", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    DETACHED_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session: str
    expected_position: int
    input: _types_pb2.Input
    sampling: _types_pb2.SamplingParams
    stop: _types_pb2.StopConditions
    constraint: _types_pb2.Constraint
    output: _types_pb2.OutputOptions
    on_disconnect: DisconnectPolicy
    detached_timeout: _duration_pb2.Duration
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., session: _Optional[str] = ..., expected_position: _Optional[int] = ..., input: _Optional[_Union[_types_pb2.Input, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_types_pb2.StopConditions, _Mapping]] = ..., constraint: _Optional[_Union[_types_pb2.Constraint, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ..., on_disconnect: _Optional[_Union[DisconnectPolicy, str]] = ..., detached_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class ResumeGenerationRequest(_message.Message):
    __slots__ = ("name", "from_offset", "output")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FROM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    from_offset: int
    output: _types_pb2.OutputOptions
    def __init__(self, name: _Optional[str] = ..., from_offset: _Optional[int] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ...) -> None: ...

class GetGenerationRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListGenerationsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListGenerationsResponse(_message.Message):
    __slots__ = ("generations", "next_page_token")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[_types_pb2.Generation]
    next_page_token: str
    def __init__(self, generations: _Optional[_Iterable[_Union[_types_pb2.Generation, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelGenerationRequest(_message.Message):
    __slots__ = ("name", "discard_output")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISCARD_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    discard_output: bool
    def __init__(self, name: _Optional[str] = ..., discard_output: bool = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "add_bos")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    text: str
    add_bos: bool
    def __init__(self, text: _Optional[str] = ..., add_bos: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class RenderChatRequest(_message.Message):
    __slots__ = ("chat",)
    CHAT_FIELD_NUMBER: _ClassVar[int]
    chat: _types_pb2.Chat
    def __init__(self, chat: _Optional[_Union[_types_pb2.Chat, _Mapping]] = ...) -> None: ...

class RenderChatResponse(_message.Message):
    __slots__ = ("text", "ids", "renderer")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    RENDERER_FIELD_NUMBER: _ClassVar[int]
    text: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    renderer: str
    def __init__(self, text: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., renderer: _Optional[str] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("session_id", "session", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    session: _types_pb2.Session
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "filter", "order_by")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    filter: str
    order_by: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[str] = ..., order_by: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[_types_pb2.Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[_types_pb2.Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdateSessionRequest(_message.Message):
    __slots__ = ("session", "update_mask")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    session: _types_pb2.Session
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, session: _Optional[_Union[_types_pb2.Session, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("name", "etag", "force", "allow_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    force: bool
    allow_missing: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., force: bool = ..., allow_missing: bool = ...) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("name", "position", "session_id", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    session_id: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ..., session_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class RewindSessionRequest(_message.Message):
    __slots__ = ("name", "position", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    etag: str
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ..., etag: _Optional[str] = ...) -> None: ...

class PrefillSessionRequest(_message.Message):
    __slots__ = ("request_id", "name", "expected_position", "input", "output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    name: str
    expected_position: int
    input: _types_pb2.Input
    output: _types_pb2.OutputOptions
    def __init__(self, request_id: _Optional[str] = ..., name: _Optional[str] = ..., expected_position: _Optional[int] = ..., input: _Optional[_Union[_types_pb2.Input, _Mapping]] = ..., output: _Optional[_Union[_types_pb2.OutputOptions, _Mapping]] = ...) -> None: ...

class CheckpointSessionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReadSessionRequest(_message.Message):
    __slots__ = ("name", "position", "page_size", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    position: int
    page_size: int
    text: bool
    def __init__(self, name: _Optional[str] = ..., position: _Optional[int] = ..., page_size: _Optional[int] = ..., text: bool = ...) -> None: ...

class ReadSessionResponse(_message.Message):
    __slots__ = ("ids", "text", "next_position")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    next_position: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., next_position: _Optional[int] = ...) -> None: ...
