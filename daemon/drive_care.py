"""Looks after the drives behind the generations' backs: reads the container slowly while nothing runs, and tries again
what was bad.

Owns the scrub of an idle daemon (a pass a week at a limited rate, paused as soon as anything runs, its position kept in
the state folder) and the recovery of degraded drives: every minute the places that are known to be bad are read again,
and a drive whose places are all right is opened anew and called well. On a thread of its own, so that a drive that
hangs holds nobody up. Never writes to a drive of the container.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from colibri.core.container import Container
from colibri.core.errors import CoreError
from colibri.core.scrub import Finding, Position, Scrub
from colibri.daemon.core_errors import fault_place
from colibri.daemon.drives import Drives
from colibri.daemon.journal import SCRUB_FAULT, fields_of
from colibri.daemon.scrub_file import ScrubFile, ScrubState

log = logging.getLogger("colibri.daemon.scrub")

RETRY_SECONDS = 60.0
IDLE_SECONDS = 60.0  # without anything running, before the scrub begins or goes on
PASS_SECONDS = 7 * 86400.0  # from the beginning of one pass to that of the next
SAVE_SECONDS = 30.0
POLL_SECONDS = 1.0
MAX_REPORTS = 16  # findings of one pass that are told one by one; a dead drive would fill the journal


def describe(finding: Finding) -> str:
    """A finding in the words of the core's errors, so that its place is read as theirs is."""
    whose = "the mirror of " if finding.mirror else ""
    return (
        f"layer {finding.layer} expert {finding.expert}: {finding.bytes} bytes at offset {finding.offset} of "
        f"{whose}stripe {finding.stripe} ({finding.path}): {finding.problem}"
    )


def expert_problem(container: Container, layer: int, expert: int, path: Path) -> str:
    """Reads what `path` has of an expert; what is wrong with it, "" if nothing is."""
    counts = [
        entry.experts * container.extents_per_record(i) for i, entry in enumerate(container.manifest.expert_layers)
    ]
    index = [entry.layer for entry in container.manifest.expert_layers].index(layer)
    pieces = container.extents_per_record(index)
    first = sum(counts[:index]) + expert * pieces
    with Scrub(container, Position(container.manifest.layout.uuid, first)) as scrub:
        while scrub.position.extent < first + pieces:
            step = next(scrub)
            if step.finding is not None and step.path == path:
                return describe(step.finding)
    return ""


class DriveCare:
    """`rate`: bytes per second of the scrub, 0: none. `busy`: whether anything runs. `reopen`: opens degraded stripes
    again, between two steps; raises CoreError. `look_for_lost`: looks whether what was lost at the start is back.
    `clock` never goes back, `now` is Unix time."""

    def __init__(
        self,
        container: Container,
        drives: Drives,
        file: ScrubFile,
        rate: float,
        busy: Callable[[], bool],
        reopen: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        look_for_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._container, self._drives, self._file = container, drives, file
        self._rate, self._busy, self._reopen = rate, busy, reopen
        self._clock, self._now, self._look_for_lost = clock, now, look_for_lost
        self._scrub: Scrub | None = None
        self._state = self._saved = file.load()
        self._saved_at = self._busy_at = clock()
        self._retry_at = float("-inf")
        self._found = 0
        self._unsaved = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drives", daemon=True)
        self.failure = ""  # why there is no care any more

    def start(self) -> None:
        for stripe, text in self._state.bad:
            self._drives.found_bad(stripe, text)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread behind the extent that it reads, and stores how far it was."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)  # a drive that hangs keeps its thread; the process ends without it

    def retry_now(self) -> None:
        """Reads the bad places again within a second; any thread."""
        self._retry_at = float("-inf")

    @property
    def fraction(self) -> float | None:
        """Of the pass under way, None without one; any thread."""
        scrub = self._scrub
        return None if scrub is None else scrub.done_bytes / max(1, scrub.total_bytes)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.once()):
                pass
            self._save()
        except Exception as error:
            self.failure = f"drives are not looked after any more: {error!r}"
            log.exception("the care of the drives failed; there is none until the next start")
        finally:
            if self._scrub is not None:
                self._scrub.close()

    def once(self) -> float:
        """What is due now; seconds until there is more to do."""
        if self._clock() >= self._retry_at:
            self._retry_at = self._clock() + RETRY_SECONDS
            self._retry()
            self._look_for_lost()
        if self._busy():
            self._busy_at = self._clock()
        if self._clock() - self._saved_at >= SAVE_SECONDS:
            self._save()
        if not self._rate or self._clock() - self._busy_at < IDLE_SECONDS or not self._under_way():
            return POLL_SECONDS
        return self._step()

    # ---- what was bad

    def _retry(self) -> None:
        bad: dict[tuple[int, bool], list[str]] = {}
        for stripe, text, mirror in self._drives.bad_places():
            bad.setdefault((stripe, mirror), []).append(text)
        healed = [copy for copy, texts in bad.items() if not any(self._still_bad(copy[0], text) for text in texts)]
        if not healed:
            return
        try:
            self._reopen()
        except CoreError as error:
            log.warning("a stripe cannot be opened again: %s", error)
        for stripe, mirror in healed:
            self._drives.healed(stripe, mirror)
        self._save()

    def _still_bad(self, stripe: int, text: str) -> bool:
        if self._stop.is_set():
            return True
        place = fault_place(text)
        if place.layer is None or place.expert is None:
            return False
        path = self._container.stripe_paths[stripe] if place.file is None else Path(place.file)
        return bool(expert_problem(self._container, place.layer, place.expert, path))

    # ---- the scrub

    def _under_way(self) -> bool:
        if self._scrub is not None:
            return True
        position = self._state.position
        if position is None and self._now() - self._state.begun < PASS_SECONDS:
            return False
        self._scrub = Scrub(self._container, position)
        self._found = 0
        if position is None:
            self._state = ScrubState(None, self._now())
            log.info("scrub: a pass over the container begins", extra=fields_of("scrub-begun"))
        return True

    def _step(self) -> float:
        """Reads one extent; how long to wait so that the rate is kept."""
        assert self._scrub is not None
        began = self._clock()
        step = next(self._scrub, None)
        if step is None:
            self._end_pass()
            return POLL_SECONDS
        if step.finding is not None:
            self._found += 1
            self._report(step.finding)
        return max(0.0, step.bytes / self._rate - (self._clock() - began))

    def _report(self, finding: Finding) -> None:
        text = describe(finding)
        if self._found <= MAX_REPORTS:
            more = "; further ones are counted only" if self._found == MAX_REPORTS else ""
            log.error("scrub: %s%s", text, more, extra=fields_of("scrub-fault", SCRUB_FAULT, fault_place(text)))
        self._drives.found_bad(finding.stripe, text)

    def _end_pass(self) -> None:
        assert self._scrub is not None
        self._scrub.close()
        self._scrub = None
        log.info("scrub: the whole container was read, %d extents are bad", self._found, extra=fields_of("scrub-ended"))
        self._state = ScrubState(None, self._state.begun)
        self._save()

    def _save(self) -> None:
        self._saved_at = self._clock()
        position = self._scrub.position if self._scrub is not None else self._state.position
        bad = tuple((stripe, text) for stripe, text, _ in self._drives.bad_places())
        state = ScrubState(position, self._state.begun, bad)
        if state == self._saved:
            return
        try:
            self._file.save(state)
        except OSError as error:
            if not self._unsaved:
                log.warning("%s cannot be written: %s", self._file.path, error)
            self._unsaved = True
        else:
            self._state = self._saved = state
            self._unsaved = False
