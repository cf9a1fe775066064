"""Reads a file from its drive, past the page cache: what a scrub and a repair must see is the drive, not a copy of it.

Owns descriptor and buffer of one file. Offsets and sizes are multiples of 4096, as all extents are. Where the file
system refuses O_DIRECT the pages are dropped before each read instead (`direct` says which). Not for several threads.
"""

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.core.tensors import crc32c

BUFFER_BYTES = 4 << 20
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectFile:
    """A file opened for reading; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.direct = True
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._open_buffered()
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)  # page-aligned, as O_DIRECT wants it

    def _open_buffered(self) -> None:
        self.close()
        self.direct = False
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def pieces(self, offset: int, count: int) -> Iterator[memoryview]:
        """Give the bytes [offset, offset + count) in pieces, each valid until the next one.

        Raises OSError, and EOFError where the file ends before.
        """
        view = memoryview(self._buffer)
        try:
            while count:
                got = self._read_into(view[: min(count, BUFFER_BYTES)], offset)
                # A direct read may only go on at a whole block: the rest of one that was cut is read again.
                if got != min(count, BUFFER_BYTES):
                    got -= got % mmap.PAGESIZE
                if not got:
                    raise EOFError(f"the file ends before offset {offset + min(count, mmap.PAGESIZE)}")
                piece = view[:got]
                yield piece
                piece.release()
                offset, count = offset + got, count - got
        finally:
            view.release()

    def _read_into(self, view: memoryview, offset: int) -> int:
        with view:
            if not self.direct:
                os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)
            try:
                return os.preadv(self._fd, [view], offset)
            except OSError as error:
                if not self.direct or error.errno not in _REFUSED:
                    raise
            self._open_buffered()
            return os.preadv(self._fd, [view], offset)

    def read(self, offset: int, count: int) -> bytes:
        """Return the bytes [offset, offset + count). Raises OSError, EOFError."""
        return b"".join(bytes(piece) for piece in self.pieces(offset, count))

    def crc32c(self, offset: int, count: int) -> int:
        """Return the CRC-32C of the bytes [offset, offset + count). Raises OSError, EOFError."""
        crc = 0
        for piece in self.pieces(offset, count):
            crc = crc32c(piece, crc)
        return crc

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
