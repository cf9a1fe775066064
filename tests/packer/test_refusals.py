"""What a pack refuses `plan` refuses too, in the same words, and neither leaves anything behind."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colibri.core.paths import FolderLock
from colibri.packer import cli
from testkit.checkpoints import write_tq
from testkit.faulty_disk import PowerCut, PowerCutDisk
from testkit.packing import pack_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def in_use(_: Path, here: Path) -> tuple[list[Path], str]:
    (here / "a").mkdir()
    FolderLock(here / "a", exclusive=True)
    return [here / "new", here / "a"], f"{here}/a is in use: another colibri-pack"


def twice(_: Path, here: Path) -> tuple[list[Path], str]:
    return [here / "z", here / "z"], "z is given twice"


def nested(_: Path, here: Path) -> tuple[list[Path], str]:
    return [here / "z", here / "y", here / "z" / "x" / ".." / "y"], f"making {here}/z/x/../y: {here}/z: No such file"


def inside(_: Path, here: Path) -> tuple[list[Path], str]:
    (here / "z").mkdir()
    return [here / "z", here / "z" / "y"], f"{here}/z/y lies inside {here}/z: "


def the_source(source: Path, _: Path) -> tuple[list[Path], str]:
    return [source], "tq holds the checkpoint"


def a_stripe_in_the_source(source: Path, here: Path) -> tuple[list[Path], str]:
    return [here / "z", source], "tq holds the checkpoint"


def not_empty(_: Path, here: Path) -> tuple[list[Path], str]:
    (here / "z").mkdir()
    (here / "z" / "mine").touch()
    return [here / "y", here / "x", here / "z"][::-1], f"{here}/z holds mine: "


def no_parent(_: Path, here: Path) -> tuple[list[Path], str]:
    return [here / "y", here / "no" / "z"], f"making {here}/no/z: {here}/no: No such file or directory; is the drive"


def another_finished_one(source: Path, here: Path) -> tuple[list[Path], str]:
    pack_folder(source, [here / "z"], precision="all=f32")
    return [here / "z"], "z holds a finished container of another source or with other options"


def another_unfinished_one(source: Path, here: Path) -> tuple[list[Path], str]:
    with pytest.raises(PowerCut):
        pack_folder(source, [here / "z"], precision="all=f32", disk=PowerCutDisk(30), sync_bytes=1)
    return [here / "z"], "z holds an unfinished pack of another source or with other options"


REFUSED = [twice, nested, inside, the_source, a_stripe_in_the_source, not_empty, no_parent, in_use]


@pytest.mark.parametrize("arrange", [*REFUSED, another_finished_one, another_unfinished_one])
def test_pack_and_plan_refuse_the_same_and_leave_nothing_behind(
    source: Path,
    tmp_path: Path,
    arrange: Callable[[Path, Path], tuple[list[Path], str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders, text = arrange(source, tmp_path)
    before = sorted([*tmp_path.rglob("*"), *source.rglob("*")])
    words = [source, "--out", folders[0], *(word for folder in folders[1:] for word in ("--stripe", folder))]
    told = []
    for command in (["plan"], []):
        assert run(*command, *words) == 1
        told.append(capsys.readouterr().err.splitlines()[-1])  # a pack warns of a shared drive before
        assert sorted([*tmp_path.rglob("*"), *source.rglob("*")]) == before
    assert told[0] == told[1]
    assert text in told[0]


def test_a_plan_that_does_not_fit_is_refused_as_the_pack_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("colibri.packer.disk.Disk.free_bytes", lambda *_: 123_456)
    told = []
    for command in (["plan"], []):
        assert run(*command, source, "--out", tmp_path / "out", "--json") == 74
        told.append(json.loads(capsys.readouterr().out))
        assert list(tmp_path.iterdir()) == []
    assert told[0] == told[1]
    assert told[0]["free_bytes"] == 123_456
    assert run("plan", source, "--json") == 0  # no folder: what it needs


def test_a_plan_warns_of_stripes_on_one_file_system_as_the_pack_does(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (source, "--out", tmp_path / "a", "--stripe", tmp_path / "b", "--mirror")
    assert run("plan", *words, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["drive_warnings"]
    assert run("plan", *words) == 0
    shown = capsys.readouterr().out
    assert run(*words, "--json") == 0
    assert planned == json.loads(capsys.readouterr().out)["drive_warnings"] != []
    assert all(f"warning: {text}" in shown for text in planned)
    assert f"{tmp_path}/a and {tmp_path}/b lie on one file system" in shown


def as_nobody(*words: object) -> tuple[int, str]:
    """Runs colibri-pack as a user without rights, in a process of its own: (exit code, standard error)."""
    code = (
        "import os, sys; from colibri.packer import cli; import colibri.packer.repair\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter: those of pytest are its own user's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_file_that_may_not_be_read_is_no_damage_and_is_named_with_what_is_needed(
    source: Path, open_folder: Path
) -> None:
    folders = [open_folder / "a", open_folder / "b"]
    pack_folder(source, folders, mirror=True)
    repair = ("repair", folders[0], "--stripe", folders[1])
    for path in (folders[0] / "dense.safetensors", folders[0] / "config.json", folders[1] / "stripe-001.colibri"):
        mode = path.stat().st_mode
        path.chmod(0)
        code, told = as_nobody(*repair)
        path.chmod(mode)
        assert code == 1
        assert f"opening {path}: Permission denied; uid " in told
        assert "needs to read and write it (mode 0000, owner uid " in told
    folders[0].chmod(0)
    code, told = as_nobody("inspect", folders[0])
    folders[0].chmod(0o755)
    assert code == 1
    assert f"{folders[0]}: Permission denied; uid " in told
    assert "needs to list and enter it (mode 0000" in told
    assert "Errno" not in told
