"""Opens a container: the folder of the manifest and the folders of its stripes, proved to belong together.

Holds the shared locks while it is open and gives the core the place of every extent. The weights' bytes are checked
where they are used (by the core) or by `colibri-pack verify`. The packer (verify, export) and the daemon both come in
here. docs/container.md describes the format.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from colibri.core.container_check import canonical_name
from colibri.core.container_files import ContainerError
from colibri.core.container_survey import (
    DENSE_NAME,
    MANIFEST_NAME,
    Survey,
    read_manifest,
    split_digests,
    stripe_name,
)
from colibri.core.identity import canonical_encoding, content_id
from colibri.core.paths import FolderLock, why_unreachable
from colibri.core.striping import EXTENT, ExtentTable, extents_per_record, layer_extents

__all__ = [
    "DENSE_NAME",
    "EXTENT",
    "MANIFEST_NAME",
    "Container",
    "ContainerError",
    "canonical_encoding",
    "canonical_name",
    "content_id",
    "open_container",
    "stripe_name",
]


class Container:
    """An open container. Holds the shared locks of its folders until close(); made by open_container()."""

    def __init__(self, survey: Survey, locks: list[FolderLock]) -> None:
        """Take over the locks. Raises ContainerError with the first fault that the survey found."""
        if survey.faults:
            raise ContainerError(survey.faults[0])
        assert survey.extent_crcs is not None
        assert survey.record_digests is not None
        self.manifest = survey.manifest
        self.primary = survey.primary
        self.dense_path = survey.primary / DENSE_NAME
        self.stripe_paths = [
            path for path in survey.stripe_paths if path
        ]  # by number; index 0 is in the primary folder
        self.content_id = survey.manifest.content_id
        self.record_digests = split_digests(survey.record_digests)  # SHA-256 of each record, in logical order
        self._extent_crcs = np.frombuffer(survey.extent_crcs, "<u4")
        self._locks = locks

    def extents_per_record(self, layer_index: int) -> int:
        """Return into how many extents a record of manifest.expert_layers[layer_index] is cut."""
        return extents_per_record(self.manifest.expert_layers[layer_index])

    def extents(self, layer_index: int) -> ExtentTable:
        """Return the extents of a layer, [experts, extents_per_record] of EXTENT (the layout of cl_extent).

        layer_index counts manifest.expert_layers.
        """
        layers = self.manifest.expert_layers
        first = sum(layer.experts * extents_per_record(layer) for layer in layers[:layer_index])
        table = layer_extents(layers[layer_index])
        table["crc32c"] = self._extent_crcs[first : first + table.size].reshape(table.shape)
        return table

    def first_record(self, layer_index: int) -> int:
        """Return the index of the layer's expert 0 among all records in logical order."""
        return sum(layer.experts for layer in self.manifest.expert_layers[:layer_index])

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


def open_container(primary: Path, stripes: Sequence[Path] = (), *, lock: bool = True) -> Container:
    """Open the container with its manifest in `primary` and further stripes in the folders `stripes`, in any order.

    Checks the manifest, the headers of all files, both tables, the bundled files and the content id, and takes a
    shared lock on every folder (`lock=False`: the caller holds them exclusively). Raises ContainerError, and OSError
    for a read that fails after the file was opened.
    """
    folders = [Path(folder).absolute() for folder in (primary, *stripes)]
    locks = lock_folders(folders) if lock else []
    try:
        return Container(Survey(folders, read_manifest(folders[0])), locks)
    except BaseException:
        for held in locks:
            held.close()
        raise


def lock_folders(folders: Sequence[Path]) -> list[FolderLock]:
    """Take the shared locks of a container's folders, which must be readable and distinct. Raises ContainerError."""
    _check_folders(folders)
    locks: list[FolderLock] = []
    for folder in folders:
        try:
            locks.append(FolderLock(folder, exclusive=False))
        except OSError as error:
            for held in locks:
                held.close()
            if isinstance(error, BlockingIOError):
                raise ContainerError(f"{folder} is being written by another process, which holds its LOCK") from error
            raise ContainerError(f"{folder}: LOCK cannot be taken: {error.strerror}") from error
    return locks


def _check_folders(folders: Sequence[Path]) -> None:
    for index, folder in enumerate(folders):
        what = "container" if index == 0 else "stripe folder"
        try:
            os.listdir(folder)
        except OSError as error:
            raise ContainerError(f"{what} {folder} cannot be read: {why_unreachable(folder, error)}") from error
        for other in folders[:index]:
            if folder == other:
                raise ContainerError(f"{what} {folder} is given twice")
            if folder.samefile(other):
                raise ContainerError(f"{what} {folder} is the same folder as {other}")
