"""The daemon's log: to a terminal with times, to the journal with structured fields.

Owns the handlers and the names of the journal's fields (COLIBRI_EVENT, COLIBRI_DRIVE, COLIBRI_FILE, COLIBRI_OFFSET,
COLIBRI_ERRNO ...) and message ids, one id for each kind of event, which never change. Under systemd the lines go
through systemd-python; where that package is absent, to stderr with a priority in front. Prompts and answers are never
logged.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colibri.daemon.core_errors import FaultPlace

JOURNAL_SOCKET = "/run/systemd/journal/socket"

# MESSAGE_ID of each kind of event, for `journalctl MESSAGE_ID=...`.
READY = "6a1c3f0e5c0d4b0b9a51f7a4a2c9d301"
IO_ERROR = "0f5d7c1b2e5a4f3c8d0a6be19d7f4402"
DRIVE_DEGRADED = "b3c8e2d94a6f4c57a1e0f2d63b8c5503"
DRIVE_HEALED = "4d92f6a7c1b84e0e93d5a8f07e2b6604"
QUARANTINE = "9e7b0a5d3f1c4862b4c6d8e1f0a37705"
SCRUB_FAULT = "27d4b8f1a0c94e6dbe53f9c2a6d18806"
WEAK_VERIFY = "c85f2e0b7d3a4196af4e1b9c0d6e9907"


def fields_of(event: str, message_id: str = "", place: FaultPlace | None = None, **more: object) -> dict[str, Any]:
    """The `extra` of a log line: COLIBRI_EVENT, what is known of the place, and further fields by name."""
    named = (place.metadata() if place is not None else {}) | more
    fields = {f"COLIBRI_{name.upper()}": str(value) for name, value in named.items()}
    identity = {"MESSAGE_ID": message_id} if message_id else {}
    return {"COLIBRI_EVENT": event, **fields, **identity}


def set_up_logging(level: str) -> None:
    """One handler for everything, at `level`."""
    logging.basicConfig(level=level.upper(), handlers=[make_handler()], force=True)


def make_handler() -> logging.Handler:
    """The journal's own where stderr is the journal, so that fields arrive; else one on stderr."""
    if not stderr_is_the_journal():
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(TerminalFormatter())
        return handler
    journal = _journal_module()
    if journal is not None:
        made: logging.Handler = journal.JournalHandler(SYSLOG_IDENTIFIER="colibrid")
        return made
    handler = logging.StreamHandler()
    handler.setFormatter(PrefixFormatter())
    return handler


def _journal_module() -> Any:
    """systemd-python's journal, or None where it is not installed or the journal's socket is not there."""
    if not os.path.exists(JOURNAL_SOCKET):
        return None
    try:
        return importlib.import_module("systemd.journal")
    except ImportError:
        return None


def stderr_is_the_journal() -> bool:
    """JOURNAL_STREAM names device and inode of the journal's socket; stderr may since have been redirected."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


class TerminalFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")


class PrefixFormatter(logging.Formatter):
    """sd-daemon(3): "<6>" and the like in front of every line."""

    _PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in self._PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())
