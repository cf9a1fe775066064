"""A drive that is taken away under a running daemon, comes back or is replaced; and one that is not there at the start.

What is open stays readable after a lazy unmount, as the kernel has it: the daemon goes on until it is told to open its
stripes again, and then it names what is gone.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testkit.asking import Bystander, check_right
from testkit.image_damage import on_device
from testkit.loop_drives import DriveSpec, LoopDrive, drop_cached, loop_drives, why_not
from testkit.models import Tiny
from testkit.process import colibrid, serving, write_config
from testkit.scene import Scene
from testkit.watched import is_well, reload, until

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(120)]

OnDrive = Callable[[Scene], tuple[Tiny, LoopDrive]]


@contextmanager
def mounted(device: Path, folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "noatime", str(device), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_drive_that_was_unmounted_and_came_back(scene: Scene, on_drive: OnDrive, tmp_path: Path) -> None:
    tiny, drive = on_drive(scene)
    stripe = scene.place(tiny).path
    with serving(write_config(tmp_path / "d", tiny, max_context=512)) as process:
        drive.unmount()
        assert not stripe.exists()
        check_right(process, scene)
        reload(process)
        assert f"stripe 1 ({stripe}): open failed: No such file or directory" in process.log.read_text()
        Bystander(process, scene).has_the_right_answer()
        with mounted(drive.device, drive.folder):
            reload(process)
            until(process, is_well)
            check_right(process, scene)


def test_a_drive_that_was_replaced(scene: Scene, on_drive: OnDrive, tmp_path: Path) -> None:
    """The new drive is read after a reload, the old one is not needed any more."""
    tiny, old = on_drive(scene)
    place = scene.place(tiny)
    where = on_device(place.path, place.offset)
    with serving(write_config(tmp_path / "d", tiny, max_context=512)) as process, new_drive(old, tmp_path) as new:
        old.unmount()
        with mounted(new.device, old.folder):
            reload(process)
            with old.cut(where):
                check_right(process, scene)
            until(process, is_well)


@contextmanager
def new_drive(old: LoopDrive, tmp_path: Path) -> Iterator[LoopDrive]:
    """Another drive with the same files."""
    with loop_drives([DriveSpec(old.image.stat().st_size)], under=tmp_path) as (new,):
        shutil.copytree(old.folder, new.folder, dirs_exist_ok=True)
        yield new


def refusal(config: Path) -> str:
    """Why the daemon does not start, in words that `serve` and `check` share; neither is to be tried again."""
    checked, served = colibrid("check", "--config", str(config)), colibrid("serve", "--config", str(config))
    assert (checked.returncode, served.returncode) == (78, 78)
    said = served.stderr.strip().splitlines()[-1].partition("colibrid: ")[2]
    assert f"FAIL container  {said}" in checked.stdout
    return said


def test_a_drive_that_is_not_mounted_at_the_start(scene: Scene, on_drive: OnDrive, tmp_path: Path) -> None:
    tiny, drive = on_drive(scene)
    drive.unmount()
    assert "stripe 1" in refusal(write_config(tmp_path / "d", tiny))


def test_a_drive_that_fails_at_the_start(scene: Scene, on_drive: OnDrive, tmp_path: Path) -> None:
    tiny, drive = on_drive(scene)
    for path in drive.folder.glob("*.colibri"):
        drop_cached(path)
    with drive.cut(0):
        said = refusal(write_config(tmp_path / "d", tiny))
    assert said == f"{scene.place(tiny).path}: its header cannot be read: Input/output error"
