"""Looks at every file of a container but the weights' bytes, and says what is wrong with it.

Reads manifest, headers, tables and bundled files. container.py opens a container only where nothing is wrong; `verify`
goes on and names every fault. Everything is hostile until checked; a fault names file, field, stripe and offset.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from colibri.core.container_check import MANIFEST_LIMIT, check_manifest, parse_manifest, stored_tensors, table_counts
from colibri.core.container_files import (
    ALIGN,
    ContainerError,
    StripeHeader,
    dense_metadata,
    read_exact,
    read_safetensors_header,
    unpack_table,
)
from colibri.core.identity import content_id
from colibri.core.paths import why_unreachable
from colibri.core.tensors import crc32c
from colibri.v1 import manifest_pb2

MANIFEST_NAME = "manifest.json"
DENSE_NAME = "dense.safetensors"
EXTENTS_NAME = "extents.crc32c"
RECORDS_NAME = "records.sha256"
_STRIPE_NAME = re.compile(r"stripe-([0-9]{3})\.colibri")


def stripe_name(number: int) -> str:
    """Return the file name of a stripe."""
    return f"stripe-{number:03d}.colibri"


class Survey:
    """What was found in the folders of a container. `faults` is empty if all of it belongs together.

    extent_crcs (u32 each), record_digests (32 bytes each) and entries of stripe_paths (by number) are None where the
    file is missing or wrong.
    """

    def __init__(self, folders: Sequence[Path], manifest: manifest_pb2.Manifest) -> None:
        """Look at everything behind `manifest`, which read_manifest() gave; folders[0] is the primary."""
        self.primary = folders[0]
        self.manifest = manifest
        self.faults: list[str] = []
        layout = manifest.layout
        extent_count, record_count = table_counts(manifest)
        self.extent_crcs = self._table(EXTENTS_NAME, 4, extent_count, layout.extent_checksums.crc32c)
        self.record_digests = self._table(RECORDS_NAME, 32, record_count, layout.record_digests.crc32c)
        with self._noting():
            self._check_content_id()
        with self._noting():
            _check_dense_file(self.primary / DENSE_NAME, manifest)
        for file in manifest.files:
            with self._noting():
                _check_bundled_file(self.primary / file.name, file)
        self.stripe_paths: list[Path | None] = [None] * len(layout.stripes)
        for folder in folders:
            with self._noting():
                self._add_stripe(folder)
        with self._noting():
            self._check_stripes(folders)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except ContainerError as error:
            self.faults.append(str(error))

    def _table(self, name: str, entry_bytes: int, count: int, crc: int) -> bytes | None:
        with self._noting():
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

    def _add_stripe(self, folder: Path) -> None:
        path = _only_stripe(folder)
        if path is None:
            return
        number = _check_stripe(path, self.manifest)
        other = self.stripe_paths[number]
        if other is not None:
            raise ContainerError(f"stripe {number} stands twice: {other} and {path}")
        self.stripe_paths[number] = path

    def _check_stripes(self, folders: Sequence[Path]) -> None:
        wanted = len(self.stripe_paths)
        missing = [number for number, path in enumerate(self.stripe_paths) if path is None]
        if missing:
            places = ", ".join(str(folder) for folder in folders)
            noun, verb = ("stripe", "is") if len(missing) == 1 else ("stripes", "are")
            raise ContainerError(
                f"{noun} {', '.join(map(str, missing))} of {wanted} {verb} missing: no usable "
                f"{', '.join(map(stripe_name, missing))} in the folders given ({places})"
            )
        used = {path.parent for path in self.stripe_paths if path}
        empty = [str(folder) for folder in folders if folder not in used]
        if empty:
            verb = "holds" if len(empty) == 1 else "hold"
            raise ContainerError(f"{', '.join(empty)} {verb} no stripe of this container, which has {wanted}")
        first = self.stripe_paths[0]
        if first is not None and first.parent != self.primary:
            raise ContainerError(f"{first}: stripe 0 belongs beside the manifest, in {self.primary}")


def split_digests(entries: bytes) -> list[bytes]:
    """Return the 32-byte digests of a table's entries."""
    return [entries[i : i + 32] for i in range(0, len(entries), 32)]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of what is wrong with it."""
    try:
        yield
    except ContainerError as error:
        raise ContainerError(f"{path}: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Give descriptor and size of a regular file, and name it in every refusal."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ContainerError(f"{path} cannot be opened: {why_unreachable(path, error)}") from error
    try:
        with _naming(path):
            if not os.path.isfile(path):
                raise ContainerError("is no regular file")
            yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_manifest(primary: Path) -> manifest_pb2.Manifest:
    """Return the manifest of the container in `primary`, parsed and consistent in itself. Raises ContainerError."""
    path = primary / MANIFEST_NAME
    if primary.is_dir() and not path.exists():
        raise ContainerError(f"{primary} holds no {MANIFEST_NAME}: no container, or one whose packing has not finished")
    with _opened(path) as (fd, size):
        if size > MANIFEST_LIMIT:
            raise ContainerError(f"is {size} bytes, more than {MANIFEST_LIMIT}")
        manifest = parse_manifest(read_exact(fd, 0, size))
        check_manifest(manifest)
        return manifest


def _read_table(path: Path, uuid: UUID, entry_bytes: int, count: int, crc: int) -> bytes:
    with _opened(path) as (fd, size):
        limit = ALIGN + entry_bytes * count
        if size > limit:
            raise ContainerError(f"is {size} bytes, {count} entries take less than {limit}")
        entries = unpack_table(read_exact(fd, 0, size), uuid, entry_bytes, count)
        if crc32c(entries) != crc:
            raise ContainerError(f"is not the table of this manifest: CRC-32C {crc32c(entries):08x}, not {crc:08x}")
        return entries


def _check_dense_file(path: Path, manifest: manifest_pb2.Manifest) -> None:
    with _opened(path) as (fd, size):
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
    with _opened(path) as (fd, size):
        if size != file.bytes:
            raise ContainerError(f"is {size} bytes, the manifest says {file.bytes}")
        found = hashlib.sha256(read_exact(fd, 0, size)).hexdigest()
        if found != file.sha256:
            raise ContainerError(f"was changed: SHA-256 {found}, the manifest says {file.sha256}")


def _only_stripe(folder: Path) -> Path | None:
    try:
        names = sorted(name for name in os.listdir(folder) if _STRIPE_NAME.fullmatch(name))
    except OSError as error:
        raise ContainerError(f"{folder} cannot be read: {why_unreachable(folder, error)}") from error
    if len(names) > 1:
        raise ContainerError(f"{folder} holds more than one stripe file: {', '.join(names)}")
    return folder / names[0] if names else None


def _check_stripe(path: Path, manifest: manifest_pb2.Manifest) -> int:
    """Return the number of a stripe file that is whole and of this container."""
    layout = manifest.layout
    with _opened(path) as (fd, size):
        header = StripeHeader.unpack(os.pread(fd, ALIGN, 0))
        if str(header.uuid) != layout.uuid:
            same = " (another pack of the same model)" if header.content_id == manifest.content_id else ""
            raise ContainerError(f"belongs to container {header.uuid}{same}, not to {layout.uuid}")
        if header.content_id != manifest.content_id:
            raise ContainerError(f"has content_id {header.content_id}, the manifest {manifest.content_id}")
        if header.stripes != len(layout.stripes) or header.stripe >= header.stripes:
            raise ContainerError(
                f"is stripe {header.stripe} of {header.stripes}, the manifest has {len(layout.stripes)} stripes"
            )
        if path.name != stripe_name(header.stripe):
            raise ContainerError(
                f"holds stripe {header.stripe} by its header: swapped with {stripe_name(header.stripe)}?"
            )
        expected = layout.stripes[header.stripe].bytes
        if not size == header.file_bytes == expected:
            cut = "is cut short: " if size < expected else ""
            raise ContainerError(
                f"{cut}stripe {header.stripe} is {size} bytes, "
                f"its header says {header.file_bytes}, the manifest {expected}"
            )
        return header.stripe
