"""When journal lines are written, and what is kept when a drive fails half-way."""

import errno
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk, DriveError
from colibri.packer.journal import Done, Journal
from colibri.packer.writer import pack
from testkit.checkpoints import write_tq
from testkit.faulty_disk import CountingDisk
from testkit.packing import files_of, pack_folder, plan_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


def test_what_is_complete_is_kept_when_a_drive_fails(source: Path, tmp_path: Path) -> None:
    class Full(Disk):
        """The second stripe takes its header and two records."""

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if offset > 1 << 14 and os.readlink(f"/proc/self/fd/{fd}").endswith("stripe-001.colibri.partial"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwrite(fd, data, offset)

    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DriveError, match="No space left"):
        pack_folder(source, folders, disk=Full())
    (line,) = (folders[0] / "pack.journal").read_text().splitlines()[1:]
    assert len(json.loads(line[9:])["records"]) == 5  # and the first stripe three
    pack_folder(source, folders)
    pack_folder(source, [tmp_path / "c", tmp_path / "d"])
    assert [files_of(folder) for folder in folders] == [files_of(tmp_path / name) for name in "cd"]


def test_after_a_failed_sync_nothing_is_called_done(source: Path, tmp_path: Path) -> None:
    """The next fsync of such a file may succeed, whatever was lost."""

    class Lossy(Disk):
        syncs = 0

        def fsync(self, fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("dense.safetensors.partial"):
                self.syncs += 1
                if self.syncs == 1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(DriveError, match="Input/output error"):
        pack_folder(source, [tmp_path / "a"], disk=Lossy(), sync_bytes=40_000)
    assert (tmp_path / "a" / "pack.journal").read_bytes().count(b"\n") == 1


def test_a_journal_line_is_due_after_a_time_too(source: Path, tmp_path: Path) -> None:
    append, units = Journal.append, []

    def note(journal: Journal, done: Done) -> None:
        units.append(len(done.dense) + len(done.records))
        append(journal, done)

    with Checkpoint.open(source) as checkpoint, mock.patch.object(Journal, "append", note):
        plan = plan_of(checkpoint)
        pack(checkpoint, plan, [tmp_path / "a"], disk=CountingDisk(), sync_seconds=0.0)
    assert units == [1] * (len(plan.manifest.dense) + sum(layer.experts for layer in plan.manifest.expert_layers))
