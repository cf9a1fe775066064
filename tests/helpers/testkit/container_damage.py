"""Damage to a container's files, and the way back: what tests of verify, mirrors and repair have in common."""

from collections.abc import Sequence
from pathlib import Path

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk
from colibri.packer.repair import repair
from colibri.packer.repair_stripes import Repairs


def raw(folders: Sequence[Path]) -> list[dict[str, bytes]]:
    """Return all bytes of all files, as they are."""
    return [{path.name: path.read_bytes() for path in sorted(folder.iterdir())} for folder in folders]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Put `data` at `offset`, in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    """Change one bit of the byte at `offset`."""
    with open(path, "rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    overwrite(path, offset, bytes([byte ^ 1]))


def repaired(folders: Sequence[Path], source: Path | None = None, disk: Disk | None = None) -> Repairs:
    """Repair the container in `folders`, the primary first, from its mirrors or the checkpoint `source`."""
    if source is None:
        return repair(folders[0], folders[1:], disk=disk)
    with Checkpoint.open(source) as checkpoint:
        return repair(folders[0], folders[1:], checkpoint, disk=disk)
