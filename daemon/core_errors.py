"""What an error of the core means to whoever asked for a generation.

Owns the mapping from the core's exceptions to the daemon's; the core's own words (file, drive, offset, layer, expert)
are kept as they are.
"""

from __future__ import annotations

from colibri.core.errors import CancelledError, CorruptError, StorageError
from colibri.daemon.errors import DaemonError, EngineFailedError, ExpertChecksumError, StorageUnavailableError


def is_cancelled(error: Exception) -> bool:
    return isinstance(error, CancelledError)


def daemon_error(error: Exception) -> DaemonError:
    """The error that a generation fails with."""
    if isinstance(error, DaemonError):
        return error
    if isinstance(error, CorruptError):
        return ExpertChecksumError(str(error))
    if isinstance(error, StorageError):
        return StorageUnavailableError(str(error))
    return EngineFailedError(f"{type(error).__name__}: {error}")
