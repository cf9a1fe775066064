"""Recordings of routing: a new file each time, ended in order, and a failure that ends nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.core.errors import StorageError
from colibri.core.traces import Trace
from colibri.daemon.engine_loop import NoUpkeep
from colibri.daemon.recording import LOOK_SECONDS, Recording, free_path
from testkit.models import Tiny, some_tokens
from testkit.process import colibrid, serving, write_config
from testkit.service import tokens_of


class Recorder:
    """A model that records on paper. `error`: what stops it; `begin_error`, `end_error`: what its ends say."""

    def __init__(self) -> None:
        self.calls: list[Path | None] = []
        self.error: Exception | None = None
        self.begin_error: Exception | None = None
        self.end_error: Exception | None = None

    def trace(self, path: Path | None) -> None:
        self.calls.append(path)
        if path is not None and self.begin_error is not None:
            raise self.begin_error
        if path is None and self.end_error is not None:
            raise self.end_error

    def trace_error(self) -> Exception | None:
        return self.error


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    wanted = tmp_path / "trace"
    for name in ("trace", "trace.1", "trace.2"):
        assert free_path(wanted) == tmp_path / name
        (tmp_path / name).touch()
    (tmp_path / "trace.3").symlink_to(tmp_path / "nowhere")
    assert free_path(wanted) == tmp_path / "trace.4"


def test_it_ends_once_with_the_engine_or_behind_it(tmp_path: Path) -> None:
    model = Recorder()
    recording = Recording(model, tmp_path / "t", NoUpkeep())
    recording.stop()
    assert model.calls == []
    recording.begin()
    recording.end()
    recording.stop()
    assert model.calls == [tmp_path / "t", None]
    assert recording.failure == ""


def test_a_drive_that_is_full_at_the_start_ends_the_recording_and_not_the_start(tmp_path: Path) -> None:
    model = Recorder()
    model.begin_error = StorageError("t: write: No space left on device")
    recording = Recording(model, tmp_path / "t", NoUpkeep())
    recording.begin()
    assert recording.failure == "the recording of routing has ended: t: write: No space left on device"
    recording.stepped()
    recording.end()
    assert model.calls == [tmp_path / "t"]


def test_what_stops_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    model = Recorder()
    recording = Recording(model, tmp_path / "t", NoUpkeep(), clock=lambda: now)
    recording.begin()
    model.error = StorageError("trace: write failed: No space left on device")
    recording.stepped()
    assert recording.failure == "", "not looked at after every step"
    for _ in range(5):
        now += LOOK_SECONDS
        recording.stepped()
    assert "No space left" in recording.failure
    model.end_error = StorageError("trace: write failed: No space left on device")
    recording.end()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_what_stops_it_behind_the_last_step_is_said_while_nothing_runs(tmp_path: Path) -> None:
    now = 0.0
    model = Recorder()
    recording = Recording(model, tmp_path / "t", NoUpkeep(), clock=lambda: now)
    recording.begin()
    assert recording.idle() is None, "no step, nothing to look for"
    recording.stepped()
    model.error = StorageError("trace: write failed: No space left on device")
    assert recording.idle() == LOOK_SECONDS
    assert recording.failure == ""
    now += LOOK_SECONDS
    assert recording.idle() is None
    assert "No space left" in recording.failure


def test_a_daemon_records_what_it_serves_and_a_restart_begins_a_new_file(tmp_path: Path, tiny: Tiny) -> None:
    config = write_config(tmp_path / "d", tiny, trace=str(tmp_path / "routing"), expert_slots=4)
    answers = []
    for _ in range(2):
        with serving(config) as process:
            answers.append(tokens_of(process.generate(some_tokens(20), max_tokens=12)))
    assert answers[0] == answers[1]
    for name in ("routing", "routing.1"):
        with Trace(tmp_path / name) as trace:
            assert trace.info.is_complete
            assert trace.info.cache_slots == 4
            assert trace.info.accesses > 0


def test_a_recording_that_cannot_begin_is_refused_at_the_start_and_by_check(tmp_path: Path, tiny: Tiny) -> None:
    config = str(write_config(tmp_path / "d", tiny, trace=str(tmp_path / "nowhere" / "routing")))
    served, checked = colibrid("serve", "--config", config), colibrid("check", "--config", config)
    assert (served.returncode, checked.returncode) == (78, 78)
    assert str(tmp_path / "nowhere") in served.stderr
    assert "FAIL trace" in checked.stdout
    assert str(tmp_path / "nowhere") in checked.stdout
