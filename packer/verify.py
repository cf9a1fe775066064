"""`colibri-pack verify`: reads every byte of a container and names everything that is wrong with it.

Covers what opening a container does not: the CRC-32C and SHA-256 of each dense tensor and each expert record. Goes on
after a fault, be it a stripe folder that cannot be reached or a lost table: only without a manifest there is nothing to
go by. Takes the shared lock, so it may run beside a daemon.
"""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.core.container import DENSE_NAME
from colibri.core.container_folders import ContainerFolders
from colibri.core.striping import layer_areas
from colibri.core.tensors import crc32c
from colibri.packer.check_records import Checked, State, check_record, layer_records, tally
from colibri.packer.encode import worker_count
from colibri.packer.progress import Reporter
from colibri.packer.remains import Remains
from colibri.v1 import manifest_pb2

READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Verdict:
    """What verify found; the container is in order if `faults` is empty.

    `experts` and `tensors` count the experts and the dense tensors of each state.
    """

    manifest: manifest_pb2.Manifest
    faults: list[str]
    checked_bytes: int
    experts: dict[State, int] = field(default_factory=lambda: tally(()))
    tensors: dict[State, int] = field(default_factory=lambda: tally(()))


def verify(primary: Path, stripes: Sequence[Path], reporter: Reporter) -> Verdict:
    """Check everything. Raises ContainerError only where there is no manifest to check against, or a lock is held."""
    with ContainerFolders(primary, stripes, partial=True) as folders:
        remains = Remains(folders)
        # Whoever verifies wants to know of a lost second copy too.
        faults = [*remains.faults, *remains.warnings]
        checked, states = 0, list[list[State]]()
        for part in (_dense_checks(remains), _record_checks(remains)):
            states.append([])
            for found in part:
                reporter.advance(found.bytes)
                checked += found.bytes
                faults += found.faults
                states[-1].append(found.state)
        return Verdict(folders.manifest, faults, checked, experts=tally(states[1]), tensors=tally(states[0]))


def total_bytes(manifest: manifest_pb2.Manifest) -> int:
    """Return how many bytes verify will read."""
    dense = sum(tensor.codes.bytes + tensor.scales.bytes + tensor.mins.bytes for tensor in manifest.dense)
    return dense + stripes_bytes(manifest)


def stripes_bytes(manifest: manifest_pb2.Manifest) -> int:
    """Return how many bytes of extents all stripes and mirrors hold."""
    total = 0
    for layer in manifest.expert_layers:
        for area in layer_areas(layer):
            copies = 2 if manifest.layout.stripes[area.stripe].mirrored else 1
            total += copies * (area.end - area.begin)
    return total


def _record_checks(remains: Remains) -> Iterator[Checked]:
    with _Files() as files, ThreadPoolExecutor(worker_count()) as pool:
        for records in layer_records(remains):
            yield from pool.map(lambda record: check_record(record, remains.copies, files.pieces), records)


class _Files:
    """Files opened for reading at their first use, for several threads; a context manager."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()

    def pieces(self, path: Path, offset: int, count: int) -> Iterator[bytes]:
        """Give the bytes [offset, offset + count) in pieces. Raises OSError, EOFError at the end of the file."""
        fd = self._fd(path)
        while count:
            piece = os.pread(fd, min(READ_BYTES, count), offset)
            if not piece:
                raise EOFError(f"the file ends at offset {offset}")
            yield piece
            offset, count = offset + len(piece), count - len(piece)

    def _fd(self, path: Path) -> int:
        with self._lock:
            if path not in self._fds:
                self._fds[path] = fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the drive is meant, not a copy in memory
            return self._fds[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)


def _dense_checks(remains: Remains) -> Iterator[Checked]:
    path = remains.primary / DENSE_NAME
    readable = _is_readable(path)
    with _Files() as files:
        for tensor in remains.manifest.dense:
            if readable:
                yield _check_tensor(path, files, tensor)
            else:
                yield Checked(0, [], State.LOST)


def _is_readable(path: Path) -> bool:
    """Whether there is such a file, and it can be opened; where it cannot, the survey has said why."""
    return os.access(path, os.R_OK) and path.is_file()


def _check_tensor(path: Path, files: _Files, tensor: manifest_pb2.DenseTensor) -> Checked:
    digest = hashlib.sha256()
    found = []
    for name, blob in (("codes", tensor.codes), ("scales", tensor.scales), ("mins", tensor.mins)):
        where = f"{path}: tensor {tensor.name}, {name}, {blob.bytes} bytes at offset {blob.offset}"
        crc = 0
        try:
            for piece in files.pieces(path, blob.offset, blob.bytes):
                crc = crc32c(piece, crc)
                digest.update(piece)
        except (OSError, EOFError) as error:
            found.append(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}")
            continue
        if crc != blob.crc32c:
            found.append(f"{where}: CRC-32C is {crc:08x}, the manifest says {blob.crc32c:08x}")
    if not found and digest.hexdigest() != tensor.sha256:
        found.append(f"{path}: tensor {tensor.name}: SHA-256 differs from the manifest's {tensor.sha256}")
    size = tensor.codes.bytes + tensor.scales.bytes + tensor.mins.bytes
    return Checked(size, found, State.DAMAGED if found else State.INTACT)
