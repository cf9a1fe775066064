"""The folders that a pack writes into: made, locked, empty of anything else, and with enough room.

Refuses a folder that is in use, that holds another container or foreign files, or whose file system is too small for
what all its stripes need together; all before the first byte of data.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from colibri.core.container import DENSE_NAME, MANIFEST_NAME, Container
from colibri.core.paths import LOCK_NAME, FolderLock
from colibri.packer.disk import Disk, DriveError, reaching
from colibri.packer.errors import FolderError
from colibri.packer.journal import JOURNAL_NAME
from colibri.packer.outputs import PARTIAL, stripe_copies
from colibri.packer.target import Target
from colibri.packer.wording import need_text
from colibri.v1 import manifest_pb2

PROBE_NAME = "drive-probe.partial"  # bandwidth.py makes it and removes its name at once

_HARMLESS = {LOCK_NAME, "lost+found", JOURNAL_NAME + PARTIAL, PROBE_NAME}


def check_folders(folders: Sequence[Path]) -> None:
    """Do what make_folders() checks, and write nothing.

    Raises FolderError for a folder that cannot be made, that is named twice or lies inside another, DriveError.
    """
    for folder in folders:
        with reaching(folder, "making"):
            _check_possible(folder)
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(folders):
        for other in range(index):
            if resolved[index] == resolved[other]:
                raise FolderError(f"{folder} is given twice: a stripe needs a folder of its own")
            for inner, outer in ((index, other), (other, index)):
                if resolved[inner].is_relative_to(resolved[outer]):
                    raise FolderError(
                        f"{folders[inner]} lies inside {folders[outer]}: a stripe needs a folder of its own"
                    )


def refuse_within(folders: Sequence[Path], kept: Iterable[Path], what: str) -> None:
    """Raises FolderError if one of `folders` is one of `kept` or lies inside it: who removes `what` would remove it."""
    for outer in dict.fromkeys(kept):
        for folder in folders:
            if _is_same(folder, outer):
                raise FolderError(f"{folder} holds {what}: give another folder")
            if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(outer)):
                raise FolderError(f"{folder} lies inside {outer}, which holds {what}: give another folder")


def _is_same(folder: Path, other: Path) -> bool:
    """Also through a bind mount. A folder that cannot be reached is not the other; make_folders() says what it has."""
    try:
        return folder.samefile(other)
    except OSError:
        return False


def folders_of(container: Container) -> list[Path]:
    """Return the folders that hold parts of the container, mirrors included."""
    paths = (container.dense_path, *container.stripe_paths, *container.mirror_paths)
    return list(dict.fromkeys(path.parent for path in paths if path is not None))


def _check_possible(folder: Path) -> None:
    """Raises what mkdir would, and FolderError where something stands there that is no folder."""
    try:
        folder.stat()
    except FileNotFoundError:
        folder.parent.stat()
        if os.path.lexists(folder):  # a link to nothing
            raise FolderError(f"making {folder}: it is there already, and is no folder") from None
        if not os.access(folder.parent, os.W_OK | os.X_OK):
            read_only = os.statvfs(folder.parent).f_flag & os.ST_RDONLY
            code = errno.EROFS if read_only else errno.EACCES
            raise OSError(code, os.strerror(code)) from None
        return
    if not folder.is_dir():
        raise FolderError(f"making {folder}: it is there already, and is no folder")


def make_folders(folders: Sequence[Path]) -> None:
    """Make the folders that do not exist; their parents must. Nothing is made where one of them is refused.

    Raises FolderError for one that cannot be made, is named twice or lies inside another, DriveError for a drive that
    fails or is full.
    """
    check_folders(folders)
    for folder in folders:
        # Parents are not made: on a drive that is not mounted that would fill the disk below its mount point.
        with reaching(folder, "making"):
            try:
                folder.mkdir(exist_ok=True)
            except FileExistsError as error:
                raise FolderError(f"making {folder}: it is there already, and is no folder") from error


@contextmanager
def made_folders(folders: Sequence[Path]) -> Iterator[None]:
    """Make the folders for the block. Where it is refused, folders and LOCK files that this run made are removed.

    Folders in which the work has begun stay: the same command goes on there. Raises as make_folders().
    """
    before = {folder: _names(folder) for folder in folders}
    try:
        make_folders(folders)
        yield
    except Exception:
        for folder, names in reversed(before.items()):
            with suppress(OSError):  # what is left behind is harmless, and the refusal is what has to be told
                _take_back(folder, names)
        raise


def _names(folder: Path) -> set[str] | None:
    """What the folder holds, None if it is not there or not to be seen."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return None


