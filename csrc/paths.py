"""Opening files that others own: which component of a path fails, and who holds a folder's lock.

A daemon that runs as its own user under systemd meets paths that its administrator can read and it cannot. The error of
open() names the whole path; these functions name the first component that stands in the way.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path

LOCK_NAME = "LOCK"
# Where systemd's ProtectHome= puts an empty, closed folder in place of the real one.
_HOMES = ("/home", "/root", "/run/user")


def why_unreachable(path: Path, error: OSError, *, named: Path | None = None, file: bool = False) -> str:
    """Return the reason for which `path` could not be opened, naming the first component that fails.

    The caller's text names `named` (or else `path`) already: where that very path is what fails, it is not said again.
    `file`: path is of a file in a container's folder; one that is gone from among others is no sign of a drive that is
    not mounted.
    """
    absolute = Path(os.path.abspath(path))
    said = absolute if named is None else Path(os.path.abspath(named))
    part, why = _first_failure(absolute, error, file)
    return why if part == said else f"{part}: {why}"


def _first_failure(absolute: Path, error: OSError, file: bool) -> tuple[Path, str]:
    for part in [*reversed(absolute.parents), absolute]:
        try:
            status = part.stat()
        except OSError as found:
            gone = found.errno == errno.ENOENT
            hidden = gone and not (file and part == absolute and not looks_unmounted(part.parent))
            return part, f"{_strerror(found)}{_hint(part, found, hidden)}"
        if part != absolute and not stat.S_ISDIR(status.st_mode):
            return part, "is no folder"
        if part != absolute and not os.access(part, os.X_OK, effective_ids=True):
            owner = f"mode {stat.S_IMODE(status.st_mode):04o}, owner uid {status.st_uid}"
            denied = OSError(errno.EACCES, os.strerror(errno.EACCES))
            return part, f"may not be entered by uid {os.geteuid()} ({owner}){_hint(part, denied, False)}"
    hidden = error.errno == errno.ENOENT and looks_unmounted(absolute)
    return absolute, f"{_strerror(error)}{_hint(absolute, error, hidden)}"


def _strerror(error: OSError) -> str:
    return error.strerror or str(error)


def looks_unmounted(folder: Path) -> bool:
    """Whether a container's folder is missing or empty, as where its drive is not mounted. LOCK counts as nothing."""
    try:
        return not set(os.listdir(folder)) - {LOCK_NAME, "lost+found"}
    except OSError as error:
        return error.errno == errno.ENOENT


def _hint(path: Path, error: OSError, hidden: bool) -> str:
    under_home = any(path.is_relative_to(home) for home in _HOMES)
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT) and under_home and "INVOCATION_ID" in os.environ:
        return "; systemd's ProtectHome= may hide it from this service"
    if hidden:
        return "; is the drive mounted?"
    if error.errno == errno.EROFS and "INVOCATION_ID" in os.environ:
        return "; systemd's ReadWritePaths= may have to name it"
    return ""


class FolderLock:
    """The flock of a container folder's LOCK file, held until close() or the end of the process."""

    def __init__(self, folder: Path, *, exclusive: bool) -> None:
        """Take the lock without waiting.

        Raises BlockingIOError if another process holds it against us, OSError if LOCK cannot be opened. A shared lock
        on a folder that we may not write to needs a LOCK file that is there already, as colibri-pack leaves it.
        """
        path = folder / LOCK_NAME
        flags = os.O_RDWR if exclusive else os.O_RDONLY
        try:
            self._fd = os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            self._fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Let go of the lock; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
