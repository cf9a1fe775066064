"""Damage to a packed model, expert by expert, and which experts a generation needs.

Flips bytes in the stripe files of a container, also under a daemon that serves it; the same flip again is the repair.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.core.container import open_container
from colibri.core.core import Row
from colibri.core.core import Sequence as CoreSequence
from colibri.core.errors import CorruptError
from colibri.daemon.core_errors import fault_place
from colibri.daemon.opening import open_text
from testkit.models import GREEDY, Tiny, opened


@dataclass(frozen=True)
class Need:
    """An expert that a generation reads first when `produced` tokens are out."""

    produced: int
    layer: int
    expert: int


@dataclass(frozen=True)
class Extent:
    path: Path
    offset: int
    bytes: int

    def flip(self) -> None:
        """Changes one byte; twice is nothing."""
        with self.path.open("r+b") as file:
            file.seek(self.offset + 100)
            byte = file.read(1)[0]
            file.seek(self.offset + 100)
            file.write(bytes([byte ^ 0x40]))


def extents(tiny: Tiny) -> dict[tuple[int, int], list[Extent]]:
    """The extents of every expert, by (layer of the model, expert)."""
    found: dict[tuple[int, int], list[Extent]] = {}
    with open_container(tiny.folders[0], tiny.folders[1:], lock=False) as container:
        for index, layer in enumerate(container.manifest.expert_layers):
            for expert, row in enumerate(container.extents(index)):
                found[layer.layer, expert] = [
                    Extent(container.stripe_paths[int(e["stripe"])], int(e["file_offset"]), int(e["bytes"]))
                    for e in row
                ]
    return found


def copy_of(tiny: Tiny, folder: Path) -> Tiny:
    """The same container again, in folders below `folder`."""
    copies = []
    for number, source in enumerate(tiny.folders):
        copies.append(Path(shutil.copytree(source, folder / f"drive{number}")))
    return Tiny(tiny.checkpoint, tuple(copies))


def experts_needed(tiny: Tiny, prompt: Sequence[int], count: int, scratch: Path) -> list[Need]:
    """Which experts the greedy answer of `count` tokens to `prompt` reads, in the order of their first use."""
    with Needs(tiny, scratch) as needs:
        return needs.of(prompt, count)


class Needs:
    """Finds out which experts an answer reads, on a copy below `scratch` in which every expert is damaged.

    Each failure names one that is needed, and it is healed until the answer is there. The first answer's needs are
    complete; a later one's may lack an expert that an earlier answer has left in one of the few slots.
    """

    def __init__(self, tiny: Tiny, scratch: Path, expert_slots: int = 0) -> None:
        """`expert_slots` 0: as many as there are experts, for one answer."""
        self._scratch = scratch
        copy = copy_of(tiny, scratch)
        self._places = extents(copy)
        for record in self._places.values():
            record[0].flip()
        with open_container(tiny.folders[0], tiny.folders[1:], lock=False) as container:
            banned = tuple(open_text(container).banned_ids())  # the daemon never answers with these
        self._opened = opened(copy, expert_slots=expert_slots or len(self._places), banned_tokens=banned)
        self._model = self._opened.__enter__()

    def of(self, prompt: Sequence[int], count: int) -> list[Need]:
        """In the order of first use; see the class."""
        needs: list[Need] = []
        sequence = self._model.sequence()
        token = self._prefilled(sequence, prompt, needs)
        for produced in range(1, count):
            row = Row(sequence, token, GREEDY)
            self._model.step([row], [])
            while row.error is not None:
                self._heal(row.error, produced, needs)
                row = Row(sequence, token, GREEDY)
                self._model.step([row], [])
            token = row.next_token
        sequence.close()
        for need in needs:
            self._places[need.layer, need.expert][0].flip()
        return needs

    def _prefilled(self, sequence: CoreSequence, prompt: Sequence[int], needs: list[Need]) -> int:
        while True:
            cursor = self._model.prefill(sequence, prompt, GREEDY)
            while not cursor.done and cursor.error is None:
                self._model.step([], [cursor])
            error, token = cursor.error, cursor.next_token
            cursor.close()
            if error is None:
                return token
            self._heal(error, 0, needs)

    def _heal(self, error: Exception, produced: int, needs: list[Need]) -> None:
        assert isinstance(error, CorruptError), error
        place = fault_place(str(error))
        assert place.layer is not None
        assert place.expert is not None
        needs.append(Need(produced, place.layer, place.expert))
        self._places[place.layer, place.expert][0].flip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, value, trace)
        shutil.rmtree(self._scratch)


def distinct(needs: Iterable[Need]) -> set[tuple[int, int]]:
    return {(need.layer, need.expert) for need in needs}
