"""What of a container can still be looked at, however damaged it is: the copies of its stripes, and how far they go.

For verify, scrub and inspect, which name what is wrong and go on; whoever needs a whole container opens it with
open_container. A stripe file that is cut, or damaged in its header, is read as far as it goes, if what it holds is this
container's. Says of each lost or damaged stripe how many experts that concerns, and what makes it whole again.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from colibri.core.container_files import ALIGN
from colibri.core.container_folders import ContainerFolders
from colibri.core.container_stripes import Copy, DamagedFile
from colibri.core.container_survey import EXTENTS_NAME, RECORDS_NAME, Survey, checked_extents
from colibri.core.direct_file import DirectFile
from colibri.core.striping import ExtentTable, layer_extents
from colibri.packer.places import has_our_header
from colibri.packer.wording import counted

_PROBED = 32  # extents of a damaged file of which one must pass before its others are held against their checksums


class Remains:
    """A container that may be damaged, while its `folders` are locked.

    `faults` say what is damaged or lost, `warnings` what is and can be done without. extent_crcs (u32 each) and
    record_digests (32 bytes each) are None where that table is damaged.
    """

    def __init__(self, folders: ContainerFolders) -> None:
        """Look at everything but the weights' bytes."""
        survey = Survey(folders.paths, folders.manifest)
        self.manifest = folders.manifest
        self.primary = survey.primary
        self.extent_crcs, self.record_digests = survey.extent_crcs, survey.record_digests
        self._files = survey.files
        self._copies = [self._usable(number) for number in range(len(self.manifest.layout.stripes))]
        self._experts = sum(layer.experts for layer in self.manifest.expert_layers)
        mirrored = any(stripe.mirrored for stripe in self.manifest.layout.stripes)
        more = self._advice() | self._table_advice(survey.faults)
        self.faults = [text + more.get(text, "") for text in survey.faults]
        self.warnings = [text + more.get(text, "") for text in survey.warnings]
        (self.warnings if mirrored else self.faults)[:0] = folders.warnings

    def extents(self, layer_index: int) -> ExtentTable:
        """Return the extents of a layer, [experts, extents_per_record] of EXTENT; CRC-32Cs only where there are any."""
        if self.extent_crcs is None:
            return layer_extents(self.manifest.expert_layers[layer_index])
        return checked_extents(self.manifest, np.frombuffer(self.extent_crcs, "<u4"), layer_index)

    def copies(self, stripe: int) -> list[Copy]:
        """Return the files that hold a stripe or a beginning of it: the stripe file first, then the mirror."""
        return self._copies[stripe]

    def _usable(self, number: int) -> list[Copy]:
        size = self.manifest.layout.stripes[number].bytes
        copies = []
        for mirror, path in ((False, self._files.stripes[number]), (True, self._files.mirrors[number])):
            if path is not None:
                copies.append(Copy(path, mirror, size))
                continue
            for file in self._files.damaged:
                if (file.number, file.mirror) == (number, mirror) and (left := self._left(file)) is not None:
                    copies.append(left)
                    break
        return copies

    def _left(self, file: DamagedFile) -> Copy | None:
        """What a damaged file still holds, None if that is nothing or not this container's."""
        try:
            copy = Copy(file.path, file.mirror, file.path.stat().st_size if file.path.is_file() else 0)
            with DirectFile(file.path) as reader:
                return copy if self._holds_ours(reader, file.number, copy.bytes) else None
        except OSError:
            return None  # `file.text` says that it cannot be read

    def _holds_ours(self, reader: DirectFile, number: int, size: int) -> bool:
        """Whether an extent passes its CRC-32C. Without CRC-32Cs the records' SHA-256 will say whose the bytes are."""
        if self.extent_crcs is None:
            return True
        whole = (e for e in self._extents_of(number) if int(e["file_offset"]) + int(e["bytes"]) <= size)
        for extent in islice(whole, _PROBED):
            try:
                if reader.crc32c(int(extent["file_offset"]), int(extent["bytes"])) == int(extent["crc32c"]):
                    return True
            except (OSError, EOFError):
                continue
        return False

    def _extents_of(self, number: int) -> Iterator[ExtentTable]:
        for index in range(len(self.manifest.expert_layers)):
            table = self.extents(index)
            yield from table[table["stripe"] == number]

    def _advice(self) -> dict[str, str]:
        """What is to be said behind a fault or warning, by its text."""
        told = {self._files.why_missing([number]): self._missing_advice(number) for number in self._files.missing}
        for file in self._files.damaged:
            if file.number < len(self._copies):
                told[file.text] = self._damaged_advice(file)
        return told

    def _table_advice(self, faults: list[str]) -> dict[str, str]:
        tables = {EXTENTS_NAME: self.extent_crcs, RECORDS_NAME: self.record_digests}
        good = [name for name, entries in tables.items() if entries is not None]
        instead = f"are held against {good[0]} instead" if good else "cannot be checked without a table"
        more = f"; the experts {instead}, `colibri-pack repair` makes this one again"
        lost = [str(self.primary / name) for name in tables if name not in good]
        return {text: more for text in faults if any(text.startswith(path) for path in lost)}

    def _missing_advice(self, number: int) -> str:
        return (
            f"; {self._concerned(number, 0)}: `colibri-pack repair` makes it anew from the checkpoint (--source), in "
            "an empty folder where its own is lost"
        )

    def _damaged_advice(self, file: DamagedFile) -> str:
        copies = self._copies[file.number]
        left = max((copy.bytes for copy in copies if copy.path == file.path), default=0)
        concerned = self._concerned(file.number, left)
        if not os.access(file.path, os.R_OK):
            return f"; {concerned}"  # a repair by this user could not read it either
        other = any(copy.mirror != file.mirror for copy in copies)
        twin = "from its stripe" if file.mirror else "from its mirror"
        origin = twin if other else "from the checkpoint (--source)"
        if not left and _shows_nothing_ours(file.path):
            return f"; {concerned}: if it is not needed, remove it, and `colibri-pack repair` makes it anew {origin}"
        return f"; {concerned}: `colibri-pack repair` sets it right, {origin}"

    def _concerned(self, number: int, left: int) -> str:
        """How many experts have bytes in a stripe file behind its first `left` bytes."""
        count = 0
        for index in range(len(self.manifest.expert_layers)):
            table = self.extents(index)
            gone = (table["stripe"] == number) & (table["file_offset"] + table["bytes"] > left)
            count += int(np.count_nonzero(gone.any(axis=1)))
        if not count:
            return "the bytes of all its experts are there"
        where = "behind its end" if left else "in it"
        return f"{count} of {counted(self._experts, 'expert')} {'has' if count == 1 else 'have'} bytes {where}"


def _shows_nothing_ours(path: Path) -> bool:
    """Whether a repair refuses to write over a file of which no data could be told to be this container's."""
    return not path.is_file() or (path.stat().st_size > ALIGN and not has_our_header(path))
