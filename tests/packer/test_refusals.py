"""What a pack refuses `plan` refuses too, in the same words, and neither leaves anything behind."""

import json
from collections.abc import Callable
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
