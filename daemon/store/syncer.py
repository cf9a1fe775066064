"""The thread that makes KV pages durable, behind the thread that writes them.

Owns the order of what waits for a drive and not for a token: pages are synced in batches (the bytes of each, then each
folder once), and what builds on their being durable, such as removing the pages that they replace, runs behind them. No
token log is written here, so no log waits for a page's sync.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri.daemon.store.files import sync_folder

log = logging.getLogger("colibri.daemon.store")

MAX_BATCH = 64


@dataclass(frozen=True)
class _Page:
    link: Path
    on_result: Callable[[OSError | None], None]


class Syncer:
    """`sync_page` brings one page's bytes to the drive, or raises OSError."""

    def __init__(self, sync_page: Callable[[Path], None]) -> None:
        self._sync_page = sync_page
        self._queue: deque[_Page | Callable[[], None]] = deque()
        self._busy = False
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="store-syncer", daemon=True)
        self._thread.start()

    # ---- any thread

    def page(self, link: Path, on_result: Callable[[OSError | None], None]) -> None:
        """Syncs a page and the folder that names it; then tells, on this thread, how it went."""
        self._add(_Page(link, on_result))

    def then(self, run: Callable[[], None]) -> None:
        """Runs `run` behind all that was queued before; it reports its own errors."""
        self._add(run)

    def flush(self) -> None:
        """Waits until everything queued so far is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._busy))

    def close(self) -> None:
        """Finishes what is queued and ends the thread. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _add(self, item: _Page | Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(item)
            self._changed.notify_all()

    # ---- the syncer's thread

    def _run(self) -> None:
        while True:
            pages: list[_Page] = []
            job: Callable[[], None] | None = None
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                self._busy = True
                while self._queue and len(pages) < MAX_BATCH and job is None:
                    item = self._queue.popleft()
                    if isinstance(item, _Page):
                        pages.append(item)
                    else:
                        job = item
            try:
                self._sync(pages)
                if job is not None:
                    job()
            except Exception:  # a defect in one session's page must not end the thread that all others need
                log.critical("the store's syncer met an unexpected error", exc_info=True)

    def _sync(self, pages: list[_Page]) -> None:
        results = [_outcome(self._sync_page, page.link) for page in pages]
        folders = {page.link.parent: _outcome(sync_folder, page.link.parent) for page in pages}
        for page, error in zip(pages, results, strict=True):
            page.on_result(error or folders[page.link.parent])


def _outcome(work: Callable[[Path], None], path: Path) -> OSError | None:
    try:
        work(path)
    except OSError as error:
        return error
    return None
