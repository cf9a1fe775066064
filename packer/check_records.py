"""Holds the records of a container against what its tables say: each extent's CRC-32C, each record's SHA-256.

Where one of the tables is lost the other one is enough to find damage: CRC-32Cs alone tell every bad extent, and a
record that has its SHA-256 proves its extents, by which those of the other copy are judged. Only reads.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from colibri.core.container_stripes import Copy
from colibri.core.striping import ExtentTable
from colibri.core.tensors import crc32c
from colibri.packer.remains import Remains

Read = Callable[[Path, int, int], Iterable[bytes | memoryview]]  # file, offset, count; may raise OSError, EOFError


class State(Enum):
    """What is known of an expert or a dense tensor."""

    INTACT = "intact"  # every copy that there is holds what was packed
    DAMAGED = "damaged"  # some copy does not
    LOST = "lost"  # some of its bytes are in no file that is left
    UNCHECKED = "unchecked"  # there is nothing to hold it against


@dataclass(frozen=True)
class Record:
    """An expert's record: extents, their CRC-32Cs and the record's SHA-256, None where that table is lost."""

    layer: int
    expert: int
    row: ExtentTable
    crcs: list[int] | None
    digest: bytes | None

    def __str__(self) -> str:
        """Return what it is called in messages."""
        return f"layer {self.layer}, expert {self.expert}"


@dataclass(frozen=True)
class Checked:
    """A record, or a dense tensor, after it was read: how many bytes that were, what is wrong with it."""

    bytes: int
    faults: list[str]
    state: State


@dataclass(frozen=True)
class _Sum:
    """One copy of an extent and the CRC-32C of what it holds, None where it cannot be read."""

    copy: Copy
    crc: int | None


def layer_records(remains: Remains) -> Iterator[list[Record]]:
    """Give the records in logical order, a layer at a time."""
    number = 0
    for index, layer in enumerate(remains.manifest.expert_layers):
        table, records = remains.extents(index), []
        for expert, row in enumerate(table):
            crcs = None if remains.extent_crcs is None else row["crc32c"].tolist()
            digests = remains.record_digests
            digest = None if digests is None else digests[32 * number : 32 * (number + 1)]
            records.append(Record(layer.layer, expert, row, crcs, digest))
            number += 1
        yield records


def check_record(record: Record, copies: Callable[[int], Sequence[Copy]], read: Read) -> Checked:
    """Read every copy of a record; `copies` gives those of a stripe."""
    look = _Look(record, read)
    for extent in record.row:
        end = int(extent["file_offset"]) + int(extent["bytes"])
        look.at(extent, [copy for copy in copies(int(extent["stripe"])) if end <= copy.bytes])
    found = look.faults + (look.compared() if record.crcs is not None else look.proved())
    if look.lost:
        state = State.LOST
    elif found:
        state = State.DAMAGED
    else:
        state = State.UNCHECKED if record.crcs is None and record.digest is None else State.INTACT
    return Checked(look.bytes, found, state)


class _Look:
    """One record being read: SHA-256 of the first copies of its extents, and of the last ones where they are needed."""

    def __init__(self, record: Record, read: Read) -> None:
        self.faults: list[str] = []
        self.bytes = 0
        self.lost = False
        self._record = record
        self._read = read
        self._sums: list[list[_Sum]] = []
        self._digests = [hashlib.sha256()]
        if record.crcs is None and record.digest is not None:
            self._digests.append(hashlib.sha256())

    def at(self, extent: ExtentTable, copies: Sequence[Copy]) -> None:
        """Read the next extent from all its copies."""
        self.lost = self.lost or not copies
        sums = []
        for copy in copies:
            wanting = [d for d, c in zip(self._digests, (copies[0], copies[-1]), strict=False) if c is copy]
            sums.append(_Sum(copy, self._crc(extent, copy, wanting)))
            self.bytes += int(extent["bytes"])
        self._sums.append(sums)

    def _crc(self, extent: ExtentTable, copy: Copy, digests: "list[hashlib._Hash]") -> int | None:
        crc = 0
        try:
            for piece in self._read(copy.path, int(extent["file_offset"]), int(extent["bytes"])):
                crc = crc32c(piece, crc)
                for digest in digests:
                    digest.update(piece)
        except (OSError, EOFError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            self.faults.append(f"{self._where(copy, extent)}: cannot be read: {why}")
            return None
        return crc

    def compared(self) -> list[str]:
        """Hold the extents against their CRC-32Cs, and the record against its SHA-256 if all of them pass."""
        crcs = self._record.crcs or []
        found = self._differing(crcs, "extents.crc32c says")
        passed = [bool(sums) and sums[0].crc == crc for sums, crc in zip(self._sums, crcs, strict=True)]
        wanted = self._record.digest
        if all(passed) and wanted is not None and self._digests[0].digest() != wanted:
            found.append(f"{self._record}: SHA-256 of the record differs from records.sha256")
        return found

    def proved(self) -> list[str]:
        """Hold the record against its SHA-256, then each extent against the copy that has it."""
        wanted = self._record.digest
        if wanted is None or self.lost:
            return []
        tried = []
        for which, digest in zip((0, -1), self._digests, strict=True):
            crcs = [sums[which].crc for sums in self._sums]
            if None in crcs:
                continue
            if digest.digest() == wanted:
                return self._differing([crc for crc in crcs if crc is not None], "the record by its SHA-256 has")
            tried += [str(sums[which].copy.path) for sums in self._sums]
        files = ", ".join(dict.fromkeys(tried))
        return (
            [f"{self._record}: SHA-256 of the record differs from records.sha256, as read from {files}"]
            if tried
            else []
        )

    def _differing(self, crcs: list[int], says: str) -> list[str]:
        found = []
        for extent, sums, wanted in zip(self._record.row, self._sums, crcs, strict=True):
            for seen in sums:
                if seen.crc not in (None, wanted):
                    where = self._where(seen.copy, extent)
                    found.append(f"{where}: CRC-32C is {seen.crc:08x}, {says} {wanted:08x}")
        return found

    def _where(self, copy: Copy, extent: ExtentTable) -> str:
        size, offset = int(extent["bytes"]), int(extent["file_offset"])
        return f"{copy.path}: {self._record}: {size} bytes at offset {offset}"


def tally(states: Iterable[State]) -> dict[State, int]:
    """Return how many there are of each state, 0 included."""
    counts = dict.fromkeys(State, 0)
    for state in states:
        counts[state] += 1
    return counts
