"""Law 1 as code: the same tokens through a model in every way that may only decide speed; the same bytes must come out.

An `Opening` is how a model is opened, a `Course` is how the tokens go through it; both together are one combination.
`check_courses` runs courses in one opening and compares the logits of every position, the companions' included, with
those of the plainest way (`case_of`), and so the pages that a restart finds on the drive. `DIMENSIONS` are all
the ways.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from colibri.core.container import open_container
from colibri.core.core import Model, ModelOptions, ModelStats, Row
from colibri.core.core import Sequence as CoreSequence
from colibri.core.core_options import IoBackend, Switch, Verify
from colibri.daemon.core_model import CoreModel
from colibri.daemon.engine import page_identity
from colibri.daemon.model_port import PAGE_POSITIONS
from colibri.daemon.store.pages import PageChain, PageName
from colibri.daemon.store.store import SessionStore
from testkit.models import F32, GREEDY, OPTIONS, Tiny, decode, opened, prefill
from testkit.pairwise import Value
from testkit.sessions import Appender, new_session

STRIPES = (1, 2, 3)
ISAS = ("generic", "avx2")
IO_BACKENDS: tuple[IoBackend, ...] = ("auto", "threads")
OPENED_BY = ("isa", "slots", "stripes", "threads")
VERIFY: tuple[Verify, ...] = ("always", "first", "never")
LOOKAHEAD: tuple[Switch, ...] = ("on", "off")
# Fields of Opening and Course. The cheaper value first: a row of a covering array takes it when nothing depends on it.
DIMENSIONS: Mapping[str, tuple[Value, ...]] = {
    "isa": ISAS[::-1],
    "slots": ("smallest", "half", "all"),
    "stripes": STRIPES,
    "threads": (2, 1),
    "cut": (0, 1, 7, 64),
    "company": (1, 4),
    "resumed": (False, True),
}
SMALLEST_SLOTS = 1
CPU_FLAGS = Path("/proc/cpuinfo")


@dataclass(frozen=True, order=True)
class Opening:
    """How a model is opened: instruction set, stripes it lies on, expert slots, threads."""

    isa: str
    stripes: int
    slots: str
    threads: int


@dataclass(frozen=True, order=True)
class Course:
    """How the tokens go through it. `cut`: tokens in a piece of the prompt, 0: whole. `company`: sequences in a step.
    `resumed`: in the middle the model is closed, and another one goes on from the pages on the drive."""

    cut: int
    company: int
    resumed: bool


@dataclass(frozen=True)
class Text:
    """Tokens, of which the first `prompt` are prefilled and the others decoded; a restart comes after `restart`.
    `companions`: where the three other sequences of a batch stand at first."""

    tokens: list[int]
    prompt: int
    restart: int
    companions: tuple[int, int, int]


@dataclass(frozen=True)
class Subject:
    """A model, packed once for each number of stripes, and the text that goes through it."""

    packs: Mapping[int, Tiny]
    experts: int
    text: Text

    def slots(self, name: str) -> int:
        return {"smallest": SMALLEST_SLOTS, "half": self.experts // 2, "all": self.experts}[name]


@dataclass(frozen=True)
class Reference:
    """What must come out: the logits [tokens, vocab] of the text, and the pages of its first `restart` positions."""

    text: Text
    logits: F32
    pages: list[bytes]


Case = tuple[Subject, Reference]


def machine_has_avx2() -> bool:
    """Whether this CPU has what the AVX2 kernels need; the core must then offer them."""
    return {"avx2", "fma", "f16c"} <= set(CPU_FLAGS.read_text().split())


needs_avx2 = pytest.mark.skipif(not machine_has_avx2(), reason="this CPU has no AVX2")


def combination(row: Mapping[str, Value]) -> tuple[Opening, Course]:
    """What a value for each of DIMENSIONS means."""
    opening = Opening(str(row["isa"]), int(row["stripes"]), str(row["slots"]), int(row["threads"]))
    return opening, Course(int(row["cut"]), int(row["company"]), bool(row["resumed"]))


def full_matrix() -> dict[Opening, list[Course]]:
    """Every opening with every course."""
    matrix: dict[Opening, list[Course]] = {}
    for values in product(*DIMENSIONS.values()):
        opening, course = combination(dict(zip(DIMENSIONS, values, strict=True)))
        matrix.setdefault(opening, []).append(course)
    return matrix


def case_of(packs: Mapping[int, Tiny], text: Text) -> Case:
    """The model that `packs` hold, once for each number of stripes, with what must come out of it."""
    subject = Subject(packs, _experts_of(packs[1]), text)
    return subject, _reference_of(subject)


def _experts_of(tiny: Tiny) -> int:
    """How many expert records the container has, over all layers."""
    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        return sum(layer.experts for layer in container.manifest.expert_layers)


def _reference_of(subject: Subject) -> Reference:
    """The plainest way: generic code, one thread, one stripe, all experts kept, the prompt in one piece, alone."""
    text = subject.text
    with opened(subject.packs[1], isa="generic", threads=1, expert_slots=subject.experts) as model:
        seq, stopped = model.sequence(), model.sequence()
        prompt = prefill(model, seq, text.tokens[: text.prompt])
        answer = decode(model, seq, text.tokens[text.prompt :])
        prefill(model, stopped, text.tokens[: text.restart])
        pages = _exported(stopped)
    return Reference(text, np.concatenate((prompt, answer)), pages)


def check_courses(
    subject: Subject, reference: Reference, opening: Opening, courses: Sequence[Course], folder: Path
) -> set[Course]:
    """Run `courses` in one model, those that are resumed up to the restart, and their rest in a second model.

    Return the courses that ran to their end, every position compared. `folder` takes the sessions.
    """
    finished: set[Course] = set()
    with _running(subject, opening, folder) as (model, store):
        others = companions(model, reference.text, courses)
        for course in courses:
            walk = Walk(model, reference, course, others, f"{opening}, {course}")
            if course.resumed:
                seq = walk.run(model.sequence(), reference.text.restart)
                _keep(store, course, seq, reference, walk.where)
            else:
                walk.run(model.sequence(), len(reference.text.tokens))
                finished.add(course)
            walk.close()
        stats = [model.stats()]
    resumed = [course for course in courses if course.resumed]
    if resumed:
        with _running(subject, opening, folder) as (model, store):
            others = companions(model, reference.text, resumed)
            for course in resumed:
                walk = Walk(model, reference, course, others, f"{opening}, {course}, after the restart")
                walk.run(_brought_back(store, course, model, reference.text), len(reference.text.tokens))
                finished.add(course)
                walk.close()
            stats.append(model.stats())
    _check_counters(subject, opening, stats)
    return finished


def reading(opening: Opening) -> ModelOptions:
    """How the experts of an opening are read; the openings take turns, so that all combinations occur."""
    values = (opening.isa, opening.slots, opening.stripes, opening.threads)
    turns = [DIMENSIONS[name].index(value) for name, value in zip(OPENED_BY, values, strict=True)]
    return replace(
        OPTIONS,
        io_backend=IO_BACKENDS[sum(turns) % 2],
        verify=VERIFY[sum(turns[1:3]) % 3],
        lookahead=LOOKAHEAD[(turns[1] + turns[3]) % 2],
    )


@contextmanager
def _running(subject: Subject, opening: Opening, folder: Path) -> Iterator[tuple[Model, SessionStore]]:
    """A loaded model that is opened in this way, and the store of its sessions."""
    pack = subject.packs[opening.stripes]
    options = replace(
        reading(opening),
        isa=opening.isa,
        threads=opening.threads,
        expert_slots=subject.slots(opening.slots),
        ring_slots=2,
    )
    with open_container(pack.folders[0], pack.folders[1:]) as container, Model(container, options) as model:
        assert len(container.stripe_paths) == opening.stripes
        model.load()
        assert (model.isa, model.stats().threads) == (opening.isa, opening.threads)
        identity = page_identity(CoreModel(model, options, container.content_id))
        store = SessionStore(folder, identity, durability="turn")
        try:
            yield model, store
        finally:
            store.close()


def _check_counters(subject: Subject, opening: Opening, stats: Sequence[ModelStats]) -> None:
    """Over the models of an opening. Too few slots: experts were evicted and, as some model read more often than there
    are experts, read again. Enough: neither."""
    evictions, loads = sum(s.expert_evictions for s in stats), sum(s.expert_loads for s in stats)
    if opening.slots == "all":
        assert evictions == 0, opening
        assert all(0 < s.expert_loads <= subject.experts for s in stats), opening
    else:
        assert evictions > 0, opening
        assert loads > subject.experts * len(stats), opening
    assert all((s.read_errors, s.checksum_errors) == (0, 0) for s in stats), opening


# ---- one course ------------------------------------------------------------------------------------------------------


class Companion:
    """Another sequence in the batch, course after course: it decodes the same text from another place on, and starts
    again at the end."""

    def __init__(self, model: Model, tokens: list[int], start: int) -> None:
        self._model, self._tokens = model, tokens
        self.seq = model.sequence()
        if start:
            prefill(model, self.seq, tokens[:start])

    def row(self) -> Row:
        if self.seq.length == len(self._tokens):
            self.seq.close()
            self.seq = self._model.sequence()
        return Row(self.seq, self._tokens[self.seq.length], GREEDY, want_logits=True)


def companions(model: Model, text: Text, courses: Sequence[Course]) -> list[Companion]:
    """As many as the courses need."""
    needed = max(course.company for course in courses) - 1
    return [Companion(model, text.tokens, start) for start in text.companions[:needed]]


class Walk:
    """The text's way through a model on one course; what comes out is compared step by step."""

    def __init__(
        self, model: Model, reference: Reference, course: Course, others: Sequence[Companion], where: str
    ) -> None:
        self.where = where
        self._model, self._reference, self._course = model, reference, course
        self._companions = others[: course.company - 1]
        self._seq: CoreSequence | None = None

    def run(self, seq: CoreSequence, end: int) -> CoreSequence:
        """Take `seq` from where it stands to the position `end`."""
        self._seq = seq
        while seq.length < end:
            rows = [companion.row() for companion in self._companions]
            positions = [row.seq.length for row in rows]
            stop = min(self._stop(seq.length), end)
            if seq.length < self._reference.text.prompt:
                self._prefill(seq, stop, rows)
            else:
                self._decode(seq, rows)
            assert seq.length == stop, self.where
            for number, (row, position) in enumerate(zip(rows, positions, strict=True)):
                self._check(row, position, f"companion {number}")
        return seq

    def whole(self) -> None:
        """Take a new sequence through the whole text."""
        self.run(self._model.sequence(), len(self._reference.text.tokens))
        self.close()

    def close(self) -> None:
        """Close the sequence: the next course needs its pages."""
        if self._seq is not None:
            self._seq.close()

    def _stop(self, position: int) -> int:
        """Where the piece that begins at `position` ends."""
        prompt, cut = self._reference.text.prompt, self._course.cut
        if position >= prompt:
            return position + 1
        return min(position + cut, prompt) if cut else prompt

    def _prefill(self, seq: CoreSequence, stop: int, rows: list[Row]) -> None:
        start = seq.length
        cursor = self._model.prefill(seq, self._reference.text.tokens[start:stop], GREEDY, all_logits=True)
        self._model.step(rows, [cursor])
        assert cursor.error is None, f"{self.where}: {cursor.error}"
        assert cursor.logits is not None, self.where
        self._compare(cursor.logits, start, "the prompt")
        cursor.close()

    def _decode(self, seq: CoreSequence, others: list[Row]) -> None:
        position = seq.length
        row = Row(seq, self._reference.text.tokens[position], GREEDY, want_logits=True)
        rows = list(others)
        rows.insert(position % (len(others) + 1), row)  # its place in the batch must not matter either
        self._model.step(rows, [])
        self._check(row, position, "the answer")

    def _check(self, row: Row, position: int, who: str) -> None:
        assert row.error is None, f"{self.where}: {who}: {row.error}"
        assert row.logits is not None
        self._compare(row.logits[None], position, who)

    def _compare(self, logits: F32, first: int, who: str) -> None:
        expected = self._reference.logits[first : first + len(logits)]
        assert logits.shape == expected.shape, self.where
        if logits.tobytes() != expected.tobytes():
            (bad,) = (logits.view(np.uint32) != expected.view(np.uint32)).any(axis=1).nonzero()
            raise AssertionError(f"{self.where}: {who}: other logits at positions {(bad + first).tolist()}")


