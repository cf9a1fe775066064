"""A container that is to be made, decided before a byte is written: its manifest, its sizes, the room it needs.

What pack and restripe have in common; plan.py makes one from a checkpoint, restripe.py from another container.
"""

from collections.abc import Sequence
from typing import Protocol

from google.protobuf import json_format

from colibri.core.container_check import table_counts
from colibri.core.container_files import TABLE_HEADER_BYTES
from colibri.core.container_stripes import mirror_folder
from colibri.packer.layout import LayoutError
from colibri.v1 import manifest_pb2

# Room for what is small and not known to the byte: LOCK, folders' own blocks, the reports in manifest and journal.
_SLACK_BYTES = 1 << 20
_JOURNAL_BYTES_PER_UNIT = 512


class Target(Protocol):
    """A container to be made: a PackPlan or a MovePlan."""

    @property
    def manifest(self) -> manifest_pb2.Manifest:
        """The manifest, but for uuid and create time, and what only the data can tell."""

    @property
    def dense_header_bytes(self) -> int:
        """Where the data of dense.safetensors begins."""

    @property
    def dense_file_bytes(self) -> int:
        """Size of dense.safetensors."""

    @property
    def folder_bytes(self) -> tuple[int, ...]:
        """What each folder will hold at most, the primary first."""

    @property
    def fingerprint(self) -> str:
        """A text that is equal for the same input and options only."""


def needed_bytes(manifest: manifest_pb2.Manifest, dense_file_bytes: int) -> tuple[int, ...]:
    """Return what each folder of a container will hold at most while it is made, mirrors included."""
    extents, records = table_counts(manifest)
    text = len(json_format.MessageToJson(manifest, preserving_proto_field_name=True))
    primary = dense_file_bytes + 2 * text + 4 * extents + 32 * records
    primary += _JOURNAL_BYTES_PER_UNIT * (len(manifest.dense) + records) + 32 * extents
    primary += sum(file.bytes for file in manifest.files)
    stripes = manifest.layout.stripes
    folders = [stripe.bytes + _SLACK_BYTES for stripe in stripes]
    for stripe in stripes:
        if stripe.mirrored:
            folders[mirror_folder(stripe.number, len(stripes))] += stripe.bytes
    folders[0] += primary
    return tuple(folders)


def place_stripes(
    manifest: manifest_pb2.Manifest, weights: Sequence[int], stripe_bytes: Sequence[int], *, mirror: bool
) -> None:
    """Fill in the layout's stripes. Raises LayoutError for a mirror without a second drive."""
    if mirror and len(weights) == 1:
        raise LayoutError("a mirror needs a second drive, and one folder is given: a copy beside it would be lost too")
    for number, (weight, size) in enumerate(zip(weights, stripe_bytes, strict=True)):
        manifest.layout.stripes.add(number=number, weight=weight, bytes=size, mirrored=mirror)


def fill_tables(manifest: manifest_pb2.Manifest, min_extent_bytes: int) -> None:
    """Fill in the rest of the layout that the placement decides: the tables' sizes."""
    extents, records = table_counts(manifest)
    layout = manifest.layout
    layout.min_extent_bytes = min_extent_bytes
    layout.extent_checksums.offset = TABLE_HEADER_BYTES
    layout.extent_checksums.bytes = 4 * extents
    layout.record_digests.offset = TABLE_HEADER_BYTES
    layout.record_digests.bytes = 32 * records
