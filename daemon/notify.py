"""Tells the service manager how the daemon is: READY, STATUS, STOPPING, more time, the watchdog.

Goes through systemd-python; where that package is absent the same datagram is sent directly, and without NOTIFY_SOCKET
nothing is sent at all. Time is only asked for while work is getting done, so that a load that hangs still times out.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Mapping

EXTENSION_SECONDS = 60.0
EXTEND_EVERY_SECONDS = 10.0


def _library() -> Callable[[str], object] | None:
    """systemd-python's notify, or None if it is not installed."""
    try:
        daemon = importlib.import_module("systemd.daemon")
    except ImportError:
        return None
    notify: Callable[[str], object] = daemon.notify
    return notify


def send_datagram(address: str, text: str) -> None:
    """Sends one notification as sd_notify(3) describes; "@" begins an abstract socket's name. Raises OSError."""
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(text.encode(), address)


class Notifier:
    """What the service manager hears. `status` is kept for whoever else wants to show it."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        environment = os.environ if environment is None else environment
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._clock = clock
        self._warn = warn
        self._library = _library() if self._address and environment is os.environ else None
        self._progress = -1
        self._extended_at = float("-inf")
        self.status = ""
        self.watchdog_seconds = self._watchdog(environment)

    @staticmethod
    def _watchdog(environment: Mapping[str, str]) -> float | None:
        """The interval within which systemd wants a sign of life from this process, or None."""
        text, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        if not text.isdigit() or int(text) == 0 or (pid and pid != str(os.getpid())):
            return None
        return int(text) / 1e6

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            if self._library is not None:
                self._library(text)
            else:
                send_datagram(self._address, text)
        except OSError as error:
            self._warn(f"the service manager at {self._address} cannot be told {text.partition('=')[0]}: {error}")

    def ready(self, status: str) -> None:
        self.status = status
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Followed by `ready`; the time stamp is what newer service managers ask for."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def tell(self, status: str) -> None:
        """STATUS=, if it differs from the last one."""
        if status != self.status:
            self.status = status
            self._send(f"STATUS={status}")

    def stopping(self, status: str) -> None:
        self.status = status
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def extend(self, progress: int) -> bool:
        """Asks for another minute if `progress` (any counter of work done) has grown; at most every ten seconds."""
        now = self._clock()
        if progress <= self._progress or now - self._extended_at < EXTEND_EVERY_SECONDS:
            return False
        self._progress, self._extended_at = progress, now
        self._send(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_SECONDS * 1e6)}")
        return True
