"""Learned pins over the life of an engine: taken over at the start, warmed in idle time, stored between steps."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from colibri.daemon.engine import Engine, EngineOptions, page_identity
from colibri.daemon.heat_file import Heat, HeatFile
from colibri.daemon.learned_pins import WARM_BUDGET_US, LearnedPins
from colibri.daemon.model_port import PrefillPort, RowPort
from colibri.daemon.store import files
from colibri.daemon.store.files import Quarantine
from colibri.daemon.store.store import SessionStore
from testkit.engine import EVER, Bench
from testkit.fake_model import CONTENT, FakeModel, continuation

EXPERTS = 6


@dataclass
class Heated(FakeModel):
    """A model that learns 1/1024 of heat for expert 0 with each step, and has `cold` pieces of warming to do."""

    heat: Heat = field(default_factory=lambda: np.zeros(EXPERTS, np.float32))
    cold: int = 0
    budgets: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    warm_seconds: float = 0.0

    def step(self, rows: Sequence[RowPort], prefills: Sequence[PrefillPort], budget_us: int | None) -> None:
        super().step(rows, prefills, budget_us)
        self.heat[0] += 1 / 1024

    def export_heat(self) -> Heat:
        assert not self._busy.locked(), "between steps only"
        self.threads.add(threading.current_thread().name)
        return self.heat.copy()

    def import_heat(self, heat: Heat) -> None:
        self.heat = heat.copy()

    def warm(self, budget_us: int) -> bool:
        assert not self._busy.locked(), "between steps only"
        self.threads.add(threading.current_thread().name)
        self.budgets.append(budget_us)
        time.sleep(self.warm_seconds)
        self.cold = max(0, self.cold - 1)
        return self.cold > 0


class HeatedBench(Bench):
    """An engine that keeps its model's heat beside its sessions."""

    every = 3600.0

    def start(self) -> None:
        self.store = SessionStore(self.root, page_identity(self.model), "fake", "token")
        self.file = HeatFile(self.root, Quarantine(self.root / "quarantine"), CONTENT, EXPERTS)
        assert isinstance(self.model, Heated)
        self.pins = LearnedPins(self.model, self.file, self.every)
        self.pins.begin()
        self.engine = Engine(self.model, self.store, EngineOptions(), upkeep=self.pins)
        self.engine.start()

    def stop(self) -> None:
        assert self.engine.drain(EVER)
        self.pins.close()
        self.store.close()


def wait_for(happened: object) -> None:
    assert callable(happened)
    until = time.monotonic() + EVER
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_heat_is_stored_at_the_end_and_taken_over_and_warmed_up_at_the_next_start(tmp_path: Path) -> None:
    model = Heated()
    bench = HeatedBench(tmp_path, model)
    assert bench.run([5], max_tokens=7) == continuation([5], 7)
    bench.stop()
    learned = model.heat.copy()
    assert learned[0] >= 7 / 1024
    again = Heated(cold=4)
    bench.model = again
    bench.start()
    wait_for(lambda: again.cold == 0 and not bench.pins.warming)
    assert np.array_equal(again.heat, learned)
    assert again.budgets == [WARM_BUDGET_US] * 4
    assert again.threads == {"engine"}
    bench.stop()


def test_without_stored_heat_nothing_is_warmed_before_something_was_learned(tmp_path: Path) -> None:
    model = Heated(cold=3)
    bench = HeatedBench(tmp_path, model)
    time.sleep(0.1)
    assert model.budgets == []
    bench.run([5])
    wait_for(lambda: model.cold == 0)
    bench.stop()


def test_a_request_waits_for_one_piece_of_warming_at_most(tmp_path: Path) -> None:
    model = Heated(warm_seconds=0.03)
    bench = HeatedBench(tmp_path, model)
    bench.run([5])
    model.cold = 10**6
    bench.run([6])  # warming begins behind it, and has no end
    wait_for(lambda: len(model.budgets) > 2)
    before = len(model.budgets)
    assert bench.run([7]) == continuation([7], 5)
    assert len(model.budgets) - before <= 2
    bench.stop()


def test_heat_is_stored_between_steps_while_a_generation_runs_and_while_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeatedBench, "every", 0.05)
    model = Heated(item_seconds=0.002)
    bench = HeatedBench(tmp_path, model)
    running = bench.submit([5], max_tokens=300)
    wait_for(bench.file.path.exists)
    assert not running.view().state.finished
    running.result(EVER)

    def stored() -> bool:
        found = bench.file.load()
        return found is not None and bool(np.array_equal(found, model.heat))

    wait_for(stored)
    bench.stop()


def test_a_full_disk_is_said_once_and_is_over_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HeatedBench, "every", 0.0)
    bench = HeatedBench(tmp_path, Heated())
    with monkeypatch.context() as patched:
        patched.setattr(HeatFile, "save", full)
        assert bench.run([5]) == continuation([5], 5)
        wait_for(lambda: "No space left" in bench.pins.failure)
        bench.run([6])
    bench.run([7])
    wait_for(lambda: bench.pins.failure == "")
    assert len([r for r in caplog.records if "learned pins are not kept" in r.getMessage()]) == 1
    bench.stop()
    assert files.read_all(bench.file.path, 1 << 20)


def test_upkeep_that_fails_ends_and_nothing_else_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Heated):
        def warm(self, budget_us: int) -> bool:  # noqa: ARG002
            raise RuntimeError("no warmth")

    bench = HeatedBench(tmp_path, Broken())
    bench.run([5])
    wait_for(lambda: any("upkeep failed" in record.getMessage() for record in caplog.records))
    assert bench.run([6]) == continuation([6], 5)
    bench.stop()
