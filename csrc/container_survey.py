"""Looks at every file of a container but the weights' bytes, and says what is wrong with it.

Reads manifest, headers, tables and bundled files. container.py opens a container only where nothing is wrong; `verify`
goes on and names every fault. Everything is hostile until checked; a fault names file, field, stripe and offset.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import numpy as np
import numpy.typing as npt

from colibri.core.container_check import MANIFEST_LIMIT, check_manifest, parse_manifest, stored_tensors, table_counts
from colibri.core.container_files import (
    ALIGN,
    ContainerError,
    dense_metadata,
    opened,
    read_exact,
    read_safetensors_header,
    unpack_table,
)
from colibri.core.container_stripes import StripeFiles
from colibri.core.identity import content_id
from colibri.core.striping import ExtentTable, extents_per_record, layer_extents
from colibri.core.tensors import crc32c
from colibri.v1 import manifest_pb2

MANIFEST_NAME = "manifest.json"
DENSE_NAME = "dense.safetensors"
EXTENTS_NAME = "extents.crc32c"
RECORDS_NAME = "records.sha256"


class Survey:
    """What was found in the folders of a container. `faults` is empty if all of it belongs together.

    extent_crcs (u32 each), record_digests (32 bytes each) and entries of stripe_paths (by number) are None where the
    file is missing or wrong. Where a stripe is lost and its mirror is good, stripe_paths has the mirror. mirror_paths
    are the second copies beside those, None where there is none; `warnings` name what is lost and can be done without.
    """

    def __init__(self, folders: Sequence[Path], manifest: manifest_pb2.Manifest) -> None:
        """Look at everything behind `manifest`, which read_manifest() gave; folders[0] is the primary."""
        self.primary = folders[0]
        self.manifest = manifest
        self.faults: list[str] = []
        self.read_error: OSError | None = None  # the first read that a drive refused; it is among the faults too
        layout = manifest.layout
        extent_count, record_count = table_counts(manifest)
        self.extent_crcs = self._table(EXTENTS_NAME, 4, extent_count, layout.extent_checksums.crc32c)
        self.record_digests = self._table(RECORDS_NAME, 32, record_count, layout.record_digests.crc32c)
        with self._noting(self.primary / MANIFEST_NAME):
            self._check_content_id()
        with self._noting(self.primary / DENSE_NAME):
            _check_dense_file(self.primary / DENSE_NAME, manifest)
        for file in manifest.files:
            with self._noting(self.primary / file.name):
                _check_bundled_file(self.primary / file.name, file)
        self.files = StripeFiles(folders, manifest)
        self.faults += self.files.faults
        self.warnings = list(self.files.warnings)
        numbers = range(len(layout.stripes))
        self.stripe_paths = [self.files.readable(number) for number in numbers]
        self.mirror_paths = [self.files.spare(number) for number in numbers]

    @property
    def refusal(self) -> str:
        """The first fault, for who does not go on; stripes that are missing are named together."""
        missing = self.files.missing
        if missing and self.faults[0] == self.files.why_missing(missing[:1]):
            return self.files.why_missing(missing)
        return self.faults[0]

    @contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        try:
            yield
        except ContainerError as error:
            self.faults.append(str(error))
        except OSError as error:
            self.read_error = self.read_error or OSError(error.errno, error.strerror, str(path))
            self.faults.append(f"{path} cannot be read: {error.strerror or error}")

    def _table(self, name: str, entry_bytes: int, count: int, crc: int) -> bytes | None:
        with self._noting(self.primary / name):
            return _read_table(self.primary / name, UUID(self.manifest.layout.uuid), entry_bytes, count, crc)
        return None

    def _check_content_id(self) -> None:
        if self.record_digests is None:
            return
        said = self.manifest.content_id
        found = content_id(self.manifest, split_digests(self.record_digests))
        if found != said:
            path = self.primary / MANIFEST_NAME
            raise ContainerError(f"{path}: content_id is {said}, spec, tensors and files give {found}")


def checked_extents(manifest: manifest_pb2.Manifest, crcs: npt.NDArray[np.uint32], layer_index: int) -> ExtentTable:
    """Return the extents of manifest.expert_layers[layer_index], [experts, extents_per_record] of EXTENT.

    `crcs` are the entries of extents.crc32c, u32 [all extents].
    """
    layers = manifest.expert_layers
    first = sum(layer.experts * extents_per_record(layer) for layer in layers[:layer_index])
    table = layer_extents(layers[layer_index])
    table["crc32c"] = crcs[first : first + table.size].reshape(table.shape)
    return table


def split_digests(entries: bytes) -> list[bytes]:
    """Return the 32-byte digests of a table's entries."""
    return [entries[i : i + 32] for i in range(0, len(entries), 32)]


def read_manifest(primary: Path) -> manifest_pb2.Manifest:
    """Return the manifest of the container in `primary`, parsed and consistent in itself. Raises ContainerError."""
    path = primary / MANIFEST_NAME
    if primary.is_dir() and not path.exists():
        raise ContainerError(f"{primary} holds no {MANIFEST_NAME}: no container, or one whose packing has not finished")
    with opened(path) as (fd, size):
        if size > MANIFEST_LIMIT:
            raise ContainerError(f"is {size} bytes, more than {MANIFEST_LIMIT}")
        manifest = parse_manifest(read_exact(fd, 0, size))
        check_manifest(manifest)
        return manifest


def _read_table(path: Path, uuid: UUID, entry_bytes: int, count: int, crc: int) -> bytes:
    with opened(path) as (fd, size):
        limit = ALIGN + entry_bytes * count
        if size > limit:
            raise ContainerError(f"is {size} bytes, {count} entries take less than {limit}")
        entries = unpack_table(read_exact(fd, 0, size), uuid, entry_bytes, count)
        if crc32c(entries) != crc:
            raise ContainerError(f"is not the table of this manifest: CRC-32C {crc32c(entries):08x}, not {crc:08x}")
        return entries


def _check_dense_file(path: Path, manifest: manifest_pb2.Manifest) -> None:
    with opened(path) as (fd, size):
        stored, metadata = read_safetensors_header(fd, size)
        uuid = metadata.get("colibri_uuid", "")
        if uuid != manifest.layout.uuid:
            raise ContainerError(f"belongs to container {uuid[:80]}, not to {manifest.layout.uuid}")
        if metadata != dense_metadata(uuid):
            raise ContainerError(f"has the metadata {str(metadata)[:200]}, not {dense_metadata(uuid)}")
        for tensor in manifest.dense:
            for wanted in stored_tensors(tensor):
                found = stored.pop(wanted.name, None)
                if found is None:
                    raise ContainerError(f"lacks tensor {wanted.name}")
                if found != wanted:
                    raise ContainerError(f"tensor {wanted.name}: the header has {found}, the manifest {wanted}")
        if stored:
            raise ContainerError(f"holds tensor {min(stored)[:200]}, which the manifest does not know")


def _check_bundled_file(path: Path, file: manifest_pb2.BundledFile) -> None:
    with opened(path) as (fd, size):
        if size != file.bytes:
            raise ContainerError(f"is {size} bytes, the manifest says {file.bytes}")
        found = hashlib.sha256(read_exact(fd, 0, size)).hexdigest()
        if found != file.sha256:
            raise ContainerError(f"was changed: SHA-256 {found}, the manifest says {file.sha256}")
