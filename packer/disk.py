"""Every call by which the packer changes a drive: whole writes, fsync, rename, and the space that is left.

One small class, so that tests can put a failing or dying drive in its place. What a drive refuses comes as DriveError,
which names the path and what the system said; a path that cannot be used as it was given is a FolderError. Nothing is
retried but short writes.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colibri.core.paths import why_unreachable
from colibri.packer.errors import FolderError

# One Linux write moves at most 0x7ffff000 bytes and says so only by its result (write(2)); pieces stay far below.
PIECE_BYTES = 64 << 20


# What the system says of a path that is wrong, or not ours to use: no drive has failed, a second try changes nothing.
REFUSALS = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EACCES, errno.EPERM),
    }
)


class DriveError(Exception):
    """The system refused to write, sync, rename or read; the text names the path.

    `facts` are the numbers of the text, in bytes, for programs.
    """

    def __init__(self, text: str, code: int | None = None, facts: dict[str, int] | None = None) -> None:
        super().__init__(text)
        self.errno = code
        self.facts = facts or {}


@contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError of the block into a DriveError that says what was done to which path."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; make room there and run the same command again, it resumes" if full else ""
        raise DriveError(f"{what} {path}: {error.strerror or error}{advice}", error.errno) from error


@contextmanager
def reaching(path: Path, what: str) -> Iterator[None]:
    """Like naming, where the block looks a path up: one that cannot be used is a FolderError naming the component."""
    try:
        with naming(path, what):
            yield
    except DriveError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in REFUSALS:
            raise
        raise FolderError(f"{what} {path}: {why_refused(path, cause)}") from cause


def why_refused(path: Path, error: OSError, *, write: bool = True) -> str:
    """Return why `path`, which the caller names, could not be used (`write`: also written), naming the component that
    is in the way and, where permission is missing, whose and which. A file that is not there could not be made: then it
    is its folder."""
    standing = path if os.path.lexists(path) else path.parent
    why = why_unreachable(standing, error, named=path)
    if error.errno not in (errno.EACCES, errno.EPERM):
        return why
    with suppress(OSError):  # behind a folder that may not be entered, which `why` names
        status = standing.stat()
        needs = ("list and enter", "enter and write") if standing.is_dir() else ("read", "read and write")
        mode = stat.S_IMODE(status.st_mode)
        return f"{why}; uid {os.geteuid()} needs to {needs[write]} it (mode {mode:04o}, owner uid {status.st_uid})"
    return why


def require_readable(path: Path) -> None:
    """Raises FolderError where `path` is there and may not be read by us: it must not be taken for damaged."""
    if path.exists() and not os.access(path, os.R_OK, effective_ids=True):
        denied = OSError(errno.EACCES, os.strerror(errno.EACCES))
        raise FolderError(f"opening {path}: {why_refused(path, denied)}")


def refusal_text(error: OSError) -> str:
    """Return an OSError of reading that nobody gave words to as one line: the path first, and no errno."""
    why = error.strerror or str(error)
    if not isinstance(error.filename, str | bytes):
        return why
    path = Path(os.fsdecode(error.filename))
    return f"{path}: {why_refused(path, error, write=False) if error.errno in REFUSALS else why}"


class OutputFile:
    """A file being written, at any offset. Made by Disk.open_output."""

    def __init__(self, disk: "Disk", path: Path, fd: int) -> None:
        self.path = path
        self._disk = disk
        self._fd = fd

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at `offset`. Raises DriveError."""
        view = memoryview(data).cast("B")
        with naming(self.path, "writing"):
            while view.nbytes:
                written = self._disk.pwrite(self._fd, view[: self._disk.piece_bytes], offset)
                view, offset = view[written:], offset + written

    def read(self, offset: int, count: int) -> bytes:
        """Read back `count` bytes, fewer only at the end of the file. Raises DriveError."""
        pieces = []
        with naming(self.path, "reading"):
            while count:
                piece = os.pread(self._fd, min(count, self._disk.piece_bytes), offset)
                if not piece:
                    break
                pieces.append(piece)
                offset, count = offset + len(piece), count - len(piece)
        return b"".join(pieces)

    def fileno(self) -> int:
        """Return the descriptor, for what must not go by name."""
        return self._fd

    def size(self) -> int:
        """Return the file's length."""
        return os.fstat(self._fd).st_size

    def cut(self, size: int) -> None:
        """Set the file's length. Raises DriveError."""
        with naming(self.path, "resizing"):
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Return when everything written is on the drive; then let the page cache go. Raises DriveError."""
        with naming(self.path, "syncing"):
            self._disk.fsync(self._fd)
        # The pages will not be read again soon and would push out what the machine's other programs use.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing. Raises DriveError, for a quota may speak up only now."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with naming(self.path, "closing"):
                self._disk.close(fd)


class Disk:
    """The real one. Tests override the calls below to fail or to kill the process at the n-th."""

    piece_bytes = PIECE_BYTES

    def open_output(self, path: Path) -> OutputFile:
        """Open a file for reading and writing, made if it is not there. Raises DriveError, FolderError."""
        with reaching(path, "opening"):
            return OutputFile(self, path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """pwrite(2): may write less."""
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        """fsync(2)."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """close(2)."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its final name. Raises DriveError."""
        with naming(target, "renaming to"):
            source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file. Raises DriveError."""
        with naming(path, "removing"):
            path.unlink()

    def sync_folder(self, folder: Path) -> None:
        """Make renames in `folder` last. Raises DriveError."""
        with naming(folder, "syncing"):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self.fsync(fd)
            finally:
                os.close(fd)

    def free_bytes(self, folder: Path) -> int:
        """Return the room that is left for this user on the folder's file system. Raises DriveError."""
        with naming(folder, "asking for the free space of"):
            status = os.statvfs(folder)
            return status.f_bavail * status.f_frsize
