"""The log's three ways out: a terminal, the journal with fields, the journal through stderr."""

from __future__ import annotations

import logging
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from systemd.journal import JournalHandler

from colibri.daemon import journal
from colibri.daemon.core_errors import fault_place

CHECKSUM = "layer 3 expert 5: 4096 bytes at offset 8192 of stripe 1 (/drive one/stripe-001.colibri) fail their checksum"


@pytest.fixture
def in_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes stderr the journal's, and puts a stand-in where the journal's socket is."""
    monkeypatch.setattr(journal, "stderr_is_the_journal", lambda: True)
    (tmp_path / "socket").touch()
    monkeypatch.setattr(journal, "JOURNAL_SOCKET", str(tmp_path / "socket"))


class Sent(logging.Handler):
    """systemd.journal.JournalHandler, but that it keeps what it is given."""

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self.fields = fields
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(members)
    return made


@pytest.mark.usefixtures("in_journal")
def test_under_systemd_lines_go_through_the_journal_s_own_handler_with_their_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "systemd", module("systemd"))
    monkeypatch.setitem(sys.modules, "systemd.journal", module("systemd.journal", JournalHandler=Sent))
    handler = journal.make_handler()
    assert isinstance(handler, Sent)
    assert handler.fields == {"SYSLOG_IDENTIFIER": "colibrid"}
    extra = journal.fields_of(
        "drive-degraded", journal.DRIVE_DEGRADED, fault_place(CHECKSUM), generation="generations/g"
    )
    handler.handle(logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "text", (), None, extra=extra))
    (record,) = handler.records
    assert record.__dict__["COLIBRI_EVENT"] == "drive-degraded"
    assert record.__dict__["MESSAGE_ID"] == journal.DRIVE_DEGRADED
    named = {k: v for k, v in record.__dict__.items() if k.startswith("COLIBRI_")}
    assert named == {
        "COLIBRI_EVENT": "drive-degraded",
        "COLIBRI_LAYER": "3",
        "COLIBRI_EXPERT": "5",
        "COLIBRI_STRIPE": "1",
        "COLIBRI_DRIVE": "/drive one",
        "COLIBRI_FILE": "/drive one/stripe-001.colibri",
        "COLIBRI_OFFSET": "8192",
        "COLIBRI_GENERATION": "generations/g",
    }


def test_the_real_handler_takes_the_fields() -> None:
    sent: list[dict[str, Any]] = []
    handler = JournalHandler(SYSLOG_IDENTIFIER="colibrid", sender_function=lambda m, **kw: sent.append({"M": m, **kw}))
    extra = journal.fields_of("ready", journal.READY)
    handler.handle(logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "ready: %s", ("m",), None, extra=extra))
    assert (sent[0]["M"], sent[0]["MESSAGE_ID"], sent[0]["COLIBRI_EVENT"]) == ("ready: m", journal.READY, "ready")


@pytest.mark.usefixtures("in_journal")
@pytest.mark.parametrize("missing", ["package", "socket"])
def test_without_the_package_or_the_journal_s_socket_lines_carry_their_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, "systemd.journal", None)
    if missing == "socket":
        monkeypatch.setattr(journal, "JOURNAL_SOCKET", str(tmp_path / "nowhere"))
    handler = journal.make_handler()
    record = logging.getLogger("x").makeRecord("x", logging.WARNING, "f", 1, "one\ntwo", (), None)
    assert handler.format(record) == "<4>one\n<4>two"


def test_the_journal_is_recognised_by_device_and_inode(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert journal.stderr_is_the_journal()
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
    assert not journal.stderr_is_the_journal()


def test_a_terminal_gets_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "text", (), None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d .* INFO    text", journal.make_handler().format(record))


def test_message_ids_are_distinct_and_of_the_journal_s_form() -> None:
    ids = [
        value for name, value in vars(journal).items() if name.isupper() and re.fullmatch("[0-9a-f]{32}", str(value))
    ]
    assert len(ids) == len(set(ids)) >= 7
