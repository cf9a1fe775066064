"""`colibri-pack verify`: reads every byte of a container and names everything that is wrong with it.

Covers what opening a container does not: the CRC-32C and SHA-256 of each dense tensor and each expert record. Goes on
after a fault. Takes the shared lock, so it may run beside a daemon.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from colibri.core.container import DENSE_NAME
from colibri.core.container_folders import ContainerFolders
from colibri.core.container_survey import Survey
from colibri.core.striping import ExtentTable, layer_areas, layer_extents
from colibri.core.tensors import crc32c
from colibri.packer.encode import worker_count
from colibri.packer.progress import Reporter
from colibri.v1 import manifest_pb2

READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Verdict:
    """What verify found; the container is in order if `faults` is empty."""

    manifest: manifest_pb2.Manifest
    faults: list[str]
    checked_bytes: int


def verify(primary: Path, stripes: Sequence[Path], reporter: Reporter) -> Verdict:
    """Check everything. Raises ContainerError only where there is no manifest to check against, or a lock is held."""
    with ContainerFolders(primary, stripes) as folders:
        survey = Survey(folders.paths, folders.manifest)
        # Whoever verifies wants to know of a lost second copy too.
        faults = [*survey.faults, *folders.warnings, *survey.warnings]
        checked = 0
        for count, found in _all_checks(survey):
            reporter.advance(count)
            checked += count
            faults += found
        return Verdict(folders.manifest, faults, checked)


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


def _all_checks(survey: Survey) -> Iterator[tuple[int, list[str]]]:
    yield from _check_dense(survey)
    if survey.record_digests is None or survey.extent_crcs is None:
        return
    paths = [survey.stripe_paths, survey.mirror_paths]
    with ExitStack() as stack, ThreadPoolExecutor(worker_count()) as pool:
        copies = [_Copies(group, stack.enter_context(_opened(group))) for group in paths]
        record = extent = 0
        for layer in survey.manifest.expert_layers:
            jobs = []
            for expert, row in enumerate(layer_extents(layer)):
                crcs = memoryview(survey.extent_crcs)[4 * extent : 4 * (extent + len(row))].cast("I").tolist()
                digest = survey.record_digests[32 * record : 32 * (record + 1)]
                jobs.append((copies, f"layer {layer.layer}, expert {expert}", row, crcs, digest))
                record, extent = record + 1, extent + len(row)
            yield from pool.map(lambda job: _check_record(*job), jobs)


@dataclass(frozen=True)
class _Copies:
    """The files of one copy of each stripe, by number: paths, and descriptors where there is a file, else -1."""

    paths: Sequence[Path | None]
    fds: Sequence[int]


@contextmanager
def _opened(paths: Sequence[Path | None]) -> Iterator[list[int]]:
    with ExitStack() as stack:
        fds = []
        for path in paths:
            fds.append(-1 if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            if path is not None:
                stack.callback(os.close, fds[-1])
                os.posix_fadvise(fds[-1], 0, 0, os.POSIX_FADV_DONTNEED)  # the drive is meant, not a copy in memory
        yield fds


def _pieces(fd: int, offset: int, count: int) -> Iterator[bytes]:
    """The bytes [offset, offset + count) in pieces. Raises OSError, EOFError at the end of the file."""
    while count:
        piece = os.pread(fd, min(READ_BYTES, count), offset)
        if not piece:
            raise EOFError(f"the file ends at offset {offset}")
        yield piece
        offset, count = offset + len(piece), count - len(piece)


def _check_dense(survey: Survey) -> Iterator[tuple[int, list[str]]]:
    path = survey.primary / DENSE_NAME
    with ExitStack() as stack:
        try:
            (fd,) = stack.enter_context(_opened([path]))
        except OSError:
            return  # the survey has said why
        for tensor in survey.manifest.dense:
            size = tensor.codes.bytes + tensor.scales.bytes + tensor.mins.bytes
            yield size, _check_tensor(path, fd, tensor)


def _check_tensor(path: Path, fd: int, tensor: manifest_pb2.DenseTensor) -> list[str]:
    digest = hashlib.sha256()
    found = []
    for name, blob in (("codes", tensor.codes), ("scales", tensor.scales), ("mins", tensor.mins)):
        where = f"{path}: tensor {tensor.name}, {name}, {blob.bytes} bytes at offset {blob.offset}"
        crc = 0
        try:
            for piece in _pieces(fd, blob.offset, blob.bytes):
                crc = crc32c(piece, crc)
                digest.update(piece)
        except (OSError, EOFError) as error:
            found.append(f"{where}: cannot be read: {error}")
            continue
        if crc != blob.crc32c:
            found.append(f"{where}: CRC-32C is {crc:08x}, the manifest says {blob.crc32c:08x}")
    if not found and digest.hexdigest() != tensor.sha256:
        found.append(f"{path}: tensor {tensor.name}: SHA-256 differs from the manifest's {tensor.sha256}")
    return found


def _check_record(
    copies: list[_Copies], what: str, row: ExtentTable, crcs: list[int], wanted: bytes
) -> tuple[int, list[str]]:
    """Check each copy of a record; the second one, the mirrors, extent by extent. Return the bytes read, and faults."""
    digest = hashlib.sha256()
    found: list[str] = []
    read = whole = 0
    for mirror, copy in enumerate(copies):
        for extent, crc in zip(row, crcs, strict=True):
            stripe, size = int(extent["stripe"]), int(extent["bytes"])
            if copy.fds[stripe] < 0:
                continue  # the survey has named the stripe, or it has no mirror
            read += size
            fault = _check_extent(copy, what, extent, crc, None if mirror else digest)
            found += fault
            whole += 0 if mirror or fault else 1
    if whole == len(row) and digest.digest() != wanted:
        found.append(f"{what}: SHA-256 of the record differs from records.sha256")
    return read, found


def _check_extent(copy: _Copies, what: str, extent: ExtentTable, crc: int, digest: "hashlib._Hash | None") -> list[str]:
    stripe, offset, size = int(extent["stripe"]), int(extent["file_offset"]), int(extent["bytes"])
    where = f"{copy.paths[stripe]}: {what}: {size} bytes at offset {offset}"
    seen = 0
    try:
        for piece in _pieces(copy.fds[stripe], offset, size):
            seen = crc32c(piece, seen)
            if digest is not None:
                digest.update(piece)
    except (OSError, EOFError) as error:
        return [f"{where}: cannot be read: {error}"]
    return [] if seen == crc else [f"{where}: CRC-32C is {seen:08x}, extents.crc32c says {crc:08x}"]
