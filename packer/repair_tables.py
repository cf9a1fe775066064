"""The two tables of a container, made again from what they speak of.

The manifest holds a CRC-32C of each table's entries and the content_id, which runs over all record digests: what is
made is compared with these before it is written. One table is made from records that the other one vouches for; both
together from the stripes as they are, or from the checkpoint.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

from colibri.core.container_files import pack_table
from colibri.core.container_survey import EXTENTS_NAME, RECORDS_NAME, split_digests
from colibri.core.direct_file import DirectFile
from colibri.core.identity import content_id
from colibri.core.striping import ExtentTable, layer_extents
from colibri.core.tensors import crc32c
from colibri.packer.disk import Disk
from colibri.packer.making import write_whole
from colibri.packer.outputs import PARTIAL
from colibri.packer.places import Place
from colibri.packer.rebuild import Rebuilder
from colibri.packer.repair_stripes import Repairs
from colibri.v1 import manifest_pb2


class TableRepair:
    """Makes extents.crc32c and records.sha256 again where they are missing or damaged."""

    def __init__(
        self, manifest: manifest_pb2.Manifest, places: Sequence[Place], rebuilder: Rebuilder | None, disk: Disk
    ) -> None:
        self._manifest, self._disk, self._rebuilder = manifest, disk, rebuilder
        count = len(manifest.layout.stripes)
        self._copies: list[list[Path]] = [[] for _ in range(count)]
        for place in places:
            if not place.lost:
                self._copies[place.copy.number].append(place.path)

    def run(
        self, primary: Path, crcs: bytes | None, digests: bytes | None, repairs: Repairs
    ) -> tuple[bytes, bytes] | None:
        """Return the entries of both tables, what is None of them made again and written; None if that cannot be.

        Raises DriveError, CheckpointError.
        """
        if crcs is not None and digests is not None:
            return crcs, digests
        made = self._made(crcs, digests)
        for name, entry_bytes, old, index in ((EXTENTS_NAME, 4, crcs, 0), (RECORDS_NAME, 32, digests, 1)):
            if old is None and made is None:
                why = "" if self._rebuilder else ", and no checkpoint is given (--source)"
                repairs.remains.append(f"{primary / name} is lost: it cannot be made again from damaged records{why}")
            elif old is None and made is not None:
                self._write(primary, name, pack_table(UUID(self._manifest.layout.uuid), entry_bytes, made[index]))
                repairs.fixed.append(f"{primary / name}: was missing or damaged, made again")
        return made

    def _write(self, primary: Path, name: str, data: bytes) -> None:
        write_whole(self._disk, primary / (name + PARTIAL), data)
        self._disk.rename(primary / (name + PARTIAL), primary / name)
        self._disk.sync_folder(primary)

    def _made(self, crcs: bytes | None, digests: bytes | None) -> tuple[bytes, bytes] | None:
        for from_source in (False, True):
            if from_source and self._rebuilder is None:
                continue
            found = self._tables(crcs, digests, only_source=from_source)
            if found is not None and self._is_right(*found):
                return found
        return None

    def _is_right(self, crcs: bytes, digests: bytes) -> bool:
        layout = self._manifest.layout
        return (
            crc32c(crcs) == layout.extent_checksums.crc32c
            and crc32c(digests) == layout.record_digests.crc32c
            and content_id(self._manifest, split_digests(digests)) == self._manifest.content_id
        )

    def _tables(self, crcs: bytes | None, digests: bytes | None, *, only_source: bool) -> tuple[bytes, bytes] | None:
        made_crcs, made_digests = bytearray(), bytearray()
        number = extent = 0
        for layer_index, layer in enumerate(self._manifest.expert_layers):
            for expert, row in enumerate(layer_extents(layer)):
                known = None if crcs is None else struct.unpack_from(f"<{len(row)}I", crcs, 4 * extent)
                digest = None if digests is None else digests[32 * number : 32 * (number + 1)]
                for pieces in self._candidates(layer_index, expert, row, known, only_source):
                    found = hashlib.sha256(b"".join(pieces)).digest()
                    sums = [crc32c(piece) for piece in pieces]
                    if digest in (None, found) and known in (None, tuple(sums)):
                        break
                else:
                    return None
                made_crcs += struct.pack(f"<{len(sums)}I", *sums)
                made_digests += found
                number, extent = number + 1, extent + len(row)
        return bytes(made_crcs), bytes(made_digests)

    def _candidates(
        self, layer_index: int, expert: int, row: ExtentTable, known: tuple[int, ...] | None, only_source: bool
    ) -> Iterator[list[bytes]]:
        """What the record may be: from stripes, from mirrors, extent by extent from whichever is right, from source."""
        if not only_source:
            copies = [self._read(extent) for extent in row]
            for choice in (0, -1):
                if all(copies):
                    yield [pieces[choice] for pieces in copies]
            if known is not None:
                good = [[p for p in pieces if crc32c(p) == crc] for pieces, crc in zip(copies, known, strict=True)]
                if all(good):
                    yield [pieces[0] for pieces in good]
        if self._rebuilder is not None:
            data = self._rebuilder.unproved(layer_index, expert)
            yield [data[int(e["record_offset"]) :][: int(e["bytes"])] for e in row]

    def _read(self, extent: ExtentTable) -> list[bytes]:
        found = []
        for path in self._copies[int(extent["stripe"])]:
            try:
                with DirectFile(path) as file:
                    found.append(file.read(int(extent["file_offset"]), int(extent["bytes"])))
            except (OSError, EOFError):
                continue
        return found
