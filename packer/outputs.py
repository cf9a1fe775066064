"""The unfinished files of a container: dense.safetensors, the stripes and their mirrors under temporary names.

Owns where they lie and that they belong to this container: each carries its UUID from its first byte on, so that work
that is taken up again notices a drive that is not mounted, or another one in its place. Refuses to touch anything
else's files.
"""

from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from colibri.core.container import DENSE_NAME, MANIFEST_NAME, ContainerError, stripe_name
from colibri.core.container_check import stored_tensors
from colibri.core.container_files import ALIGN, StripeHeader, dense_metadata, pack_safetensors_header
from colibri.core.container_stripes import mirror_folder, mirror_name
from colibri.core.paths import looks_unmounted
from colibri.packer.disk import Disk, DriveError, OutputFile, reaching
from colibri.packer.errors import FolderError
from colibri.packer.target import Target
from colibri.v1 import manifest_pb2

PARTIAL = ".partial"
NO_CONTENT = "0" * 64  # content_id in a stripe's header until the container is complete


@dataclass(frozen=True)
class StripeCopy:
    """A stripe file or a mirror of stripe `number`; `folder` is the index of its folder, 0 the primary."""

    number: int
    mirror: bool
    folder: int
    name: str
    bytes: int

    @property
    def what(self) -> str:
        """Return how it is called in messages."""
        return f"{'the mirror of ' if self.mirror else ''}stripe {self.number}"


def stripe_copies(layout: manifest_pb2.Layout) -> list[StripeCopy]:
    """Return every stripe file and mirror of a layout, stripes first."""
    count = len(layout.stripes)
    copies = [StripeCopy(s.number, False, s.number, stripe_name(s.number), s.bytes) for s in layout.stripes]
    copies += [
        StripeCopy(s.number, True, mirror_folder(s.number, count), mirror_name(s.number), s.bytes)
        for s in layout.stripes
        if s.mirrored
    ]
    return copies


def copy_header(copy: StripeCopy, stripes: int, uuid: UUID, content_id: str) -> bytes:
    """Return the first block of a stripe file or mirror."""
    return StripeHeader(copy.number, stripes, uuid, content_id, copy.bytes, copy.mirror).pack()


def dense_header(manifest: manifest_pb2.Manifest, uuid: UUID, header_bytes: int) -> bytes:
    """Return what stands before the data of dense.safetensors."""
    entries = [entry for tensor in manifest.dense for entry in stored_tensors(tensor)]
    return pack_safetensors_header(entries, dense_metadata(str(uuid)), header_bytes)


