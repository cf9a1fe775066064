"""Reads every extent of an open container, one after the other, and says which no longer hold what was written.

An iterator: each step reads one extent of one file from its drive, past the page cache, so that the caller decides the
pace (`colibri-pack scrub` by a rate, a daemon by its idle moments) and may stop for good between any two. The position
can be stored as text and taken up later. Covers the stripes and their mirrors; dense weights and tables are checked
when a container is loaded, and by `colibri-pack verify`. Never writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from colibri.core.container_stripes import Copy
from colibri.core.direct_file import DirectFile
from colibri.core.striping import ExtentTable, extents_per_record
from colibri.v1 import manifest_pb2


class Readable(Protocol):
    """What a scrub reads: an open container, or what is left of one that cannot be opened."""

    manifest: manifest_pb2.Manifest

    def extents(self, layer_index: int) -> ExtentTable:
        """Return the extents of a layer with their CRC-32Cs, [experts, extents_per_record] of EXTENT."""
        ...

    def copies(self, stripe: int) -> list[Copy]:
        """Return the files that hold a stripe or a beginning of it."""
        ...


@dataclass(frozen=True)
class Position:
    """The next extent, counted in logical order over all layers, of the container with this UUID."""

    uuid: str
    extent: int = 0

    def text(self) -> str:
        """Return the position in one line."""
        return f"{self.uuid} {self.extent}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Return the position that text() wrote. Raises ValueError."""
        uuid, _, extent = text.strip().partition(" ")
        if not uuid or not extent.isdecimal():
            raise ValueError(f"{text[:80]!r} is no position of a scrub")
        return cls(uuid, int(extent))


@dataclass(frozen=True)
class Finding:
    """An extent that does not hold what was written, in a stripe or in its mirror; `bytes` at `offset` of `path`."""

    path: Path
    stripe: int
    mirror: bool
    offset: int
    bytes: int
    layer: int
    expert: int
    problem: str

    def __str__(self) -> str:
        """Return one line that names all of it."""
        return (
            f"{self.path}: layer {self.layer}, expert {self.expert}: {self.bytes} bytes at offset {self.offset}: "
            f"{self.problem}"
        )


@dataclass(frozen=True)
class Scrubbed:
    """One step: `bytes` were to be read from `path`; `finding` says what was wrong, None if nothing was."""

    path: Path
    bytes: int
    finding: Finding | None


class Scrub:
    """A pass over a container; iterate over it. A context manager, which closes the files, not the container.

    `total_bytes` is what a whole pass reads, `done_bytes` how far this one is, what came before a resumed position
    included.
    """

    def __init__(self, container: Readable, position: Position | None = None) -> None:
        """Begin at `position`, or at the start if it is of another container or at the end of this one."""
        self._container = container
        self._files: dict[Path, DirectFile] = {}
        self._uuid = container.manifest.layout.uuid
        layers = container.manifest.expert_layers
        self._counts = [layer.experts * extents_per_record(layer) for layer in layers]
        begin = position.extent if position is not None and position.uuid == self._uuid else 0
        self._next = begin if begin < sum(self._counts) else 0
        self.total_bytes = self._copied_bytes(sum(self._counts))
        self.done_bytes = self._copied_bytes(self._next)
        self._steps = self._read_all()

    @property
    def position(self) -> Position:
        """Where a later pass goes on: behind the extents of which every copy has been read."""
        return Position(self._uuid, self._next)

    def __iter__(self) -> Iterator[Scrubbed]:
        """Return itself."""
        return self

    def __next__(self) -> Scrubbed:
        """Read the next extent of a stripe or mirror. What cannot be read is a finding, not an exception."""
        return next(self._steps)

    def _copied_bytes(self, count: int) -> int:
        """Bytes of all copies of the first `count` extents."""
        total = 0
        for layer_index, in_layer in enumerate(self._counts):
            table = self._container.extents(layer_index).reshape(-1)[: min(count, in_layer)]
            for stripe in range(len(self._container.manifest.layout.stripes)):
                extents = table[table["stripe"] == stripe]
                for copy in self._container.copies(stripe):
                    there = extents["file_offset"] + extents["bytes"] <= copy.bytes
                    total += int(extents["bytes"][there].sum())
            count = max(0, count - in_layer)
        return total

    def _read_all(self) -> Iterator[Scrubbed]:
        first = 0
        for layer_index, count in enumerate(self._counts):
            if self._next < first + count:
                table = self._container.extents(layer_index)
                while self._next < first + count:
                    expert, piece = divmod(self._next - first, table.shape[1])
                    yield from self._read_extent(layer_index, expert, table[expert, piece])
            first += count

    def _read_extent(self, layer_index: int, expert: int, extent: ExtentTable) -> Iterator[Scrubbed]:
        stripe, offset, size = int(extent["stripe"]), int(extent["file_offset"]), int(extent["bytes"])
        layer = self._container.manifest.expert_layers[layer_index].layer
        copies = [copy for copy in self._container.copies(stripe) if offset + size <= copy.bytes]
        if not copies:
            self._next += 1
        for copy in copies:
            problem = self._problem(copy.path, offset, size, int(extent["crc32c"]))
            found = (copy.path, stripe, copy.mirror, offset, size, layer, expert)
            self.done_bytes += size
            if copy is copies[-1]:
                self._next += 1
            yield Scrubbed(copy.path, size, Finding(*found, problem) if problem else None)

    def _problem(self, path: Path, offset: int, size: int, wanted: int) -> str:
        try:
            if path not in self._files:
                self._files[path] = DirectFile(path)
            found = self._files[path].crc32c(offset, size)
        except (OSError, EOFError) as error:
            if path in self._files:  # a drive that comes back has to be opened again
                self._files.pop(path).close()
            text = error.strerror if isinstance(error, OSError) else None
            return f"cannot be read: {text or error}"
        return "" if found == wanted else f"CRC-32C is {found:08x}, extents.crc32c says {wanted:08x}"

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
