"""The unfinished files of a pack: dense.safetensors and the stripes under their temporary names.

Owns where they lie and that they belong to this pack: each carries the container's UUID from its first byte on, so
that a resumed pack notices a drive that is not mounted, or another one in its place. Refuses to touch anything else's
files.
"""

from pathlib import Path
from uuid import UUID

from colibri.core.container import DENSE_NAME, MANIFEST_NAME, ContainerError, stripe_name
from colibri.core.container_check import stored_tensors
from colibri.core.container_files import ALIGN, StripeHeader, dense_metadata, pack_safetensors_header
from colibri.packer.disk import Disk, DriveError, OutputFile, reaching
from colibri.packer.errors import FolderError
from colibri.packer.plan import PackPlan

PARTIAL = ".partial"
NO_CONTENT = "0" * 64  # content_id in a stripe's header until the pack is complete


class Outputs:
    """The open files: `dense`, and `stripes` by number. folders[0] is the primary."""

    def __init__(self, disk: Disk, folders: list[Path], plan: PackPlan, uuid: UUID) -> None:
        """Describe the files; create() or reopen() opens them."""
        self._disk = disk
        self._folders = folders
        self._plan = plan
        self._uuid = uuid
        self._final: dict[OutputFile, Path] = {}
        self.dense: OutputFile
        self.stripes: list[OutputFile] = []

    def create(self) -> None:
        """Make the files, full length, with headers. Raises DriveError, FolderError for those of another pack."""
        for number, folder in enumerate(self._folders):
            self._refuse_others(number, folder)
        self.dense = self._open(self._folders[0] / DENSE_NAME)
        self.dense.cut(0)
        self.dense.cut(self._plan.dense_file_bytes)
        self.dense.write(0, self._dense_header())
        for number, (folder, stripe) in enumerate(zip(self._folders, self._plan.manifest.layout.stripes, strict=True)):
            file = self._open(folder / stripe_name(number))
            self.stripes.append(file)
            file.cut(0)
            file.cut(stripe.bytes)
            file.write(0, self._stripe_header(number, NO_CONTENT))
        for folder in self._folders:
            self._disk.sync_folder(folder)  # the journal may only speak of files whose names last

    def _refuse_others(self, number: int, folder: Path) -> None:
        """A pack that was stopped before its first data may be gone on with in other folders than it began in."""
        own = stripe_name(number) + PARTIAL
        with reaching(folder, "listing"):
            paths = sorted(folder.iterdir())
        for path in paths:
            if path.name == MANIFEST_NAME or (path.name.startswith("stripe-") and path.name != own):
                raise FolderError(f"{path} is of another container: give the --stripe folders of the first run")
        if not (folder / own).exists():
            return
        with reaching(folder / own, "opening"), open(folder / own, "rb") as file:
            block = file.read(ALIGN)
        try:
            header = StripeHeader.unpack(block)
        except ContainerError:
            return  # the kill came before the header was written
        if header.uuid != self._uuid:
            raise FolderError(
                f"{folder / own} is of the unfinished container {header.uuid}, wanted is {self._uuid}: give the "
                "--stripe folders of the first run"
            )

    def reopen(self) -> None:
        """Open the files of a pack that was stopped. Raises DriveError for a missing one, FolderError for another's."""
        self.dense = self._reopen(self._folders[0] / DENSE_NAME, self._plan.dense_file_bytes)
        if self.dense.read(0, self._plan.dense_header_bytes) != self._dense_header():
            raise FolderError(f"{self.dense.path} is not of the pack that its journal speaks of")
        for number, (folder, stripe) in enumerate(zip(self._folders, self._plan.manifest.layout.stripes, strict=True)):
            file = self._reopen(folder / stripe_name(number), stripe.bytes)
            self.stripes.append(file)
            try:
                header = StripeHeader.unpack(file.read(0, ALIGN))
            except ContainerError as error:
                raise DriveError(f"{file.path} {error}") from error
            if (header.uuid, header.stripe) != (self._uuid, number):
                raise FolderError(
                    f"{file.path} is stripe {header.stripe} of container {header.uuid}, wanted is stripe {number} "
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
            raise DriveError(f"{partial} is gone, the journal of this pack needs it: is the drive mounted?")
        file = self._disk.open_output(path)
        if path == partial:
            self._final[file] = final
        if file.size() != size:
            raise DriveError(f"{path} is {file.size()} bytes, this pack made it {size}")
        return file

    def _dense_header(self) -> bytes:
        entries = [entry for tensor in self._plan.manifest.dense for entry in stored_tensors(tensor)]
        return pack_safetensors_header(entries, dense_metadata(str(self._uuid)), self._plan.dense_header_bytes)

    def _stripe_header(self, number: int, content_id: str) -> bytes:
        stripes = self._plan.manifest.layout.stripes
        return StripeHeader(number, len(stripes), self._uuid, content_id, stripes[number].bytes).pack()

    def seal(self, content_id: str) -> None:
        """Write what is known only at the end into the stripes' headers, and sync everything. Raises DriveError."""
        for number, file in enumerate(self.stripes):
            file.write(0, self._stripe_header(number, content_id))
        self.sync()

    def sync(self) -> None:
        """Return when all that was written is on the drives. Raises DriveError."""
        for file in (self.dense, *self.stripes):
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
        for file in (*self._final, *self.stripes):
            file.close()
        if hasattr(self, "dense"):
            self.dense.close()
