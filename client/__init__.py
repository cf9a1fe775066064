"""colibri: the Python client library and command line. Speaks the protocol of colibri.v1, depends on nothing else here.
The library is loaded when a name of it is first used: the command line can then catch Ctrl-C while that lasts.

async with Client() as client:
    session = await client.sessions.create()
    async for event in client.chat("What is the capital of France?", session=session.name):
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        NobodyThereError,
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
    "NobodyThereError",
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

_MODULES = ("client", "errors", "events", "options", "stream")

if not TYPE_CHECKING:  # a type checker reads the imports above, and must not take every name for known

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in map(import_module, (f"{__name__}.{module}" for module in _MODULES)):
                if hasattr(module, name):
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
