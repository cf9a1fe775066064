"""`make demo`: the whole road with a small real model, on the commands that a user would type.

Makes the model, packs it over two stripe folders, serves it, asks a question, restarts the daemon, and goes on in the
same session without computing any earlier position again. Owns a folder in the user's cache and the daemon that it
leaves running there; touches nothing else. What fails is shown with its command and the last lines it wrote.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smallmodel.cache import cache_root

TOOLS = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SESSION = "demo-script"
"""Of the scripted questions; asked afresh by every run"""
USER_SESSION = "demo"
"""For whoever tries the daemon afterwards; no run touches it"""
QUESTION = "What is the capital of France?"
FOLLOW_UP = "What language do people speak there?"
MAX_TOKENS = 48
LOG_LINES = 20
READY_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
Command = Sequence[str | Path]
MAX_SOCKET_PATH = 107
"""sizeof(sockaddr_un.sun_path) - 1"""


class DemoError(Exception):
    """A step failed; the text is all that there is to say about it."""


@dataclass(frozen=True)
class Place:
    """Where the demo keeps its things: a folder per model and per version of the packer."""

    root: Path
    model: Path

    @property
    def container(self) -> Path:
        return self.root / "stripe0"

    @property
    def stripe(self) -> Path:
        return self.root / "stripe1"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def log(self) -> Path:
        return self.root / "colibrid.log"

    @property
    def pid_file(self) -> Path:
        return self.root / "colibrid.pid"

    @property
    def socket(self) -> Path:
        """In the folder, unless its name is longer than a socket's may be."""
        inside = self.root / "colibrid.sock"
        if len(os.fsencode(inside)) <= MAX_SOCKET_PATH:
            return inside
        name = hashlib.sha256(os.fsencode(inside)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"colibri-demo-{os.getuid()}-{name}.sock"

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"


def say(text: str) -> None:
    print(text, flush=True)


def show(command: Command, background: bool = False) -> None:
    say(f"$ {readable(command)}{' &' if background else ''}")


def readable(command: Command) -> str:
    """`command` as one would type it in the repository with .venv active."""
    words = [str(word) for word in command]
    if Path(words[0]).parent == BIN:
        words[0] = Path(words[0]).name
    return shlex.join(words)


def last_lines(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-LOG_LINES:]) or "    (it wrote nothing)"


@dataclass(frozen=True)
class Outcome:
    """What a command wrote: stdout (empty if it went to the terminal) and stderr."""

    stdout: str
    stderr: str


