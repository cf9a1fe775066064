"""Executes a plan: writes, hashes, syncs, journals and publishes; resumes what was stopped.

The order is what makes a kill at any moment harmless: data under temporary names, synced, then a journal line; at the
end all small files, synced; then the renames; the manifest last; then the journal goes. Refuses folders that hold
anything but this very pack. Memory is bounded by encode.py, not by the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from uuid import uuid4

from colibri.core.container import MANIFEST_NAME, ContainerError, open_container
from colibri.core.striping import layer_extents
from colibri.core.tensors import crc32c
from colibri.packer.batch import SYNC_SECONDS, Batch
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk, OutputFile
from colibri.packer.encode import Piece, dense_pieces, encode_all, piece_bytes, record_pieces, worker_count
from colibri.packer.errors import FolderError
from colibri.packer.finish import finished_manifest, is_finished_form_of, small_files
from colibri.packer.folders import lock_folders, make_folders, require_empty, require_room
from colibri.packer.interrupt import held
from colibri.packer.journal import JOURNAL_NAME, Done, Journal, journal_exists
from colibri.packer.outputs import PARTIAL, Outputs
from colibri.packer.plan import PackPlan
from colibri.packer.progress import Reporter, Silent
from colibri.packer.wording import counted
from colibri.v1 import manifest_pb2

SYNC_BYTES = 256 << 20  # data between two journal lines: with SYNC_SECONDS, what a kill can cost
_VERIFY_BYTES = 8 << 20


def pack(
    checkpoint: Checkpoint,
    plan: PackPlan,
    folders: Sequence[Path],
    *,
    disk: Disk | None = None,
    reporter: Reporter | None = None,
    workers: int = 0,
    sync_bytes: int = SYNC_BYTES,
    sync_seconds: float = SYNC_SECONDS,
) -> manifest_pb2.Manifest:
    """Pack into `folders` (the primary first) and return the manifest; what is there of this pack is not done again.

    Raises CheckpointError for a bad source, FolderError and JournalError for folders that hold something else,
    DriveError for what the drives refuse, Interrupted for SIGINT and SIGTERM. After any of them, or a kill, the same
    call resumes; what was complete when an error or a signal came is not done again.
    """
    disk, reporter, folders = disk or Disk(), reporter or Silent(), list(folders)
    make_folders(folders)
    if folders[0].samefile(checkpoint.folder):
        raise FolderError(f"{folders[0]} is the checkpoint itself")
    locks = lock_folders(folders)
    try:
        if (folders[0] / MANIFEST_NAME).exists():
            return _finished(disk, checkpoint, plan, folders, reporter)
        return _Pack(checkpoint, plan, folders, disk, reporter).run(workers or worker_count(), sync_bytes, sync_seconds)
    finally:
        for lock in locks:
            lock.close()


def _finished(
    disk: Disk, checkpoint: Checkpoint, plan: PackPlan, folders: list[Path], reporter: Reporter
) -> manifest_pb2.Manifest:
    """The manifest is there: this pack, complete, perhaps killed before the journal went; or another one."""
    try:
        with open_container(folders[0], folders[1:], lock=False) as container:
            manifest = container.manifest
    except ContainerError as error:
        raise FolderError(f"there is a finished container, which is not in order: {error}") from error
    if not is_finished_form_of(manifest, plan.manifest):
        raise FolderError(f"{folders[0]} holds a finished container of another source or with other options")
    _refuse_newer(checkpoint, manifest, folders[0])
    if journal_exists(folders[0]):
        disk.remove(folders[0] / JOURNAL_NAME)
        disk.sync_folder(folders[0])
    reporter.note(f"{folders[0]} is packed already; nothing to do")
    return manifest


def _refuse_newer(checkpoint: Checkpoint, manifest: manifest_pb2.Manifest, primary: Path) -> None:
    """Weights written over in place leave names, shapes and sizes as they were; only the time tells."""
    end = (manifest.layout.create_unix_seconds + 1) * 1_000_000_000
    newer = [path for path in checkpoint.files if path.stat().st_mtime_ns >= end]
    if newer:
        raise FolderError(
            f"{newer[0]} was changed after {primary} was packed from it: to pack it as it is now, give an empty folder "
            "or remove the container first"
        )


class _Pack:
    """One run of a pack."""

    def __init__(
        self, checkpoint: Checkpoint, plan: PackPlan, folders: list[Path], disk: Disk, reporter: Reporter
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._folders = folders
        self._disk = disk
        self._reporter = reporter

    def run(self, workers: int, sync_bytes: int, sync_seconds: float) -> manifest_pb2.Manifest:
        """Write what is missing and publish."""
        self._open()
        try:
            self._write(workers, Batch(self._plan.manifest, self._outputs, self._journal, sync_bytes, sync_seconds))
            return self._publish()
        finally:
            self._journal.close()
            self._outputs.close()

    def _open(self) -> None:
        primary, fingerprint = self._folders[0], self._plan.fingerprint
        resumed = journal_exists(primary)
        if resumed:
            self._journal = Journal.resume(self._disk, primary, fingerprint)
        else:
            require_empty(self._folders)
        require_room(self._disk, self._folders, self._plan.folder_bytes)
        if not resumed:
            self._journal = Journal.create(self._disk, primary, fingerprint, uuid4())
        self._outputs = Outputs(self._disk, self._folders, self._plan, self._journal.uuid)
        try:
            if self._journal.done.dense or self._journal.done.records:
                self._outputs.reopen()
                self._check_done()
            else:
                self._outputs.create()
        except BaseException:
            self._outputs.close()
            self._journal.close()
            raise

    def _check_done(self) -> None:
        """Read again what the journal calls done; from the first thing that differs on, it is done anew."""
        done = self._journal.done
        dense = _good_prefix(self._dense_intact(done))
        records = _good_prefix(self._records_intact(done)) if dense == len(done.dense) else 0
        if (dense, records) != (len(done.dense), len(done.records)):
            self._reporter.note("some of what was written before has changed on the drive; it is written again")
            kept = Done(done.dense[:dense], done.records[:records])
            self._journal.close()
            self._journal = Journal.create(self._disk, self._folders[0], self._plan.fingerprint, self._journal.uuid)
            self._journal.append(kept)
        self._reporter.note(f"resuming: {counted(dense, 'dense tensor')} and {counted(records, 'expert')} done before")

    def _dense_intact(self, done: Done) -> Iterator[bool]:
        for tensor, sums in zip(self._plan.manifest.dense, done.dense, strict=False):
            blobs = (tensor.codes, tensor.scales, tensor.mins)
            yield all(
                _crc_of(self._outputs.dense, blob.offset, blob.bytes) == crc
                for blob, crc in zip(blobs, sums.crcs, strict=True)
            )

    def _records_intact(self, done: Done) -> Iterator[bool]:
        extents = chain.from_iterable(layer_extents(layer) for layer in self._plan.manifest.expert_layers)
        for row, sums in zip(extents, done.records, strict=False):
            yield all(
                _crc_of(self._outputs.stripes[int(e["stripe"])], int(e["file_offset"]), int(e["bytes"])) == crc
                for e, crc in zip(row, sums.crcs, strict=True)
            )

    def _write(self, workers: int, batch: Batch) -> None:
        manifest, model, done = self._plan.manifest, self._plan.model, self._journal.done
        self._reporter.skip(self._done_bytes())
        pieces = chain(
            dense_pieces(model, manifest, len(done.dense)), record_pieces(model, manifest, len(done.records))
        )
        with held() as check, batch, closing(encode_all(self._checkpoint, pieces, workers)) as stream:
            for encoded in stream:
                batch.feed(encoded)
                self._reporter.advance(piece_bytes(self._checkpoint, encoded.piece))
                check()

    def _done_bytes(self) -> int:
        done, model, manifest = self._journal.done, self._plan.model, self._plan.manifest
        pieces: Iterator[Piece] = chain(
            (piece for piece in dense_pieces(model, manifest, 0) if piece.unit < len(done.dense)),
            (piece for piece in record_pieces(model, manifest, 0) if piece.unit < len(done.records)),
        )
        return sum(piece_bytes(self._checkpoint, piece) for piece in pieces)

    def _publish(self) -> manifest_pb2.Manifest:
        primary = self._folders[0]
        manifest = finished_manifest(self._plan.manifest, self._journal.uuid, self._journal.done)
        names = []
        for name, data in small_files(manifest, self._journal.done, self._checkpoint):
            self._write_whole(primary / (name + PARTIAL), data)
            names.append(name)
        self._outputs.seal(manifest.content_id)
        self._outputs.publish()
        assert names[-1] == MANIFEST_NAME
        for name in names[:-1]:
            self._disk.rename(primary / (name + PARTIAL), primary / name)
        self._disk.sync_folder(primary)
        self._disk.rename(primary / (MANIFEST_NAME + PARTIAL), primary / MANIFEST_NAME)
        self._disk.sync_folder(primary)
        self._journal.close()
        self._disk.remove(primary / JOURNAL_NAME)
        self._disk.sync_folder(primary)
        return manifest

    def _write_whole(self, path: Path, data: bytes) -> None:
        file = self._disk.open_output(path)
        try:
            file.cut(0)
            file.write(0, data)
            file.sync()
        finally:
            file.close()


def _good_prefix(intact: Iterator[bool]) -> int:
    count = 0
    for good in intact:
        if not good:
            break
        count += 1
    return count


def _crc_of(file: OutputFile, offset: int, count: int) -> int:
    crc = 0
    for begin in range(0, count, _VERIFY_BYTES):
        crc = crc32c(file.read(offset + begin, min(_VERIFY_BYTES, count - begin)), crc)
    return crc
