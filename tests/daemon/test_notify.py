"""Notifications to the service manager, received on a real socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.daemon import notify
from colibri.daemon.notify import Notifier


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(2)
        yield sock


def heard(receiver: socket.socket) -> list[str]:
    receiver.setblocking(False)
    messages = []
    while True:
        try:
            messages.append(receiver.recv(4096).decode())
        except BlockingIOError:
            return messages


def notifier(receiver: socket.socket, **environment: str) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": receiver.getsockname(), **environment})


def test_a_life_is_told(receiver: socket.socket) -> None:
    told = notifier(receiver)
    told.tell("loading")
    told.tell("loading")
    told.ready("ready: tiny")
    told.alive()
    told.stopping("stopping")
    assert heard(receiver) == [
        "STATUS=loading",
        "READY=1\nSTATUS=ready: tiny",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=stopping",
    ]
    assert told.status == "stopping"


def test_time_is_asked_for_only_while_bytes_move(receiver: socket.socket) -> None:
    now = 0.0
    told = Notifier({"NOTIFY_SOCKET": receiver.getsockname()}, clock=lambda: now)
    assert told.extend(0)
    now = 11.0
    assert not told.extend(0), "nothing moved"
    assert told.extend(5)
    now = 12.0
    assert not told.extend(9), "too soon"
    now = 21.5
    assert told.extend(9)
    assert heard(receiver) == ["EXTEND_TIMEOUT_USEC=60000000"] * 3


def test_without_a_service_manager_nothing_is_sent() -> None:
    told = Notifier({})
    told.ready("ready")
    assert told.extend(1)
    assert told.status == "ready"


def test_a_manager_that_is_gone_is_a_warning_not_a_failure(tmp_path: Path) -> None:
    warnings: list[str] = []
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}, warn=warnings.append).ready("x")
    assert len(warnings) == 1
    assert "cannot be told READY" in warnings[0]


def test_abstract_sockets_work() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0colibri-test-{os.getpid()}")
        Notifier({"NOTIFY_SOCKET": f"@colibri-test-{os.getpid()}"}).alive()
        assert receiver.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "120000000"}, 120.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": str(os.getpid())}, 120.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "no"}, None),
    ],
)
def test_the_watchdog_s_interval(environment: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environment).watchdog_seconds == seconds


def test_the_real_environment_is_used(receiver: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", receiver.getsockname())
    Notifier().ready("on")
    assert heard(receiver) == ["READY=1\nSTATUS=on"]


def test_a_manager_that_does_not_read_holds_nothing_up_and_hears_the_last_word_later(receiver: socket.socket) -> None:
    warnings: list[str] = []
    told = Notifier({"NOTIFY_SOCKET": receiver.getsockname()}, warn=warnings.append)
    began = time.monotonic()
    for number in range(2000):
        told.tell(f"status {number}")
        told.alive()
    assert time.monotonic() - began < 2
    assert warnings == []
    assert 0 < len(heard(receiver)) < 1000
    assert told.status == "status 1999"
    told.tell("status 1999")
    told.tell("status 1999")
    assert heard(receiver) == ["STATUS=status 1999"]


def test_ready_waits_for_a_while_and_then_gives_up_with_a_warning(
    receiver: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "PATIENCE_SECONDS", 0.2)
    warnings: list[str] = []
    told = Notifier({"NOTIFY_SOCKET": receiver.getsockname()}, warn=warnings.append)
    for number in range(2000):
        told.tell(f"status {number}")
    told.ready("on")
    assert len(warnings) == 1
    assert "cannot be told READY" in warnings[0]
    heard(receiver)
    told.ready("on")
    assert heard(receiver) == ["READY=1\nSTATUS=on"]
