"""Looks at every copy of every extent of a container, and writes anew those that do not hold what they must.

Good bytes come from the other copy, else from the checkpoint, and are proved by the record's SHA-256 and the extents'
CRC-32C before they are written: in place, through the same inode, so that a daemon that has the file open reads them at
its next try. Only bytes that fail their checksum are ever written over. After fsync everything written is read back
from the drive. A file that is lost is made under a temporary name and renamed when it is whole.
"""

import errno
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from uuid import UUID

import numpy as np

from colibri.core.direct_file import DirectFile
from colibri.core.striping import ExtentTable, layer_extents
from colibri.core.tensors import crc32c
from colibri.packer.disk import Disk, DriveError, OutputFile
from colibri.packer.encode import worker_count
from colibri.packer.errors import CheckpointError
from colibri.packer.outputs import copy_header
from colibri.packer.places import Place, require_ours
from colibri.packer.progress import Reporter
from colibri.packer.rebuild import Rebuilder
from colibri.packer.wording import counted
from colibri.v1 import manifest_pb2

SYNC_BYTES = 64 << 20  # written between two syncs
_AHEAD = 2  # records per thread that are looked at, and rebuilt, in one go: a bound on memory
_ORIGINS = {"stripe": "its stripe", "mirror": "its mirror", "source": "the checkpoint"}


@dataclass(frozen=True)
class Repaired:
    """An extent that was written anew, and where its bytes came from: "stripe", "mirror" or "source"."""

    path: Path
    offset: int
    bytes: int
    layer: int
    expert: int
    origin: str

    def __str__(self) -> str:
        """Return one line that names all of it."""
        where = f"{self.bytes} bytes at offset {self.offset}"
        return f"{self.path}: layer {self.layer}, expert {self.expert}: {where}: rebuilt from {_ORIGINS[self.origin]}"


@dataclass
class Repairs:
    """What a repair did and what it could not do; the container is in order afterwards if nothing `remains`.

    `fixed` are headers, tensors, tables and files that were set right, and lost stripes that were made anew, whose
    extents are not in `extents`.
    """

    extents: list[Repaired] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    remains: list[str] = field(default_factory=list)
    checked_bytes: int = 0


@dataclass(frozen=True)
class Record:
    """An expert's record: its extents with their checksums, and its SHA-256."""

    layer_index: int
    layer: int
    expert: int
    row: ExtentTable
    digest: bytes


def records_of(manifest: manifest_pb2.Manifest, crcs: bytes, digests: bytes) -> Iterator[Record]:
    """Give every record in logical order, with the checksums of the two tables' entries."""
    entries, extent, record = np.frombuffer(crcs, "<u4"), 0, 0
    for layer_index, layer in enumerate(manifest.expert_layers):
        table = layer_extents(layer)
        table["crc32c"] = entries[extent : extent + table.size].reshape(table.shape)
        extent += table.size
        for expert, row in enumerate(table):
            yield Record(layer_index, layer.layer, expert, row, digests[32 * record : 32 * (record + 1)])
            record += 1


def _extents_on(stripe: int, records: Iterable[Record]) -> Iterator[ExtentTable]:
    return (extent for record in records for extent in record.row if int(extent["stripe"]) == stripe)


@dataclass(frozen=True)
class _Bad:
    """An extent of one copy that does not hold what it must; `index` is its place in the record."""

    place: Place
    index: int
    problem: str


@dataclass(frozen=True)
class _Seen:
    """A record after a look at all its copies.

    `good` has, for each extent, a place that holds it, or None. Where a bad extent has none, `whole` is the record from
    the checkpoint, or `why` says why not.
    """

    record: Record
    bad: list[_Bad]
    good: list[Place | None]
    read_bytes: int
    whole: bytes | None
    why: str


