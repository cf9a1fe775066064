"""What this machine and its cgroup leave for the daemon: MemAvailable, memory limits of cgroup v1 and v2, own memory.

Reads /proc and /sys only. `root` is the folder in which proc/ and sys/ are looked up: tests bring their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 writes a number just below 2^63 for "no limit"


@dataclass(frozen=True)
class Limit:
    """Bytes that may still be used, and who says so."""

    bytes: int
    source: str


def available_memory(root: Path = Path("/")) -> Limit:
    """The tightest of MemAvailable and what every cgroup above this process still allows."""
    return min([_mem_available(root), *cgroup_limits(root)], key=lambda limit: limit.bytes)


def _mem_available(root: Path) -> Limit:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return Limit(int(line.split()[1]) * 1024, "MemAvailable of /proc/meminfo")
    raise OSError(f"{root / 'proc/meminfo'} has no line MemAvailable")


def cgroup_limits(root: Path = Path("/")) -> list[Limit]:
    """What is left under each memory limit between this process's cgroup and the root: limit minus what is in use and
    cannot be dropped. Page cache counts as free."""
    limits = []
    for folder, version in _cgroup_folders(root):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        maximum, used = (_number(folder / name) for name in names)
        if maximum is not None and used is not None and maximum < _UNLIMITED:
            left = max(0, maximum - max(0, used - _page_cache(folder, version)))
            limits.append(Limit(left, f"{names[0]} = {maximum} of {folder}"))
    return limits


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of this process's memory cgroup and all those above it, with the cgroup version."""
    mounts = dict(_cgroup_mounts(root))
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if controllers == "" else 1
        if version not in mounts or (version == 1 and "memory" not in controllers.split(",")):
            continue
        top, inside = mounts[version]
        # In a container the mount shows a part of the hierarchy: the path may be told from a root that is not visible.
        relative = path.removeprefix(inside.rstrip("/")).strip("/")
        folder = top / relative
        if not folder.is_dir():
            folder = top
        while True:
            yield folder, version
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _cgroup_mounts(root: Path) -> Iterator[tuple[int, tuple[Path, str]]]:
    """(version, (mount point, root inside the hierarchy)) of the memory hierarchies, from mountinfo."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        columns = left.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split()[-1].split(",")):
            yield 2 if kind == "cgroup2" else 1, (root / columns[4].lstrip("/"), columns[3])


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _page_cache(folder: Path, version: int) -> int:
    """Bytes of file pages that the kernel drops when it needs the room."""
    names = ("inactive_file", "active_file") if version == 2 else ("total_inactive_file", "total_active_file")
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    pairs = (line.split() for line in lines)
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)


def anonymous_bytes(pid: int | str = "self", root: Path = Path("/")) -> int:
    """RssAnon + VmSwap of a process: memory that only it uses and that no file backs."""
    total = 0
    for line in (root / f"proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "VmSwap:")):
            total += int(line.split()[1]) * 1024
    return total
