"""Drives that die: at the n-th change a kill, a power cut, or an error of the system. Used in place of
packer.disk.Disk.

Every change of a drive (a write, a sync, a close, a rename, a removal, a new file) counts as one operation, from 0.
"""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from colibri.packer.disk import Disk, OutputFile


class CountingDisk(Disk):
    """Counts operations, and tells subclasses before each."""

    def __init__(self) -> None:
        self.operations = 0

    def before(self, name: str) -> None:
        """Called before operation number `operations`."""

    def _count(self, name: str) -> None:
        self.before(name)
        self.operations += 1

    def open_output(self, path: Path) -> OutputFile:
        self._count("open")
        return super().open_output(path)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count("write")
        return super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:  # noqa: ARG002
        # Not passed on: neither a kill nor a simulated power cut depends on the real drive, and it is slow.
        self._count("fsync")

    def close(self, fd: int) -> None:
        self._count("close")
        super().close(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count("remove")
        super().remove(path)


class KillingDisk(CountingDisk):
    """kill -9 before operation `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def before(self, name: str) -> None:  # noqa: ARG002
        if self.operations == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


class FailingDisk(CountingDisk):
    """The `at`-th operation called `name` fails with `code`, and all operations of that name after it."""

    def __init__(self, name: str, at: int, code: int) -> None:
        super().__init__()
        self._name, self._at, self._code = name, at, code
        self.hit = False

    def before(self, name: str) -> None:
        if name != self._name:
            return
        if self._at == 0:
            self.hit = True
            raise OSError(self._code, os.strerror(self._code))
        self._at -= 1

    def close(self, fd: int) -> None:
        try:
            super().close(fd)
        except OSError:
            os.close(fd)  # as Linux does, whatever close returns
            raise


class PowerCut(BaseException):
    """The moment after which nothing runs any more."""


class PowerCutDisk(CountingDisk):
    """Loses, before operation `at`, all that was not synced: written bytes, new files, and renames.

    A file's bytes last when the file was synced, a new name when its folder was.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self._undo: list[tuple[tuple[int, int], Callable[[], None]]] = []

    def before(self, name: str) -> None:  # noqa: ARG002
        if self.operations == self._at:
            for _, undo in reversed(self._undo):
                undo()
            self._undo = []
            raise PowerCut

    def open_output(self, path: Path) -> OutputFile:
        new = not path.exists()
        file = super().open_output(path)
        if new:
            self._undo.append((_identity(path.parent), path.unlink))
        return file

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        size, old = os.fstat(fd).st_size, os.pread(fd, len(data), offset)
        copy = os.dup(fd)

        def undo() -> None:
            os.pwrite(copy, old, offset)
            os.ftruncate(copy, size)
            os.close(copy)

        written = super().pwrite(fd, data, offset)
        self._undo.append((_identity(fd), undo))
        return written

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        synced = _identity(fd)
        self._undo = [(what, undo) for what, undo in self._undo if what != synced]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)

        def undo() -> None:
            target.rename(source)

        self._undo.append((_identity(target.parent), undo))


def _identity(what: int | Path) -> tuple[int, int]:
    status = os.fstat(what) if isinstance(what, int) else what.stat()
    return status.st_dev, status.st_ino


class RoomyDisk(Disk):
    """Claims endless space, so that the real limit is met while writing."""

    def free_bytes(self, folder: Path) -> int:  # noqa: ARG002
        return 1 << 60


FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
