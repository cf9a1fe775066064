"""Law 1 for streaming: every way in which an expert's bytes may come into memory gives the same logits.

A `Way` is one combination: which container (as packed, moved onto other drives, repaired), how many copies of it and
whether the first can be read, the back end, checksums, lookahead, learned heat, and beside them what the other matrix
has, too: slots, threads, how the prompt is cut, company. `run_way` runs the text on it, compares the logits of every
position with the plainest way's (testkit.law1), and proves by counters that the way was taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

import numpy as np

from colibri.core.container import Container, open_container
from colibri.core.core import Model
from colibri.core.core_options import IoBackend, Switch, Verify
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.repair import repair
from colibri.packer.restripe import plan_move, restripe
from testkit.damage import copy_of, extents
from testkit.law1 import Case, Course, Walk, companions
from testkit.models import F32, OPTIONS, Tiny, packed
from testkit.pairwise import Value

BACKENDS: tuple[IoBackend, ...] = ("io_uring", "threads")
VERIFY: tuple[Verify, ...] = get_args(Verify)
LOOKAHEAD: tuple[Switch, ...] = ("on", "off")
# Fields of Way. copies: one; two; the second, because the first is damaged wherever that can be noticed.
DIMENSIONS: Mapping[str, tuple[Value, ...]] = {
    "container": ("packed", "restriped", "repaired"),
    "copies": ("one", "two", "second"),
    "backend": BACKENDS,
    "verify": VERIFY,
    "lookahead": LOOKAHEAD,
    "heat": ("learned", "empty"),
    "slots": ("half", "smallest", "all"),
    "threads": (2, 1),
    "cut": (0, 7),
    "company": (1, 4),
}
WARM_US = 20_000


@dataclass(frozen=True, order=True)
class Way:
    """A value of each of DIMENSIONS."""

    container: str
    copies: str
    backend: IoBackend
    verify: Verify
    lookahead: Switch
    heat: str
    slots: str
    threads: int
    cut: int
    company: int

    @classmethod
    def of(cls, row: Mapping[str, Value]) -> "Way":
        """What a row of a covering array means."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class Streamed:
    """A model in all its containers, by (container, whether it has mirrors); what must come out of it; the heat that
    the text leaves behind."""

    packs: Mapping[tuple[str, bool], Tiny]
    case: Case
    heat: F32


@dataclass(frozen=True)
class Weights:
    """Weights of the drives of a container when it is packed, and after its move."""

    packed: tuple[int, ...]
    moved: tuple[int, ...]


# ---- the containers --------------------------------------------------------------------------------------------------


def make_containers(checkpoint: Path, folder: Path, precision: str, weights: Weights) -> dict[tuple[str, bool], Tiny]:
    """Pack, move and repair, without and with mirrors, below the new `folder`."""
    folder.mkdir()
    made = {}
    for mirror in (False, True):
        below = folder / ("mirrored" if mirror else "plain")
        below.mkdir()
        first = packed(checkpoint, below / "packed", precision, weights.packed, mirror=mirror)
        made["packed", mirror] = first
        made["restriped", mirror] = moved(first, below / "restriped", weights.moved, mirror=mirror)
        made["repaired", mirror] = repaired(first, below / "repaired")
    return made


def moved(tiny: Tiny, folder: Path, weights: Sequence[int], *, mirror: bool) -> Tiny:
    """The container on len(weights) other drives."""
    folders = tuple(folder / f"drive{number}" for number in range(len(weights)))
    folder.mkdir()
    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        restripe(container, plan_move(container.manifest, weights, mirror=mirror), folders)
    return Tiny(tiny.checkpoint, folders)


def repaired(tiny: Tiny, folder: Path) -> Tiny:
    """A copy of the container that was damaged everywhere and then repaired; its stripes are to the bit what they were.

    Every second expert is damaged, and the last stripe is lost as a whole.
    """
    copy = copy_of(tiny, folder)
    for record in list(extents(copy).values())[::2]:
        record[0].flip()
    lost = copy.folders[-1] / f"stripe-{len(copy.folders) - 1:03}.colibri"
    lost.unlink()
    with Checkpoint.open(copy.checkpoint) as checkpoint:
        done = repair(copy.folders[0], copy.folders[1:], checkpoint)
    assert done.extents
    assert not done.remains
    for original, again in zip(tiny.folders, copy.folders, strict=True):
        for path in original.glob("*.colibri"):
            assert (again / path.name).read_bytes() == path.read_bytes(), path
    return copy


