"""What a pack is refused for names the file or folder, and names it once."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from colibri.core.tensors import crc32c
from colibri.packer.disk import DriveError
from colibri.packer.errors import FolderError
from colibri.packer.journal import JournalError
from testkit.checkpoints import write_tq
from testkit.packing import pack_folder
from testkit.wording import assert_says_once, paths_named_twice


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


def refusal(source: Path, folders: Sequence[Path]) -> str:
    with pytest.raises((DriveError, FolderError, JournalError)) as caught:
        pack_folder(source, folders)
    return str(caught.value)


def test_a_folder_that_cannot_be_used(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refusal(source, [file]) == f"making {file}: it is there already, and is no folder"
    assert refusal(source, [file / "out"]) == f"making {file}/out: {file}: Not a directory"
    gone = tmp_path / "no"
    assert refusal(source, [gone / "out"]).startswith(f"making {gone}/out: {gone}: No such file or directory")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    text = refusal(source, [loop / "out"])
    assert text == f"making {loop}/out: {loop}: {os.strerror(errno.ELOOP)}"
    out = tmp_path / "out"
    assert_says_once(refusal(source, [out, out]), out)


def test_a_relative_folder_is_not_said_again_in_full(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    text = refusal(source, [Path("loop")])
    assert text.startswith("making loop: ")
    assert str(tmp_path) not in text


def first_line_damaged(folder: Path) -> Path:
    (folder / "pack.journal").write_text("damaged")
    return folder / "pack.journal"


def version_9(folder: Path) -> Path:
    text = json.dumps({"version": 9}).encode()
    (folder / "pack.journal").write_bytes(b"%08x " % crc32c(text) + text + b"\n")
    return folder / "pack.journal"


def a_manifest_of_nothing(folder: Path) -> Path:
    (folder / "manifest.json").write_text("{}")
    return folder / "manifest.json"


@pytest.mark.parametrize("spoil", [first_line_damaged, version_9, a_manifest_of_nothing])
def test_a_folder_with_something_else_in_it(source: Path, tmp_path: Path, spoil: Callable[[Path], Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    path = spoil(out)
    assert_says_once(refusal(source, [out]), path)


def test_a_finished_container_that_is_not_in_order(source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "out", tmp_path / "second"]
    pack_folder(source, folders)
    (folders[1] / "stripe-001.colibri").unlink()
    text = refusal(source, folders)
    assert "stripe 1 of 2 is missing" in text
    assert_says_once(text, folders[1])


def test_the_check_itself_finds_what_is_said_twice(tmp_path: Path) -> None:
    assert paths_named_twice(f"{tmp_path} cannot be read: {tmp_path}: No such file") == [str(tmp_path)]
    assert paths_named_twice(f"making {tmp_path}/a: {tmp_path}: No such file") == []
