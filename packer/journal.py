"""The journal of a pack: how far it came, so that the same command goes on where a killed one stopped.

Lines of `crc32c json`, appended only after the data that they speak of has been synced. The first line binds the
journal to one input and one set of options. A torn last line is dropped; anything else that does not fit is refused.
The journal lies beside the unfinished files in the primary folder and is removed when the manifest stands.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from colibri.core.tensors import crc32c
from colibri.packer.disk import Disk, OutputFile, reaching

JOURNAL_NAME = "pack.journal"
JOURNAL_VERSION = 1
_AND_THE_REST = "and every *.partial file in the folders of the pack"


class JournalError(Exception):
    """A journal that cannot be continued; the text says why and what to do."""


@dataclass(frozen=True)
class UnitReport:
    """What quantisation did to one dense tensor or one expert record: sums, and its worst matrix."""

    values: int
    nonzero: int
    zeroed: int
    sum_squares: float
    error_squares: float
    worst_rms: float
    worst_name: str


NO_REPORT = UnitReport(0, 0, 0, 0.0, 0.0, 0.0, "")  # of what was moved, not quantised


@dataclass(frozen=True)
class DoneDense:
    """A dense tensor on the drive: CRC-32C of codes, scales and mins (0 where absent), SHA-256 over all."""

    crcs: tuple[int, int, int]
    sha256: str
    report: UnitReport


@dataclass(frozen=True)
class DoneRecord:
    """An expert record on the drives: CRC-32C of each extent, SHA-256 of the record."""

    crcs: tuple[int, ...]
    sha256: str
    report: UnitReport


@dataclass
class Done:
    """Everything that is safely on the drives: the first dense tensors, and then the first records, in logical
    order."""

    dense: list[DoneDense] = field(default_factory=list)
    records: list[DoneRecord] = field(default_factory=list)


class Journal:
    """An open journal; `uuid` is that of the container being made, `done` what its lines say."""

    def __init__(self, file: OutputFile, uuid: UUID, done: Done, end: int) -> None:
        self.uuid = uuid
        self.done = done
        self._file = file
        self._end = end

    @classmethod
    def create(cls, disk: Disk, folder: Path, fingerprint: str, uuid: UUID, weights: Sequence[int]) -> "Journal":
        """Start a journal under its final name, with nothing done. Raises DriveError."""
        partial = folder / f"{JOURNAL_NAME}.partial"
        file = disk.open_output(partial)
        try:
            file.cut(0)
            head = {"version": JOURNAL_VERSION, "fingerprint": fingerprint, "uuid": str(uuid)}
            line = _line({**head, "weights": list(weights)})
            file.write(0, line)
            file.sync()
            disk.rename(partial, folder / JOURNAL_NAME)
            disk.sync_folder(folder)
        except BaseException:
            file.close()
            raise
        file.path = folder / JOURNAL_NAME
        return cls(file, uuid, Done(), len(line))

    @classmethod
    def resume(cls, disk: Disk, folder: Path, fingerprint: str) -> "Journal":
        """Open the journal of `folder`. Raises JournalError if it is of another input or command, DriveError."""
        path = folder / JOURNAL_NAME
        file = disk.open_output(path)
        try:
            lines, end = _read_lines(file.read(0, file.size()))
            _check_head(lines, path, fingerprint)
            file.cut(end)
            return cls(file, UUID(lines[0]["uuid"]), _collect(lines[1:], path), end)
        except BaseException:
            file.close()
            raise

    def append(self, done: Done) -> None:
        """Add what has just been synced. Raises DriveError."""
        line = _line({"dense": [_dump(item) for item in done.dense], "records": [_dump(item) for item in done.records]})
        self._file.write(self._end, line)
        self._file.sync()
        self._end += len(line)
        self.done.dense += done.dense
        self.done.records += done.records

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def journal_exists(folder: Path) -> bool:
    """Return whether a pack was begun in `folder` and not finished. Raises DriveError, FolderError."""
    with reaching(folder, "looking into"):
        return (folder / JOURNAL_NAME).exists()


def check_journal(folder: Path, fingerprint: str) -> None:
    """Refuse what Journal.resume() would, and write nothing. Raises JournalError, DriveError, FolderError."""
    path = folder / JOURNAL_NAME
    with reaching(path, "reading"):
        lines, _ = _read_lines(path.read_bytes())
    _check_head(lines, path, fingerprint)


def _check_head(lines: list[dict[str, Any]], path: Path, fingerprint: str) -> None:
    if not lines:
        raise JournalError(f"{path}: its first line is damaged; remove that file {_AND_THE_REST}")
    head = lines[0]
    if head.get("version") != JOURNAL_VERSION:
        raise JournalError(f"{path}: version {head.get('version')!r}; remove that file {_AND_THE_REST}")
    if head["fingerprint"] != fingerprint:
        raise JournalError(
            f"{path.parent} holds an unfinished pack of another source or with other options (or the source changed "
            f"since); run the command that began it, or, to give that pack up: remove {JOURNAL_NAME} {_AND_THE_REST}"
        )


def journal_weights(folder: Path) -> list[int] | None:
    """Return the weights with which the unfinished pack in `folder` began; None where there is none to go on with.

    Whether the pack can be gone on with is for resume() to say. Raises DriveError, FolderError.
    """
    path = folder / JOURNAL_NAME
    if not journal_exists(folder):
        return None
    with reaching(path, "reading"):
        lines, _ = _read_lines(path.read_bytes())
    weights = lines[0].get("weights") if lines else None
    if not isinstance(weights, list) or not all(type(weight) is int and 0 < weight < 2**32 for weight in weights):
        return None
    return weights


def _line(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x " % crc32c(text) + text + b"\n"


def _read_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines, and where the last of them ends; a torn or damaged one ends the journal."""
    lines: list[dict[str, Any]] = []
    end = 0
    while (newline := data.find(b"\n", end)) >= 0:
        crc, _, text = data[end:newline].partition(b" ")
        if crc != b"%08x" % crc32c(text):
            break
        lines.append(json.loads(text))
        end = newline + 1
    return lines, end


def _dump(item: DoneDense | DoneRecord) -> list[Any]:
    report = item.report
    sums = [report.values, report.nonzero, report.zeroed, report.sum_squares, report.error_squares]
    return [list(item.crcs), item.sha256, [*sums, report.worst_rms, report.worst_name]]


def _collect(lines: list[dict[str, Any]], path: Path) -> Done:
    done = Done()
    try:
        for line in lines:
            for crcs, sha256, report in line["dense"]:
                codes, scales, mins = crcs
                done.dense.append(DoneDense((codes, scales, mins), sha256, UnitReport(*report)))
            for crcs, sha256, report in line["records"]:
                done.records.append(DoneRecord(tuple(crcs), sha256, UnitReport(*report)))
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path}: a line has not the fields of version {JOURNAL_VERSION}: {error!r}") from error
    return done