def damage_first_copies(container: Container, verify: Verify) -> None:
    """Under an open model: cut every stripe in its middle, and change every second extent before that where checksums
    are compared at the first read."""
    for number, path in enumerate(container.stripe_paths):
        places = [e for layer in range(len(container.manifest.expert_layers)) for e in container.extents(layer).ravel()]
        offsets = sorted(int(e["file_offset"]) for e in places if int(e["stripe"]) == number)
        middle = offsets[len(offsets) // 2]
        with path.open("r+b") as file:
            file.truncate(middle)
            for offset in offsets[: len(offsets) // 2 : 2] if verify != "never" else []:
                file.seek(offset + 50)
                (byte,) = file.read(1)
                file.seek(offset + 50)
                file.write(bytes([byte ^ 0x08]))


# ---- one way ---------------------------------------------------------------------------------------------------------


def learned_heat(tiny: Tiny, case: Case) -> F32:
    """The heat after the text has been decoded once."""
    subject, reference = case
    with _model(tiny, expert_slots=subject.experts) as (_, model):
        Walk(model, reference, Course(0, 1, False), [], "the text whose heat is learned").whole()
        return model.export_heat()


@contextmanager
def _model(tiny: Tiny, **changes: object) -> Iterator[tuple[Container, Model]]:
    with (
        open_container(tiny.folders[0], tiny.folders[1:]) as container,
        Model(container, replace(OPTIONS, **changes)) as model,  # type: ignore[arg-type]
    ):
        model.load()
        yield container, model


def run_way(way: Way, streamed: Streamed, folder: Path) -> None:
    """Run the text on a copy of the container in the new `folder`; raises AssertionError where anything differs."""
    subject, reference = streamed.case
    tiny = copy_of(streamed.packs[way.container, way.copies != "one"], folder)
    options = {
        "expert_slots": subject.slots(way.slots),
        "threads": way.threads,
        "ring_slots": 2,
        "io_backend": way.backend,
        "verify": way.verify,
        "lookahead": way.lookahead,
    }
    with _model(tiny, **options) as (container, model):
        if way.copies == "second":
            damage_first_copies(container, way.verify)
        if way.heat == "learned":
            read = warm(model, streamed.heat)
            assert (read > 0) == (way.slots != "smallest"), way  # what is needed at once has the only slot
        course = Course(way.cut, way.company, False)
        Walk(model, reference, course, companions(model, reference.text, [course]), str(way)).whole()
        check_counters(way, model, subject.experts)


def warm(model: Model, heat: F32) -> int:
    """Take the heat over, and read what it asks for; return how many bytes that were."""
    assert np.count_nonzero(heat) > 0
    model.import_heat(heat)
    while model.warm(WARM_US):
        pass
    return model.stats().expert_bytes


def check_counters(way: Way, model: Model, experts: int) -> None:
    """The way was really taken."""
    stats, drives = model.stats(), model.drive_stats()
    assert {drive.backend for drive in drives} == {way.backend}, way
    assert {drive.mirror for drive in drives} == {way.copies != "one"}, way
    assert all((drive.mirror_reads > 0) == (way.copies == "second") for drive in drives), (way, drives)
    assert any(drive.degraded for drive in drives) == (way.copies == "second"), way
    assert (stats.expert_evictions > 0) == (way.slots != "all"), (way, stats)
    if way.slots != "all":
        assert stats.expert_loads > experts, (way, stats)  # something was read again
    looked = way.lookahead == "on" and way.slots != "all"  # with all of them in memory there is nothing to look for
    assert (stats.lookahead_predicted > 0) == looked, (way, stats)
    if way.slots == "half":  # with the smallest number the drive may never have time for it
        assert (stats.lookahead_loads > 0) == looked, (way, stats)
