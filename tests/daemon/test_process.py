"""A real daemon over a real container: readiness, memory, signals, second daemons, and coming back after kill -9."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from colibri.core.container import open_container
from colibri.v1 import admin_service_pb2 as admin_pb2
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2
from testkit.models import Tiny, make_tiny, some_tokens
from testkit.process import Process, colibrid, serving, write_config
from testkit.service import request, tokens_of

Generation = types_pb2.Generation
LONG_PROMPT = 3000
MOST_AGAIN = 64 + 1  # positions that are computed again after kill -9: one page and one position
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 7},
}


def create(process: Process, name: str) -> str:
    made = process.sessions.CreateSession(inference_pb2.CreateSessionRequest(session_id=name))
    return str(made.name)


def position(process: Process, session: str) -> int:
    return int(process.sessions.GetSession(inference_pb2.GetSessionRequest(name=session)).position)


def stored(process: Process, session: str) -> int:
    """Positions whose keys and values are on the drive."""
    return int(process.sessions.GetSession(inference_pb2.GetSessionRequest(name=session)).kv_position)


def test_ready_means_it_answers_and_it_stays_within_its_plan(tmp_path: Path, tiny: Tiny) -> None:
    config = write_config(tmp_path, tiny)
    plan = colibrid("plan", "--json", "--config", str(config))
    assert plan.returncode == 0, plan.stderr
    with serving(config) as process:
        assert process.health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        prompt = some_tokens(300)
        first = process.generate(prompt, max_tokens=16)
        assert len(tokens_of(first)) == 16
        for seed in range(20):
            process.generate(prompt[seed:], max_tokens=4, sampling={"temperature": 1.0, "seed": seed})
        assert tokens_of(process.generate(prompt, max_tokens=16)) == tokens_of(first)
        usage = first[-1].finished.usage
        assert usage.prompt_tokens == 300
        assert usage.expert_hits + usage.expert_loads > 0
        planned = json.loads(plan.stdout)["planned_bytes"]
        assert process.status("RssAnon") <= planned + max(planned // 50, 64 << 20)
        assert "experts in" in process.log.read_text()
        assert process.end() == 0
        process.hear("STOPPING=1")
    assert not (tmp_path / "d.sock").exists()


def test_c04_health_answers_while_the_core_works_on_a_long_prompt(tmp_path: Path, tiny: Tiny) -> None:
    with serving(write_config(tmp_path, tiny, max_context=8192, pass_tokens=8192)) as process:
        done: list[types_pb2.GenerateEvent] = []
        asked = request(some_tokens(LONG_PROMPT), max_tokens=1)
        reading = threading.Thread(target=lambda: done.extend(process.inference.Generate(asked)))
        reading.start()
        slowest, checks = 0.0, 0
        while reading.is_alive():
            began = time.monotonic()
            process.health.Check(health_pb2.HealthCheckRequest())
            slowest, checks = max(slowest, time.monotonic() - began), checks + 1
            time.sleep(0.05)
        reading.join()
        assert done[-1].finished.state == Generation.STATE_SUCCEEDED
        assert any(event.progress.prompt_tokens_done > 0 for event in done)
        assert checks >= 5
        assert slowest < 0.5


@pytest.mark.parametrize("how", ["greedy", "seeded"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_comes_back_after_an_end_in_mid_answer_and_goes_on_the_same(
    tmp_path: Path, tiny: Tiny, number: signal.Signals, how: str
) -> None:
    prompt, follow_up = some_tokens(150), some_tokens(10, start=40)
    config = write_config(tmp_path, tiny)
    with serving(config) as process:
        session = create(process, "alpha")
        call = process.inference.Generate(request(prompt, session=session, max_tokens=800, sampling=SAMPLING[how]))
        seen: list[types_pb2.GenerateEvent] = []
        durable = 0
        for event in call:
            seen.append(event)
            durable = max(durable, event.durable_offset)
            if durable >= 40:
                break
        on_drive = stored(process, session)
        code = process.end(number)
        if number is signal.SIGTERM:
            assert code == 0
            seen += list(call)
            assert seen[-1].finished.state == Generation.STATE_PAUSED
            durable = seen[-1].durable_offset
            assert durable == seen[-1].next_offset
    produced = tokens_of(seen)
    with serving(config) as process:
        name = seen[0].started.name
        found = process.inference.GetGeneration(inference_pb2.GetGenerationRequest(name=name))
        assert found.state == Generation.STATE_PAUSED
        kept = found.next_offset
        assert kept >= durable > 0
        at = position(process, session)
        assert at == len(prompt) + kept
        after = process.generate(follow_up, session=session, max_tokens=24, sampling=SAMPLING[how])
        cached = after[-1].finished.usage.cached_prompt_tokens
        assert cached >= at - (1 if number is signal.SIGTERM else MOST_AGAIN)
        assert cached >= on_drive
        twin = create(process, "twin")
        straight = process.generate(prompt, session=twin, max_tokens=int(kept), sampling=SAMPLING[how])
        assert tokens_of(straight)[: len(produced)] == produced[:kept]
        again = process.generate(follow_up, session=twin, max_tokens=24, sampling=SAMPLING[how])
        assert tokens_of(again) == tokens_of(after)


def killed_in_mid_answer(process: Process, session: str, given: list[int], durable: int, delay: float) -> list[int]:
    """Kills the daemon `delay` seconds after it called `durable` tokens of an answer durable; what was read of it."""
    seen: list[types_pb2.GenerateEvent] = []
    last = 0
    for event in process.inference.Generate(request(given, session=session, max_tokens=900)):
        seen.append(event)
        last = max(last, event.durable_offset)
        if last >= durable:
            break
    time.sleep(delay)
    process.end(signal.SIGKILL)
    assert last >= durable, "the answer ended before it was to be interrupted"
    return tokens_of(seen)


@pytest.mark.parametrize(("prompt_tokens", "most"), [(20, 500), (600, 1)], ids=["long answer", "long prompt"])
def test_a_killed_daemon_recomputes_a_page_and_a_position_at_most_whenever_it_is_killed(
    tmp_path: Path, tiny: Tiny, prompt_tokens: int, most: int
) -> None:
    """Several kills, each in the answer to a prompt that goes on where the last one broke off."""
    config = write_config(tmp_path, tiny, max_context=8192)
    moments = random.Random(most)
    history: list[int] = []
    for number in range(3):
        given = some_tokens(prompt_tokens, start=17 * number)
        with serving(config) as process:
            session = create(process, "alpha") if not number else "sessions/alpha"
            read = killed_in_mid_answer(process, session, given, moments.randint(1, most), moments.random() * 0.05)
        with serving(config) as process:
            kept = position(process, session)
            assert kept > len(history) + len(given)
            after = process.generate([3], session=session, max_tokens=1)
            usage = after[-1].finished.usage
            assert usage.prompt_tokens == kept + 1
            assert kept - MOST_AGAIN <= usage.cached_prompt_tokens < kept
            # The same without an interruption, and without anything stored: equal, token for token.
            produced = kept - len(history) - len(given)
            straight = process.generate([*history, *given], max_tokens=produced)
            assert tokens_of(straight)[: len(read)] == read[:produced]
            history += [*given, *tokens_of(straight), 3]
            assert tokens_of(process.generate(history, max_tokens=1)) == tokens_of(after)
            history += tokens_of(after)
            assert position(process, session) == len(history)


def test_a_killed_daemon_that_was_idle_recomputes_one_position(tmp_path: Path, tiny: Tiny) -> None:
    config = write_config(tmp_path, tiny)
    with serving(config) as process:
        session = create(process, "alpha")
        process.generate(some_tokens(100), session=session, max_tokens=50)
        until = time.monotonic() + 20
        while stored(process, session) < 149:
            assert time.monotonic() < until
            time.sleep(0.02)
        process.end(signal.SIGKILL)
    with serving(config) as process:
        after = process.generate([5], session=session, max_tokens=1)
        assert after[-1].finished.usage.cached_prompt_tokens == 149
        assert after[-1].finished.usage.prompt_tokens == 151


def test_a_second_daemon_on_the_socket_or_the_state_folder_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    config = write_config(tmp_path, tiny)
    with serving(config) as process:
        second = colibrid("serve", "--config", str(config))
        assert second.returncode == 75
        assert f"d.sock is in use by another daemon (process {process.popen.pid})" in second.stderr
        elsewhere = colibrid("serve", "--config", str(config), "--listen", f"unix:{tmp_path}/other.sock")
        assert elsewhere.returncode == 75
        assert f"state is in use by another daemon (process {process.popen.pid})" in elsewhere.stderr
        assert not (tmp_path / "other.sock").exists()
        assert process.generate([5], max_tokens=1)[-1].finished.state == Generation.STATE_SUCCEEDED


def test_signals_that_come_twice_or_in_mid_flight_do_no_harm(tmp_path: Path, tiny: Tiny) -> None:
    with serving(write_config(tmp_path, tiny)) as process:
        call = process.inference.Generate(request(some_tokens(20), max_tokens=900))
        next(call)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            process.popen.send_signal(number)
        events = list(call)
        assert events[-1].finished.state in (Generation.STATE_PAUSED, Generation.STATE_SUCCEEDED)
        assert process.popen.wait(20) == 0


def test_loopback_tcp_is_served_and_a_taken_port_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    config = write_config(tmp_path, tiny, listen="127.0.0.1:0")
    with serving(config) as process:
        bound = next(line for line in process.log.read_text().splitlines() if "listening on" in line).split()[-1]
        with grpc.insecure_channel(bound) as channel:
            from colibri.v1 import admin_service_pb2_grpc

            stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
            assert stub.GetServerInfo(admin_pb2.GetServerInfoRequest()).vocab_size == 139
        second = colibrid("serve", "--config", str(config), "--listen", bound, "--state", str(tmp_path / "other"))
        assert second.returncode == 75
        assert f"{bound} cannot be bound" in second.stderr


def test_a_damaged_expert_stands_in_the_log_the_status_and_the_server_s_info(tmp_path: Path) -> None:
    tiny = make_tiny("glm4_moe", tmp_path / "model", precision="")
    config = write_config(tmp_path / "d", tiny, max_context=256)
    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        extents = [record[0] for record in container.extents(0)]
        path = container.stripe_paths[int(extents[0]["stripe"])]
        damaged = [int(e["file_offset"]) + 100 for e in extents if int(e["stripe"]) == int(extents[0]["stripe"])]
    with path.open("r+b") as file:
        for offset in damaged:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
    with serving(config) as process:
        for start in range(3):
            last = process.generate(some_tokens(40, start=start), max_tokens=2)[-1]
            assert (last.finished.state, last.finished.error.reason) == (Generation.STATE_FAILED, "EXPERT_CHECKSUM")
        process.hear_of(f"degraded: drive {path.parent}: layer ")
        (said,) = process.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()).degraded
        assert re.match(rf"drive {path.parent}: layer \d+ expert \d+: .* of stripe \d+ \({path}\) fail", said)
        errors = [line for line in process.log.read_text().splitlines() if "ERROR" in line]
        assert len([line for line in errors if f"drive {path.parent} is degraded: " in line]) == 1
        logged = [line for line in errors if " is degraded: " not in line]
        assert logged
        for line in logged:
            assert re.search(rf"layer \d+ expert \d+: \d+ bytes at offset \d+ of stripe \d+ \({path}\) fail", line)
        experts = [re.search(r"layer \d+ expert \d+", line)[0] for line in logged]  # type: ignore[index]
        assert len(experts) == len(set(experts)), "each is logged once a minute"


def test_what_routing_taught_is_read_ahead_after_a_restart_and_shown(tmp_path: Path, tiny: Tiny) -> None:
    config = write_config(tmp_path, tiny, expert_slots=6, pins="on")
    with serving(config) as process:
        first = tokens_of(process.generate(some_tokens(30), max_tokens=40))
        call = process.admin.WatchStats(admin_pb2.WatchStatsRequest(expert_heat=True))
        heat = next(call).expert_heat
        call.cancel()
        assert len(heat) == 16
        assert max(heat) == 255
    assert (tmp_path / "state" / "heat.bin").exists()
    with serving(config) as process:
        assert "heat of" in process.log.read_text()
        until = time.monotonic() + 20
        while True:
            (stats,) = [next(process.admin.WatchStats(admin_pb2.WatchStatsRequest(expert_heat=True)))]
            if not stats.warming and sum(device.reads for device in stats.devices):
                break
            assert time.monotonic() < until, stats
            time.sleep(0.05)
        assert stats.expert_heat == heat
        assert tokens_of(process.generate(some_tokens(30), max_tokens=40)) == first
    off = write_config(tmp_path, tiny, expert_slots=6, pins="off")
    with serving(off) as process:
        stats = next(process.admin.WatchStats(admin_pb2.WatchStatsRequest(expert_heat=True)))
        assert (max(stats.expert_heat), sum(device.reads for device in stats.devices)) == (0, 0)
