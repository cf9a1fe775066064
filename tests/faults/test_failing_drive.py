"""A drive that fails under a running daemon, with the kernel's own errors: who fails, with which words, and who does not.

The last stripe lies on a loop device. Its image is cut short (reads behind the cut are EIO) or changed (checksums fail)
below the file system.
"""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from colibri.v1 import admin_service_pb2 as admin_pb2
from colibri.v1 import types_pb2
from testkit.damage import Extent
from testkit.image_damage import flip_on_drive, is_in_one_piece, on_device
from testkit.loop_drives import LoopDrive, why_not
from testkit.models import Tiny
from testkit.process import Process, serving, write_config
from testkit.scene import BYSTANDER_TOKENS, VICTIM_TOKENS, Scene
from testkit.service import request, tokens_of

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(120)]

Generation = types_pb2.Generation
OnDrive = Callable[[Scene], tuple[Tiny, LoopDrive]]


class Bystander:
    """The other request: it has begun to answer, and its stream is read beside what the test does."""

    def __init__(self, process: Process, scene: Scene) -> None:
        self._scene = scene
        stream = process.inference.Generate(request(scene.bystander, max_tokens=BYSTANDER_TOKENS))
        self._events: list[types_pb2.GenerateEvent] = [next(stream)]
        self._thread = threading.Thread(target=lambda: self._events.extend(stream))
        self._thread.start()

    def has_the_right_answer(self) -> None:
        self._thread.join()
        assert self._events[-1].finished.state == Generation.STATE_SUCCEEDED
        assert tokens_of(self._events) == self._scene.bystander_answer


def victim(process: Process, scene: Scene) -> list[types_pb2.GenerateEvent]:
    return process.generate(scene.victim, max_tokens=VICTIM_TOKENS)


def check_right(process: Process, scene: Scene) -> None:
    events = victim(process, scene)
    assert events[-1].finished.state == Generation.STATE_SUCCEEDED, events[-1]
    assert tokens_of(events) == scene.victim_answer


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


def test_eio_fails_who_needs_the_expert_and_nobody_else(scene: Scene, on_drive: OnDrive, tmp_path: Path) -> None:
    tiny, drive = on_drive(scene)
    place = scene.place(tiny)
    assert is_in_one_piece(place.path)
    with serving(write_config(tmp_path / "d", tiny, max_context=512)) as process:
        with drive.cut(on_device(place.path, place.offset)):
            bystander = Bystander(process, scene)
            check_data_loss(victim(process, scene), scene, place, "EXPERT_UNREADABLE")
            bystander.has_the_right_answer()
        check_right(process, scene)
