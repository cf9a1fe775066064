"""Tells the service manager how the daemon is: READY, STATUS, STOPPING, more time, the watchdog.

Sends the datagrams of sd_notify(3) itself: that function waits for a manager that does not read, and the event loop,
which tells, must not. What changes the manager's mind (READY, STOPPING) is given a few seconds, all else is dropped and
told at the next occasion. Without NOTIFY_SOCKET nothing is sent. Time is only asked for while work is getting done, so
that a load that hangs still times out.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

EXTENSION_SECONDS = 60.0
EXTEND_EVERY_SECONDS = 10.0
PATIENCE_SECONDS = 5.0  # for what must arrive


def send_datagram(address: str, text: str, patience: float = 0.0) -> None:
    """Sends one notification as sd_notify(3) describes; "@" begins an abstract socket's name. Waits `patience` seconds
    at most for a receiver whose queue is full. Raises OSError, of which BlockingIOError and TimeoutError mean that."""
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(patience)
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
        self._progress = -1
        self._extended_at = float("-inf")
        self.status = ""
        self._told = ""
        self.watchdog_seconds = self._watchdog(environment)

    @staticmethod
    def _watchdog(environment: Mapping[str, str]) -> float | None:
        """The interval within which systemd wants a sign of life from this process, or None."""
        text, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        if not text.isdigit() or int(text) == 0 or (pid and pid != str(os.getpid())):
            return None
        return int(text) / 1e6

    def _send(self, text: str, patience: float = 0.0) -> bool:
        """Whether it was sent, or there is nobody to send it to."""
        if not self._address:
            return True
        try:
            send_datagram(self._address, text, patience)
        except OSError as error:
            if not isinstance(error, BlockingIOError) or patience:
                self._warn(f"the service manager at {self._address} cannot be told {text.partition('=')[0]}: {error}")
            return False
        return True

    def ready(self, status: str) -> None:
        self.status = self._told = status
        self._send(f"READY=1\nSTATUS={status}", PATIENCE_SECONDS)

    def reloading(self) -> None:
        """Followed by `ready`; the time stamp is what newer service managers ask for."""
        self._send(
            f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}", PATIENCE_SECONDS
        )

    def tell(self, status: str) -> None:
        """STATUS=, if it differs from the last one that could be told."""
        self.status = status
        if status != self._told and self._send(f"STATUS={status}"):
            self._told = status

    def stopping(self, status: str) -> None:
        self.status = self._told = status
        self._send(f"STOPPING=1\nSTATUS={status}", PATIENCE_SECONDS)

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def extend(self, progress: int) -> bool:
        """Asks for another minute if `progress` (any counter of work done) has grown; at most every ten seconds."""
        now = self._clock()
        if progress <= self._progress or now - self._extended_at < EXTEND_EVERY_SECONDS:
            return False
        if not self._send(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_SECONDS * 1e6)}"):
            return False
        self._progress, self._extended_at = progress, now
        return True
