"""What can go wrong on the way to a daemon, one class per kind, with the daemon's own reason and numbers in it.

Owns the mapping from a gRPC status (with its google.rpc.ErrorInfo and RetryInfo details) to a typed exception.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from colibri.v1 import types_pb2

_DETAILS_KEY = "grpc-status-details-bin"


class ColibriError(Exception):
    """Base of everything this library raises on purpose."""


class AddressError(ColibriError):
    """No daemon address, several to choose from, or one that cannot be used."""


class NobodyThereError(ColibriError):
    """No daemon behind a socket's path."""


class ProtocolError(ColibriError):
    """The daemon broke the contract of a stream: events out of order, an end without `finished`."""


class OffsetGapError(ProtocolError):
    """A delta that does not begin where the one before it ended: tokens are missing or repeated."""

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(f"the stream jumped: a delta begins at token offset {found}, {expected} was expected")
        self.expected = expected
        self.found = found


class ServiceError(ColibriError):
    """The daemon refused or failed a call.

    `reason` and `metadata` are the ErrorInfo's (empty if the answer carried none); `retry_after` is in seconds.
    `generation` and `next_offset` say where a stream stood, if it had begun.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.generation = ""
        self.next_offset = 0

    def __str__(self) -> str:
        details = ", ".join(f"{key}={value}" for key, value in sorted(self.metadata.items()))
        label = f"{self.code.name}/{self.reason}" if self.reason else self.code.name
        return f"{self.message} ({label}{': ' if details else ''}{details})"


class UnavailableError(ServiceError):
    """The daemon cannot be reached, or does not take work now (loading, draining)."""


class ServerLostError(UnavailableError):
    """A daemon that answered before went silent: its connection broke or three heartbeats are missing."""


class ResourceExhaustedError(ServiceError):
    """A queue, quota or disk is full."""


class FailedPreconditionError(ServiceError):
    """The daemon's state forbids it, for instance a session of another model."""


class AbortedError(ServiceError):
    """Somebody else was first: the session is busy, or not where it was expected."""


class InvalidArgumentError(ServiceError):
    """A request that can never succeed; the metadata names field and limit."""


class OutOfRangeError(ServiceError):
    """An offset beyond what exists."""


class NotFoundError(ServiceError):
    """No such session or generation, or its log has expired."""


class AlreadyExistsError(ServiceError):
    """The id is taken by something else."""


class DataLossError(ServiceError):
    """Stored data failed its check; never to be retried blindly."""


class AccessError(ServiceError):
    """No valid token, or not the owner."""


class UnimplementedError(ServiceError):
    """The daemon does not offer this call."""


class CancelledError(ServiceError):
    """The call was cancelled by the daemon."""


class DeadlineError(ServiceError):
    """The call's own time limit passed."""


class InternalError(ServiceError):
    """A fault inside the daemon."""


_BY_CODE: dict[grpc.StatusCode, type[ServiceError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.INTERNAL: InternalError,
}
_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The typed exception for a failed call, with what its details say."""
    info, retry = _details(error)
    kind = _BY_CODE.get(error.code(), ServiceError)
    text = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE and info is None:  # these are gRPC's words, not the daemon's
        text = "the daemon does not answer, or the connection to it broke"
    return kind(
        text,
        code=error.code(),
        reason=info.reason if info else "",
        metadata=info.metadata if info else None,
        retry_after=retry.retry_delay.ToTimedelta().total_seconds() if retry else None,
    )


def from_error_detail(detail: types_pb2.ErrorDetail) -> ServiceError:
    """The typed exception for a generation that ended in an error: the same classes as for a failed call."""
    code = _BY_NUMBER.get(detail.code, grpc.StatusCode.UNKNOWN)
    kind = _BY_CODE.get(code, ServiceError)
    return kind(detail.message or code.name, code=code, reason=detail.reason, metadata=detail.metadata)


def _details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.RetryInfo | None]:
    info: error_details_pb2.ErrorInfo | None = None
    retry: error_details_pb2.RetryInfo | None = None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            details = status_pb2.Status.FromString(value).details
        except DecodeError:
            continue  # the status itself still says what failed
        for detail in details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
    return info, retry
