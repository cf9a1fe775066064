"""The engine on the real core with a tiny packed model: what is produced does not depend on how it came about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from colibri.core.container import open_container
from colibri.core.core import Model, ModelOptions
from colibri.daemon.core_model import CoreModel
from colibri.daemon.engine import Engine, page_identity
from colibri.daemon.errors import ExpertChecksumError
from colibri.daemon.generation import Generation, GenerationSpec, GenerationState, SamplingSpec
from colibri.daemon.store.store import SessionStore
from testkit.models import Tiny, make_tiny, some_tokens

EVER = 60.0
OPTIONS = ModelOptions(
    expert_slots=3, ring_slots=2, kv_pages=12, max_context=256, pass_tokens=50, max_rows=4, max_prefills=1
)
HOT = SamplingSpec(temperature=0.9, top_k=40, top_p=0.95, seed=11)
TURNS = [some_tokens(90), some_tokens(9, start=50), some_tokens(70, start=7)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("glm4_moe", tmp_path_factory.mktemp("engine"), precision="", weights=(1, 1))


@contextmanager
def engine(tiny: Tiny, state: Path, **changes: object) -> Iterator[Engine]:
    options = replace(OPTIONS, **changes)  # type: ignore[arg-type]
    with (
        open_container(tiny.folders[0], tiny.folders[1:]) as container,
        Model(container, options) as model,
    ):
        model.load()
        port = CoreModel(model, options, container.content_id)
        store = SessionStore(state, page_identity(port), "tiny")
        running = Engine(port, store)
        running.start()
        try:
            yield running
        finally:
            assert running.drain(EVER)
            store.close()


def submit(engine: Engine, tokens: list[int], session: str | None = None, count: int = 12) -> Generation:
    return engine.submit(GenerationSpec("", tuple(tokens), HOT, session, max_tokens=count))


def finished(generation: Generation) -> list[int]:
    view = generation.result(EVER)
    assert view.state is GenerationState.SUCCEEDED, view.error
    return generation.tokens()


@pytest.fixture(scope="module")
def expected(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers to TURNS, each turn from nothing: all history in one stateless prompt."""
    answers: list[list[int]] = []
    history: list[int] = []
    with engine(tiny, tmp_path_factory.mktemp("expected"), expert_slots=16, pass_tokens=256) as plain:
        for given in TURNS:
            history += given
            answers.append(finished(submit(plain, history)))
            history += answers[-1]
    assert len({tuple(answer) for answer in answers}) == len(TURNS)
    return answers


def test_a_session_answers_as_one_long_prompt_does(tiny: Tiny, tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(tiny, tmp_path) as running:
        running.create_session("alpha")
        assert [finished(submit(running, given, "alpha")) for given in TURNS] == expected


def test_so_it_does_after_restarts_with_nothing_computed_again(
    tiny: Tiny, tmp_path: Path, expected: list[list[int]]
) -> None:
    position = 0
    for given, answer in zip(TURNS, expected, strict=True):
        with engine(tiny, tmp_path) as running:
            if position == 0:
                running.create_session("alpha")
            generation = submit(running, given, "alpha")
            assert finished(generation) == answer
            view = generation.view()
            assert view.usage.cached_prompt_tokens == max(0, position - 1)
            assert not view.re_prefilled
            stats = running.stats()
            assert stats.prefill_tokens == len(given) + min(1, position)
            assert stats.expert_loads > 0
            position += len(given) + len(answer)


def test_so_it_does_evicted_and_beside_others(tiny: Tiny, tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(tiny, tmp_path, kv_pages=8) as running:
        names = ["alpha", "beta", "gamma"]
        for name in names:
            running.create_session(name)
        for given, answer in zip(TURNS, expected, strict=True):
            generations = [submit(running, given, name) for name in names]
            other = submit(running, some_tokens(30, start=99))
            assert [finished(generation) for generation in generations] == [answer] * 3
            finished(other)
        assert running.stats().kv_pages_used <= 8


def test_a_cancel_in_mid_prompt_leaves_the_session(tiny: Tiny, tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(tiny, tmp_path) as running:
        running.create_session("alpha")
        assert finished(submit(running, TURNS[0], "alpha")) == expected[0]
        victim = submit(running, some_tokens(130, start=77), "alpha")
        running.cancel(victim.name)
        assert victim.result(EVER).state is GenerationState.CANCELLED
        assert running.session("alpha").position == len(TURNS[0]) + 12
        assert finished(submit(running, TURNS[1], "alpha")) == expected[1]


def test_a_damaged_expert_fails_who_needs_it_and_nobody_else(tmp_path: Path) -> None:
    tiny = make_tiny("qwen3_moe", tmp_path, precision="")
    prompts = [some_tokens(4, start=start) for start in range(40)]
    with engine(tiny, tmp_path / "whole") as running:
        whole = [finished(submit(running, prompt, count=2)) for prompt in prompts]
    _damage_one_record(tiny)
    with engine(tiny, tmp_path / "damaged") as running:
        generations = [submit(running, prompt, count=2) for prompt in prompts]
        views = [generation.result(EVER) for generation in generations]
    states = {view.state for view in views}
    assert states == {GenerationState.SUCCEEDED, GenerationState.FAILED}
    for view, generation, tokens in zip(views, generations, whole, strict=True):
        if view.state is GenerationState.SUCCEEDED:
            assert generation.tokens() == tokens
        else:
            assert isinstance(view.error, ExpertChecksumError)
            assert "expert" in view.error.message


def _damage_one_record(tiny: Tiny) -> None:
    """Flips a bit in the middle of one expert's record."""
    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        extent = container.extents(0)[1][0]
        path = container.stripe_paths[int(extent["stripe"])]
        offset = int(extent["file_offset"]) + int(extent["bytes"]) // 2
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
