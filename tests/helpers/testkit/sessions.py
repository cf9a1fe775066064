"""Ready-made pieces for the tests of stored sessions: an identity, token sequences, pages, filled stores."""

from __future__ import annotations

import threading
from pathlib import Path

from colibri.daemon.model_port import PAGE_POSITIONS, PageSection
from colibri.daemon.store.meta import SessionMeta
from colibri.daemon.store.pages import PageChain, PageIdentity, PageName
from colibri.daemon.store.store import SessionStore, StoredSession
from colibri.daemon.store.token_log import Kind, encode_json
from colibri.daemon.store.writer import AppendResult, Durability, Entry

CONTENT = "11" * 32
OTHER_CONTENT = "22" * 32
SECTIONS = (PageSection(0, 1, 1, 0, 1000), PageSection(1, 1, 1, 1000, 1048))
IDENTITY = PageIdentity(CONTENT, "1/i16/f16/64", SECTIONS, 2048)


def open_store(root: Path, content_id: str = CONTENT, durability: Durability = "token") -> SessionStore:
    identity = PageIdentity(content_id, IDENTITY.numerics_id, SECTIONS, IDENTITY.page_bytes)
    return SessionStore(root, identity, model=f"model-{content_id[:2]}", durability=durability)


def new_session(store: SessionStore, session: str = "alpha") -> StoredSession:
    return store.create(SessionMeta(session, store.identity.content_id, store.identity.numerics_id, 1.5))


def start(name: str = "g") -> Entry:
    return Entry(Kind.GEN_START, payload=encode_json({"generation": name}))


def end(name: str = "g") -> Entry:
    return Entry(Kind.GEN_END, payload=encode_json({"generation": name}))


class Appender:
    """Appends and keeps what the store answered."""

    def __init__(self, store: SessionStore, stored: StoredSession, position: int = 0) -> None:
        self.store, self.stored, self.position = store, stored, position
        self.results: list[AppendResult] = []

    def add(self, *entries: Entry, commit: bool = False) -> AppendResult:
        """Waits for the answer."""
        answered = threading.Event()

        def on_result(result: AppendResult) -> None:
            self.results.append(result)
            answered.set()

        self.position += sum(len(entry.tokens) for entry in entries)
        self.store.append(self.stored, list(entries), self.position, commit, on_result)
        assert answered.wait(10)
        return self.results[-1]

    def turn(self, given: list[int], sampled: list[int], name: str = "g") -> AppendResult:
        self.add(start(name), Entry(Kind.INPUT, tuple(given)), Entry(Kind.SAMPLED, tuple(sampled[:1])))
        for token in sampled[1:]:
            self.add(Entry(Kind.SAMPLED, (token,)))
        return self.add(end(name), commit=True)


def page_bytes(name: PageName) -> bytes:
    """Some bytes that depend on the page's name."""
    return (name.digest * 64)[: IDENTITY.page_bytes]


def put_pages(store: SessionStore, stored: StoredSession, tokens: list[int]) -> list[PageName]:
    """Stores pages for all positions of `tokens`, and waits."""
    chain = PageChain(store.identity)
    names = []
    for first in range(0, len(tokens), PAGE_POSITIONS):
        name = chain.name(tokens, first // PAGE_POSITIONS, min(PAGE_POSITIONS, len(tokens) - first))
        store.put_page(stored, name, page_bytes(name))
        names.append(name)
    store.flush()
    return names


def spoil(page: Path, data: bytes) -> None:
    """Other bytes in a page file that the store has finished with, and nothing else changed."""
    mode = page.stat().st_mode
    page.chmod(0o600)
    page.write_bytes(data)
    page.chmod(mode)
