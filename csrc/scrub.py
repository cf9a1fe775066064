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
from typing import Self

from colibri.core.container import Container
from colibri.core.direct_file import DirectFile
from colibri.core.striping import ExtentTable


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

    def __init__(self, container: Container, position: Position | None = None) -> None:
        """Begin at `position`, or at the start if it is of another container or at the end of this one."""
        self._container = container
        self._files: dict[Path, DirectFile] = {}
        self._uuid = container.manifest.layout.uuid
        layers = container.manifest.expert_layers
        self._counts = [layer.experts * container.extents_per_record(i) for i, layer in enumerate(layers)]
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

    def _copies(self, stripe: int) -> Iterator[tuple[Path, bool]]:
        mirror = self._container.mirror_paths[stripe]
        path = self._container.stripe_paths[stripe]
        yield path, path.name.startswith("mirror-")
        if mirror is not None:
            yield mirror, True

    def _copied_bytes(self, count: int) -> int:
        """Bytes of all copies of the first `count` extents."""
        total = 0
        for layer_index, in_layer in enumerate(self._counts):
            table = self._container.extents(layer_index).reshape(-1)[: min(count, in_layer)]
            for stripe in range(len(self._container.stripe_paths)):
                size = int(table["bytes"][table["stripe"] == stripe].sum())
                total += size * sum(1 for _ in self._copies(stripe))
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
        copies = list(self._copies(stripe))
        for path, mirror in copies:
            problem = self._problem(path, offset, size, int(extent["crc32c"]))
            finding = Finding(path, stripe, mirror, offset, size, layer, expert, problem) if problem else None
            self.done_bytes += size
            if (path, mirror) == copies[-1]:
                self._next += 1
            yield Scrubbed(path, size, finding)

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
