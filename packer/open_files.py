"""Files that are read at given offsets: a bounded number of descriptors, whole reads or an error.

Owns every read of a checkpoint's tensor bytes. Uses pread, never mmap: a mapped file that shrinks kills the process, a
read that comes back short is an error with a name. Refuses anything that is not a regular file and a file that changed
after it was first seen. Sits below safetensors_file and checkpoint.
"""

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.packer.errors import CheckpointError, CorruptCheckpointError

# Linux moves at most 2,147,479,552 bytes in one read (read(2)); pieces stay far below: signals are answered soon.
DEFAULT_PIECE_BYTES = 16 << 20
DEFAULT_MAX_OPEN_FILES = 32

Identity = tuple[int, int, int, int]


class _Entry:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0


class OpenFiles:
    """Reads from many files with few descriptors; the least recently used one is closed. Safe to use from threads."""

    def __init__(self, *, piece_bytes: int = DEFAULT_PIECE_BYTES, max_open_files: int = DEFAULT_MAX_OPEN_FILES) -> None:
        if piece_bytes < 1 or max_open_files < 1:
            raise ValueError(f"piece_bytes {piece_bytes} and max_open_files {max_open_files} must be at least 1")
        self._piece_bytes = piece_bytes
        self._max_open_files = max_open_files
        self._entries: OrderedDict[Path, _Entry] = OrderedDict()
        self._identities: dict[Path, Identity] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor. No read may be running; later reads raise ValueError."""
        with self._lock:
            self._closed = True
            for entry in self._entries.values():
                os.close(entry.descriptor)
            self._entries.clear()

    def size(self, path: Path) -> int:
        """Return the length of `path` in bytes, as it was when first opened."""
        with self._use(path):
            return self._identities[path][2]

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes, writable, contiguous) from `offset` of `path`.

        Raises CorruptCheckpointError if the file ends before the buffer is full, CheckpointError if the system refuses.
        """
        wanted = buffer.nbytes
        done = 0
        with self._use(path) as descriptor:
            while done < wanted:
                piece = buffer[done : done + self._piece_bytes]
                try:
                    got = os.preadv(descriptor, [piece], offset + done)  # retries EINTR itself (PEP 475)
                except OSError as error:
                    raise CheckpointError(f"{path}: reading at offset {offset + done}: {error.strerror}") from error
                if got == 0:
                    raise CorruptCheckpointError(
                        f"{path}: the file ends early: wanted {wanted} bytes at offset {offset}, got {done}"
                    )
                done += got

    @contextmanager
    def _use(self, path: Path) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{path}: read after close")
            entry = self._entries.get(path)
            if entry is None:
                self._evict()
                entry = self._entries[path] = _Entry(self._open(path))
            self._entries.move_to_end(path)
            entry.users += 1
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1

    def _evict(self) -> None:
        idle = [path for path, entry in self._entries.items() if entry.users == 0]
        for path in idle[: max(0, len(self._entries) + 1 - self._max_open_files)]:
            os.close(self._entries.pop(path).descriptor)

    def _open(self, path: Path) -> int:
        try:
            # O_NONBLOCK: opening a named pipe must not wait for a writer. It changes nothing for a regular file.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{path}: {describe_open_failure(path, error)}") from error
        try:
            self._check(path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self, path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._identities.setdefault(path, identity) != identity:
            raise CorruptCheckpointError(f"{path}: the file changed while it was being packed")


def describe_open_failure(path: Path, error: OSError) -> str:
    """Return why `path` could not be opened; a link that leads nowhere is named together with its target."""
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"the link leads to {os.readlink(path)!r}, which does not exist"
    return error.strerror or str(error)
