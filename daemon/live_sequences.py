"""The sequences that hold the KV of sessions: opened, restored from stored pages, saved page by page, closed.

Owns which sessions have KV in memory and which of their pages the store has been given. Used by the engine's thread
alone. Saving never waits for a drive where it need not: pages that do not fit into the store's queue are offered again
later; only a sequence that must go at once waits for its pages to be taken. Until then the records that would let the
token log run ahead of them are held: the answer goes on, and what of it is called durable lags.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from colibri.daemon.model_port import PAGE_POSITIONS, ModelPort
from colibri.daemon.sessions import HeldRecords, Session
from colibri.daemon.store.pages import PageChain, PageName
from colibri.daemon.store.store import SessionStore

RETRY_SECONDS = 0.02

# What a killed daemon may have to compute again: one page, and the last token, which has no KV yet. The log may be that
# far ahead of the pages that were queued before it.
MOST_AHEAD = PAGE_POSITIONS + 1


class LiveSequences:
    """Keyed by session. `unsaved`: idle ones with pages that the store has not been given yet."""

    def __init__(self, model: ModelPort, store: SessionStore) -> None:
        self._model, self._store = model, store
        self._live: dict[str, Session] = {}
        self._unsaved: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def unsaved(self) -> bool:
        return bool(self._unsaved)

    # ---- opening and restoring

    def open(self, session: Session, prompt: list[int], chain: PageChain) -> list[PageName]:
        """Makes a sequence; returns the pages from which it is to be restored, in order. They may reach into the new
        part of `prompt`, if the daemon ended in the middle of the same prompt before; its last position is left, for
        only a computed position tells what follows."""
        session.sequence = self._model.sequence()
        self._live[session.id] = session
        pages = self._store.cached_pages(session.stored, prompt[:-1], chain)
        session.saved_pages = sum(page.positions == PAGE_POSITIONS for page in pages)
        session.tail = pages[-1] if len(pages) > session.saved_pages else None
        return pages

    def restore(self, session: Session, name: PageName) -> bool:
        """Imports the next page; False if it cannot be used: what comes before it is good, the rest is not."""
        page = self._store.read_page(session.stored, name)
        if page is None:
            session.saved_pages, session.tail = name.first // PAGE_POSITIONS, None
            return False
        assert session.sequence is not None
        session.sequence.import_page(page, name.positions)
        return True

    # ---- closing

    def close(self, session: Session) -> None:
        self._live.pop(session.id, None)
        self._unsaved.pop(session.id, None)
        sequence, session.sequence = session.sequence, None
        self._release(session, every=True)
        if sequence is not None:
            sequence.close()

    def evict(self, session_id: str) -> None:
        session = self._live.get(session_id)
        if session is not None:
            self.save_now(session)
            self.close(session)

    def drop(self, session: Session, keep_prompt: bool) -> None:
        """KV of tokens that were not committed cannot stay in memory; that of those before them is stored, to be
        restored. `keep_prompt`: stored pages of the prompt stay too, for the same prompt may come again."""
        if session.sequence is not None and session.sequence.length >= len(session.tokens):
            self.save_now(session, prune=not keep_prompt)
        self.close(session)

    def close_all(self) -> None:
        for session in list(self._live.values()):
            self.close(session)

    # ---- the log

    def append(self, session: Session, records: HeldRecords) -> None:
        """Gives records to the store, in order, as soon as its pages allow it. Their `position` counts the tokens that
        the log has then."""
        session.held.append(records)
        self._release(session)

    def _release(self, session: Session, every: bool = False) -> None:
        """`every`: there are no pages to wait for."""
        every = every or session.sequence is None or bool(session.stored.kv_error)
        limit = session.saved_pages * PAGE_POSITIONS + MOST_AHEAD
        while session.held and (every or session.held[0].position <= limit):
            records = session.held.popleft()
            self._store.append(session.stored, records.entries, records.position, records.commit, records.on_result)

    # ---- saving

    def keep(self, session: Session) -> None:
        """The session is idle now: its partial page is to be saved too."""
        self._unsaved[session.id] = session

    def resume(self, session: Session) -> None:
        """The session is used again. What a full drive refused is offered again, from the first page that is missing:
        pages are stored as far as the committed tokens reach without a gap."""
        self._unsaved.pop(session.id, None)
        if self._store.store_again(session.stored):
            pages = self._store.cached_pages(session.stored, session.tokens, session.chain)
            session.saved_pages = sum(page.positions == PAGE_POSITIONS for page in pages)
            session.tail = pages[-1] if len(pages) > session.saved_pages else None

    def save_idle(self) -> None:
        for session in list(self._unsaved.values()):
            if self.save(session):
                del self._unsaved[session.id]

    def save_full(self, session: Session, tokens: Sequence[int], chain: PageChain) -> bool:
        """Queues the full pages that are not stored yet, as far as there is room; whether none is left. `tokens` and
        their `chain`: what the sequence holds, a prompt that is not committed yet included."""
        sequence, stored = session.sequence, session.stored
        pages = 0 if sequence is None else min(sequence.length, len(tokens)) // PAGE_POSITIONS
        while sequence is not None and session.saved_pages < pages and not stored.kv_error:
            if not self._store.has_room():
                break
            name = chain.name(tokens, session.saved_pages)
            self._store.put_page(stored, name, sequence.export_page(session.saved_pages))
            session.saved_pages += 1
        self._release(session)
        return session.saved_pages >= pages or bool(stored.kv_error)

    def save(self, session: Session, prune: bool = True) -> bool:
        """Queues all pages of the committed tokens, the partial one too; whether nothing is left. Then other pages are
        removed, if `prune`."""
        sequence = session.sequence
        if not self.save_full(session, session.tokens, session.chain):
            return False
        if sequence is None or session.stored.kv_error:
            return True
        positions = min(sequence.length, len(session.tokens))
        names = session.page_names(positions)
        if positions % PAGE_POSITIONS and names[-1] != session.tail:
            if not self._store.has_room():
                return False
            self._store.put_page(session.stored, names[-1], sequence.export_page(len(names) - 1))
            session.tail = names[-1]
        if session.stored.meta.numerics_id != self._model.numerics_id:
            self._store.note_numerics(session.stored)
        if prune:
            self._store.keep_pages(session.stored, names)
        return True

    def save_now(self, session: Session, prune: bool = True) -> None:
        while not self.save(session, prune):
            time.sleep(RETRY_SECONDS / 4)

    def save_all(self) -> None:
        """Everything there is, down to the drive."""
        for session in list(self._live.values()):
            self.save_now(session)
        self._store.flush()
