"""Fixtures of the packer's tests."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.checkpoints import write_td
from testkit.packing import pack_folder


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; only root can mount one."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def td(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint TD."""
    return write_td(tmp_path_factory.mktemp("td") / "td")


@pytest.fixture(scope="session")
def plain(td: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """TD packed onto three drives, one with half of the records; not to be changed."""
    root = tmp_path_factory.mktemp("plain")
    folders = [root / name for name in "abc"]
    pack_folder(td, folders, weights=[2, 1, 1])
    return folders


@pytest.fixture(scope="session")
def mirrored(td: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same with mirrors; not to be changed."""
    root = tmp_path_factory.mktemp("mirrored")
    folders = [root / name for name in "abc"]
    pack_folder(td, folders, weights=[2, 1, 1], mirror=True)
    return folders
