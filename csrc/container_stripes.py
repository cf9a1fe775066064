"""Finds the stripe files of a container and their mirrors in the folders given, and proves whose they are.

A stripe is recognised by its name and by the UUID and number in its header. What must not be is a fault: a stripe that
is missing, foreign or swapped. A mirror is a second copy that a container can do without, so whatever is wrong with one
is a warning; and a stripe that is lost or damaged is only a warning too where its mirror is good and stands in for it.
container_survey.py looks at all the other files.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colibri.core.container_files import ALIGN, ContainerError, StripeHeader, naming, opened, read_exact
from colibri.core.paths import why_unreachable
from colibri.v1 import manifest_pb2

STRIPE_FILE = re.compile(r"(stripe|mirror)-([0-9]{3})\.colibri")


class DamagedStripeError(ContainerError):
    """A stripe file or mirror that is this container's by its name, and cut, unreadable or damaged in its header."""


@dataclass(frozen=True)
class Copy:
    """A file that stripe bytes can be read from: a stripe or a mirror, of which the first `bytes` are there."""

    path: Path
    mirror: bool
    bytes: int


@dataclass(frozen=True)
class DamagedFile:
    """A stripe file, or a mirror, that has the name of stripe `number` and is no whole copy of it; `text` says why."""

    number: int
    mirror: bool
    path: Path
    text: str


def stripe_name(number: int) -> str:
    """Return the file name of a stripe."""
    return f"stripe-{number:03d}.colibri"


def mirror_name(number: int) -> str:
    """Return the file name of the mirror of stripe `number`."""
    return f"mirror-{number:03d}.colibri"


def mirror_folder(number: int, stripes: int) -> int:
    """Return the number of the stripe beside which the mirror of stripe `number` lies."""
    return (number + 1) % stripes


class StripeFiles:
    """The stripe files and mirrors of a container, by number; None where there is none that is whole.

    `faults` say why the container cannot be used, `warnings` what it lacks and can do without.
    """

    def __init__(self, folders: Sequence[Path], manifest: manifest_pb2.Manifest) -> None:
        """Look into `folders`, of which the first is the primary."""
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self._manifest = manifest
        self._folders = folders
        self._primary = folders[0]
        self.missing: list[int] = []  # the stripes of which there is neither a file nor a mirror
        count = len(manifest.layout.stripes)
        self.stripes: list[Path | None] = [None] * count
        self.mirrors: list[Path | None] = [None] * count
        self._used: set[Path] = set()
        self.damaged: list[DamagedFile] = []  # each is spoken of in `faults` or `warnings`, by its text
        self._blamed: set[int] = set()  # stripes, by their file's name, whose file a fault speaks of already
        for folder in folders:
            with self._noting():
                self._look_into(folder)
        for number in range(count):
            self._check_mirror(number)
        lost = [number for number, path in enumerate(self.stripes) if path is None]
        replaced = bool(lost) and all(self.mirrors[number] for number in lost)
        (self.warnings if replaced else self.faults).extend(d.text for d in self.damaged if not d.mirror)
        self._judge(lost, replaced, folders)

    def readable(self, number: int) -> Path | None:
        """Return the file to read stripe `number` from: its mirror where the stripe is lost."""
        return self.stripes[number] or self.mirrors[number]

    def spare(self, number: int) -> Path | None:
        """Return the mirror of stripe `number`, unless it stands in for the stripe already."""
        return self.mirrors[number] if self.stripes[number] else None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except ContainerError as error:
            self.faults.append(str(error))

    def _look_into(self, folder: Path) -> None:
        try:
            found = [match for name in sorted(os.listdir(folder)) if (match := STRIPE_FILE.fullmatch(name))]
        except OSError as error:
            raise ContainerError(f"{folder} cannot be read: {why_unreachable(folder, error)}") from error
        for match in (match for match in found if match[1] == "mirror"):
            self._add_mirror(folder / match[0], int(match[2]))
        names = [match[0] for match in found if match[1] == "stripe"]
        if len(names) > 1:
            raise ContainerError(f"{folder} holds more than one stripe file: {', '.join(names)}")
        if names:
            number = int(next(match[2] for match in found if match[0] == names[0]))
            self._add_stripe(folder / names[0], number)

    def _add_stripe(self, path: Path, named: int) -> None:
        try:
            number = check_stripe_file(path, self._manifest)
        except DamagedStripeError as error:
            self.damaged.append(DamagedFile(named, False, path, str(error)))
            self._used.add(path.parent)
            self._blamed.add(named)
            return
        except ContainerError:
            self._blamed.add(named)
            raise
        other = self.stripes[number]
        if other is not None:
            raise ContainerError(f"stripe {number} stands twice: {other} and {path}")
        self.stripes[number] = path
        self._used.add(path.parent)

    def _add_mirror(self, path: Path, number: int) -> None:
        stripes = self._manifest.layout.stripes
        if number >= len(stripes) or not stripes[number].mirrored:
            self.warnings.append(f"{path}: this container has no such mirror; the file is not used")
            return
        self._used.add(path.parent)
        try:
            check_stripe_file(path, self._manifest, mirror=True)
        except ContainerError as error:
            text = f"the mirror of stripe {number} is not used: {error}"
            self.warnings.append(text)
            if isinstance(error, DamagedStripeError):
                self.damaged.append(DamagedFile(number, True, path, text))
            return
        other = self.mirrors[number]
        if other is not None:
            self.warnings.append(f"the mirror of stripe {number} stands twice: {path} is not used, {other} is")
            return
        self.mirrors[number] = path

    def _check_mirror(self, number: int) -> None:
        if not self._manifest.layout.stripes[number].mirrored:
            return
        mirror, host = self.mirrors[number], mirror_folder(number, len(self.stripes))
        beside = self.stripes[host]
        if mirror is None:
            name = mirror_name(number)
            place = beside.parent / name if beside else f"{name}, beside stripe {host}"
            self.warnings.append(f"stripe {number} has no usable mirror, only one copy of it is left: {place}")
        elif beside is not None and beside.parent != mirror.parent:
            self.warnings.append(f"{mirror}: this mirror belongs beside stripe {host}, in {beside.parent}")

    def _judge(self, lost: list[int], replaced: bool, folders: Sequence[Path]) -> None:
        if replaced:
            for number in lost:
                self.warnings.append(f"stripe {number} is lost: its mirror {self.mirrors[number]} stands in for it")
        elif lost:
            # Folders without a stripe are the same fault seen from its other side: they are not named beside it.
            self.missing = [n for n in lost if not self.mirrors[n] and n not in self._blamed]
            self.faults += [self.why_missing([number]) for number in self.missing]
            return
        with self._noting():
            empty = [str(folder) for folder in folders if folder not in self._used]
            if empty:
                verb = "holds" if len(empty) == 1 else "hold"
                text = f"{', '.join(empty)} {verb} no stripe of this container, which has {len(self.stripes)}"
                if not replaced:
                    raise ContainerError(text)
                self.warnings.append(text)
            first = self.stripes[0]
            if first is not None and first.parent != self._primary:
                raise ContainerError(f"{first}: stripe 0 belongs beside the manifest, in {self._primary}")

    def why_missing(self, numbers: Sequence[int]) -> str:
        """Return the fault of stripes that are nowhere in the folders."""
        noun, verb = ("stripe", "is") if len(numbers) == 1 else ("stripes", "are")
        return (
            f"{noun} {', '.join(map(str, numbers))} of {len(self.stripes)} {verb} missing: no usable "
            f"{', '.join(map(stripe_name, numbers))} in the folders given ({', '.join(map(str, self._folders))})"
        )


