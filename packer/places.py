"""Where each stripe and mirror of a damaged container is or has to be: found by names, judged by headers.

For repair, which opens what nobody else would. Refuses, by name, a file of another container in the place of one of
ours: nothing of it may be overwritten.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri.core.container import ContainerError
from colibri.core.container_files import ALIGN, StripeHeader
from colibri.core.container_stripes import STRIPE_FILE, DamagedStripeError, check_stripe_file
from colibri.core.direct_file import DirectFile
from colibri.core.striping import ExtentTable
from colibri.packer.errors import FolderError
from colibri.packer.outputs import PARTIAL, StripeCopy, stripe_copies
from colibri.v1 import manifest_pb2


@dataclass(frozen=True)
class Place:
    """A stripe file or mirror: its final path, and what is wrong with the file as a whole, "" if nothing is.

    `lost`: there is no such file; it is made under `work`, a temporary name, and renamed when it is whole.
    """

    copy: StripeCopy
    path: Path
    problem: str
    lost: bool

    @property
    def work(self) -> Path:
        """Return the file that is read and written."""
        return self.path.with_name(self.path.name + PARTIAL) if self.lost else self.path


def find_places(folders: Sequence[Path], manifest: manifest_pb2.Manifest) -> tuple[list[Place], list[str]]:
    """Return the places of all stripes and mirrors, and what has none because a folder for it is not given.

    Raises ContainerError and FolderError for what must not be touched.
    """
    hosts = _hosts(folders, len(manifest.layout.stripes))
    places, unplaced = [], []
    for copy in stripe_copies(manifest.layout):
        there = [folder / copy.name for folder in folders if os.path.lexists(folder / copy.name)]
        if len(there) > 1:
            raise ContainerError(f"{copy.what} stands twice: {there[0]} and {there[1]}")
        if there:
            places.append(_judge(copy, there[0], manifest))
        elif copy.folder in hosts:
            place = Place(copy, hosts[copy.folder] / copy.name, "is missing", lost=True)
            _refuse_foreign_partial(place, manifest)
            places.append(place)
        else:
            unplaced.append(f"{copy.what} is lost, and no folder for it is given: an empty one, with --stripe")
    return places, unplaced


def _hosts(folders: Sequence[Path], count: int) -> dict[int, Path]:
    """The folder of each stripe: of its file, or of the mirror that lies beside it, or an empty one."""
    names = {folder: [m for name in os.listdir(folder) if (m := STRIPE_FILE.fullmatch(name))] for folder in folders}
    hosts: dict[int, Path] = {}
    for folder, found in names.items():
        numbers = [int(match[2]) for match in found if match[1] == "stripe"]
        if len(numbers) > 1:
            raise ContainerError(f"{folder} holds more than one stripe file")
        if numbers:
            if numbers[0] >= count or (folder == folders[0]) != (numbers[0] == 0):
                raise ContainerError(f"{folder} holds stripe {numbers[0]}, which does not belong there")
            hosts.setdefault(numbers[0], folder)
    hosts.setdefault(0, folders[0])
    for folder, found in names.items():
        beside = [(int(match[2]) + 1) % count for match in found if match[1] == "mirror"]
        if folder not in hosts.values() and beside:
            hosts.setdefault(beside[0], folder)
    free = [folder for folder in folders if folder not in hosts.values()]
    lost = [number for number in range(count) if number not in hosts]
    if len(free) > len(lost):
        raise FolderError(f"{free[len(lost)]} holds no stripe of this container, and no further stripe is lost")
    hosts.update(zip(lost, free, strict=False))
    return hosts


def _judge(copy: StripeCopy, path: Path, manifest: manifest_pb2.Manifest) -> Place:
    try:
        check_stripe_file(path, manifest, mirror=copy.mirror)
    except DamagedStripeError as error:
        return Place(copy, path, str(error).removeprefix(f"{path}: ").removeprefix(f"{path} "), lost=False)
    return Place(copy, path, "", lost=False)


def _refuse_foreign_partial(place: Place, manifest: manifest_pb2.Manifest) -> None:
    """What an earlier repair began is gone on with; an unfinished pack of another container is not ours."""
    if not place.work.exists():
        return
    with open(place.work, "rb") as file:
        block = file.read(ALIGN)
    if not any(block):
        return  # a kill came before the header was written
    try:
        header = StripeHeader.unpack(block)
    except ContainerError as error:
        raise FolderError(f"{place.work} {error}: remove it if it is not needed") from error
    if str(header.uuid) != manifest.layout.uuid or (header.stripe, header.mirror) != (
        place.copy.number,
        place.copy.mirror,
    ):
        raise FolderError(f"{place.work} is of container {header.uuid}: remove it if it is not needed")


def require_ours(place: Place, extents: Iterable[ExtentTable]) -> None:
    """Refuse to write over a file whose header does not say that it is ours, unless some of its data does.

    `extents` are this stripe's. Raises ContainerError.
    """
    if not place.problem or place.lost or place.path.stat().st_size <= ALIGN or has_our_header(place.path):
        return
    with DirectFile(place.path) as file:
        for extent in extents:
            try:
                if file.crc32c(int(extent["file_offset"]), int(extent["bytes"])) == int(extent["crc32c"]):
                    return
            except (OSError, EOFError):
                continue
    raise ContainerError(
        f"{place.path}: {place.problem}, and none of its data is of this container: to have it made anew, remove it"
    )


def has_our_header(path: Path) -> bool:
    """Whether the header is whole: then check_stripe_file has seen that it is this container's."""
    try:
        with open(path, "rb") as file:
            StripeHeader.unpack(file.read(ALIGN))
    except (OSError, ContainerError):
        return False
    return True
