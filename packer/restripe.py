"""`colibri-pack restripe`: a container onto other drives, or other weights, without the checkpoint it came from.

Every dense tensor and record is read, checked (CRC-32C and SHA-256), cut anew and written by making.py, so it can be
killed at any moment and goes on when the same command is run again. The result is another pack (new UUID) of the same
content (equal content_id): sessions and pins stay valid. The old container is only read, under a shared lock, and is
the user's to delete. Memory is bounded by MEMORY_BYTES or a few records, whatever the model's size.
"""

import hashlib
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from colibri.core.container import MANIFEST_NAME, Container, ContainerError, canonical_encoding, open_container
from colibri.core.container_files import read_exact
from colibri.core.striping import ExtentTable, layer_extents
from colibri.core.tensors import crc32c
from colibri.packer.batch import SYNC_SECONDS, Batch
from colibri.packer.disk import Disk
from colibri.packer.encode import worker_count
from colibri.packer.errors import FolderError
from colibri.packer.finish import sign, small_files
from colibri.packer.folders import folders_of, lock_folders, made_folders, refuse_within
from colibri.packer.interrupt import held
from colibri.packer.journal import NO_REPORT, Done, DoneDense, DoneRecord, journal_exists
from colibri.packer.layout import LayoutError, place_experts
from colibri.packer.making import Making, remove_journal
from colibri.packer.outputs import Outputs
from colibri.packer.plan import created_by
from colibri.packer.progress import Reporter, Silent
from colibri.packer.records import RecordReader
from colibri.packer.target import fill_tables, needed_bytes, place_stripes
from colibri.packer.writer import SYNC_BYTES
from colibri.v1 import manifest_pb2

MEMORY_BYTES = 256 << 20  # records in flight
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class MovePlan:
    """A move, ready to be executed (a Target). `manifest` lacks UUID and time, and the tables' checksums."""

    manifest: manifest_pb2.Manifest
    dense_header_bytes: int
    dense_file_bytes: int
    folder_bytes: tuple[int, ...]
    fingerprint: str


def plan_move(
    old: manifest_pb2.Manifest,
    weights: Sequence[int],
    *,
    mirror: bool | None = None,
    min_extent_bytes: int | None = None,
) -> MovePlan:
    """Plan a move onto len(weights) drives, the primary first; what is None is as the old container has it.

    Raises LayoutError for drives that cannot be, such as a single one for a container with mirrors.
    """
    if mirror is None:
        mirror = any(stripe.mirrored for stripe in old.layout.stripes)
        if mirror and len(weights) == 1:
            raise LayoutError(
                "the container has mirrors, which one folder has no place for: a second --to, or --no-mirror"
            )
    manifest = manifest_pb2.Manifest()
    manifest.CopyFrom(old)
    manifest.ClearField("layout")
    manifest.ClearField("manifest_sha256")
    least = min_extent_bytes or old.layout.min_extent_bytes
    placement = place_experts(manifest.expert_layers, weights, least)
    for layer, striping in zip(manifest.expert_layers, placement.striping, strict=True):
        layer.striping.CopyFrom(striping)
    place_stripes(manifest, weights, placement.stripe_bytes, mirror=mirror)
    fill_tables(manifest, least)
    blobs = [blob for tensor in manifest.dense for blob in _blobs(tensor) if blob.bytes]
    dense_bytes = max(blob.offset + blob.bytes for blob in blobs)
    told = created_by().encode() + old.manifest_sha256.encode() + canonical_encoding(manifest)
    return MovePlan(
        manifest=manifest,
        dense_header_bytes=min(blob.offset for blob in blobs),
        dense_file_bytes=dense_bytes,
        folder_bytes=needed_bytes(manifest, dense_bytes),
        fingerprint=hashlib.sha256(told).hexdigest(),
    )


def moved_bytes(manifest: manifest_pb2.Manifest) -> int:
    """Return how many bytes a move reads."""
    dense = sum(blob.bytes for tensor in manifest.dense for blob in _blobs(tensor))
    return dense + sum(layer.experts * layer.record_bytes for layer in manifest.expert_layers)