def check_stripe_file(path: Path, manifest: manifest_pb2.Manifest, *, mirror: bool = False) -> int:
    """Return the number of a stripe file, or a mirror, that is whole and of this container.

    Raises DamagedStripeError for one that is cut, unreadable or damaged in its header, ContainerError for one of
    another container or in another's place.
    """
    header, size = _read_header(path)
    with naming(path):
        _check_owner(path, header, manifest, mirror)
    expected = manifest.layout.stripes[header.stripe].bytes
    if not size == header.file_bytes == expected:
        cut = "is cut short: " if size < expected else ""
        raise DamagedStripeError(
            f"{path}: {cut}stripe {header.stripe} is {size} bytes, "
            f"its header says {header.file_bytes}, the manifest {expected}"
        )
    return header.stripe


def _read_header(path: Path) -> tuple[StripeHeader, int]:
    try:
        with opened(path) as (fd, size):
            try:
                return StripeHeader.unpack(read_exact(fd, 0, min(ALIGN, size))), size
            except OSError as error:
                raise ContainerError(f"its header cannot be read: {error.strerror or error}") from error
    except ContainerError as error:
        raise DamagedStripeError(str(error)) from error


def _check_owner(path: Path, header: StripeHeader, manifest: manifest_pb2.Manifest, mirror: bool) -> None:
    layout = manifest.layout
    if str(header.uuid) != layout.uuid:
        same = " (another pack of the same model)" if header.content_id == manifest.content_id else ""
        raise ContainerError(f"belongs to container {header.uuid}{same}, not to {layout.uuid}")
    if header.content_id != manifest.content_id:
        raise ContainerError(f"has content_id {header.content_id}, the manifest {manifest.content_id}")
    if header.stripes != len(layout.stripes) or header.stripe >= header.stripes:
        raise ContainerError(
            f"is stripe {header.stripe} of {header.stripes}, the manifest has {len(layout.stripes)} stripes"
        )
    if header.mirror != mirror:
        kinds = ("a stripe", "a mirror")
        raise ContainerError(f"is {kinds[header.mirror]} by its header, and {kinds[mirror]} by its name")
    named = (mirror_name if mirror else stripe_name)(header.stripe)
    if path.name != named:
        raise ContainerError(f"holds stripe {header.stripe} by its header: swapped with {named}?")
