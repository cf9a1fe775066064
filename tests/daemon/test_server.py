"""The life of a daemon: loading, ready, draining; what answers when, and what the service manager hears."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from colibri.daemon.config import Address
from colibri.daemon.drives import Drives
from colibri.daemon.endpoint import Endpoint, EndpointError, lock_path
from colibri.daemon.errors import EngineFailedError
from colibri.daemon.opening import StartError
from colibri.daemon.runtime import buffered_remark, verify_remark
from colibri.daemon.server import message_limit
from colibri.daemon.stats import RuntimeView
from colibri.v1 import admin_service_pb2 as admin_pb2
from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2
from testkit.drive_counters import Counters
from testkit.fake_model import FakeModel, continuation
from testkit.service import VOCAB, blocked, daemon, first, refused, request, rest, run, tokens_of, until_ready

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_while_loading_health_and_server_info_answer_and_all_else_says_loading(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, wait=False, hold_loading=True) as running:
            await running.channel.channel_ready()
            watch = running.health.Watch(health_pb2.HealthCheckRequest(service="colibri.v1.InferenceService"))
            assert (await watch.read()).status == NOT_SERVING
            info = await running.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            assert info.model == "fake"
            for call in (
                running.inference.Generate(request([5])).read(),
                running.inference.Tokenize(inference_pb2.TokenizeRequest(text="x")),
                running.sessions.ListSessions(inference_pb2.ListSessionsRequest()),
            ):
                refusal = await refused(call)
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING")
                assert refusal.retry
                assert "3.00 of 6.00 GiB" in refusal.message
            running.runtime.loading.set()
            await until_ready(running)
            assert (await watch.read()).status == SERVING
            assert tokens_of(await running.generate(tokens=[5])) == continuation([5], 5, vocab=VOCAB)
            running.server.stop()
            assert (await watch.read()).status == NOT_SERVING

    run(work)


def test_a_signal_while_loading_ends_it_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, wait=False, hold_loading=True) as running:
            await running.channel.channel_ready()
            running.server.stop()
            assert await asyncio.wait_for(running.running, 4) == 0
            assert running.server.loading_abandoned

    run(work)


@pytest.mark.parametrize("second_signal", [False, True])
def test_draining_pauses_what_runs_tells_its_streams_and_keeps_the_tokens(tmp_path: Path, second_signal: bool) -> None:
    async def work() -> None:
        async with daemon(tmp_path, FakeModel(vocab_size=VOCAB, item_seconds=0.02)) as running:
            name = await running.session()
            calls = [
                running.inference.Generate(request([5, 6], session=name, max_tokens=200)),
                running.inference.Generate(request([7], max_tokens=200)),
            ]
            heads = [await first(call, "delta") for call in calls]
            running.server.stop()
            if second_signal:
                running.server.stop()
            for head, call in zip(heads, calls, strict=True):
                events = [head, *(await rest(call))]
                finished = events[-1].finished
                assert finished.state == types_pb2.Generation.STATE_PAUSED
                assert len(tokens_of(events)) == finished.next_offset > 0
            kept = tokens_of([heads[0], *[]])
            assert await asyncio.wait_for(running.running, 10) == 0
        async with daemon(tmp_path) as running:
            position = await running.position(name)
            assert running.runtime.engine is not None
            log = running.runtime.engine.session_tokens("alpha")
            assert position == len(log) > 3
            assert log == [5, 6, *continuation([5, 6], position - 2, vocab=VOCAB)]
            assert log[2 : 2 + len(kept)] == kept
            events = await running.generate(tokens=[9], session=name)
            assert tokens_of(events) == continuation([*log, 9], 5, vocab=VOCAB)
            assert events[-1].finished.usage.cached_prompt_tokens == position - 1

    run(work)


def test_while_draining_new_calls_are_told_to_come_back(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB)
        async with daemon(tmp_path, model) as running:
            gate = blocked(model)
            call = running.inference.Generate(request([5]))
            await first(call, "started")
            await asyncio.sleep(0.05)
            running.server.stop()
            while running.server.phase != "draining":
                await asyncio.sleep(0.01)
            refusal = await refused(running.inference.Generate(request([6])).read())
            assert (refusal.code, refusal.reason, refusal.retry) == (grpc.StatusCode.UNAVAILABLE, "DRAINING", True)
            gate.set()
            assert (await rest(call))[-1].finished.state == types_pb2.Generation.STATE_PAUSED

    run(work)


def test_a_load_that_fails_gives_its_exit_code(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, wait=False, hold_loading=True) as running:

            def fail() -> None:
                raise StartError("dense.safetensors is damaged", 78)

            running.runtime.load = fail  # type: ignore[method-assign]
            assert await asyncio.wait_for(running.running, 5) == 78

    run(work)


def test_an_engine_that_dies_ends_the_daemon_with_an_error(tmp_path: Path) -> None:
    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB)

        def broken() -> None:
            raise RuntimeError("the model is broken")

        async with daemon(tmp_path, model) as running:
            model.before_step = broken
            events = await running.generate(tokens=[5])
            assert events[-1].finished.state == types_pb2.Generation.STATE_FAILED
            assert events[-1].finished.error.reason == EngineFailedError.reason
            assert "the model is broken" in events[-1].finished.error.message
            assert await asyncio.wait_for(running.running, 5) == 1

    run(work)


def test_a_generation_that_fails_alone_leaves_the_daemon_alive(tmp_path: Path) -> None:
    from colibri.core.errors import StorageError

    async def work() -> None:
        model = FakeModel(vocab_size=VOCAB)
        file = "/drives/b/stripe-001.colibri"
        text = f"layer 1 expert 3: reading stripe 1 ({file}) at offset 4096 failed: Input/output error (errno 5)"

        def fail(*_: object) -> None:
            raise StorageError(text)

        async with daemon(tmp_path, model) as running:
            healthy, model.before_item = model.before_item, fail
            finished = (await running.generate(tokens=[5]))[-1].finished
            assert finished.error.reason == "EXPERT_UNREADABLE"
            assert finished.error.code == grpc.StatusCode.DATA_LOSS.value[0]
            assert finished.error.message == text
            assert dict(finished.error.metadata) == {
                "layer": "1",
                "expert": "3",
                "stripe": "1",
                "drive": "/drives/b",
                "file": file,
                "offset": "4096",
                "errno": "5",
            }
            model.before_item = healthy
            assert (await running.generate(tokens=[5]))[-1].finished.state == types_pb2.Generation.STATE_SUCCEEDED

    run(work)


# ---- the address


def address(path: Path) -> Address:
    return Address(f"unix:{path}", path)


def test_a_socket_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "below" / "d.sock"
    owner = Endpoint(address(path))
    with pytest.raises(EndpointError, match=r"in use by another daemon \(process \d+\)") as refusal:
        Endpoint(address(path))
    assert refusal.value.busy
    owner.release()
    owner.release()
    Endpoint(address(path)).release()


def test_a_socket_left_by_a_killed_daemon_is_replaced_but_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    endpoint = Endpoint(address(path))
    assert not path.exists()
    endpoint.release()
    path.write_text("precious")
    with pytest.raises(EndpointError, match="exists and is not a socket"):
        Endpoint(address(path))
    assert path.read_text() == "precious"
    path.unlink()
    Endpoint(address(path)).release()
    assert lock_path(path).exists()


def test_a_folder_that_cannot_hold_a_socket_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EndpointError, match=r"file.*(Not a directory|File exists)") as refusal:
        Endpoint(address(tmp_path / "file" / "d.sock"))
    assert not refusal.value.busy


def test_the_message_limit_grows_with_the_context() -> None:
    assert message_limit(4096) == 64 << 20
    assert message_limit(1 << 20) > 1 << 26


@pytest.mark.parametrize("direct", ["auto", "on", "off"])
@pytest.mark.parametrize("buffered", [False, True])
def test_c17_reads_through_the_page_cache_are_remarked_where_nobody_asked_for_them(direct: str, buffered: bool) -> None:
    drives = Drives([Path("/a/stripe-000.colibri"), Path("/b/stripe-001.colibri")])
    drives.update([Counters(), Counters(direct=not buffered)])
    remark = buffered_remark(direct, drives.views())
    assert bool(remark) == (direct == "auto" and buffered)
    assert not remark or remark.endswith("from stripe 1 (/b/stripe-001.colibri)")


def test_a_weaker_check_of_experts_is_remarked() -> None:
    assert verify_remark("always") == ""
    assert "verify = first" in verify_remark("first")
    assert "verify = never" in verify_remark("never")


def test_c17_a_remark_of_the_runtime_stands_in_the_status_line_and_in_the_server_s_info(tmp_path: Path) -> None:
    async def work() -> None:
        async with daemon(tmp_path, wait=False, hold_loading=True) as running:
            remark = "stripe 1 is read through the page cache"
            running.runtime.view = RuntimeView(remarks=(remark,))
            running.runtime.loading.set()
            await until_ready(running)
            async with asyncio.timeout(10):
                while f"degraded: {remark}" not in running.server.status:
                    await asyncio.sleep(0.05)
            info = await running.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            assert list(info.degraded) == [remark]
            running.runtime.view = RuntimeView()
            async with asyncio.timeout(10):
                while (await running.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())).degraded:
                    await asyncio.sleep(0.05)

    run(work)


def test_a_session_that_is_not_stored_any_more_says_so_to_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def work() -> None:
        async with daemon(tmp_path) as running:
            name = await running.session()
            asked = inference_pb2.GetSessionRequest(name=name)
            assert (await running.sessions.GetSession(asked)).degraded == ""
            with monkeypatch.context() as patched:
                patched.setattr("colibri.daemon.store.writer.write_all", full)
                await running.generate(tokens=[5], session=name)
                assert "No space left" in (await running.sessions.GetSession(asked)).degraded
                async with asyncio.timeout(10):
                    info = admin_pb2.GetServerInfoResponse()
                    while not any("session alpha: " in reason for reason in info.degraded):
                        await asyncio.sleep(0.05)
                        info = await running.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())

    run(work)
