"""Executes a plan: a checkpoint's matrices, quantised, into a container that making.py begins, takes up or publishes.

Refuses a source that changed since it was packed. Memory is bounded by encode.py, not by the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

from colibri.core.container import MANIFEST_NAME, ContainerError, open_container
from colibri.packer.batch import SYNC_SECONDS, Batch
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk
from colibri.packer.encode import Piece, dense_pieces, encode_all, piece_bytes, record_pieces, worker_count
from colibri.packer.errors import FolderError
from colibri.packer.finish import finished_manifest, is_finished_form_of, small_files
from colibri.packer.folders import (
    check_folders,
    lock_folders,
    made_folders,
    needs_of,
    refuse_in_use,
    refuse_within,
    require_empty,
    require_room,
)
from colibri.packer.interrupt import held
from colibri.packer.journal import Done, check_journal, journal_exists
from colibri.packer.making import Making, remove_journal
from colibri.packer.plan import PackPlan
from colibri.packer.progress import Reporter, Silent
from colibri.v1 import manifest_pb2

SYNC_BYTES = 256 << 20  # data between two journal lines: with SYNC_SECONDS, what a kill can cost


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
    refuse_source(checkpoint, folders)
    with made_folders(folders):
        return _pack_locked(checkpoint, plan, folders, disk, reporter, workers, sync_bytes, sync_seconds)


def check_pack(checkpoint: Checkpoint, plan: PackPlan, folders: Sequence[Path], *, room: bool = True) -> None:
    """Refuse what pack() would before its first byte, and write nothing; `room`: also what does not fit.

    Raises FolderError, JournalError, DriveError.
    """
    folders = list(folders)
    refuse_source(checkpoint, folders)
    check_folders(folders)
    refuse_in_use(folders)
    if (folders[0] / MANIFEST_NAME).exists():
        _refuse_other(checkpoint, plan, folders)
        return
    if journal_exists(folders[0]):
        check_journal(folders[0], plan.fingerprint)
    else:
        require_empty(folders)
    if room:
        require_room(Disk(), needs_of(folders, plan))


def refuse_source(checkpoint: Checkpoint, folders: Sequence[Path]) -> None:
    """Raises FolderError if one of `folders` is that of the checkpoint or lies inside it."""
    refuse_within(folders, [checkpoint.folder], "the checkpoint")


def _pack_locked(
    checkpoint: Checkpoint,
    plan: PackPlan,
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
            return _finished(disk, checkpoint, plan, folders, reporter)
        with Making(disk, folders, plan, reporter) as making:
            journal = making.journal
            batch = Batch(plan.manifest, making.outputs, journal, sync_bytes, sync_seconds)
            _write(checkpoint, plan, journal.done, batch, workers or worker_count(), reporter)
            manifest = finished_manifest(plan.manifest, journal.uuid, journal.done)
            bundled = ((path.name, checkpoint.read_file(path)) for path in checkpoint.bundled)
            making.publish(manifest.content_id, small_files(manifest, journal.done, bundled))
            return manifest
    finally:
        for lock in locks:
            lock.close()


def _finished(
    disk: Disk, checkpoint: Checkpoint, plan: PackPlan, folders: list[Path], reporter: Reporter
) -> manifest_pb2.Manifest:
    """The manifest is there: this pack, complete, perhaps killed before the journal went; or another one."""
    manifest = _refuse_other(checkpoint, plan, folders)
    if journal_exists(folders[0]):
        remove_journal(disk, folders[0])
    reporter.note(f"{folders[0]} is packed already; nothing to do")
    return manifest


def _refuse_other(checkpoint: Checkpoint, plan: PackPlan, folders: list[Path]) -> manifest_pb2.Manifest:
    """The manifest of the finished container in `folders`. Raises FolderError if it is not that of this pack."""
    try:
        with open_container(folders[0], folders[1:], lock=False) as container:
            manifest = container.manifest
    except ContainerError as error:
        raise FolderError(f"there is a finished container, which is not in order: {error}") from error
    if not is_finished_form_of(manifest, plan.manifest):
        raise FolderError(f"{folders[0]} holds a finished container of another source or with other options")
    _refuse_newer(checkpoint, manifest, folders[0])
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


def _write(checkpoint: Checkpoint, plan: PackPlan, done: Done, batch: Batch, workers: int, reporter: Reporter) -> None:
    manifest, model = plan.manifest, plan.model
    reporter.skip(_done_bytes(checkpoint, plan, done))
    pieces = chain(dense_pieces(model, manifest, len(done.dense)), record_pieces(model, manifest, len(done.records)))
    with held() as check, batch, closing(encode_all(checkpoint, pieces, workers)) as stream:
        for encoded in stream:
            batch.feed(encoded)
            reporter.advance(piece_bytes(checkpoint, encoded.piece))
            check()


def _done_bytes(checkpoint: Checkpoint, plan: PackPlan, done: Done) -> int:
    model, manifest = plan.model, plan.manifest
    pieces: Iterator[Piece] = chain(
        (piece for piece in dense_pieces(model, manifest, 0) if piece.unit < len(done.dense)),
        (piece for piece in record_pieces(model, manifest, 0) if piece.unit < len(done.records)),
    )
    return sum(piece_bytes(checkpoint, piece) for piece in pieces)