def restripe(
    container: Container,
    plan: MovePlan,
    folders: Sequence[Path],
    *,
    disk: Disk | None = None,
    reporter: Reporter | None = None,
    workers: int = 0,
    sync_bytes: int = SYNC_BYTES,
    sync_seconds: float = SYNC_SECONDS,
) -> manifest_pb2.Manifest:
    """Move `container` into `folders`, the primary first, and return the new manifest.

    Raises ContainerError for what is damaged in every copy, FolderError and JournalError for folders that hold
    something else, DriveError for what the drives refuse, Interrupted for SIGINT and SIGTERM. After any of them, or a
    kill, the same call resumes.
    """
    disk, reporter, folders = disk or Disk(), reporter or Silent(), list(folders)
    refuse_own_folders(container, folders)
    with made_folders(folders):
        return _move_locked(container, plan, folders, disk, reporter, workers, sync_bytes, sync_seconds)


def _move_locked(
    container: Container,
    plan: MovePlan,
    folders: list[Path],
    disk: Disk,
    reporter: Reporter,
    workers: int,
    sync_bytes: int,
    sync_seconds: float,
) -> manifest_pb2.Manifest:
    locks = lock_folders(folders)
    try:
        if (folders[0] / MANIFEST_NAME).exists():
            return _finished(disk, plan, folders, reporter)
        with Making(disk, folders, plan, reporter) as making:
            journal = making.journal
            batch = Batch(plan.manifest, making.outputs, journal, sync_bytes, sync_seconds)
            _Move(container, plan, making.outputs, reporter).run(journal.done, batch, workers or worker_count())
            manifest = manifest_pb2.Manifest()
            manifest.CopyFrom(plan.manifest)
            sign(manifest, journal.uuid, journal.done)
            if manifest.content_id != container.content_id:
                raise ContainerError(
                    f"the moved container has content_id {manifest.content_id}, the old one {container.content_id}"
                )
            making.publish(manifest.content_id, small_files(manifest, journal.done, _bundled(container)))
            return manifest
    finally:
        for lock in locks:
            lock.close()


def refuse_own_folders(container: Container, folders: Sequence[Path]) -> None:
    """Raises FolderError if one of `folders` is the container's own or lies inside one of those."""
    refuse_within(folders, folders_of(container), "the container that is to be moved")


def _finished(disk: Disk, plan: MovePlan, folders: list[Path], reporter: Reporter) -> manifest_pb2.Manifest:
    """The manifest is there: this move, complete, perhaps killed before the journal went; or something else."""
    try:
        with open_container(folders[0], folders[1:], lock=False) as container:
            manifest = container.manifest
    except ContainerError as error:
        raise FolderError(f"there is a finished container, which is not in order: {error}") from error
    if _bare(manifest) != _bare(plan.manifest):
        raise FolderError(f"{folders[0]} holds a finished container of another model or with another layout")
    if journal_exists(folders[0]):
        remove_journal(disk, folders[0])
    reporter.note(f"{folders[0]} holds the moved container already; nothing to do")
    return manifest


def _bare(manifest: manifest_pb2.Manifest) -> manifest_pb2.Manifest:
    bare = manifest_pb2.Manifest()
    bare.CopyFrom(manifest)
    bare.ClearField("manifest_sha256")
    for field in ("uuid", "create_unix_seconds", "created_by"):
        bare.layout.ClearField(field)
    bare.layout.extent_checksums.ClearField("crc32c")
    bare.layout.record_digests.ClearField("crc32c")
    return bare


def _bundled(container: Container) -> Iterator[tuple[str, bytes]]:
    for file in container.manifest.files:
        yield file.name, (container.primary / file.name).read_bytes()


def _blobs(tensor: manifest_pb2.DenseTensor) -> tuple[manifest_pb2.Blob, manifest_pb2.Blob, manifest_pb2.Blob]:
    return tensor.codes, tensor.scales, tensor.mins


