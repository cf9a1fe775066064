"""What an error of the core means to whoever asked for a generation.

Owns the mapping from the core's exceptions to the daemon's, and the reading of the places that the core's texts name;
the core's own words (file, drive, offset, layer, expert) are kept as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from colibri.core.errors import CancelledError, CorruptError, StorageError
from colibri.daemon.errors import (
    DaemonError,
    EngineFailedError,
    ExpertChecksumError,
    ExpertUnreadableError,
    StorageUnavailableError,
)

_EXPERT = re.compile(r"layer (\d+) expert (\d+)\b")
# The name at the end is the container's own, so a path with brackets or colons in it is still read to its end.
_FILE = re.compile(r"stripe (\d+) \((.*?(?:stripe|mirror)-\d{3}\.colibri)\)")
_ENDS_EARLY = re.compile(r"(?:stripe|mirror)-\d{3}\.colibri\) ends at offset \d+, inside an extent")
_OFFSET = re.compile(r"\bat offset (\d+)")
_ERRNO = re.compile(r"\(errno (\d+)\)")


@dataclass(frozen=True)
class FaultPlace:
    """Where a read of an expert failed. None where the text does not say; `errno` is None for a failed checksum."""

    layer: int | None = None
    expert: int | None = None
    stripe: int | None = None
    file: str | None = None
    offset: int | None = None
    errno: int | None = None

    @property
    def drive(self) -> str | None:
        """The folder of the stripe: one per drive."""
        return None if self.file is None else str(Path(self.file).parent)

    def metadata(self) -> dict[str, object]:
        """What is known, by name, for an error's metadata."""
        names = ("layer", "expert", "stripe", "drive", "file", "offset", "errno")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def fault_place(text: str) -> FaultPlace:
    """The places that a text of the core names; the first of each kind."""
    file = _FILE.search(text)
    rest = text.replace(file[0], "") if file else text  # a path may hold words that look like an offset
    expert, offset, errno = _EXPERT.match(text), _OFFSET.search(rest), _ERRNO.search(rest)
    return FaultPlace(
        layer=int(expert[1]) if expert else None,
        expert=int(expert[2]) if expert else None,
        stripe=int(file[1]) if file else None,
        file=file[2] if file else None,
        offset=int(offset[1]) if offset else None,
        errno=int(errno[1]) if errno else None,
    )


def is_cancelled(error: Exception) -> bool:
    return isinstance(error, CancelledError)


def daemon_error(error: Exception) -> DaemonError:
    """The error that a generation fails with. An expert that is damaged or cannot be read is DATA_LOSS with its place
    as metadata; a drive's error that concerns no expert may be over at another try."""
    if isinstance(error, DaemonError):
        return error
    text = str(error)
    place = fault_place(text)
    if isinstance(error, CorruptError) and place.expert is not None and _ENDS_EARLY.search(text):
        return ExpertUnreadableError(text, **place.metadata())
    if isinstance(error, CorruptError):
        return ExpertChecksumError(text, **place.metadata())
    if isinstance(error, StorageError) and place.expert is not None:
        return ExpertUnreadableError(text, **place.metadata())
    if isinstance(error, StorageError):
        return StorageUnavailableError(text)
    return EngineFailedError(f"{type(error).__name__}: {error}")
