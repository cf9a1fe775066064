"""Reads whole expert records of an open container, every extent checked, from the mirror where the stripe is damaged.

For what moves records or takes them apart: restripe and export. The daemon's core has its own reader.
"""

import os
from pathlib import Path

from colibri.core.container import Container, ContainerError
from colibri.core.container_files import read_exact
from colibri.core.striping import ExtentTable
from colibri.core.tensors import crc32c


class RecordReader:
    """The open stripes and mirrors of a container. read() may be called from several threads."""

    def __init__(self, container: Container) -> None:
        """Raises OSError."""
        self._container = container
        self._tables = [container.extents(index) for index in range(len(container.manifest.expert_layers))]
        self._fds: dict[Path, int] = {}
        for path in (*container.stripe_paths, *container.mirror_paths):
            if path is not None:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, layer_index: int, expert: int) -> bytes:
        """Return a record. Raises ContainerError naming every copy of an extent that is damaged in all of them."""
        layer = self._container.manifest.expert_layers[layer_index].layer
        return b"".join(self._extent(extent, layer, expert) for extent in self._tables[layer_index][expert])

    def _extent(self, extent: ExtentTable, layer: int, expert: int) -> bytes:
        stripe, offset, size = int(extent["stripe"]), int(extent["file_offset"]), int(extent["bytes"])
        wanted = int(extent["crc32c"])
        found = []
        for path in (self._container.stripe_paths[stripe], self._container.mirror_paths[stripe]):
            if path is None:
                continue
            where = f"{path}: layer {layer}, expert {expert}, offset {offset}"
            try:
                data = read_exact(self._fds[path], offset, size)
                # Read once and never again: the page cache is for others.
                os.posix_fadvise(self._fds[path], offset, size, os.POSIX_FADV_DONTNEED)
            except (OSError, ContainerError) as error:
                found.append(f"{where}: {getattr(error, 'strerror', None) or error}")
                continue
            seen = crc32c(data)
            if seen == wanted:
                return data
            found.append(f"{where}: CRC-32C is {seen:08x}, extents.crc32c says {wanted:08x}")
        raise ContainerError("; ".join(found))

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
