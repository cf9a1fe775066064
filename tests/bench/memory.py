"""Peak memory of a tree of processes: the sum over all that run at the same time, sampled.

A sample can miss a short peak, so the result is never below the kernel's own mark of any one process.
"""

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_S = 0.1


def tree(pid: int) -> list[int]:
    """`pid` and all that descend from it; without those that end meanwhile."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            found += tree(int(child))
    return found


def resident(pid: int, field: str) -> int:
    """A field of /proc/PID/status in bytes; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(field + ":")), 0)


class TreePeak:
    """The peak of `pid` and its descendants while the block runs, sampled by a thread; `bytes` is it so far."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._seen = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def bytes(self) -> int:
        self._sample()
        return self._seen

    def _sample(self) -> None:
        members = tree(self._pid)
        together = sum(resident(pid, "VmRSS") for pid in members)
        self._seen = max(self._seen, together, *(resident(pid, "VmHWM") for pid in members))

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._sample()

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()


WATCH = TreePeak()  # of a benchmark and its children; run.py lets it run
