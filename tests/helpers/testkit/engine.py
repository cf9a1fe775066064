"""An engine over a real state folder and a model of the test's choice, with restarts and crashes."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colibri.daemon.engine import Engine, EngineOptions, page_identity
from colibri.daemon.generation import Generation, GenerationSpec, GenerationState, GenerationView
from colibri.daemon.store.store import SessionStore
from colibri.daemon.store.writer import Durability
from testkit.fake_model import FakeModel

EVER = 30.0  # seconds after which a test has failed


class Bench:
    """`model` may be replaced between a stop and a start. After a stop everything that the model opened is closed."""

    def __init__(
        self, root: Path, model: FakeModel | None = None, durability: Durability = "token", **options: Any
    ) -> None:
        self.root = root / "state"
        self.model = model or FakeModel()
        self._durability: Durability = durability
        self._options = EngineOptions(**options)
        self.start()

    def start(self) -> None:
        self.store = SessionStore(self.root, page_identity(self.model), "fake", self._durability)
        self.engine = Engine(self.model, self.store, self._options)
        self.engine.start()

    def stop(self) -> None:
        assert self.engine.drain(EVER)
        self.store.close()
        assert self.model.open_sequences == []
        assert self.model.open_prefills == []

    def restart(self, model: FakeModel | None = None) -> None:
        self.stop()
        self.model = model or FakeModel()
        self.start()

    def crash(self, copy: Path, model: FakeModel | None = None, **options: Any) -> Bench:
        """Another bench on a copy of what is on the drive at one moment, as after kill -9; this one goes on."""
        at_rest, copied = threading.Semaphore(0), threading.Event()

        def rest() -> None:
            at_rest.release()
            copied.wait(EVER)

        self.store._writer.submit(rest)
        self.store._syncer.then(rest)
        assert at_rest.acquire(timeout=EVER)
        assert at_rest.acquire(timeout=EVER)
        shutil.copytree(self.root, copy / "state", copy_function=shutil.copy2)
        copied.set()
        _link_pages(copy / "state")
        return Bench(copy, model, **options)

    def spec(self, tokens: Sequence[int], session: str | None = None, **fields: Any) -> GenerationSpec:
        fields.setdefault("request_id", str(uuid.uuid4()))
        fields.setdefault("max_tokens", 5)
        return GenerationSpec(input_ids=tuple(tokens), session=session, **fields)

    def submit(self, tokens: Sequence[int], session: str | None = None, **fields: Any) -> Generation:
        return self.engine.submit(self.spec(tokens, session, **fields))

    def run(self, tokens: Sequence[int], session: str | None = None, **fields: Any) -> list[int]:
        """The tokens of a generation that succeeds."""
        generation = self.submit(tokens, session, **fields)
        view = generation.result(EVER)
        assert view.state is GenerationState.SUCCEEDED, view.error
        return generation.tokens()


def _link_pages(root: Path) -> None:
    """A copied folder has lost its hard links: make them again, as the file system of a crashed machine has them."""
    for link in root.glob("sessions/*/*/kv/*.kvp"):
        page = root / "pages" / link.name[:2] / link.name
        if page.exists():  # a page that another session found bad is not among the shared ones any more
            link.unlink()
            link.hardlink_to(page)


def until(generation: Generation, count: int) -> GenerationView:
    """Waits until `count` tokens were produced, or the end."""
    view = generation.view()
    while view.next_offset < count and not view.state.finished:
        view = generation.wait_sync(view.version, EVER)
    return view
