"""The address that the daemon listens on, held against a second daemon.

A grpcio server that binds a Unix socket in use steals the path without a word, and deletes the thief's or the owner's
socket when either stops. So the path is locked first: an flock on PATH.lock, held until the process ends. What lies at
the path is only replaced if it is a socket. For TCP the kernel refuses a second owner (SO_REUSEPORT is off).
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from colibri.daemon.config import Address


class EndpointError(Exception):
    """The address cannot be used. `busy`: another daemon has it, so that a later try may succeed."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class Endpoint:
    """An address that this process alone may bind; give it back with `release`. Raises EndpointError."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = -1
        if address.path is not None:
            self._lock = _take_lock(address.path)
            try:
                _clear(address.path)
            except EndpointError:
                self.release()
                raise

    def release(self) -> None:
        """Removes the socket file if it is still there and gives the lock back; a second call does nothing."""
        if self._lock < 0 or self.address.path is None:
            return
        try:
            if stat.S_ISSOCK(self.address.path.lstat().st_mode):
                self.address.path.unlink()
        except FileNotFoundError:
            pass  # grpcio removes it when its server stops
        finally:
            os.close(self._lock)
            self._lock = -1


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _take_lock(path: Path) -> int:
    lock = lock_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EndpointError(f"socket {path}: {error.filename or lock}: {error.strerror or error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise EndpointError(f"socket {path} is in use by another daemon (process {holder})", busy=True) from None
        raise EndpointError(f"{lock}: {error.strerror or error}") from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _clear(path: Path) -> None:
    """Removes the socket that a killed daemon left; refuses to touch anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise EndpointError(f"{path} exists and is not a socket; the daemon will not replace it")
    path.unlink()
