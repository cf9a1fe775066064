"""A container while it is made: journal and unfinished files, begun anew or taken up again, and published at the end.

The order is what makes a kill at any moment harmless: data under temporary names, synced, then a journal line; at the
end all small files, synced; then the renames; the manifest last; then the journal goes. Refuses folders that hold
anything but this very container. What is written comes from writer.py (pack) or restripe.py.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from colibri.core.container import MANIFEST_NAME
from colibri.core.striping import layer_extents
from colibri.core.tensors import crc32c
from colibri.packer.disk import Disk, OutputFile
from colibri.packer.folders import needs_of, require_empty, require_room
from colibri.packer.journal import JOURNAL_NAME, Done, Journal, journal_exists
from colibri.packer.outputs import PARTIAL, Outputs
from colibri.packer.progress import Reporter
from colibri.packer.target import Target
from colibri.packer.wording import counted

_VERIFY_BYTES = 8 << 20


class Making:
    """The open `journal` and `outputs` of `target` in `folders`, the primary first. A context manager."""

    def __init__(self, disk: Disk, folders: list[Path], target: Target, reporter: Reporter) -> None:
        """Begin, or go on: what the journal calls done is read once more and kept if it still holds.

        Raises FolderError and JournalError for folders that hold something else, DriveError.
        """
        self._disk, self._folders, self._target, self._reporter = disk, folders, target, reporter
        primary, fingerprint = folders[0], target.fingerprint
        resumed = journal_exists(primary)
        if resumed:
            self.journal = Journal.resume(disk, primary, fingerprint)
        else:
            require_empty(folders)
        require_room(disk, needs_of(folders, target))
        if not resumed:
            weights = [stripe.weight for stripe in target.manifest.layout.stripes]
            self.journal = Journal.create(disk, primary, fingerprint, uuid4(), weights)
        self.outputs = Outputs(disk, folders, target, self.journal.uuid)
        try:
            if self.journal.done.dense or self.journal.done.records:
                self.outputs.reopen()
                self._check_done()
            else:
                self.outputs.create()
        except BaseException:
            self.close()
            raise

    def _check_done(self) -> None:
        """Read again what the journal calls done; from the first thing that differs on, it is done anew."""
        done = self.journal.done
        dense = _good_prefix(self._dense_intact(done))
        records = _good_prefix(self._records_intact(done)) if dense == len(done.dense) else 0
        if (dense, records) != (len(done.dense), len(done.records)):
            self._reporter.note("some of what was written before has changed on the drive; it is written again")
            kept = Done(done.dense[:dense], done.records[:records])
            self.journal.close()
            weights = [stripe.weight for stripe in self._target.manifest.layout.stripes]
            self.journal = Journal.create(
                self._disk, self._folders[0], self._target.fingerprint, self.journal.uuid, weights
            )
            self.journal.append(kept)
        self._reporter.note(f"resuming: {counted(dense, 'dense tensor')} and {counted(records, 'expert')} done before")

    def _dense_intact(self, done: Done) -> Iterator[bool]:
        for tensor, sums in zip(self._target.manifest.dense, done.dense, strict=False):
            blobs = (tensor.codes, tensor.scales, tensor.mins)
            yield all(
                _crc_of(self.outputs.dense, blob.offset, blob.bytes) == crc
                for blob, crc in zip(blobs, sums.crcs, strict=True)
            )

    def _records_intact(self, done: Done) -> Iterator[bool]:
        extents = chain.from_iterable(layer_extents(layer) for layer in self._target.manifest.expert_layers)
        for row, sums in zip(extents, done.records, strict=False):
            yield all(
                _crc_of(file, int(e["file_offset"]), int(e["bytes"])) == crc
                for e, crc in zip(row, sums.crcs, strict=True)
                for file in self.outputs.copies(int(e["stripe"]))
            )

    def publish(self, content_id: str, small_files: Iterable[tuple[str, bytes]]) -> None:
        """Write the small files, the manifest last of them, and give everything its final name. Raises DriveError."""
        primary = self._folders[0]
        names = []
        for name, data in small_files:
            write_whole(self._disk, primary / (name + PARTIAL), data)
            names.append(name)
        self.outputs.seal(content_id)
        self.outputs.publish()
        assert names[-1] == MANIFEST_NAME
        for name in names[:-1]:
            self._disk.rename(primary / (name + PARTIAL), primary / name)
        self._disk.sync_folder(primary)
        self._disk.rename(primary / (MANIFEST_NAME + PARTIAL), primary / MANIFEST_NAME)
        self._disk.sync_folder(primary)
        self.journal.close()
        remove_journal(self._disk, primary)

    def close(self) -> None:
        """Close journal and files; a second call does nothing. Raises DriveError."""
        self.journal.close()
        self.outputs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_journal(disk: Disk, primary: Path) -> None:
    """Remove the journal of a container that is complete. Raises DriveError."""
    disk.remove(primary / JOURNAL_NAME)
    disk.sync_folder(primary)


def write_whole(disk: Disk, path: Path, data: bytes) -> None:
    """Write a small file, synced, without giving it a final name. Raises DriveError."""
    file = disk.open_output(path)
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
