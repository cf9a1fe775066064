"""The two requests of a scene, put to a running daemon."""

from __future__ import annotations

import threading

from colibri.v1 import types_pb2
from testkit.process import Process
from testkit.scene import BYSTANDER_TOKENS, VICTIM_TOKENS, Scene
from testkit.service import request, tokens_of

Generation = types_pb2.Generation


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
