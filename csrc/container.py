"""Opens a container: the folder of the manifest and the folders of its stripes, proved to belong together.

Holds the shared locks while it is open and gives the core the place of every extent. The weights' bytes are checked
where they are used (by the core) or by `colibri-pack verify`. The packer (verify, export) and the daemon both come in
here. docs/container.md describes the format.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from colibri.core.container_check import canonical_name
from colibri.core.container_files import ContainerError
from colibri.core.container_folders import ContainerFolders
from colibri.core.container_stripes import Copy, stripe_name
from colibri.core.container_survey import DENSE_NAME, MANIFEST_NAME, Survey, checked_extents, split_digests
from colibri.core.identity import canonical_encoding, content_id
from colibri.core.striping import EXTENT, ExtentTable, extents_per_record

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

    def __init__(self, survey: Survey, folders: ContainerFolders) -> None:
        """Take over the locks of the folders. Raises ContainerError with the first fault that the survey found,
        OSError where a drive refused to read."""
        if survey.read_error is not None:
            raise survey.read_error
        if survey.faults:
            raise ContainerError(survey.refusal)
        assert survey.extent_crcs is not None
        assert survey.record_digests is not None
        self.manifest = survey.manifest
        self.primary = survey.primary
        self.dense_path = survey.primary / DENSE_NAME
        self.warnings = [*folders.warnings, *survey.warnings]  # what is lost and can be done without
        # By number; index 0 is in the primary folder. A lost stripe is read from its mirror, which stands here then.
        self.stripe_paths = [path for path in survey.stripe_paths if path]
        self.mirror_paths = survey.mirror_paths  # the second copy of each stripe, None where there is none
        self.content_id = survey.manifest.content_id
        self.record_digests = split_digests(survey.record_digests)  # SHA-256 of each record, in logical order
        self._extent_crcs = np.frombuffer(survey.extent_crcs, "<u4")
        self._folders = folders

    def extents_per_record(self, layer_index: int) -> int:
        """Return into how many extents a record of manifest.expert_layers[layer_index] is cut."""
        return extents_per_record(self.manifest.expert_layers[layer_index])

    def extents(self, layer_index: int) -> ExtentTable:
        """Return the extents of a layer, [experts, extents_per_record] of EXTENT (the layout of cl_extent).

        layer_index counts manifest.expert_layers.
        """
        return checked_extents(self.manifest, self._extent_crcs, layer_index)

    def copies(self, stripe: int) -> list[Copy]:
        """Return the files that hold stripe number `stripe`: the one that is read from, then the other one, if any."""
        size = self.manifest.layout.stripes[stripe].bytes
        paths = [self.stripe_paths[stripe], self.mirror_paths[stripe]]
        return [Copy(path, path.name.startswith("mirror-"), size) for path in paths if path is not None]

    def first_record(self, layer_index: int) -> int:
        """Return the index of the layer's expert 0 among all records in logical order."""
        return sum(layer.experts for layer in self.manifest.expert_layers[:layer_index])

    def close(self) -> None:
        """Let go of the locks; a second call does nothing."""
        self._folders.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_container(primary: Path, stripes: Sequence[Path] = (), *, lock: bool = True) -> Container:
    """Open the container with its manifest in `primary` and further stripes in the folders `stripes`, in any order.

    Checks the manifest, the headers of all files, both tables, the bundled files and the content id, and takes a
    shared lock on every folder (`lock=False`: the caller holds them exclusively). A mirror that is missing or wrong,
    and a lost stripe whose mirror is good, are warnings. Raises ContainerError, and OSError for a read that fails after
    the file was opened.
    """
    folders = ContainerFolders(primary, stripes, lock=lock)
    try:
        return Container(Survey(folders.paths, folders.manifest), folders)
    except BaseException:
        folders.close()
        raise