class _Look:
    """Reads and judges records, and rebuilds those that need it, from several threads; each has its own files."""

    def __init__(self, copies: dict[int, list[Place]], rebuilder: Rebuilder | None) -> None:
        self._copies = copies
        self._rebuilder = rebuilder
        self._local = threading.local()
        self._opened: list[DirectFile] = []

    def file(self, path: Path) -> DirectFile:
        """Return this thread's file. Raises OSError."""
        files: dict[Path, DirectFile] = self._local.__dict__.setdefault("files", {})
        if path not in files:
            files[path] = DirectFile(path)
            self._opened.append(files[path])
        return files[path]

    def at(self, record: Record) -> _Seen:
        """Read every copy of a record."""
        bad: list[_Bad] = []
        good: list[Place | None] = [None] * len(record.row)
        digest, size = hashlib.sha256(), 0
        for index, extent in enumerate(record.row):
            for place in self._copies[int(extent["stripe"])]:
                size += int(extent["bytes"])
                try:
                    data = self.file(place.work).read(int(extent["file_offset"]), int(extent["bytes"]))
                except (OSError, EOFError) as error:
                    bad.append(_Bad(place, index, f"cannot be read: {getattr(error, 'strerror', None) or error}"))
                    continue
                found = crc32c(data)
                if found != extent["crc32c"]:
                    told = f"CRC-32C is {found:08x}, extents.crc32c says {int(extent['crc32c']):08x}"
                    bad.append(_Bad(place, index, told))
                elif good[index] is None:
                    good[index] = place
                    digest.update(data)
        if all(good) and digest.digest() != record.digest:
            told = "passes its CRC-32C, and the record is not the one of records.sha256"
            good = [None] * len(record.row)
            bad = [_Bad(p, i, told) for i, e in enumerate(record.row) for p in self._copies[int(e["stripe"])]]
        wanted = any(good[item.index] is None for item in bad)
        whole, why = self._from_source(record) if wanted else (None, "")
        return _Seen(record, bad, good, size, whole, why)

    def _from_source(self, record: Record) -> tuple[bytes | None, str]:
        if self._rebuilder is None:
            return None, "no good copy is left, and no checkpoint is given (--source)"
        try:
            data = self._rebuilder.record(record.layer_index, record.expert, record.digest)
        except CheckpointError as error:  # one expert of the source; the others may be whole
            return None, f"no good copy is left, and the checkpoint does not give it: {error}"
        return data, "" if data else "no good copy is left, and the checkpoint given is not the one that was packed"

    def close(self) -> None:
        for file in self._opened:
            file.close()


