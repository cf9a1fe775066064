"""colibri: the Python client library and command line. Speaks the protocol of colibri.v1, depends on nothing else here.

async with Client() as client:
    session = await client.sessions.create()
    async for event in client.chat("What is the capital of France?", session=session.name):
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
"""

from colibri.client.client import Client, Sessions, session_name
from colibri.client.errors import (
    AbortedError,
    AccessError,
    AddressError,
    AlreadyExistsError,
    CancelledError,
    ColibriError,
    DataLossError,
    DeadlineError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OffsetGapError,
    OutOfRangeError,
    ProtocolError,
    ResourceExhaustedError,
    ServerLostError,
    ServiceError,
    UnavailableError,
    UnimplementedError,
)
from colibri.client.events import Delta, Event, Finished, Progress, PromptTokens, Started, Statistics
from colibri.client.options import Sampling, Stop, message
from colibri.client.stream import GenerationStream

__all__ = [
    "AbortedError",
    "AccessError",
    "AddressError",
    "AlreadyExistsError",
    "CancelledError",
    "Client",
    "ColibriError",
    "DataLossError",
    "DeadlineError",
    "Delta",
    "Event",
    "FailedPreconditionError",
    "Finished",
    "GenerationStream",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OffsetGapError",
    "OutOfRangeError",
    "Progress",
    "PromptTokens",
    "ProtocolError",
    "ResourceExhaustedError",
    "Sampling",
    "ServerLostError",
    "ServiceError",
    "Sessions",
    "Started",
    "Statistics",
    "Stop",
    "UnavailableError",
    "UnimplementedError",
    "message",
    "session_name",
]