def run(command: Command, capture: bool = True) -> Outcome:
    """Run a command, passing its stderr on as it comes; its stdout is kept if `capture`, else it is ours.

    Raises DemoError, with the command and the last it wrote, if it fails."""
    with tempfile.TemporaryFile() as kept:
        process = subprocess.Popen(
            list(map(str, command)), stdout=kept if capture else None, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert process.stderr is not None
        heard = b""
        with process:
            while chunk := os.read(process.stderr.fileno(), 4096):
                sys.stderr.buffer.write(chunk)
                sys.stderr.buffer.flush()
                heard += chunk
        kept.seek(0)
        outcome = Outcome(kept.read().decode(errors="replace"), heard.decode(errors="replace"))
    if process.returncode != 0:
        raise failure(command, f"failed with code {process.returncode}", outcome.stdout + outcome.stderr)
    return outcome


def failure(command: Command, what: str, log: str) -> DemoError:
    return DemoError(f"this command {what}:\n    {readable(command)}\nthe last that it wrote:\n{last_lines(log)}")


def make_model() -> Path:
    """Folder of the small model's checkpoint, made if need be."""
    command: Command = [sys.executable, TOOLS / "make_small_model.py"]
    show(command)
    path = Path(run(command).stdout.strip())
    say(f"model: {path}")
    return path


def place_for(model: Path) -> Place:
    """The demo's folder for this model and this version of what packs and serves it."""
    digest = hashlib.sha256(model.name.encode())
    sources = [path for folder in ("csrc", "packer") for path in (TOOLS.parent / folder).rglob("*")]
    for source in sorted(sources):
        if source.suffix in (".c", ".h", ".py"):
            digest.update(source.read_bytes())
    root = cache_root() / f"demo-{digest.hexdigest()[:16]}"
    root.mkdir(parents=True, exist_ok=True)
    return Place(root, model)


def pack(place: Place) -> None:
    """See to it that the container is there and sound. A pack that was stopped goes on; a damaged one is redone."""
    verify: Command = [BIN / "colibri-pack", "verify", place.container, "--stripe", place.stripe, "--json"]
    if (place.container / "manifest.json").exists():
        show(verify)
        try:
            run(verify)
        except DemoError as error:
            say(f"{error}\npacking again")
            shutil.rmtree(place.container)
            shutil.rmtree(place.stripe, ignore_errors=True)
        else:
            say("container: there already, and every checksum is right")
            return
    command: Command = [BIN / "colibri-pack", place.model, "--out", place.container, "--stripe", place.stripe]
    show(command)
    run(command, capture=False)


def daemon_command(place: Place) -> Command:
    return [
        *(BIN / "colibrid", "serve", "--container", place.container, "--stripes", place.stripe),
        *("--listen", place.address, "--state", place.state),
    ]


def running_daemon(place: Place) -> int | None:
    """Process id of the daemon that an earlier demo left here, if it still runs."""
    try:
        pid = int(place.pid_file.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    # The number may belong to another process by now.
    return pid if os.fsencode(place.state) in words else None


def start_daemon(place: Place) -> None:
    """Start colibrid in the background and wait until it serves."""
    command = daemon_command(place)
    show(command, background=True)
    started = time.monotonic()
    with place.log.open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    place.pid_file.write_text(f"{process.pid}\n")
    while not serves(place.address):
        if process.poll() is not None:
            raise failure(command, f"ended with code {process.returncode}", read_log(place))
        if time.monotonic() - started > READY_TIMEOUT_S:
            process.terminate()
            raise failure(command, f"did not serve within {READY_TIMEOUT_S} s", read_log(place))
        time.sleep(0.1)
    say(f"ready after {time.monotonic() - started:.1f} s (process {process.pid}, log {place.log})")


def read_log(place: Place) -> str:
    return place.log.read_text(errors="replace")


def serves(address: str) -> bool:
    """Whether the daemon at `address` says by the standard health protocol that it takes requests."""
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            answer: Any = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def stop_daemon(place: Place) -> bool:
    """End the demo's daemon with SIGTERM and wait until it is gone; return whether there was one."""
    pid = running_daemon(place)
    if pid is None:
        return False
    say(f"$ kill -TERM {pid}")
    started = time.monotonic()
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not select.select([handle], [], [], STOP_TIMEOUT_S)[0]:
            raise failure(daemon_command(place), f"did not stop within {STOP_TIMEOUT_S} s of SIGTERM", read_log(place))
    finally:
        os.close(handle)
    with contextlib.suppress(ChildProcessError):  # not our child if an earlier demo started it
        os.waitpid(pid, 0)
    place.pid_file.unlink()
    say(f"stopped in {time.monotonic() - started:.1f} s")
    return True


def ask(place: Place, message: str) -> tuple[int, int]:
    """Ask in the demo's session; return the prompt's tokens and how many of them were not computed again."""
    command: Command = [
        *(BIN / "colibri", "chat", "--addr", place.address, "--session", SESSION, "--message", message),
        *("--temperature", "0", "--max-tokens", str(MAX_TOKENS)),
    ]
    show(command)
    outcome = run(command, capture=False)
    statistics = re.search(r"prompt (\d+) tokens \((\d+) cached\)", outcome.stderr)
    if statistics is None:
        raise failure(command, "did not print its statistics", outcome.stderr)
    return int(statistics[1]), int(statistics[2])


def session(place: Place) -> dict[str, Any] | None:
    """The demo's session as the daemon describes it, or None if there is none."""
    listed = run([BIN / "colibri", "sessions", "list", "--addr", place.address, "--json"])
    sessions: list[dict[str, Any]] = json.loads(listed.stdout)
    return next((entry for entry in sessions if entry["name"] == f"sessions/{SESSION}"), None)


def forget_session(place: Place) -> None:
    """Remove the scripted session of an earlier demo, so that this one asks afresh."""
    if session(place) is not None:
        run([BIN / "colibri", "sessions", "rm", SESSION, "--addr", place.address])


def check_returned(before: dict[str, Any] | None, after: dict[str, Any] | None) -> int:
    """How many positions of the session the daemon found on disk after the restart.

    The last token of an answer is committed, but has not been through the model when the answer ends; so all
    positions but that one have their keys and values on disk. Raises DemoError if any is missing."""
    if before is None or after is None or after["position"] != before["position"]:
        raise DemoError(f"the session came back as {after}, and was {before}")
    position, found = int(after["position"]), int(after["kv_position"])
    if found < position - 1:
        raise DemoError(f"only {found} of the session's {position} positions have their keys and values on disk")
    say(f"session {SESSION}: {position} tokens, keys and values of {found} positions on disk")
    return found


def check_nothing_recomputed(found: int, prompt: int, cached: int) -> None:
    """Show that the follow-up computed new positions only. Raises DemoError if it did not."""
    if cached < found:
        raise DemoError(f"{found - cached} of {found} earlier positions were computed again")
    say(f"earlier positions: {found}, of which computed again: 0; new in this prompt: {prompt - cached}")


def demonstrate() -> Place:
    """The demo itself; returns where its daemon is left running."""
    place = place_for(make_model())
    stop_daemon(place)
    pack(place)
    start_daemon(place)
    forget_session(place)
    ask(place, QUESTION)
    before = session(place)
    say("\nNow the daemon is stopped and started again; the session stays.")
    stop_daemon(place)
    start_daemon(place)
    found = check_returned(before, session(place))
    check_nothing_recomputed(found, *ask(place, FOLLOW_UP))
    return place


def how_to_go_on(place: Place, seconds: float) -> str:
    chat = readable([BIN / "colibri", "chat", "--addr", place.address, "--session", USER_SESSION])
    return (
        f"\nThat took {seconds:.0f} s (without setup). The daemon goes on running. To talk to it:\n    {BIN}/{chat}\n"
        f"To stop it:\n    make demo-stop\nTo remove everything that the demo made:\n    rm -r {cache_root()}"
    )


def stop_all() -> int:
    """Stop the daemons of all demos in the cache."""
    roots = sorted(cache_root().glob("demo-*"))
    stopped = [stop_daemon(Place(root, root)) for root in roots]
    if not any(stopped):
        say("no daemon of the demo is running")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, or stop what it left running; return the exit code."""
    parser = argparse.ArgumentParser(prog="demo.py", description="The whole road with a small real model.")
    parser.add_argument("--stop", action="store_true", help="stop the daemon that the demo left running")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        if options.stop:
            return stop_all()
        place = demonstrate()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    say(how_to_go_on(place, time.monotonic() - started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
