"""The folders that a pack writes into: made, locked, empty of anything else, and with enough room.

Refuses a folder that is in use, that holds another container or foreign files, or whose file system is too small for
what all its stripes need together; all before the first byte of data.
"""

import errno
from collections.abc import Sequence
from pathlib import Path

from colibri.core.container import DENSE_NAME, MANIFEST_NAME, stripe_name
from colibri.core.paths import LOCK_NAME, FolderLock
from colibri.packer.disk import Disk, DriveError, reaching
from colibri.packer.errors import FolderError
from colibri.packer.journal import JOURNAL_NAME
from colibri.packer.outputs import PARTIAL
from colibri.packer.wording import need_text

_HARMLESS = {LOCK_NAME, "lost+found", JOURNAL_NAME + PARTIAL}


def make_folders(folders: Sequence[Path]) -> None:
    """Make the folders that do not exist; their parents must.

    Raises FolderError for one that cannot be made or is named twice, DriveError for a drive that fails or is full.
    """
    for index, folder in enumerate(folders):
        # Parents are not made: on a drive that is not mounted that would fill the disk below its mount point.
        with reaching(folder, "making"):
            try:
                folder.mkdir(exist_ok=True)
            except FileExistsError as error:
                raise FolderError(f"making {folder}: it is there already, and is no folder") from error
        for other in folders[:index]:
            if folder.samefile(other):
                raise FolderError(f"{folder} is given twice: a stripe needs a folder of its own")


def lock_folders(folders: Sequence[Path]) -> list[FolderLock]:
    """Take the exclusive locks. Raises FolderError if another process packs into a folder or serves from it."""
    locks: list[FolderLock] = []
    try:
        for folder in folders:
            with reaching(folder / LOCK_NAME, "locking"):
                locks.append(FolderLock(folder, exclusive=True))
    except (DriveError, FolderError) as error:
        for lock in locks:
            lock.close()
        if isinstance(error.__cause__, BlockingIOError):
            raise FolderError(
                f"{folder} is in use: another colibri-pack writes to it, or a daemon serves it"
            ) from error
        raise
    return locks


def require_empty(folders: Sequence[Path]) -> None:
    """Refuse to begin a pack over other files. Raises FolderError, DriveError."""
    for index, folder in enumerate(folders):
        with reaching(folder, "listing"):
            names = {path.name for path in folder.iterdir()} - _HARMLESS
        if index > 0:
            names = {name for name in names if name.startswith("stripe-") or name == MANIFEST_NAME}
        if names:
            raise FolderError(
                f"{folder} holds {', '.join(sorted(names)[:3])}: give an empty folder, or remove it first"
            )


def require_room(disk: Disk, folders: Sequence[Path], folder_bytes: Sequence[int]) -> None:
    """Compare what the folders will hold with what their file systems have left. Raises DriveError naming both.

    Folders of one file system are added up; what unfinished files already take there counts as given.
    """
    systems: dict[int, list[int]] = {}
    for index, folder in enumerate(folders):
        with reaching(folder, "looking at"):
            systems.setdefault(folder.stat().st_dev, []).append(index)
    for indexes in systems.values():
        need = sum(max(0, folder_bytes[i] - _taken(folders[i], i)) for i in indexes)
        free = disk.free_bytes(folders[indexes[0]])
        if need > free:
            names = " and ".join(str(folders[i]) for i in indexes)
            facts = {"needed_bytes": need, "free_bytes": free}
            raise DriveError(f"{names}: {need_text(need, free)}", errno.ENOSPC, facts)


def _taken(folder: Path, index: int) -> int:
    names = [stripe_name(index)] + ([DENSE_NAME] if index == 0 else [])
    paths = [folder / (name + suffix) for name in names for suffix in (PARTIAL, "")]
    with reaching(folder, "looking at"):
        return sum(512 * path.stat().st_blocks for path in paths if path.exists())
