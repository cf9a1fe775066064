"""The files of the primary folder that are not stripes: dense weights and bundled files, set right where it is proved.

A dense tensor comes from the checkpoint and is compared with its SHA-256 in the manifest; the header of
dense.safetensors follows from the manifest; a bundled file is the checkpoint's if its SHA-256 is the same. What cannot
be proved is left as it is and named.
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from colibri.core.container import DENSE_NAME, ContainerError
from colibri.core.container_files import opened, read_exact, read_safetensors_header
from colibri.core.tensors import crc32c
from colibri.packer.disk import Disk, DriveError, OutputFile
from colibri.packer.encode import EncodedPiece
from colibri.packer.errors import CheckpointError
from colibri.packer.making import write_whole
from colibri.packer.outputs import PARTIAL, dense_header
from colibri.packer.progress import Reporter
from colibri.packer.rebuild import Rebuilder
from colibri.packer.repair_stripes import Repairs
from colibri.v1 import manifest_pb2

_READ_BYTES = 4 << 20


def repair_bundled(
    primary: Path, manifest: manifest_pb2.Manifest, rebuilder: Rebuilder | None, repairs: Repairs, disk: Disk
) -> None:
    """Put back bundled files that are missing or changed. Raises DriveError, CheckpointError."""
    for file in manifest.files:
        path = primary / file.name
        try:
            with opened(path) as (fd, size):
                found = read_exact(fd, 0, size)
        except (ContainerError, OSError):
            found = b""
        if len(found) == file.bytes and hashlib.sha256(found).hexdigest() == file.sha256:
            continue
        content = None if rebuilder is None else rebuilder.bundled(file)
        if content is None:
            repairs.remains.append(f"{path} is missing or was changed: {_no_source(rebuilder, 'file')}")
            continue
        write_whole(disk, path.with_name(path.name + PARTIAL), content)
        disk.rename(path.with_name(path.name + PARTIAL), path)
        disk.sync_folder(primary)
        repairs.fixed.append(f"{path}: was missing or changed, put back from the checkpoint")


def _no_source(rebuilder: Rebuilder | None, what: str) -> str:
    return f"the checkpoint has no such {what}" if rebuilder else "no checkpoint is given (--source)"


class DenseRepair:
    """dense.safetensors of one container."""

    def __init__(
        self, primary: Path, manifest: manifest_pb2.Manifest, rebuilder: Rebuilder | None, repairs: Repairs, disk: Disk
    ) -> None:
        self._path, self._manifest = primary / DENSE_NAME, manifest
        self._rebuilder, self._repairs, self._disk = rebuilder, repairs, disk
        blobs = [blob for tensor in manifest.dense for blob in _blobs(tensor) if blob.bytes]
        self._header_bytes = min(blob.offset for blob in blobs)
        self._bytes = max(blob.offset + blob.bytes for blob in blobs)

    def run(self, reporter: Reporter) -> None:
        """Check header and tensors, and set right what can be. Raises ContainerError for a file of another container,
        DriveError, CheckpointError."""
        lost = not self._path.exists()
        if not lost:
            self._refuse_foreign()
        work = self._path.with_name(DENSE_NAME + PARTIAL) if lost else self._path
        if lost and self._rebuilder is None:
            self._repairs.remains.append(f"{self._path} is missing: no checkpoint is given (--source)")
            return
        left = len(self._repairs.remains)
        file = self._disk.open_output(work)
        try:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the drive is meant, not a copy in memory
            self._set_header(file, lost)
            for index in range(len(self._manifest.dense)):
                self._set_tensor(file, index, lost)
                size = sum(blob.bytes for blob in _blobs(self._manifest.dense[index]))
                self._repairs.checked_bytes += size
                reporter.advance(size)
        finally:
            file.close()
        if lost and len(self._repairs.remains) == left:
            self._disk.rename(work, self._path)
            self._disk.sync_folder(self._path.parent)
            self._repairs.fixed.append(f"{self._path}: was missing, made anew from the checkpoint")

    def _refuse_foreign(self) -> None:
        """A header that can be read and names another container is no damage."""
        try:
            with opened(self._path) as (fd, size):
                _, metadata = read_safetensors_header(fd, size)
        except (ContainerError, OSError):
            return
        uuid = metadata.get("colibri_uuid", "")
        if uuid != self._manifest.layout.uuid:
            raise ContainerError(f"{self._path} belongs to container {uuid[:80]}, not to {self._manifest.layout.uuid}")

    def _set_header(self, file: OutputFile, lost: bool) -> None:
        header = dense_header(self._manifest, UUID(self._manifest.layout.uuid), self._header_bytes)
        size = file.size()
        if size == self._bytes and _read(file, 0, self._header_bytes) == header:
            return
        file.cut(self._bytes)
        file.write(0, header)
        file.sync()
        if not lost:
            self._repairs.fixed.append(f"{self._path}: its header or size ({size} bytes) was damaged, set right")

    def _set_tensor(self, file: OutputFile, index: int, lost: bool) -> None:
        tensor = self._manifest.dense[index]
        if self._is_intact(file, tensor):
            return
        try:
            pieces = None if self._rebuilder is None else self._rebuilder.tensor(index)
            why = _no_source(self._rebuilder, "tensor with its SHA-256")
        except CheckpointError as error:  # one tensor of the source; the others may be whole
            pieces, why = None, f"the checkpoint does not give it: {error}"
        if pieces is None:
            self._repairs.remains.append(f"{self._path}: tensor {tensor.name} is damaged: {why}")
            return
        try:
            _write(file, tensor, pieces)
        except DriveError as error:
            if error.errno != errno.EIO:
                raise
            self._repairs.remains.append(f"{self._path}: tensor {tensor.name} is damaged: {error}")
            return
        if not self._is_intact(file, tensor):
            self._repairs.remains.append(
                f"{self._path}: tensor {tensor.name}: written, and the drive gives back something else: is it failing?"
            )
        elif not lost:
            self._repairs.fixed.append(f"{self._path}: tensor {tensor.name} was damaged, rebuilt from the checkpoint")

    def _is_intact(self, file: OutputFile, tensor: manifest_pb2.DenseTensor) -> bool:
        """Whether the tensor has its CRC-32Cs and its SHA-256. Blobs are not aligned, so this is no direct read."""
        digest = hashlib.sha256()
        for blob in _blobs(tensor):
            crc = 0
            for begin in range(0, blob.bytes, _READ_BYTES):
                piece = _read(file, blob.offset + begin, min(_READ_BYTES, blob.bytes - begin))
                if piece is None:
                    return False
                crc = crc32c(piece, crc)
                digest.update(piece)
            if crc != blob.crc32c:
                return False
        return digest.hexdigest() == tensor.sha256


def _read(file: OutputFile, offset: int, count: int) -> bytes | None:
    """What stands there, None where the drive cannot read it: writing may make a sector good. Raises DriveError."""
    try:
        return file.read(offset, count)
    except DriveError as error:
        if error.errno != errno.EIO:
            raise
        return None


def _write(file: OutputFile, tensor: manifest_pb2.DenseTensor, pieces: Iterator[EncodedPiece]) -> None:
    for encoded in pieces:
        data = (encoded.codes, encoded.scales, encoded.mins)
        for blob, part in zip(_blobs(tensor), data, strict=True):
            if blob.bytes:
                file.write(blob.offset + encoded.piece.row_begin * (blob.bytes // tensor.rows), part)
    file.sync()


def _blobs(tensor: manifest_pb2.DenseTensor) -> tuple[manifest_pb2.Blob, manifest_pb2.Blob, manifest_pb2.Blob]:
    return tensor.codes, tensor.scales, tensor.mins
