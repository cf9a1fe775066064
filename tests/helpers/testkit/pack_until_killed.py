"""Packs a checkpoint, or moves a container, with a kill at one operation after the other:
`python -m testkit.pack_until_killed SOURCE OUT STEP [move STRIPE]`, where SOURCE is then the container's first folder.

A process of its own, because it forks: for operation number n a child packs into fresh folders below OUT/n and is
killed there, then another child resumes. Every STEP-th operation has its turn, and all of the last ones, which
publish. Imports nothing that starts a thread before it forks. Exits with 0 if every pack could be resumed.
"""

import os
import sys
from pathlib import Path

from colibri.core.container import open_container
from testkit.faulty_disk import CountingDisk, KillingDisk
from testkit.packing import move_folder, pack_folder

SYNC_BYTES = 40_000  # several journal lines in a tiny pack
LAST = 30


def make(source: Path, folders: list[Path], disk: CountingDisk) -> None:
    """Pack or move."""
    if len(sys.argv) > 4:
        move_folder([source, Path(sys.argv[5])], folders, disk=disk, sync_bytes=SYNC_BYTES, mirror=True)
    else:
        pack_folder(source, folders, disk=disk, sync_bytes=SYNC_BYTES)


def run(source: Path, folders: list[Path], disk: CountingDisk) -> int:
    """Return the wait status of a child that works with `disk`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            make(source, folders, disk)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def folders_of(root: Path, at: int) -> list[Path]:
    """Return the two folders of the pack that is killed at operation `at`; their parent is made."""
    base = root / f"{at:04d}"
    base.mkdir(parents=True)
    return [base / "a", base / "b"]


def kill_and_resume(source: Path, root: Path, at: int) -> str:
    """Return what went wrong, or nothing."""
    folders = folders_of(root, at)
    if not os.WIFSIGNALED(run(source, folders, KillingDisk(at))):
        return f"operation {at} was not reached"
    if (folders[0] / "manifest.json").exists():
        open_container(folders[0], folders[1:]).close()  # what has a manifest must be complete
    if run(source, folders, CountingDisk()) != 0:
        return f"killed at operation {at}, the pack was not resumed"
    return ""


def main() -> int:
    source, root, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    counting = CountingDisk()
    make(source, folders_of(root, 9999), counting)
    total = counting.operations
    wrong = []
    for at in sorted({*range(0, total, step), *range(max(0, total - LAST), total)}):
        wrong.append(kill_and_resume(source, root, at))
    print("\n".join(filter(None, wrong)))
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