class Outputs:
    """The open files: `dense`, and those that hold each stripe. folders[0] is the primary."""

    def __init__(self, disk: Disk, folders: list[Path], target: Target, uuid: UUID) -> None:
        """Describe the files; create() or reopen() opens them."""
        self._disk = disk
        self._folders = folders
        self._target = target
        self._uuid = uuid
        self._copies = stripe_copies(target.manifest.layout)
        self._final: dict[OutputFile, Path] = {}
        self._files: list[OutputFile] = []  # of _copies, in their order
        self.dense: OutputFile

    def create(self) -> None:
        """Make the files, full length, with headers. Raises DriveError, FolderError for those of another container."""
        for index, folder in enumerate(self._folders):
            self._refuse_others(index, folder)
        self.dense = self._open(self._folders[0] / DENSE_NAME)
        self.dense.cut(0)
        self.dense.cut(self._target.dense_file_bytes)
        self.dense.write(0, self._dense_header())
        for copy in self._copies:
            file = self._open(self._folders[copy.folder] / copy.name)
            self._files.append(file)
            file.cut(0)
            file.cut(copy.bytes)
            file.write(0, self._header(copy, NO_CONTENT))
        for folder in self._folders:
            self._disk.sync_folder(folder)  # the journal may only speak of files whose names last

    def _refuse_others(self, index: int, folder: Path) -> None:
        """What was stopped before its first data may be gone on with in other folders than it began in."""
        own = {copy.name + PARTIAL: copy for copy in self._copies if copy.folder == index}
        with reaching(folder, "listing"):
            paths = sorted(folder.iterdir())
        for path in paths:
            stripe = path.name.startswith(("stripe-", "mirror-"))
            if path.name == MANIFEST_NAME or (stripe and path.name not in own):
                raise FolderError(f"{path} is of another container: give the --stripe folders of the first run")
            if path.name in own:
                self._refuse_foreign(path)

    def _refuse_foreign(self, path: Path) -> None:
        with reaching(path, "opening"), open(path, "rb") as file:
            block = file.read(ALIGN)
        try:
            header = StripeHeader.unpack(block)
        except ContainerError:
            return  # the kill came before the header was written
        if header.uuid != self._uuid:
            raise FolderError(
                f"{path} is of the unfinished container {header.uuid}, wanted is {self._uuid}: give the "
                "--stripe folders of the first run"
            )

    def reopen(self) -> None:
        """Open the files again. Raises DriveError for a missing one, FolderError for another's."""
        self.dense = self._reopen(self._folders[0] / DENSE_NAME, self._target.dense_file_bytes)
        if self.dense.read(0, self._target.dense_header_bytes) != self._dense_header():
            raise FolderError(f"{self.dense.path} is not of the pack that its journal speaks of")
        for copy in self._copies:
            file = self._reopen(self._folders[copy.folder] / copy.name, copy.bytes)
            self._files.append(file)
            try:
                header = StripeHeader.unpack(file.read(0, ALIGN))
            except ContainerError as error:
                raise DriveError(f"{file.path} {error}") from error
            if (header.uuid, header.stripe, header.mirror) != (self._uuid, copy.number, copy.mirror):
                found = StripeCopy(header.stripe, header.mirror, 0, "", 0).what
                raise FolderError(
                    f"{file.path} is {found} of container {header.uuid}, wanted is {copy.what} "
                    f"of {self._uuid}: give the --stripe folders in the order of the first run"
                )

    def _open(self, final: Path) -> OutputFile:
        file = self._disk.open_output(final.with_name(final.name + PARTIAL))
        self._final[file] = final
        return file

    def _reopen(self, final: Path, size: int) -> OutputFile:
        partial = final.with_name(final.name + PARTIAL)
        path = partial if partial.exists() else final  # killed between the renames: it has its final name already
        if not path.exists():
            hint = ": is the drive mounted?" if looks_unmounted(partial.parent) else ""
            raise DriveError(f"{partial} is gone, the journal of this pack needs it{hint}")
        file = self._disk.open_output(path)
        if path == partial:
            self._final[file] = final
        if file.size() != size:
            raise DriveError(f"{path} is {file.size()} bytes, this pack made it {size}")
        return file

    def _dense_header(self) -> bytes:
        return dense_header(self._target.manifest, self._uuid, self._target.dense_header_bytes)

    def _header(self, copy: StripeCopy, content_id: str) -> bytes:
        return copy_header(copy, len(self._target.manifest.layout.stripes), self._uuid, content_id)

    def copies(self, stripe: int) -> list[OutputFile]:
        """Return the files that hold stripe `stripe`: itself, and its mirror if it has one."""
        return [file for copy, file in zip(self._copies, self._files, strict=True) if copy.number == stripe]

    def write(self, stripe: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at `offset` of a stripe and of its mirror. Raises DriveError."""
        for file in self.copies(stripe):
            file.write(offset, data)

    def seal(self, content_id: str) -> None:
        """Write what is known only at the end into the stripes' headers, and sync everything. Raises DriveError."""
        for copy, file in zip(self._copies, self._files, strict=True):
            file.write(0, self._header(copy, content_id))
        self.sync()

    def sync(self) -> None:
        """Return when all that was written is on the drives. Raises DriveError."""
        for file in (self.dense, *self._files):
            file.sync()

    def publish(self) -> None:
        """Close the files and give them their final names. Raises DriveError."""
        self.close()
        for file, final in self._final.items():
            self._disk.rename(file.path, final)
        for folder in self._folders:
            self._disk.sync_folder(folder)

    def close(self) -> None:
        """Close what is open; a second call does nothing. Raises DriveError."""
        for file in (*self._final, *self._files):
            file.close()
        if hasattr(self, "dense"):
            self.dense.close()