class _Move:
    """One run of a move: reads, checks, cuts and writes what is not done."""

    def __init__(self, container: Container, plan: MovePlan, outputs: Outputs, reporter: Reporter) -> None:
        self._container = container
        self._manifest = plan.manifest
        self._outputs = outputs
        self._reporter = reporter

    def run(self, done: Done, batch: Batch, workers: int) -> None:
        """Move everything behind `done`."""
        layers = self._manifest.expert_layers
        dense, records = len(done.dense), len(done.records)
        sizes = [layer.record_bytes for layer in layers for _ in range(layer.experts)]
        moved = sum(blob.bytes for tensor in self._manifest.dense[:dense] for blob in _blobs(tensor))
        self._reporter.skip(moved + sum(sizes[:records]))
        with held() as check, batch:
            for index in range(dense, len(self._manifest.dense)):
                size = sum(blob.bytes for blob in _blobs(self._manifest.dense[index]))
                batch.keep(self._move_tensor(index), size)
                self._reporter.advance(size)
                check()
            with closing(self._read_records(records, workers)) as stream:
                for record, (row, data) in enumerate(stream, records):
                    batch.keep(self._write_record(row, data, self._container.record_digests[record]), len(data))
                    self._reporter.advance(len(data))
                    check()

    def _move_tensor(self, index: int) -> DoneDense:
        old, new = self._container.manifest.dense[index], self._manifest.dense[index]
        digest, crcs = hashlib.sha256(), []
        path = self._container.dense_path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name, source, target in zip(("codes", "scales", "mins"), _blobs(old), _blobs(new), strict=True):
                crc = 0
                for begin in range(0, source.bytes, _READ_BYTES):
                    piece = read_exact(fd, source.offset + begin, min(_READ_BYTES, source.bytes - begin))
                    crc = crc32c(piece, crc)
                    digest.update(piece)
                    self._outputs.dense.write(target.offset + begin, piece)
                if crc != source.crc32c:
                    raise ContainerError(
                        f"{path}: tensor {old.name}, {name} at offset {source.offset}: CRC-32C is {crc:08x}, the "
                        f"manifest says {source.crc32c:08x}; `colibri-pack repair` can rebuild it from the checkpoint"
                    )
                crcs.append(crc)
        finally:
            os.close(fd)
        if digest.hexdigest() != old.sha256:
            raise ContainerError(f"{path}: tensor {old.name}: SHA-256 differs from the manifest's {old.sha256}")
        return DoneDense((crcs[0], crcs[1], crcs[2]), digest.hexdigest(), NO_REPORT)

    def _read_records(self, first: int, workers: int) -> Generator[tuple[ExtentTable, bytes], None, None]:
        """Read on `workers` threads; give the record's new extents and its bytes, in logical order from `first` on."""
        waiting: deque[tuple[ExtentTable, Future[bytes]]] = deque()
        reader = RecordReader(self._container)
        pool = ThreadPoolExecutor(workers, thread_name_prefix="move")
        try:
            record = 0
            for layer_index, layer in enumerate(self._manifest.expert_layers):
                limit = max(1, min(2 * workers, MEMORY_BYTES // layer.record_bytes))
                table = layer_extents(layer)
                for expert in range(max(0, first - record), layer.experts):
                    while len(waiting) >= limit:
                        row, future = waiting.popleft()
                        yield row, future.result()
                    waiting.append((table[expert], pool.submit(self._read, reader, layer_index, expert)))
                record += layer.experts
            while waiting:
                row, future = waiting.popleft()
                yield row, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
            reader.close()

    def _read(self, reader: RecordReader, layer_index: int, expert: int) -> bytes:
        data = reader.read(layer_index, expert)
        wanted = self._container.record_digests[self._container.first_record(layer_index) + expert]
        if hashlib.sha256(data).digest() != wanted:
            layer = self._manifest.expert_layers[layer_index].layer
            raise ContainerError(
                f"{self._container.primary}: layer {layer}, expert {expert}: SHA-256 of the record differs from "
                "records.sha256"
            )
        return data

    def _write_record(self, row: ExtentTable, data: bytes, digest: bytes) -> DoneRecord:
        crcs = []
        for extent in row:
            begin = int(extent["record_offset"])
            piece = memoryview(data)[begin : begin + int(extent["bytes"])]
            self._outputs.write(int(extent["stripe"]), int(extent["file_offset"]), piece)
            crcs.append(crc32c(piece))
        return DoneRecord(tuple(crcs), digest.hex(), NO_REPORT)
