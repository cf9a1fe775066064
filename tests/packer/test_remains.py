"""verify, scrub and inspect look at all that is left of a damaged container, and repair does what they promise.

Each damage goes the whole road: it is named, with the experts that it concerns; what lies beside it is checked; repair
sets it right, to the byte.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colibri.core.container_stripes import stripe_name
from colibri.packer import cli
from colibri.packer.check_records import State
from colibri.packer.progress import Silent
from colibri.packer.scrub import Pace, Scrubbing, scrub
from colibri.packer.verify import Verdict, verify
from testkit.container_damage import flip, overwrite, raw, repaired
from testkit.packing import copy_container

EXPERTS, RECORD = 8, 12288  # of TD: expert e's record is whole, on stripe 0, 1, 0, 2, 0, 1, 0, 2
STRIPE_0 = 4096 + 4 * RECORD  # bytes of the file


def verified(folders: list[Path]) -> Verdict:
    return verify(folders[0], folders[1:], Silent())


def scrubbed(folders: list[Path]) -> Scrubbing:
    return scrub(folders[0], folders[1:], Pace(0), Silent())


def experts(verdict: Verdict) -> tuple[int, int, int, int]:
    """Intact, damaged, lost, unchecked."""
    return tuple(verdict.experts[state] for state in State)  # type: ignore[return-value]


def run(command: str, folders: list[Path], *words: str) -> int:
    stripes = [word for folder in folders[1:] for word in ("--stripe", str(folder))]
    return cli.main([command, str(folders[0]), *stripes, *words])


def stripe(folders: list[Path], number: int) -> Path:
    return folders[number] / stripe_name(number)


def is_mended(folders: list[Path], before: list[dict[str, bytes]], source: Path | None) -> None:
    assert repaired(folders, source).remains == []
    assert raw(folders) == before
    assert verified(folders).faults == []
    assert scrubbed(folders).told == []


@pytest.fixture
def folders(plain: list[Path], tmp_path: Path) -> list[Path]:
    return copy_container(plain, tmp_path / "plain")


@pytest.fixture
def twofold(mirrored: list[Path], tmp_path: Path) -> list[Path]:
    return copy_container(mirrored, tmp_path / "mirrored")


# ---- a stripe that is missing or cut ---------------------------------------------------------------------------------


def test_a_missing_stripe_is_one_fault_and_the_others_are_read(folders: list[Path], td: Path) -> None:
    before = raw(folders)
    stripe(folders, 1).unlink()
    flip(stripe(folders, 2), 4096 + 5)
    done = scrubbed(folders)
    (fault,) = done.faults
    assert "stripe 1 of 3 is missing: no usable stripe-001.colibri" in fault
    assert f"2 of {EXPERTS} experts have bytes in it: `colibri-pack repair` makes it anew from the checkpoint" in fault
    assert [(finding.path, finding.expert) for finding in done.findings] == [(stripe(folders, 2), 3)]
    assert done.read_bytes == 6 * RECORD
    verdict = verified(folders)
    assert (len(verdict.faults), verdict.faults[0], experts(verdict)) == (2, fault, (5, 1, 2, 0))
    is_mended(folders, before, td)


def test_a_cut_stripe_is_read_up_to_its_end(folders: list[Path], td: Path) -> None:
    before, path = raw(folders), stripe(folders, 0)
    os.truncate(path, STRIPE_0 - RECORD - 100)
    flip(path, 4096 + 5)
    done = scrubbed(folders)
    (fault,) = done.faults
    assert f"{path}: is cut short" in fault
    assert f"2 of {EXPERTS} experts have bytes behind its end: `colibri-pack repair` sets it right" in fault
    assert [(finding.path, finding.expert) for finding in done.findings] == [(path, 0)]
    assert experts(verified(folders)) == (5, 1, 2, 0)
    is_mended(folders, before, td)


def test_a_stripe_with_a_damaged_header_is_read_all_the_same(folders: list[Path], td: Path) -> None:
    before, path = raw(folders), stripe(folders, 1)
    flip(path, 30)
    flip(path, 4096 + RECORD)
    done = scrubbed(folders)
    assert [text.split(": CRC")[0] for text in done.faults] == [f"{path}: has a damaged header"]
    assert "the bytes of all its experts are there" in done.faults[0]
    assert [(finding.path, finding.expert) for finding in done.findings] == [(path, 5)]
    assert experts(verified(folders)) == (7, 1, 0, 0)
    is_mended(folders, before, td)


def test_a_file_that_holds_nothing_of_the_container_is_one_fault(folders: list[Path], td: Path) -> None:
    before = raw(folders)
    overwrite(stripe(folders, 1), 0, os.urandom(stripe(folders, 1).stat().st_size))
    assert (len(scrubbed(folders).told), len(verified(folders).faults)) == (1, 1)
    told = "if it is not needed, remove it, and `colibri-pack repair` makes it anew from the checkpoint (--source)"
    assert verified(folders).faults[0].endswith(f"; 2 of {EXPERTS} experts have bytes in it: {told}")
    assert experts(verified(folders)) == (6, 0, 2, 0)
    stripe(folders, 1).unlink()
    is_mended(folders, before, td)


def test_a_cut_copy_whose_other_one_is_whole_costs_no_expert(twofold: list[Path]) -> None:
    before, mirror = raw(twofold), twofold[0] / "mirror-002.colibri"
    os.truncate(stripe(twofold, 1), 4096 + RECORD)
    os.truncate(mirror, 4096 + RECORD)
    done = scrubbed(twofold)
    assert (done.faults, done.findings) == ([], [])
    for path, origin in ((stripe(twofold, 1), "from its mirror"), (mirror, "from its stripe")):
        (told,) = (text for text in done.warnings if f"{path}: is cut short" in text)
        assert told.endswith(
            f"; 1 of {EXPERTS} experts has bytes behind its end: `colibri-pack repair` sets it right, {origin}"
        )
    assert done.read_bytes == (2 * EXPERTS - 2) * RECORD
    assert experts(verified(twofold)) == (8, 0, 0, 0)
    is_mended(twofold, before, None)


# ---- a table ---------------------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]
DAMAGES: list[Damage] = [lambda path: path.unlink(), lambda path: flip(path, 70), lambda path: os.truncate(path, 50)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_crcs_the_experts_are_held_against_their_sha256(folders: list[Path], td: Path, damage: Damage) -> None:
    before, table = raw(folders), folders[0] / "extents.crc32c"
    damage(table)
    flip(stripe(folders, 2), 4096 + RECORD + 9)
    flip(folders[0] / "dense.safetensors", (folders[0] / "dense.safetensors").stat().st_size - 1)
    verdict = verified(folders)
    first, tensor, record = verdict.faults
    assert first.startswith(str(table))
    assert "the experts are held against records.sha256 instead, `colibri-pack repair` makes this one again" in first
    assert "dense.safetensors: tensor" in tensor
    told = "layer 1, expert 7: SHA-256 of the record differs from records.sha256, as read from"
    assert record == f"{told} {stripe(folders, 2)}"
    assert experts(verdict) == (7, 1, 0, 0)
    assert verdict.tensors[State.DAMAGED] == 1
    assert scrubbed(folders).told == [first, record]
    assert scrubbed(folders).read_bytes == EXPERTS * RECORD
    is_mended(folders, before, td)


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_sha256_the_experts_are_held_against_their_crcs(folders: list[Path], td: Path, damage: Damage) -> None:
    before, table = raw(folders), folders[0] / "records.sha256"
    damage(table)
    flip(stripe(folders, 2), 4096 + RECORD + 9)
    first, extent = verified(folders).faults
    assert first.startswith(str(table))
    assert "the experts are held against extents.crc32c instead" in first
    assert f"{stripe(folders, 2)}: layer 1, expert 7: {RECORD} bytes at offset {4096 + RECORD}: CRC-32C is" in extent
    assert scrubbed(folders).told == [first, extent]
    is_mended(folders, before, td)


def test_without_crcs_the_copy_that_has_the_sha256_tells_the_bad_one(twofold: list[Path]) -> None:
    before = raw(twofold)
    (twofold[0] / "extents.crc32c").unlink()
    bad = [stripe(twofold, 1), twofold[0] / "mirror-002.colibri"]
    for path in bad:
        flip(path, 4096 + 77)
    _, *found = verified(twofold).faults
    assert [text.split(": CRC-32C is")[0] for text in found] == [
        f"{path}: layer 1, expert {expert}: {RECORD} bytes at offset 4096"
        for path, expert in zip(bad, (1, 3), strict=True)
    ]
    assert all("the record by its SHA-256 has" in text for text in found)
    is_mended(twofold, before, None)


def test_without_either_table_it_is_said_that_nothing_vouches_for_the_experts(folders: list[Path], td: Path) -> None:
    before = raw(folders)
    for name in ("extents.crc32c", "records.sha256"):
        (folders[0] / name).unlink()
    verdict = verified(folders)
    assert all("the experts cannot be checked without a table" in text for text in verdict.faults)
    assert (len(verdict.faults), experts(verdict)) == (2, (0, 0, 0, EXPERTS))
    assert verdict.tensors[State.INTACT] == len(verdict.manifest.dense)
    is_mended(folders, before, td)


# ---- a folder that cannot be read ------------------------------------------------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int) -> None:
    """Let the drive of `folder` answer with an error."""
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if Path(path) == folder:
            raise OSError(code, os.strerror(code), str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_read_is_named_and_the_others_are_checked(
    folders: list[Path], td: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    before = raw(folders)
    if code == errno.ENOENT:
        shutil.rmtree(folders[1])
    else:
        refuse(monkeypatch, folders[1], code)
    flip(stripe(folders, 2), 4096)
    verdict = verified(folders)
    folder, missing, extent = verdict.faults
    assert folder.startswith(f"stripe folder {folders[1]} cannot be read: {os.strerror(code)}")
    assert f"stripe 1 of 3 is missing: no usable stripe-001.colibri in the folders given ({folders[0]}, " in missing
    assert str(stripe(folders, 2)) in extent
    assert experts(verdict) == (5, 1, 2, 0)
    assert verdict.tensors[State.INTACT] == len(verdict.manifest.dense)
    assert scrubbed(folders).told == verdict.faults
    # With that folder, repair does the others; with an empty one in its place, all.
    done = repaired(folders, td)
    assert [item.path for item in done.extents] == [stripe(folders, 2)]
    assert len(done.remains) == 2
    assert done.remains[0] == folder
    (tmp_path / "new").mkdir()
    is_mended([folders[0], tmp_path / "new", folders[2]], [{**files, "LOCK": b""} for files in before], td)


# ---- reads that the drive refuses ------------------------------------------------------------------------------------


def fail_reads(monkeypatch: pytest.MonkeyPatch, name: str, begin: int, end: int) -> set[str]:
    """Let reads of [begin, end) of files of this name fail with EIO until the name is taken out of the set returned."""
    bad, real = {name}, os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.name in bad and offset < end and offset + count > begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    return bad


@pytest.mark.parametrize("name", ["extents.crc32c", "records.sha256", "tokenizer.json"])
def test_a_file_that_the_drive_cannot_read_is_a_fault_like_another(
    folders: list[Path], td: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fail_reads(monkeypatch, name, 0, 1 << 20)
    (found,) = verified(folders).faults
    assert found.startswith(f"{folders[0] / name} cannot be read: Input/output error")
    assert experts(verified(folders)) == (EXPERTS, 0, 0, 0)
    assert run("inspect", folders) == 1
    (done,) = repaired(folders, td).fixed
    assert str(folders[0] / name) in done


def test_a_tensor_that_the_drive_cannot_read_is_named_and_written_anew(
    folders: list[Path], td: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = verified(folders).manifest.dense[3]
    bad = fail_reads(monkeypatch, "dense.safetensors", tensor.codes.offset, tensor.codes.offset + 1)
    verdict = verified(folders)
    (found,) = verdict.faults
    assert f"tensor {tensor.name}, codes" in found
    assert "cannot be read: Input/output error" in found
    assert verdict.tensors[State.DAMAGED] == 1
    # The sector stays bad after it was written: that is named, and nothing else is.
    (left,) = repaired(folders, td).remains
    assert f"tensor {tensor.name}" in left
    assert "is it failing?" in left
    bad.clear()
    assert verified(folders).faults == []


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_what_is_damaged_lost_and_intact_is_counted_at_the_end(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stripe(folders, 1).unlink()
    flip(stripe(folders, 2), 4096)
    assert run("verify", folders) == 1
    tensors = len(verified(folders).manifest.dense)
    assert capsys.readouterr().out.endswith(
        f"\nexperts: 5 intact, 1 damaged, 2 lost\ndense tensors: {tensors} intact, 0 damaged, 0 lost\n2 faults\n"
    )
    (folders[0] / "dense.safetensors").unlink()
    assert run("verify", folders, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["experts"] == {"intact": 5, "damaged": 1, "lost": 2, "unchecked": 0}
    assert told["tensors"] == {"intact": 0, "damaged": 0, "lost": tensors, "unchecked": 0}
    assert run("scrub", folders, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["read_bytes"], told["warnings"]) == (False, 6 * RECORD, [])
    assert len(told["faults"]) == 2
    assert [finding["expert"] for finding in told["findings"]] == [3]


def test_inspect_shows_what_a_damaged_container_holds(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(stripe(folders, 2), 5000)
    (folders[0] / "extents.crc32c").unlink()
    shutil.rmtree(folders[1])
    assert run("inspect", folders) == 1
    captured = capsys.readouterr()
    assert "content_id  " in captured.out
    for text in (f"stripe folder {folders[1]} cannot be read", "stripe-002.colibri: is cut short", "extents.crc32c"):
        assert any(line.startswith("fault: ") and text in line for line in captured.err.splitlines())
