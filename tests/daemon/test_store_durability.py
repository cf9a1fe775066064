"""Pages between write and sync: there after a kill, checked after a power cut, promised only when they are synced."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colibri.daemon.store.pages import PageChain, PageName
from colibri.daemon.store.store import SessionStore, StoredSession
from colibri.daemon.store.token_log import Kind
from colibri.daemon.store.writer import Entry
from testkit.sessions import Appender, end, new_session, open_store, page_bytes, put_pages, spoil, start

TOKENS = list(range(1000, 1150))  # two full pages and one of 22
EVER = 20.0


class Gate:
    """Holds a thread of the store at a piece of work until it is opened."""

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._open = threading.Event()
        submit(self._wait)

    def _wait(self) -> None:
        assert self._open.wait(EVER)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    made = open_store(tmp_path / "state")
    yield made
    made.close()


def names_of(store: SessionStore, tokens: list[int]) -> list[PageName]:
    chain = PageChain(store.identity)
    return [chain.name(tokens, first // 64, min(64, len(tokens) - first)) for first in range(0, len(tokens), 64)]


def queue_pages(store: SessionStore, stored: StoredSession, tokens: list[int]) -> list[PageName]:
    """Stores pages, and waits until they are written."""
    names = names_of(store, tokens)
    for name in names:
        store.put_page(stored, name, page_bytes(name))
    store._writer.flush()
    return names


def copied(store: SessionStore, target: Path) -> SessionStore:
    """A store on what is there now, as a killed process leaves it."""
    shutil.copytree(store.folder.root, target)
    for link in target.glob("sessions/*/*/kv/*.kvp"):
        link.unlink()
        link.hardlink_to(target / "pages" / link.name[:2] / link.name)
    return open_store(target)


def with_log(store: SessionStore) -> StoredSession:
    """A session whose log holds TOKENS."""
    stored = new_session(store)
    Appender(store, stored).turn(TOKENS[:-1], TOKENS[-1:])
    return stored


def is_page(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".kvp")


class TestKill:
    def test_written_pages_are_used_and_only_synced_ones_promised(self, store: SessionStore, tmp_path: Path) -> None:
        stored = with_log(store)
        gate = Gate(store._syncer.then)
        names = queue_pages(store, stored, TOKENS)
        assert (stored.kv_position, stored.waiting, len(stored.links)) == (0, {}, 3)
        other = copied(store, tmp_path / "killed")
        found, content = other.load("alpha")
        assert other.cached_pages(found, content.tokens, None) == names
        assert found.kv_position == 150  # checked and synced by now
        other.close()
        gate.open()
        store.flush()
        assert stored.kv_position == 150

    def test_what_a_killed_daemon_left_is_synced_before_it_is_promised(
        self, store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(store._syncer.then)
        queue_pages(store, with_log(store), TOKENS)
        other = copied(store, tmp_path / "killed")
        gate.open()
        store.flush()
        synced: list[str] = []
        real = os.fdatasync

        def note(fd: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", note)
        for expected in ([name.file for name in names_of(store, TOKENS)], []):  # and not a second time
            assert other.load("alpha")[0].kv_position == 150
            assert synced == expected
            synced.clear()
        other.close()

    def test_pages_beyond_the_log_are_synced_when_they_are_used(self, store: SessionStore, tmp_path: Path) -> None:
        """A prompt that was not committed, and comes again."""
        gate = Gate(store._syncer.then)
        names = queue_pages(store, new_session(store), TOKENS)
        other = copied(store, tmp_path / "killed")
        gate.open()
        found, _ = other.load("alpha")
        assert found.kv_position == 0
        assert [other.read_page(found, name) for name in names] == [page_bytes(name) for name in names]
        other.flush()
        assert found.kv_position == 150
        other.close()

    def test_records_do_not_overtake_the_pages_of_their_session(
        self, store: SessionStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order: list[str] = []
        real = store._pages.write

        def write(folder: Path, name: PageName, page: bytes) -> None:
            order.append(f"page {name.first}")
            real(folder, name, page)

        monkeypatch.setattr(store._pages, "write", write)
        alpha, beta = new_session(store, "alpha"), new_session(store, "beta")
        entries = [start(), Entry(Kind.INPUT, (1,)), Entry(Kind.SAMPLED, (2,))]
        gate = Gate(store._writer.submit)
        for name in names_of(store, TOKENS[:128]):
            store.put_page(alpha, name, page_bytes(name))
        store.append(alpha, entries, 2, False, lambda _: order.append("alpha"))
        store.append(beta, entries, 2, False, lambda _: order.append("beta"))
        gate.open()
        store.flush()
        assert order == ["beta", "page 0", "page 64", "alpha"]

    def test_replaced_pages_stay_until_the_new_ones_are_synced(self, store: SessionStore) -> None:
        stored = new_session(store)
        tail = put_pages(store, stored, TOKENS[:10])[0]
        gate = Gate(store._syncer.then)
        names = queue_pages(store, stored, TOKENS[:70])
        store.keep_pages(stored, names)
        store._writer.flush()
        path = stored.folder / "kv" / tail.file
        assert path.exists()
        assert stored.kv_position == 10
        gate.open()
        store.flush()
        assert not path.exists()
        assert stored.kv_position == 70

    def test_a_dropped_page_that_is_taken_up_again_stays(self, store: SessionStore) -> None:
        stored = new_session(store)
        names = put_pages(store, stored, TOKENS)
        gate = Gate(store._syncer.then)
        store.keep_pages(stored, names[:1])
        assert store.cached_pages(stored, TOKENS, None) == names[:1]
        queue_pages(store, stored, TOKENS[:128])
        gate.open()
        store.flush()
        assert [store.read_page(stored, name) for name in names[:2]] == [page_bytes(name) for name in names[:2]]
        assert stored.kv_position == 128
        assert not (stored.folder / "kv" / names[2].file).exists()

    def test_a_page_that_is_dropped_before_it_is_written_is_not_written(self, store: SessionStore) -> None:
        stored = new_session(store)
        gate = Gate(store._writer.submit)
        for name in names_of(store, TOKENS):
            store.put_page(stored, name, page_bytes(name))
        store.keep_pages(stored, [])
        gate.open()
        store.flush()
        assert (stored.links, stored.waiting, stored.kv_position, stored.pending) == ({}, {}, 0, 0)
        assert list(store.folder.pages.glob("*/*")) == []

    def test_a_session_can_go_while_its_pages_are_on_their_way(
        self, store: SessionStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        stored, other = new_session(store, "session-one"), new_session(store, "session-two")
        for session in (stored, other):
            for name in names_of(store, TOKENS):
                store.put_page(session, name, page_bytes(name))
        store.delete("session-one")
        store.flush()
        assert other.kv_position == 150
        assert caplog.records == []


def cut(whole: bytes, how: str) -> bytes:
    """What a power cut can leave of a page that has its name and was not synced."""
    return {
        "nothing": b"",
        "a piece": whole[:4096],
        "zeros": bytes(len(whole)),
        "no header": bytes(4096) + whole[4096:],
        "header only": whole[:4096] + bytes(len(whole) - 4096),
        "a hole": whole[:4608] + bytes(512) + whole[5120:],
        "zeros at the end": whole[:-300] + bytes(300),
        "other bytes": whole[:5000] + bytes(byte ^ 0x55 for byte in whole[5000:]),
    }[how]


class TestPowerCut:
    @pytest.mark.parametrize("synced", [False, True])
    @pytest.mark.parametrize(
        "how",
        ["nothing", "a piece", "zeros", "no header", "header only", "a hole", "zeros at the end", "other bytes", "old"],
    )
    def test_a_torn_page_is_set_aside_and_the_pages_before_it_are_used(
        self, tmp_path: Path, how: str, synced: bool
    ) -> None:
        root = tmp_path / "state"
        store = open_store(root)
        stored = with_log(store)
        names = put_pages(store, stored, TOKENS)
        store.close()
        torn = root / "pages" / names[1].file[:2] / names[1].file
        whole = torn.read_bytes()
        old = (root / "pages" / names[0].file[:2] / names[0].file).read_bytes()
        spoil(torn, old if how == "old" else cut(whole, how))
        if not synced:  # as the power cut found it
            torn.chmod(0o600)
        store = open_store(root)
        stored, content = store.load("alpha")
        assert content.tokens == TOKENS
        if synced:  # this one was damaged after it had been durable: reading tells
            assert store.read_page(stored, names[1]) is None
        assert stored.kv_position == 64
        assert store.cached_pages(stored, TOKENS, None) == names[:1]
        assert store.read_page(stored, names[0]) == page_bytes(names[0])
        assert len(list((root / "quarantine").glob("*.kvp"))) == 1
        assert not torn.exists()
        put_pages(store, stored, TOKENS)
        store.close()
        store = open_store(root)
        stored, _ = store.load("alpha")
        assert stored.kv_position == 150
        assert [store.read_page(stored, name) for name in names] == [page_bytes(name) for name in names]
        store.close()

    def test_a_torn_page_is_not_shared(self, tmp_path: Path) -> None:
        """Another session with the same beginning comes before the one whose page it was."""
        store = open_store(tmp_path)
        names = put_pages(store, new_session(store), TOKENS)
        store.close()
        torn = tmp_path / "pages" / names[0].file[:2] / names[0].file
        torn.chmod(0o600)
        torn.write_bytes(bytes(torn.stat().st_size))
        store = open_store(tmp_path)
        other = new_session(store, "other")
        put_pages(store, other, TOKENS)
        assert other.kv_position == 150
        assert store.read_page(other, names[0]) == page_bytes(names[0])
        store.close()


class TestFailingSync:
    def test_a_page_whose_sync_fails_is_not_promised_nor_kept_and_the_log_goes_on(
        self, store: SessionStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored, other = new_session(store), new_session(store, "other")
        put_pages(store, stored, TOKENS[:64])
        real = os.fdatasync
        failures: list[int] = []

        def fails_once(fd: int) -> None:
            """The system tells of a lost write once: who asks again is told that all is well."""
            if is_page(fd) and not failures:
                failures.append(fd)
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        gate = Gate(store._syncer.then)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fails_once)
            for session in (stored, other):
                queue_pages(store, session, TOKENS[:128])
            gate.open()
            store.flush()
        assert len(failures) == 1
        assert stored.kv_error == (
            "KV from position 64 on is not stored: Input/output error, nor tried again until the daemon is started anew"
        )
        assert not store.store_again(stored), "after a failed sync nobody knows what is on the drive"
        assert stored.kv_position == 64
        assert other.kv_position == 64
        assert "position 64" in other.kv_error
        assert Appender(store, stored).turn([1], [2]).durable
        third = new_session(store, "third")
        put_pages(store, third, TOKENS[:128])
        assert (third.kv_position, third.kv_error) == (128, "")

    def test_a_folder_that_cannot_be_synced_promises_nothing(
        self, store: SessionStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = new_session(store)

        def fails(_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr("colibri.daemon.store.syncer.sync_folder", fails)
            put_pages(store, stored, TOKENS)
        assert (stored.kv_position, stored.links) == (0, {})
        assert "Input/output error" in stored.kv_error
        appender = Appender(store, stored)
        appender.add(start(), Entry(Kind.INPUT, (1,)), Entry(Kind.SAMPLED, (2,)))
        assert appender.add(end(), commit=True).durable
