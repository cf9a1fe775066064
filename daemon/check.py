"""`colibrid check`: everything that can be known to be wrong before the daemon starts, each with the name of the thing.

Meant to run as the service's user (ExecStartPre): it opens what the daemon will open. Changes nothing but for a
nameless file in the state and socket folders, which proves that they can be written.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from colibri.core.paths import why_unreachable
from colibri.daemon import opening
from colibri.daemon.chat import TextModel
from colibri.daemon.config import Config
from colibri.daemon.endpoint import lock_path
from colibri.daemon.plan import mib

# A token log is small; one full context of keys and values per session is what a session folder must hold.
MIN_FREE_BYTES = 64 << 20
PROBE_BYTES = 4096


@dataclass(frozen=True)
class Finding:
    """`ok` False: the daemon would not start, or not work. `detail` says what was found, or what is wrong. `temporary`:
    it may be right at another try. `warning`: the daemon serves all the same, with less than it could have."""

    name: str
    ok: bool
    detail: str
    temporary: bool = False
    warning: bool = False


def exit_code(findings: list[Finding]) -> int:
    """What `serve` would end with: 75 if another try may find all well."""
    failed = [finding for finding in findings if not finding.ok]
    if not failed:
        return opening.EXIT_OK
    return opening.EXIT_TEMPORARY if all(finding.temporary for finding in failed) else opening.EXIT_CONFIG


def _failed(name: str, error: opening.StartError) -> Finding:
    return Finding(name, False, str(error), error.exit_code == opening.EXIT_TEMPORARY)


def run_checks(config: Config) -> list[Finding]:
    """All findings, in the order in which the daemon would meet them."""
    findings = [_state(config), _socket(config), *_trace(config)]
    try:
        container = opening.open_the_container(config)
    except opening.StartError as error:
        return [_failed("container", error), *findings]
    with container:
        layers = container.manifest.expert_layers
        found = (
            f"{container.manifest.source.name}: {opening.experts_of(container)} experts in {len(layers)} layers "
            f"on {len(container.stripe_paths)} stripes, content {container.content_id[:16]}"
        )
        lost = [Finding("container", True, text, warning=True) for text in container.warnings]
        reading = Finding("reading", True, opening.reading_text(config))
        findings = [Finding("container", True, found), *lost, reading, *findings]
        try:
            text = opening.open_text(container)
            findings.append(_text(text))
            table = opening.plan_memory(config, container, text)[1]
            room = f"{mib(table.planned)} of {mib(table.budget.bytes)} ({table.budget.source})"
            findings.append(Finding("memory", True, f"{room}, {table.expert_slots} of {table.experts} experts"))
        except opening.StartError as error:
            name = "memory" if any(finding.name == "text" for finding in findings) else "text"
            findings.append(_failed(name, error))
    return findings


def _text(text: TextModel) -> Finding:
    detail = "; ".join(text.problems + text.notes) or text.renderer
    return Finding("text", True, detail, warning=bool(text.problems))


def _state(config: Config) -> Finding:
    """The state folder, or the nearest one above it that exists, can be written, has room and is nobody else's."""
    folder = config.state
    try:
        opening.check_state_apart(config)
    except opening.StartError as error:
        return _failed("state", error)
    existing = _nearest(folder)
    problem = _unwritable(existing, folder)
    if problem:
        return Finding("state", False, f"state folder {folder}: {problem}")
    try:
        _probe(folder / "LOCK")
    except BlockingIOError as error:
        return Finding("state", False, f"state folder {folder} is in use by {error.strerror}", temporary=True)
    except OSError as error:
        return Finding("state", False, f"state folder {folder}: {error.filename}: {error.strerror}")
    free = os.statvfs(existing)
    room = free.f_bavail * free.f_frsize
    found = f"{folder} {_usable(folder, existing)}, {mib(room)} free"
    if room >= MIN_FREE_BYTES:
        return Finding("state", True, found)
    little = f"less than {mib(MIN_FREE_BYTES)}: sessions may soon not be stored any more"
    return Finding("state", True, f"{found}, {little}", warning=True)


def _usable(folder: Path, existing: Path) -> str:
    """What is known of a folder, where `existing` is the nearest that is there, and can be written."""
    return "is writable" if existing == folder.absolute() else f"will be made, {existing} is writable"


def _socket(config: Config) -> Finding:
    path = config.listen.path
    if path is None:
        return Finding("listen", True, f"{config.listen.target}: loopback")
    if path.exists() and not path.is_socket():
        return Finding("listen", False, f"{path} exists and is not a socket")
    existing = _nearest(path.parent)
    problem = _unwritable(existing, path)
    if problem:
        return Finding("listen", False, f"socket {path}: {problem}")
    try:
        _probe(lock_path(path))
    except BlockingIOError as error:
        return Finding("listen", False, f"socket {path} is in use by {error.strerror}", temporary=True)
    except OSError as error:
        return Finding("listen", False, f"socket {path}: {error.filename}: {error.strerror}")
    return Finding("listen", True, f"socket {path}: its folder {_usable(path.parent, existing)}")


def _trace(config: Config) -> list[Finding]:
    """The folder of the recording, if one is wanted, is there and can be written."""
    if config.trace is None:
        return []
    problem = _unwritable(config.trace.absolute().parent, config.trace)
    detail = f"trace {config.trace}: {problem}" if problem else f"{config.trace}: its folder is writable"
    return [Finding("trace", not problem, detail)]


def _probe(lock: Path) -> None:
    """Whether a daemon could take this lock now; a lock that is not there is free. Never waits, changes nothing.

    Raises BlockingIOError with the holder in words, another OSError with the file's name if it cannot be opened.
    """
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go by the close
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        raise BlockingIOError(error.errno, f"process {holder or 'unknown'}", str(lock)) from None
    finally:
        os.close(fd)


def _nearest(folder: Path) -> Path:
    """`folder`, or the first folder above it that is there: the daemon makes what is missing below."""
    absolute = folder.absolute()
    return next((part for part in (absolute, *absolute.parents) if _seen(part)), Path("/"))


def _seen(path: Path) -> bool:
    """Whether something is there, or might be: what may not be looked at is not taken for missing."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _unwritable(folder: Path, named: Path) -> str:
    """Why nothing can be written in `folder`, "" if it can; to stand behind the name of the path `named`."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))  # a drive without one free block takes no lock file either
    except OSError as error:
        return why_unreachable(folder, error, named=named)
    return ""


def as_json(findings: list[Finding]) -> dict[str, object]:
    return {"ok": all(finding.ok for finding in findings), "findings": [asdict(finding) for finding in findings]}


def as_text(findings: list[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    return "\n".join(f"{_mark(f)} {f.name:<{width}}  {_indented(f.detail)}" for f in findings)


def _mark(finding: Finding) -> str:
    if not finding.ok:
        return "FAIL"
    return "WARN" if finding.warning else "ok  "


def _indented(detail: str) -> str:
    """A table keeps its columns: it begins on a line of its own."""
    return "".join(f"\n  {line}" for line in detail.splitlines()) if "\n" in detail else detail