# ---- the restart -----------------------------------------------------------------------------------------------------


def _name(course: Course) -> str:
    return f"cut-{course.cut}-company-{course.company}"


def _exported(seq: CoreSequence) -> list[bytes]:
    return [seq.export_page(index) for index in range(-(-seq.length // PAGE_POSITIONS))]


def _keep(store: SessionStore, course: Course, seq: CoreSequence, reference: Reference, where: str) -> None:
    """Make a session of `seq` on the drive. Its pages are the same bytes, however they came about."""
    tokens = reference.text.tokens[: seq.length]
    pages = _exported(seq)
    assert pages == reference.pages, f"{where}: other KV pages before the restart"
    stored = new_session(store, _name(course))
    assert Appender(store, stored).turn(tokens[:-1], tokens[-1:]).error == ""
    for name, page in zip(_page_names(store, tokens), pages, strict=True):
        store.put_page(stored, name, page)
    store.flush()
    assert stored.kv_error == ""


def _brought_back(store: SessionStore, course: Course, model: Model, text: Text) -> CoreSequence:
    """The sequence of `_keep`, from what the store finds on the drive and has checked."""
    stored, content = store.load(_name(course))
    assert content.tokens == text.tokens[: text.restart]
    seq = model.sequence()
    for name in store.cached_pages(stored, content.tokens, None):
        page = store.read_page(stored, name)
        assert page is not None, f"{course}: page from position {name.first} on was refused"
        seq.import_page(page, name.positions)
    assert seq.length == text.restart
    return seq


def _page_names(store: SessionStore, tokens: list[int]) -> list[PageName]:
    chain = PageChain(store.identity)
    starts = range(0, len(tokens), PAGE_POSITIONS)
    return [chain.name(tokens, index, min(PAGE_POSITIONS, len(tokens) - start)) for index, start in enumerate(starts)]
