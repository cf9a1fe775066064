"""Drives that fail under a daemon: the model, the drives it lies on, the proof that nothing of them stays behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from testkit.leftovers import leftovers
from testkit.loop_drives import DriveSpec, LoopDrive, loop_drives
from testkit.models import Tiny, packed
from testkit.scene import WEIGHTS, Scene, make_scene

ROOM = 16 << 20  # of a drive; the models are smaller

OnDrive = Callable[[Scene], tuple[Tiny, LoopDrive]]


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="session")
def mirrored(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The same with mirrors; the stripes are laid out as without."""
    folder = tmp_path_factory.mktemp("mirrored") / "model"
    return replace(scene, tiny=packed(scene.tiny.checkpoint, folder, "", WEIGHTS, mirror=True))


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path: Path) -> Iterator[None]:
    """No mount, loop device, cgroup or process of a test outlives it."""
    before = set(leftovers(tmp_path))
    yield
    assert set(leftovers(tmp_path)) <= before


@pytest.fixture
def on_drive(tmp_path: Path) -> Iterator[OnDrive]:
    """Copies a scene's model: its last folder onto a new loop drive, the others beside it."""
    with ExitStack() as stack:

        def copy(scene: Scene) -> tuple[Tiny, LoopDrive]:
            (drive,) = stack.enter_context(loop_drives([DriveSpec(ROOM)], under=tmp_path))
            folders = [tmp_path / f"drive{number}" for number in range(len(scene.tiny.folders) - 1)]
            for source, folder in zip(scene.tiny.folders, [*folders, drive.folder], strict=True):
                shutil.copytree(source, folder, dirs_exist_ok=True)
            drive.prefault()
            return Tiny(scene.tiny.checkpoint, (*folders, drive.folder)), drive

        yield copy
