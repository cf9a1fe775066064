"""What a mirrored container had lost when the daemon started: whether it is back, and what that takes.

Owns the remarks about it. The model's files are fixed when it is opened: a reload reopens those, and a stripe, mirror
or folder that was not among them is used again after a restart only. Whoever looks at the status is told so as soon as
the file can be opened. Looks at headers and folders, on whatever thread calls; never takes a lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from colibri.core.container import Container
from colibri.core.container_files import ContainerError
from colibri.core.container_folders import ContainerFolders
from colibri.core.container_stripes import StripeFiles

log = logging.getLogger("colibri.daemon.drives")

IS_BACK = "it can be opened again: restart the daemon to use it"


class LostFiles:
    """`container` as it was opened, and the folders of its further stripes as configured."""

    def __init__(self, container: Container, stripes: Sequence[Path]) -> None:
        self._container, self._stripes = container, list(stripes)
        self._back: frozenset[str] = frozenset()  # those of the container's warnings that hold no more; any thread

    def look(self) -> None:
        """Looks again for all that was lost. Reads from the drives."""
        lost = self._container.warnings
        if not lost:
            return
        missing = self._missing_now()
        # Where something else is wrong by now, a warning that is gone says nothing: the same loss may have other words.
        back = frozenset(lost) - missing if missing <= frozenset(lost) else frozenset()
        for text in sorted(back - self._back):
            log.warning("%s; %s", text, IS_BACK)
        self._back = back

    def remarks(self) -> list[str]:
        """One text for each thing that was lost at the start; any thread."""
        back = self._back
        return [f"{text}; {IS_BACK}" if text in back else text for text in self._container.warnings]

    def _missing_now(self) -> frozenset[str]:
        """What opening the container now would warn of; all that is known to be lost where it could not be opened."""
        container = self._container
        try:
            with ContainerFolders(container.primary, self._stripes, lock=False) as folders:
                files = StripeFiles(folders.paths, container.manifest)
                if files.faults:
                    return frozenset(container.warnings)
                return frozenset([*folders.warnings, *files.warnings])
        except (ContainerError, OSError):
            return frozenset(container.warnings)
