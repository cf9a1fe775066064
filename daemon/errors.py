"""Errors that a caller of the daemon can get, one class per reason of the service contract.

Owns the reasons, the gRPC code name that belongs to each, and the metadata that makes an error actionable (the field,
the limit, the position, the drive). Knows nothing of gRPC itself: the service turns a DaemonError into a status with
ErrorInfo. Raised by the sessions, the scheduler and the engine; also kept in a generation that failed.
"""

from __future__ import annotations

from typing import ClassVar


class DaemonError(Exception):
    """An error with a stable reason. `metadata` values are text, ready for ErrorInfo."""

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"
    retry_seconds: ClassVar[float | None] = None

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = {key: str(value) for key, value in metadata.items()}


class ModelLoadingError(DaemonError):
    reason, code, retry_seconds = "MODEL_LOADING", "UNAVAILABLE", 5.0


class DrainingError(DaemonError):
    reason, code, retry_seconds = "DRAINING", "UNAVAILABLE", 5.0


class StorageUnavailableError(DaemonError):
    """A drive refused to read something other than an expert; the daemon lives on."""

    reason, code, retry_seconds = "STORAGE_UNAVAILABLE", "UNAVAILABLE", 5.0


class QueueFullError(DaemonError):
    reason, code, retry_seconds = "QUEUE_FULL", "RESOURCE_EXHAUSTED", 1.0


class DiskFullError(DaemonError):
    reason, code = "DISK_FULL", "RESOURCE_EXHAUSTED"


class ContentMismatchError(DaemonError):
    reason, code = "CONTENT_MISMATCH", "FAILED_PRECONDITION"


class SessionBusyError(DaemonError):
    reason, code = "SESSION_BUSY", "ABORTED"


class PositionMismatchError(DaemonError):
    reason, code = "POSITION_MISMATCH", "ABORTED"


class EtagMismatchError(DaemonError):
    reason, code = "ETAG_MISMATCH", "ABORTED"


class UnsupportedFieldError(DaemonError):
    reason, code = "UNSUPPORTED_FIELD", "INVALID_ARGUMENT"


class InvalidFieldError(DaemonError):
    """A field whose value cannot be used at all (empty input, max_tokens 0, a malformed id)."""

    reason, code = "INVALID_FIELD", "INVALID_ARGUMENT"


class TokenOutOfRangeError(DaemonError):
    reason, code = "TOKEN_OUT_OF_RANGE", "INVALID_ARGUMENT"


class ContextExceededError(DaemonError):
    reason, code = "CONTEXT_EXCEEDED", "INVALID_ARGUMENT"


class OffsetAheadError(DaemonError):
    reason, code = "OFFSET_AHEAD", "OUT_OF_RANGE"


class SessionNotFoundError(DaemonError):
    reason, code = "SESSION_NOT_FOUND", "NOT_FOUND"


class GenerationNotFoundError(DaemonError):
    """No such generation, or its replay time is over."""

    reason, code = "REPLAY_EXPIRED", "NOT_FOUND"


class RequestIdReusedError(DaemonError):
    reason, code = "REQUEST_ID_REUSED", "ALREADY_EXISTS"


class SessionExistsError(DaemonError):
    reason, code = "SESSION_EXISTS", "ALREADY_EXISTS"


class SessionCorruptError(DaemonError):
    """Part of a session's log failed its check; metadata `position` is the readable prefix."""

    reason, code = "SESSION_CORRUPT", "DATA_LOSS"


class ExpertChecksumError(DaemonError):
    """The bytes of an expert that the generation needed are damaged on the drive. Metadata: `layer`, `expert`,
    `stripe`, `drive`, `file`, `offset`."""

    reason, code = "EXPERT_CHECKSUM", "DATA_LOSS"


class ExpertUnreadableError(DaemonError):
    """A drive did not give the bytes of an expert that the generation needed, nor did a mirror. Metadata as for a
    damaged one, and `errno`, unless the file simply ends too early."""

    reason, code = "EXPERT_UNREADABLE", "DATA_LOSS"


class EngineFailedError(DaemonError):
    """The core failed in a way that no request can be blamed for."""

    reason, code = "ENGINE_FAILED", "INTERNAL"


class StoreError(DaemonError):
    """The state folder cannot be used: another daemon holds it, or it is of another version, or the system refused."""

    reason, code = "STATE_FOLDER", "FAILED_PRECONDITION"


def error_of_reason(reason: str, message: str, metadata: dict[str, str]) -> DaemonError:
    """An error that was written down earlier, again as an exception."""
    kinds = {kind.reason: kind for kind in DaemonError.__subclasses__()}
    return kinds.get(reason, DaemonError)(message, **metadata)