def _take_back(folder: Path, before: set[str] | None) -> None:
    """Remove LOCK, and the folder if it was not there, unless work has begun in it or another process is at it.

    Raises OSError.
    """
    if not folder.is_dir() or LOCK_NAME in (before or ()):
        return
    lock = FolderLock(folder, exclusive=True)  # whoever comes now finds it in use, and never a LOCK that is gone
    try:
        if set(os.listdir(folder)) - (before or set()) <= {LOCK_NAME}:
            (folder / LOCK_NAME).unlink()
            if before is None:
                folder.rmdir()
    finally:
        lock.close()


def refuse_in_use(folders: Sequence[Path]) -> None:
    """Look whether lock_folders() would be refused, and make no LOCK. Raises FolderError, DriveError."""
    for lock in lock_folders([folder for folder in folders if (folder / LOCK_NAME).exists()]):
        lock.close()


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
    """Refuse to begin a pack over other files; a folder that is not there is empty. Raises FolderError, DriveError."""
    for index, folder in enumerate(folders):
        if not folder.exists():
            continue
        with reaching(folder, "listing"):
            names = {path.name for path in folder.iterdir()} - _HARMLESS
        if index > 0:
            names = {name for name in names if name.startswith(("stripe-", "mirror-")) or name == MANIFEST_NAME}
        if names:
            raise FolderError(
                f"{folder} holds {', '.join(sorted(names)[:3])}: give an empty folder, or remove it first"
            )


@dataclass(frozen=True)
class Need:
    """Bytes that a folder will hold, and those of its files that already take some of them."""

    folder: Path
    bytes: int
    files: tuple[Path, ...] = ()


def needs_of(folders: Sequence[Path], target: Target) -> list[Need]:
    """Return what the folders of a container to be made need, each with its unfinished files."""
    names: list[list[str]] = [[] for _ in folders]
    names[0].append(DENSE_NAME)
    for copy in stripe_copies(target.manifest.layout):
        names[copy.folder].append(copy.name)
    return [
        Need(folder, size, tuple(folder / (name + suffix) for name in own for suffix in (PARTIAL, "")))
        for folder, size, own in zip(folders, target.folder_bytes, names, strict=True)
    ]


def require_room(disk: Disk, needs: Sequence[Need]) -> None:
    """Compare what the folders will hold with what their file systems have left. Raises DriveError naming both.

    Folders of one file system are added up; what unfinished files already take there counts as given. A folder that is
    not there yet will be on the file system of its parent.
    """
    for system in by_file_system([need.folder for need in needs]):
        need = sum(max(0, needs[i].bytes - _taken(needs[i])) for i in system)
        free = disk.free_bytes(_standing(needs[system[0]].folder))
        if need > free:
            names = " and ".join(str(needs[i].folder) for i in system)
            facts = {"needed_bytes": need, "free_bytes": free}
            raise DriveError(f"{names}: {need_text(need, free)}", errno.ENOSPC, facts)


def by_file_system(folders: Sequence[Path]) -> list[list[int]]:
    """Return the folders' indexes, those on one file system together. Raises FolderError, DriveError."""
    systems: dict[int, list[int]] = {}
    for index, folder in enumerate(folders):
        with reaching(folder, "looking at"):
            systems.setdefault(_standing(folder).stat().st_dev, []).append(index)
    return list(systems.values())


def _standing(folder: Path) -> Path:
    return folder if folder.exists() else folder.parent


def shared_drive_warnings(folders: Sequence[Path], layout: manifest_pb2.Layout) -> list[str]:
    """Return what is in vain where folders lie on one file system: striping, and mirrors beside their stripe."""
    found = []
    systems = by_file_system(folders)
    for system in systems:
        if len(system) > 1:
            names = " and ".join(str(folders[i]) for i in system)
            found.append(f"{names} lie on one file system: if that is one drive, stripes on it are read no faster")
    for copy in stripe_copies(layout):
        if copy.mirror and any({copy.number, copy.folder} <= set(system) for system in systems):
            found.append(
                f"the mirror of stripe {copy.number} in {folders[copy.folder]} lies on the file system of the stripe, "
                f"in {folders[copy.number]}: if that is one drive, its loss takes both"
            )
    return found


def _taken(need: Need) -> int:
    with reaching(need.folder, "looking at"):
        return sum(512 * path.stat().st_blocks for path in need.files if path.exists())
