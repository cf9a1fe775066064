"""The folders of a container and the shared locks on them: what comes before any of its files is trusted.

Refuses a folder that cannot be read, that is named twice or that another process writes to. In a container with
mirrors, and for those who look at damaged ones, a stripe folder that cannot be reached, such as one on a dead drive, is
left out with a warning: whether enough is left is for the survey to say. The primary folder has no second copy and must
be there.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.core.container_files import ContainerError
from colibri.core.container_survey import read_manifest
from colibri.core.paths import FolderLock, why_unreachable


class ContainerFolders:
    """The folders that can be used, the primary first (`paths`), and the manifest; `warnings` name those left out.

    Holds a shared lock on each until close().
    """

    def __init__(self, primary: Path, stripes: Sequence[Path], *, lock: bool = True, partial: bool = False) -> None:
        """Lock the folders and read the manifest (`lock=False`: the caller holds them exclusively).

        `partial`: a stripe folder that cannot be reached is left out of a container without mirrors too.

        Raises ContainerError.
        """
        self.paths: list[Path] = []
        self.warnings: list[str] = []
        self._locks: list[FolderLock] = []
        self._lock = lock
        try:
            self._take(Path(primary).absolute(), "container")
            self.manifest = read_manifest(self.paths[0])
            mirrored = any(stripe.mirrored for stripe in self.manifest.layout.stripes)
            for folder in stripes:
                self._add(Path(folder).absolute(), mirrored, partial)
        except BaseException:
            self.close()
            raise

    def _add(self, folder: Path, mirrored: bool, partial: bool) -> None:
        try:
            self._take(folder, "stripe folder")
        except _UnreachableError as error:
            if not mirrored and not partial:
                raise
            rest = ", what mirrors hold of it is read from them" if mirrored else ""
            self.warnings.append(f"{error}; it is left out{rest}")

    def _take(self, folder: Path, what: str) -> None:
        try:
            os.listdir(folder)
        except OSError as error:
            raise _UnreachableError(f"{what} {folder} cannot be read: {why_unreachable(folder, error)}") from error
        for other in self.paths:
            if folder == other:
                raise ContainerError(f"{what} {folder} is given twice")
            if folder.samefile(other):
                raise ContainerError(f"{what} {folder} is the same folder as {other}")
        if self._lock:
            try:
                self._locks.append(FolderLock(folder, exclusive=False))
            except BlockingIOError as error:
                raise ContainerError(f"{folder} is being written by another process, which holds its LOCK") from error
            except OSError as error:
                raise _UnreachableError(f"{folder}: LOCK cannot be taken: {error.strerror}") from error
        self.paths.append(folder)

    def close(self) -> None:
        """Let go of the locks; a second call does nothing."""
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _UnreachableError(ContainerError):
    """A folder that cannot be listed or locked, as on a drive that is dead or not mounted."""
