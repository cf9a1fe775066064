"""A drive that fails under a running daemon, with the kernel's own errors: who fails, in which words, and who does not.

The last stripe lies on a loop device. Its image is cut short (reads behind the cut are EIO) or changed (checksums fail)
below the file system.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from colibri.daemon.core_errors import fault_place
from colibri.v1 import admin_service_pb2 as admin_pb2
from colibri.v1 import types_pb2
from testkit.asking import Bystander, check_right, victim
from testkit.damage import Extent
from testkit.image_damage import flip_on_drive, is_in_one_piece, on_device
from testkit.loop_drives import LoopDrive, why_not
from testkit.models import Tiny
from testkit.process import Process, serving, write_config
from testkit.scene import Scene
from testkit.service import tokens_of
from testkit.watched import LAST, Device, device, is_degraded, is_well, reload, stats_of, until

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(120)]

Generation = types_pb2.Generation
OnDrive = Callable[[Scene], tuple[Tiny, LoopDrive]]


def check_data_loss(events: list[types_pb2.GenerateEvent], scene: Scene, place: Extent, reason: str) -> None:
    """The victim failed at the bad expert, says where that is, and gave the right tokens until then."""
    finished = events[-1].finished
    assert (finished.state, finished.finish_reason) == (Generation.STATE_FAILED, types_pb2.FINISH_REASON_ERROR)
    error = finished.error
    assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS.value[0], reason)
    named = {name: error.metadata[name] for name in ("layer", "expert", "file", "drive", "offset")}
    assert named == {
        "layer": str(scene.bad.layer),
        "expert": str(scene.bad.expert),
        "file": str(place.path),
        "drive": str(place.path.parent),
        "offset": str(place.offset),
    }
    assert error.metadata["errno"] == (str(errno.EIO) if reason == "EXPERT_UNREADABLE" else "")
    assert tokens_of(events) == scene.victim_answer[: scene.bad.produced]


def check_degraded(process: Process, place: Extent) -> None:
    """The drive is degraded where everybody looks, the other is not; the journal and the status line name it."""
    stats = until(process, is_degraded)
    assert device(stats).path == str(place.path)
    named = fault_place(device(stats).last_error)
    assert (named.stripe, named.file, named.offset) == (LAST, str(place.path), place.offset)
    assert device(stats, stripe=0).state == Device.STATE_OK
    folder = str(place.path.parent)
    assert any(folder in text for text in stats.degraded)
    assert any(folder in text for text in process.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()).degraded)
    assert f"drive {folder} is degraded: " in process.log.read_text()
    process.hear_of(f"degraded: drive {folder}")


def repair(tiny: Tiny, *, source: bool = True) -> None:
    """`colibri-pack repair` in a process of its own, beside the daemon; without `source` from the mirrors alone."""
    stripes = [word for folder in tiny.folders[1:] for word in ("--stripe", str(folder))]
    command = [sys.executable, "-P", "-m", "colibri.packer.cli", "repair", str(tiny.folders[0]), *stripes, "--json"]
    command += ["--source", str(tiny.checkpoint)] if source else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["extents"]


def test_eio_fails_who_needs_the_expert_and_nobody_else(scene: Scene, on_drive: OnDrive, tmp_path: Path) -> None:
    tiny, drive = on_drive(scene)
    place = scene.place(tiny)
    assert is_in_one_piece(place.path)
    with serving(write_config(tmp_path / "d", tiny, max_context=512)) as process:
        with drive.cut(on_device(place.path, place.offset)):
            bystander = Bystander(process, scene)
            check_data_loss(victim(process, scene), scene, place, "EXPERT_UNREADABLE")
            bystander.has_the_right_answer()
            check_degraded(process, place)
            Bystander(process, scene).has_the_right_answer()
            check_data_loss(victim(process, scene), scene, place, "EXPERT_UNREADABLE")  # and no other error by now
        reload(process)
        until(process, is_well)
        check_right(process, scene)


def test_what_the_drive_has_lost_is_repaired_under_the_daemon(scene: Scene, on_drive: OnDrive, tmp_path: Path) -> None:
    tiny, drive = on_drive(scene)
    place = scene.place(tiny)
    kept, size = on_device(place.path, place.offset), drive.image.stat().st_size
    with serving(write_config(tmp_path / "d", tiny, max_context=512)) as process:
        os.truncate(drive.image, kept)
        check_data_loss(victim(process, scene), scene, place, "EXPERT_UNREADABLE")
        os.truncate(drive.image, size)  # a drive that answers again, and has forgotten
        check_data_loss(victim(process, scene), scene, place, "EXPERT_CHECKSUM")
        check_degraded(process, place)
        repair(tiny)
        check_right(process, scene)
        reload(process)
        until(process, is_well)
        Bystander(process, scene).has_the_right_answer()


def test_changed_bytes_fail_who_needs_them_until_they_are_repaired(
    scene: Scene, on_drive: OnDrive, tmp_path: Path
) -> None:
    tiny, drive = on_drive(scene)
    place = scene.place(tiny)
    with serving(write_config(tmp_path / "d", tiny, max_context=512)) as process:
        flip_on_drive(drive, place.path, place.offset + 100)
        bystander = Bystander(process, scene)
        check_data_loss(victim(process, scene), scene, place, "EXPERT_CHECKSUM")
        bystander.has_the_right_answer()
        check_degraded(process, place)
        repair(tiny)
        reload(process)
        until(process, is_well)
        check_right(process, scene)


@pytest.mark.parametrize("fault", ["eio", "bytes"])
def test_the_mirror_answers_for_a_drive_that_fails(
    mirrored: Scene, on_drive: OnDrive, tmp_path: Path, fault: str
) -> None:
    tiny, drive = on_drive(mirrored)
    place = mirrored.place(tiny)
    with serving(write_config(tmp_path / "d", tiny, max_context=512)) as process, ExitStack() as faulty:
        if fault == "eio":
            faulty.enter_context(drive.cut(on_device(place.path, place.offset)))
        else:
            flip_on_drive(drive, place.path, place.offset + 100)
        check_right(process, mirrored)
        check_degraded(process, place)
        seen = device(stats_of(process))
        assert seen.mirror_reads > 0
        assert (seen.errors > 0, seen.checksum_errors > 0) == (fault == "eio", fault == "bytes")
        faulty.close()
        if fault == "bytes":
            repair(tiny, source=False)
        reload(process)
        until(process, is_well)