class StripeRepair:
    """One run over the stripes and mirrors at `places`; notes what it does in `repairs`."""

    def __init__(
        self,
        manifest: manifest_pb2.Manifest,
        places: Sequence[Place],
        rebuilder: Rebuilder | None,
        repairs: Repairs,
        disk: Disk,
    ) -> None:
        self._manifest = manifest
        self._places = places
        self._rebuilder = rebuilder
        self._repairs = repairs
        self._disk = disk
        self._writers: dict[Place, OutputFile] = {}
        self._pending: list[tuple[Place, Repaired, int]] = []
        self._pending_bytes = 0
        self._made: dict[Place, int] = {place: 0 for place in places if place.lost}
        self._unfinished: set[Place] = set()

    def run(self, records: Iterable[Record], reporter: Reporter) -> None:
        """Look at `records`, all of the container, and repair what can be. Raises DriveError."""
        copies: dict[int, list[Place]] = {number: [] for number in range(len(self._manifest.layout.stripes))}
        for place in self._places:
            copies[place.copy.number].append(place)
        look, remaining = _Look(copies, self._rebuilder), iter(records)
        workers = worker_count()
        try:
            with ThreadPoolExecutor(workers, thread_name_prefix="repair") as pool:
                while batch := list(islice(remaining, _AHEAD * workers)):
                    for seen in pool.map(look.at, batch):
                        self._repairs.checked_bytes += seen.read_bytes
                        reporter.advance(seen.read_bytes)
                        self._repair(seen, look)
            self._flush()
            self._publish()
        finally:
            look.close()
            for writer in self._writers.values():
                writer.close()

    def prepare(self, records: Callable[[], Iterable[Record]]) -> None:
        """Set sizes and headers right, and begin the files that are lost. `records` gives all of the container.

        Raises ContainerError for a file that may be another's, DriveError, FolderError.
        """
        damaged = [place for place in self._places if place.problem]
        for place in damaged:
            require_ours(place, _extents_on(place.copy.number, records()))
        layout = self._manifest.layout
        for place in damaged:
            writer = self._writer(place)
            writer.cut(place.copy.bytes)
            header = copy_header(place.copy, len(layout.stripes), UUID(layout.uuid), self._manifest.content_id)
            writer.write(0, header)
            writer.sync()
            if not place.lost:
                self._repairs.fixed.append(f"{place.path}: {place.problem}: size and header are set right")

    def _writer(self, place: Place) -> OutputFile:
        if place not in self._writers:
            self._writers[place] = self._disk.open_output(place.work)
        return self._writers[place]

    def _repair(self, seen: _Seen, look: _Look) -> None:
        record = seen.record
        for item in seen.bad:
            extent, place = record.row[item.index], seen.good[item.index]
            offset, size = int(extent["file_offset"]), int(extent["bytes"])
            try:
                data = _good_bytes(seen, extent, place, look)
            except (OSError, EOFError) as error:
                self._give_up(item, record, f"its other copy cannot be read again: {error}")
                continue
            if data is None:
                self._give_up(item, record, seen.why)
                continue
            if crc32c(data) != extent["crc32c"]:
                self._give_up(item, record, "what would be written fails its CRC-32C too")
                continue
            origin = "source" if place is None else "mirror" if place.copy.mirror else "stripe"
            done = Repaired(item.place.path, offset, size, record.layer, record.expert, origin)
            self._write(item, record, done, data)

    def _give_up(self, item: _Bad, record: Record, why: str) -> None:
        extent = record.row[item.index]
        where = f"{int(extent['bytes'])} bytes at offset {int(extent['file_offset'])}"
        what = f"layer {record.layer}, expert {record.expert}: {where}: {item.problem}"
        self._repairs.remains.append(f"{item.place.path}: {what}; {why}")
        self._unfinished.add(item.place)

    def _write(self, item: _Bad, record: Record, done: Repaired, data: bytes) -> None:
        try:
            self._writer(item.place).write(done.offset, data)
        except DriveError as error:
            if error.errno != errno.EIO:
                raise
            self._give_up(item, record, str(error))
            return
        self._pending.append((item.place, done, crc32c(data)))
        self._pending_bytes += len(data)
        if self._pending_bytes >= SYNC_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Sync what was written and read it back from the drives. Raises DriveError."""
        for place in {place for place, _, _ in self._pending}:
            self._writers[place].sync()
        for place, done, crc in self._pending:
            try:
                with DirectFile(place.work) as file:
                    good = file.crc32c(done.offset, done.bytes) == crc
            except (OSError, EOFError):
                good = False
            if not good:
                self._repairs.remains.append(f"{done}, and the drive gives back something else: is it failing?")
                self._unfinished.add(place)
            elif place.lost:
                self._made[place] += 1
            else:
                self._repairs.extents.append(done)
        self._pending, self._pending_bytes = [], 0

    def _publish(self) -> None:
        """Give the files that were lost their names, if they are whole. Raises DriveError."""
        for place, count in self._made.items():
            if place in self._unfinished:
                self._repairs.remains.append(f"{place.path} is missing: {place.work.name} is not whole yet")
                continue
            self._writer(place).sync()
            self._disk.rename(place.work, place.path)
            self._disk.sync_folder(place.path.parent)
            self._repairs.fixed.append(f"{place.path}: was missing, made anew; {counted(count, 'extent')} written")


def _good_bytes(seen: _Seen, extent: ExtentTable, place: Place | None, look: _Look) -> bytes | None:
    """What the extent must hold, from the place that has it or from the checkpoint's record. Raises OSError."""
    if place is not None:
        return look.file(place.work).read(int(extent["file_offset"]), int(extent["bytes"]))
    begin = int(extent["record_offset"])
    return None if seen.whole is None else seen.whole[begin : begin + int(extent["bytes"])]
