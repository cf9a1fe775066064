"""An expert that is damaged under a running daemon: who fails, with which words, and who does not notice."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from colibri.daemon.lost_files import IS_BACK
from colibri.v1 import admin_service_pb2 as admin_pb2
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2
from testkit.damage import Extent, Need, copy_of, distinct, experts_needed, extents
from testkit.models import Tiny, make_tiny
from testkit.packing import pack_folder
from testkit.process import Process, serving, write_config
from testkit.service import request, tokens_of

Generation = types_pb2.Generation
Stats, Device = admin_pb2.Stats, admin_pb2.Device
VICTIM_TOKENS, BYSTANDER_TOKENS = 12, 60
DATA_LOSS = grpc.StatusCode.DATA_LOSS.value[0]


@dataclass(frozen=True)
class Scene:
    """Two prompts; `bad` is an expert that the victim's answer needs from its token `bad.produced` on, and the
    bystander's not at all."""

    tiny: Tiny
    victim: list[int]
    bystander: list[int]
    bad: Need


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A model of so many experts that two answers differ in theirs."""
    folder = tmp_path_factory.mktemp("scene")
    tiny = make_tiny(
        "qwen3_moe", folder / "model", "", (2, 1), num_experts=96, num_experts_per_tok=1, max_position_embeddings=512
    )
    bystander = [9]
    spared = distinct(experts_needed(tiny, bystander, BYSTANDER_TOKENS, folder / "scratch"))
    for first in range(20, 60):
        for need in experts_needed(tiny, [first, 3], VICTIM_TOKENS, folder / "scratch"):
            if need.produced >= 3 and (need.layer, need.expert) not in spared:
                return Scene(tiny, [first, 3], bystander, need)
    raise AssertionError("no prompt needs an expert that the other does not")


@pytest.fixture
def broken(scene: Scene, tmp_path: Path) -> tuple[Path, Extent]:
    """The configuration of a daemon over a copy of the model, and the place that is to be damaged under it."""
    tiny = copy_of(scene.tiny, tmp_path / "drives")
    place = extents(tiny)[scene.bad.layer, scene.bad.expert][-1]
    return write_config(tmp_path / "d", tiny, max_context=256), place


def create(process: Process, name: str) -> str:
    return str(process.sessions.CreateSession(inference_pb2.CreateSessionRequest(session_id=name)).name)


def right_answers(config: Path, scene: Scene) -> tuple[list[int], list[int]]:
    with serving(config) as process:
        return tuple(  # type: ignore[return-value]
            tokens_of(process.generate(prompt, max_tokens=count))
            for prompt, count in ((scene.victim, VICTIM_TOKENS), (scene.bystander, BYSTANDER_TOKENS))
        )


def test_only_the_generation_that_needs_the_expert_fails_and_its_session_goes_on_after_the_repair(
    scene: Scene, broken: tuple[Path, Extent]
) -> None:
    config, place = broken
    right, bystander = right_answers(config, scene)
    with serving(config) as process:
        place.flip()
        session = create(process, "alpha")
        other = process.inference.Generate(request(scene.bystander, max_tokens=BYSTANDER_TOKENS))
        seen = [next(other)]
        heard: list[types_pb2.GenerateEvent] = []
        reading = threading.Thread(target=lambda: heard.extend(other))
        reading.start()
        events = process.generate(scene.victim, session=session, max_tokens=VICTIM_TOKENS)
        reading.join()

        finished = events[-1].finished
        assert (finished.state, finished.finish_reason) == (Generation.STATE_FAILED, types_pb2.FINISH_REASON_ERROR)
        error = finished.error
        assert (error.code, error.reason) == (DATA_LOSS, "EXPERT_CHECKSUM")
        assert error.metadata["layer"] == str(scene.bad.layer)
        assert error.metadata["expert"] == str(scene.bad.expert)
        assert error.metadata["file"] == str(place.path)
        assert error.metadata["drive"] == str(place.path.parent)
        assert error.metadata["offset"] == str(place.offset)
        assert f"layer {scene.bad.layer} expert {scene.bad.expert}: " in error.message
        kept = tokens_of(events)
        assert kept == right[: scene.bad.produced], "what was produced before is there, and nothing else"
        assert finished.durable_offset == len(kept)

        last = heard[-1].finished
        assert last.state == Generation.STATE_SUCCEEDED
        assert tokens_of(seen + heard) == bystander

        again = process.inference.GetGeneration(inference_pb2.GetGenerationRequest(name=finished.name))
        assert again.error == error
        position = process.sessions.GetSession(inference_pb2.GetSessionRequest(name=session)).position
        assert position == len(scene.victim) + len(kept)

        place.flip()
        after = tokens_of(process.generate([7], session=session, max_tokens=10))
        assert after == tokens_of(process.generate([*scene.victim, *kept, 7], max_tokens=10))


def test_the_session_of_a_failed_turn_goes_on_after_a_restart_too(scene: Scene, broken: tuple[Path, Extent]) -> None:
    config, place = broken
    with serving(config) as process:
        place.flip()
        session = create(process, "alpha")
        kept = tokens_of(process.generate(scene.victim, session=session, max_tokens=VICTIM_TOKENS))
        assert len(kept) == scene.bad.produced
    place.flip()
    with serving(config) as process:
        position = process.sessions.GetSession(inference_pb2.GetSessionRequest(name=session)).position
        assert position == len(scene.victim) + len(kept)
        after = tokens_of(process.generate([7], session=session, max_tokens=10))
        straight = tokens_of(process.generate([*scene.victim, *kept, 7], max_tokens=10))
        assert after == straight


def test_a_turn_that_fails_before_its_first_token_leaves_the_session_as_it_was(
    scene: Scene, broken: tuple[Path, Extent]
) -> None:
    config, place = broken
    with serving(config) as process:
        right = tokens_of(process.generate(scene.victim, max_tokens=VICTIM_TOKENS))
    prompt = [*scene.victim, *right]  # its prefill needs the expert
    with serving(config) as process:
        place.flip()
        session = create(process, "alpha")
        finished = process.generate(prompt, session=session, max_tokens=3)[-1].finished
        assert (finished.error.code, finished.next_offset) == (DATA_LOSS, 0)
        assert process.sessions.GetSession(inference_pb2.GetSessionRequest(name=session)).position == 0
        place.flip()
        assert process.generate(prompt, session=session, max_tokens=3)[-1].finished.state == Generation.STATE_SUCCEEDED


def test_a_stripe_that_is_cut_short_under_the_daemon_fails_what_reaches_behind_its_end(
    scene: Scene, broken: tuple[Path, Extent]
) -> None:
    config, place = broken
    with serving(config) as process:
        whole = place.path.read_bytes()
        with place.path.open("r+b") as file:
            file.truncate(place.offset + 512)
        finished = process.generate(scene.victim, max_tokens=VICTIM_TOKENS)[-1].finished
        assert finished.state == Generation.STATE_FAILED
        assert finished.error.code == DATA_LOSS
        assert re.search(r"stripe \d \(.*\) ends at offset \d+", finished.error.message)
        assert finished.error.metadata["file"] == str(place.path)
        with place.path.open("r+b") as file:
            file.write(whole)
        assert process.generate(scene.victim, max_tokens=VICTIM_TOKENS)[-1].finished.state == Generation.STATE_SUCCEEDED


def snapshot(process: Process) -> admin_pb2.Stats:
    call = process.admin.WatchStats(admin_pb2.WatchStatsRequest())
    stats: admin_pb2.Stats = next(call)
    call.cancel()
    return stats


def until_state(process: Process, state: admin_pb2.Stats.State) -> admin_pb2.Stats:
    until = time.monotonic() + 30
    while (stats := snapshot(process)).state != state:
        assert time.monotonic() < until, stats
        time.sleep(0.1)
    return stats


def until_degraded(process: Process, wanted: Callable[[list[str]], bool]) -> None:
    """Returns once what is degraded is as wanted."""
    until = time.monotonic() + 30
    while not wanted(told := list(snapshot(process).degraded)):
        assert time.monotonic() < until, told
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["gone", "of another pack"])
def test_a_stripe_that_a_reload_cannot_open_is_named_until_one_can(
    scene: Scene, broken: tuple[Path, Extent], tmp_path: Path, how: str
) -> None:
    config, place = broken
    aside = tmp_path / "aside"
    with serving(config) as process:
        until_state(process, Stats.STATE_READY)
        place.path.rename(aside)
        if how == "of another pack":
            pack_folder(scene.tiny.checkpoint, [tmp_path / "p0", tmp_path / "p1"])
            shutil.copyfile(tmp_path / f"p{place.path.name[-9]}" / place.path.name, place.path)
        process.popen.send_signal(signal.SIGHUP)
        (told,) = until_state(process, Stats.STATE_DEGRADED).degraded
        assert told.startswith("a stripe cannot be opened again, reload or restart once it is back: ")
        assert str(place.path) in told
        answer = process.generate(scene.victim, max_tokens=VICTIM_TOKENS)
        assert answer[-1].finished.state == Generation.STATE_SUCCEEDED, "the file that it has is read on"
        aside.rename(place.path)
        process.popen.send_signal(signal.SIGHUP)
        assert list(until_state(process, Stats.STATE_READY).degraded) == []


def test_a_reload_says_that_a_stripe_that_was_lost_at_the_start_needs_a_restart(scene: Scene, tmp_path: Path) -> None:
    folders = [tmp_path / "p0", tmp_path / "p1"]
    pack_folder(scene.tiny.checkpoint, folders, mirror=True)
    folders[1].rename(tmp_path / "away")
    folders[1].mkdir()
    tiny = Tiny(scene.tiny.checkpoint, tuple(folders))
    with serving(write_config(tmp_path / "d", tiny, max_context=256)) as process:
        degraded = list(until_state(process, Stats.STATE_DEGRADED).degraded)
        assert any("stripe 1 is lost" in told for told in degraded)
        shutil.rmtree(folders[1])
        (tmp_path / "away").rename(folders[1])
        process.popen.send_signal(signal.SIGHUP)
        process.hear("RELOADING=1")
        until = time.monotonic() + 30
        while "reload: what was lost at the start is used again after a restart: " not in process.log.read_text():
            assert time.monotonic() < until, process.log.read_text()
            time.sleep(0.1)
        back = [f"{told}; {IS_BACK}" for told in degraded]
        until_degraded(process, lambda now: now == back)
        (folders[1] / "stripe-001.colibri").rename(tmp_path / "away")
        process.popen.send_signal(signal.SIGHUP)
        lost = next(told for told in degraded if "stripe 1 is lost" in told)
        until_degraded(process, lambda now: lost in now)


@pytest.mark.parametrize("how", ["in place", "another file"])
def test_a_degraded_drive_is_named_until_a_reload_finds_it_repaired(
    scene: Scene, broken: tuple[Path, Extent], how: str
) -> None:
    config, place = broken
    drive, answer = place.path.parent, {"max_tokens": VICTIM_TOKENS}
    with serving(config) as process:
        assert until_state(process, Stats.STATE_READY).devices[0].state == Device.STATE_OK
        place.flip()
        assert process.generate(scene.victim, **answer)[-1].finished.state == Generation.STATE_FAILED
        stats = until_state(process, Stats.STATE_DEGRADED)
        (bad,) = [device for device in stats.devices if device.state == Device.STATE_DEGRADED]
        assert bad.path == str(place.path)
        assert bad.checksum_errors > 0
        assert f"layer {scene.bad.layer} expert {scene.bad.expert}" in bad.last_error
        assert list(stats.degraded) == [f"drive {drive}: {bad.last_error}"]
        process.hear_of(f"degraded: drive {drive}: ")

        process.popen.send_signal(signal.SIGHUP)
        process.hear("RELOADING=1")
        time.sleep(2.5)
        assert snapshot(process).state == Stats.STATE_DEGRADED, "nothing was repaired"

        if how == "another file":
            repaired = place.path.with_name("repaired")
            shutil.copyfile(place.path, repaired)
            Extent(repaired, place.offset, place.bytes).flip()
            repaired.rename(place.path)
        else:
            place.flip()
        process.popen.send_signal(signal.SIGHUP)
        stats = until_state(process, Stats.STATE_READY)
        assert list(stats.degraded) == []
        assert process.generate(scene.victim, **answer)[-1].finished.state == Generation.STATE_SUCCEEDED
        logged = process.log.read_text().splitlines()
        assert len([line for line in logged if f"drive {drive} is degraded: " in line]) == 1
        assert len([line for line in logged if f"drive {drive} is well again" in line]) == 1
        assert process.popen.poll() is None
