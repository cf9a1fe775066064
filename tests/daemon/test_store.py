"""The session store on a real folder: what was acknowledged is there after a restart, and nothing is lost silently."""

import errno
import json
import os
import re
import threading
from pathlib import Path

import pytest

from colibri.daemon.errors import ContentMismatchError, SessionCorruptError, SessionNotFoundError, StoreError
from colibri.daemon.store import writer as writer_module
from colibri.daemon.store.store import SessionStore
from colibri.daemon.store.token_log import Kind
from colibri.daemon.store.writer import Entry
from testkit.sessions import CONTENT, OTHER_CONTENT, Appender, end, new_session, open_store, put_pages, start


def log_path(root: Path, session: str = "alpha") -> Path:
    (path,) = root.glob(f"sessions/*/{session}/tokens.log")
    return path


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


def filled(root: Path) -> None:
    store = open_store(root)
    Appender(store, new_session(store)).turn([1, 2, 3], [10, 11, 12, 13])
    store.close()


def reopened(root: Path) -> tuple[SessionStore, list[int], Appender]:
    store = open_store(root)
    stored, content = store.load("alpha")
    return store, content.tokens, Appender(store, stored, len(content.tokens))


class TestTheFolder:
    def test_a_second_daemon_is_refused_by_name(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        with pytest.raises(StoreError, match=rf"{tmp_path} is in use by another daemon \(process {os.getpid()}\)"):
            open_store(tmp_path)
        store.close()
        open_store(tmp_path).close()

    @pytest.mark.parametrize(
        "text", ['{"version": 2, "models": {}}', "{", "[]", '{"version": 1}', '{"version":1,"models":[]}']
    )
    def test_another_version_or_a_strange_description_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "store.json").write_text(text)
        with pytest.raises(StoreError, match=r"store\.json"):
            open_store(tmp_path)
        assert (tmp_path / "store.json").read_text() == text

    def test_a_refused_folder_is_not_held(self, tmp_path: Path) -> None:
        (tmp_path / "store.json").write_text("{")
        with pytest.raises(StoreError):
            open_store(tmp_path)
        (tmp_path / "store.json").unlink()
        open_store(tmp_path).close()

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="file/state"):
            open_store(tmp_path / "file" / "state")

    def test_what_a_crash_left_half_made_is_removed(self, tmp_path: Path) -> None:
        filled(tmp_path)
        half = tmp_path / "sessions" / "ab" / ".tmp-0123"
        half.mkdir(parents=True)
        (half / "meta.json").write_text("{}")
        (log_path(tmp_path).parent / ".tmp-99").write_text("x")
        store = open_store(tmp_path)
        assert store.ids() == ["alpha"]
        assert not half.exists()
        assert not list(tmp_path.rglob(".tmp-*"))
        store.close()


