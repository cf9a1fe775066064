"""colibrid as a process of its own over a tiny packed model, with a client in this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from colibri.v1 import admin_service_pb2_grpc, inference_service_pb2_grpc, types_pb2
from testkit.models import Tiny
from testkit.service import request

COMMAND = (sys.executable, "-P", "-m", "colibri.daemon.cli")
EVER = 60.0
POLL = 0.1
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def colibrid(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=EVER,
        env=_environment() | environment,
        cwd="/",
    )


def _environment() -> dict[str, str]:
    unwanted = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "STATE_DIRECTORY", "RUNTIME_DIRECTORY", "JOURNAL_STREAM")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def write_config(folder: Path, tiny: Tiny, **keys: Any) -> Path:
    """A configuration over `tiny` with everything else below `folder`."""
    values = {
        "container": str(tiny.folders[0]),
        "stripes": [str(path) for path in tiny.folders[1:]],
        "listen": f"unix:{folder}/d.sock",
        "state": str(folder / "state"),
        "memory": "512MiB",
        "max_context": 1024,
        "threads": 1,
        "scrub": "off",  # a slow test is idle for long enough to begin one
    } | keys
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "colibri.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


@dataclass
class Process:
    """A running colibrid. `notified`: what it told the service manager so far."""

    popen: subprocess.Popen[bytes]
    target: str
    log: Path
    receiver: socket.socket
    notified: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.target, options=LIMITS)
        self.inference: Any = inference_service_pb2_grpc.InferenceServiceStub(self.channel)
        self.sessions: Any = inference_service_pb2_grpc.SessionServiceStub(self.channel)
        self.admin: Any = admin_service_pb2_grpc.AdminServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    def hear(self, word: str) -> None:
        """Waits until the service manager is told something that begins with `word`."""
        self._hear(word, lambda message: message.startswith(word))

    def hear_of(self, words: str) -> None:
        """Waits until the service manager is told something that has these words in it."""
        self._hear(words, lambda message: words in message)

    def _hear(self, word: str, wanted: Callable[[str], bool]) -> None:
        until = time.monotonic() + EVER
        while not any(map(wanted, list(self.notified))):
            ended = self.popen.poll() is not None
            time.sleep(3 * POLL if ended else POLL / 2)  # what it said at its end may still be on its way
            assert not ended or any(map(wanted, list(self.notified))), self.log.read_text()
            assert time.monotonic() < until, f"no {word}: {self.notified}\n{self.log.read_text()}"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Read what the service manager is told all the time, as service managers do."""
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    self.notified.append(self.receiver.recv(4096).decode())

        thread = threading.Thread(target=listen, name="service manager")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def generate(self, tokens: Sequence[int] | None = None, **fields: Any) -> list[types_pb2.GenerateEvent]:
        return list(self.inference.Generate(request(tokens, **fields)))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signals, waits, returns the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(EVER)

    def status(self, name: str) -> int:
        """A number of /proc/PID/status in bytes."""
        for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise KeyError(name)


@contextlib.contextmanager
def serving(
    config: Path,
    *flags: str,
    ready: bool = True,
    environment: Mapping[str, str] | None = None,
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Iterator[Process]:
    """A daemon with this configuration; it is ended with SIGTERM if it still runs, and must not fail then. `popen`
    starts it: a cgroup's, for instance."""
    folder = config.parent
    notify, log = folder / "notify", folder / "log"
    notify.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver, log.open("ab") as output:
        receiver.bind(str(notify))
        receiver.settimeout(POLL)
        daemon = popen(
            [*COMMAND, "serve", "--config", str(config), *flags],
            stdout=output,
            stderr=output,
            cwd="/",
            env=_environment() | dict(environment or {}) | {"NOTIFY_SOCKET": str(notify)},
        )
        process = Process(daemon, f"unix:{folder}/d.sock", log, receiver)
        try:
            with process.listening():
                if ready:
                    process.hear("READY=1")
                yield process
                if daemon.poll() is None:
                    assert process.end() == 0, log.read_text()
        finally:
            process.channel.close()
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