class TestLogs:
    def test_an_empty_session_is_legal(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        new_session(store)
        store.close()
        store, tokens, appender = reopened(tmp_path)
        assert tokens == []
        assert appender.turn([1], [2]).durable
        store.close()

    def test_acknowledged_tokens_are_there_after_a_restart(self, tmp_path: Path) -> None:
        filled(tmp_path)
        store, tokens, appender = reopened(tmp_path)
        assert tokens == [1, 2, 3, 10, 11, 12, 13]
        assert appender.stored.log.durable_position == 7
        appender.turn([4], [14])
        store.close()
        store, tokens, _ = reopened(tmp_path)
        assert tokens == [1, 2, 3, 10, 11, 12, 13, 4, 14]
        store.close()

    def test_unknown_sessions_are_not_found(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        with pytest.raises(SessionNotFoundError, match="nobody"):
            store.load("nobody")
        store.close()

    def test_durability_says_when_tokens_are_durable(self, tmp_path: Path) -> None:
        expected = {"token": [True, True, True], "turn": [False, False, True], "off": [False, False, False]}
        for policy, answers in expected.items():
            store = open_store(tmp_path / policy, durability=policy)  # type: ignore[arg-type]
            appender = Appender(store, new_session(store))
            appender.add(start(), Entry(Kind.INPUT, (1,)), Entry(Kind.SAMPLED, (2,)))
            appender.add(Entry(Kind.SAMPLED, (3,)))
            appender.add(end(), commit=True)
            assert [result.durable for result in appender.results] == answers
            assert [result.position for result in appender.results] == [2, 3, 3]
            store.close()

    def test_neighbouring_tokens_become_one_record(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        stored = new_session(store)
        gate = Appender(store, stored)
        gate_open = threading.Event()
        store._writer.submit(lambda: assert_set(gate_open))
        for position, token in enumerate([10, 11, 12], 2):
            entries = [Entry(Kind.SAMPLED, (token,))]
            if token == 10:
                entries = [start(), Entry(Kind.INPUT, (1,)), *entries]
            store.append(stored, entries, position, False, gate.results.append)
        gate_open.set()
        store.flush()
        assert [result.position for result in gate.results] == [2, 3, 4]
        store.close()
        store, tokens, _ = reopened(tmp_path)
        assert tokens == [1, 10, 11, 12]
        store.close()


class TestDamage:
    def test_a_torn_tail_is_cut_and_the_session_goes_on(self, tmp_path: Path) -> None:
        filled(tmp_path)
        path = log_path(tmp_path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-5])
        store, tokens, appender = reopened(tmp_path)
        assert tokens == [1, 2, 3, 10, 11, 12, 13]
        assert appender.stored.meta.corrupt is None
        appender.turn([4], [5])
        store.close()
        store, tokens, _ = reopened(tmp_path)
        assert tokens == [1, 2, 3, 10, 11, 12, 13, 4, 5]
        store.close()

    def test_damage_keeps_the_prefix_a_copy_and_a_mark(self, tmp_path: Path) -> None:
        filled(tmp_path)
        path = log_path(tmp_path)
        data = bytearray(path.read_bytes())
        position = data.index((11).to_bytes(4, "little"))
        data[position] ^= 16
        path.write_bytes(data)
        for _ in range(2):  # the mark outlives the process
            store, tokens, appender = reopened(tmp_path)
            mark = appender.stored.meta.corrupt
            assert tokens == [1, 2, 3, 10]
            assert mark is not None
            kept = mark.quarantined
            assert (mark.position, "a valid one follows" in mark.reason) == (4, True)
            assert re.search(r"what follows, \d+ bytes or at most \d+ tokens, is lost$", mark.reason)
            assert (tmp_path / "quarantine" / mark.quarantined).read_bytes() == data
            store.close()
        reason = json.loads((tmp_path / "quarantine" / f"{kept}.reason.json").read_text())
        assert reason["file"] == str(path)
        store, _, appender = reopened(tmp_path)
        store.acknowledge(appender.stored)
        appender.turn([4], [5])
        store.close()
        store, tokens, appender = reopened(tmp_path)
        assert (tokens, appender.stored.meta.corrupt) == ([1, 2, 3, 10, 4, 5], None)
        store.close()

    def test_a_lost_header_leaves_an_empty_session_that_can_start_anew(self, tmp_path: Path) -> None:
        filled(tmp_path)
        path = log_path(tmp_path)
        data = b"\xff" * 20 + path.read_bytes()[20:]
        path.write_bytes(data)
        store, tokens, appender = reopened(tmp_path)
        assert tokens == []
        assert appender.stored.meta.corrupt is not None
        assert path.read_bytes() == data
        store.acknowledge(appender.stored)
        appender.turn([4], [5])
        store.close()
        store, tokens, _ = reopened(tmp_path)
        assert tokens == [4, 5]
        assert len(list((tmp_path / "quarantine").glob("*tokens.log"))) == 1
        store.close()

    @pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 1, "session": 3}'])
    def test_bad_metadata_is_named_and_left_alone(self, tmp_path: Path, text: str) -> None:
        filled(tmp_path)
        path = log_path(tmp_path).with_name("meta.json")
        path.write_text(text)
        store = open_store(tmp_path)
        with pytest.raises(SessionCorruptError, match=r"session alpha cannot be read: meta\.json"):
            store.load("alpha")
        assert path.read_text() == text
        store.close()

    def test_a_log_of_another_session_is_refused(self, tmp_path: Path) -> None:
        filled(tmp_path)
        store = open_store(tmp_path, OTHER_CONTENT)
        stored, content = store.load("alpha")
        assert len(content.tokens) == 7
        with pytest.raises(ContentMismatchError, match="model-11") as caught:
            store.check_content(stored)
        assert caught.value.metadata["content_id"] == OTHER_CONTENT
        assert caught.value.metadata["session_content_id"] == CONTENT
        store.close()


class TestFullAndFailingDrives:
    def test_a_full_disk_keeps_the_records_and_catches_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(tmp_path)
        appender = Appender(store, new_session(store))
        appender.turn([1], [2])

        def full(fd: int, data: bytes, offset: int) -> None:
            os.pwrite(fd, bytes(data)[:5], offset)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(writer_module, "write_all", full)
            refused = appender.add(start(), Entry(Kind.INPUT, (3,)), Entry(Kind.SAMPLED, (4,)))
            assert (refused.position, refused.durable) == (2, False)
            assert "No space left" in refused.error
            assert not store.retry(appender.stored)
        assert appender.stored.log.durable_position == 2
        assert appender.add(Entry(Kind.SAMPLED, (5,))) == writer_module.AppendResult(5, True, "")
        store.close()
        store, tokens, _ = reopened(tmp_path)
        assert tokens == [1, 2, 3, 4, 5]
        store.close()

    def test_it_catches_up_though_somebody_keeps_the_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A log handler that keeps its records (caplog is one) keeps the error, its frames, and what those hold."""
        store = open_store(tmp_path)
        appender = Appender(store, new_session(store))
        appender.turn([1], [2])

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            assert "No space left" in appender.add(start(), Entry(Kind.INPUT, (3,)), Entry(Kind.SAMPLED, (4,))).error
        assert any("token log cannot be written" in record.getMessage() for record in caplog.records)
        assert appender.add(Entry(Kind.SAMPLED, (5,))) == writer_module.AppendResult(5, True, "")
        store.close()

    def test_an_unforeseen_error_ends_one_log_and_whoever_waits_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(tmp_path)
        alpha, beta = (Appender(store, new_session(store, name)) for name in ("alpha", "beta"))
        gate, real = threading.Event(), writer_module.append_backlog

        def hold(_: writer_module.AppendResult) -> None:
            assert_set(gate)

        store.append(alpha.stored, [start()], 0, False, hold)  # so that what follows comes in one round

        def defect(file: writer_module.LogFile, sync: bool) -> bool:
            if file is alpha.stored.log:
                raise ZeroDivisionError
            return real(file, sync)

        answered = threading.Semaphore(0)
        results: dict[str, writer_module.AppendResult] = {}

        def note(name: str, result: writer_module.AppendResult) -> None:
            results[name] = result
            answered.release()

        monkeypatch.setattr(writer_module, "append_backlog", defect)
        store.append(alpha.stored, [Entry(Kind.INPUT, (1,))], 1, False, lambda result: note("alpha", result))
        store.append(beta.stored, [start(), Entry(Kind.INPUT, (1,))], 1, False, lambda result: note("beta", result))
        gate.set()
        assert all(answered.acquire(timeout=10) for _ in range(2))
        assert results["beta"] == writer_module.AppendResult(1, True, "")
        assert not results["alpha"].durable
        assert "ZeroDivisionError" in results["alpha"].error
        assert alpha.stored.log.broken
        store.close()

    @pytest.mark.parametrize("call", ["fdatasync", "close"])
    def test_after_a_failed_sync_the_log_is_never_written_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        store = open_store(tmp_path)
        appender = Appender(store, new_session(store))
        appender.turn([1], [2])
        real = getattr(os, call)

        def fails(fd: int) -> None:
            if call == "close":
                real(fd)
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(os, call, fails)
            result = appender.add(start(), Entry(Kind.INPUT, (3,)), Entry(Kind.SAMPLED, (4,)))
        assert not result.durable
        assert "Input/output error" in result.error
        assert "Input/output error" in appender.add(Entry(Kind.SAMPLED, (5,))).error
        assert not store.retry(appender.stored)
        assert (appender.stored.log.durable_position, appender.stored.log.broken) == (2, True)
        store.close()

    def test_a_full_disk_ends_kv_persistence_of_one_session_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store(tmp_path)
        one, other = new_session(store, "session-one"), new_session(store, "session-two")
        tokens = list(range(130))
        put_pages(store, one, tokens[:64])

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("colibri.daemon.store.files.write_new", full)
            put_pages(store, one, tokens)
        full_text = "KV from position 64 on is not stored: No space left on device; tried again with the next turn"
        assert one.kv_error == full_text
        assert one.kv_position == 64
        put_pages(store, one, tokens)
        assert one.kv_position == 64
        put_pages(store, other, tokens)
        assert (other.kv_position, other.kv_error) == (130, "")
        assert store.store_again(one)
        assert not store.store_again(one)
        put_pages(store, one, tokens)
        assert (one.kv_position, one.kv_error) == (130, "")
        assert Appender(store, one).turn([1], [2]).durable
        store.close()
