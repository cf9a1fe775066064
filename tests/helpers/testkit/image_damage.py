"""Damage to a loop drive below its file system: where on the device a byte of a file lies, and bytes changed there.

What the file system has in its cache is not told; who reads past the cache (O_DIRECT) sees the damage at once.
"""

import fcntl
import os
import struct
from pathlib import Path

from testkit.loop_drives import LoopDrive

_FIEMAP = 0xC020660B  # FS_IOC_FIEMAP
_SYNC = 1
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_MOST_EXTENTS = 512


def extents_on_device(path: Path) -> list[tuple[int, int, int]]:
    """(offset in the file, offset on the device, bytes) of a file's extents, in file order. Raises OSError."""
    room = bytearray(_HEADER.pack(0, 2**64 - 1, _SYNC, 0, _MOST_EXTENTS, 0) + bytes(_EXTENT.size * _MOST_EXTENTS))
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FIEMAP, room)
    finally:
        os.close(fd)
    mapped = _HEADER.unpack_from(room)[3]
    found = [_EXTENT.unpack_from(room, _HEADER.size + _EXTENT.size * number) for number in range(mapped)]
    return [(logical, physical, length) for logical, physical, length, *_ in found]


def on_device(path: Path, offset: int) -> int:
    """Where byte `offset` of a file lies on its device."""
    for logical, physical, length in extents_on_device(path):
        if logical <= offset < logical + length:
            return physical + offset - logical
    raise ValueError(f"{path} has no byte at offset {offset}")


def is_in_one_piece(path: Path) -> bool:
    """Whether a file's bytes lie on the device in the order in which they are in the file."""
    extents = extents_on_device(path)
    return all(
        (logical + length, physical + length) == extents[number + 1][:2]
        for number, (logical, physical, length) in enumerate(extents[:-1])
    )


def flip_on_drive(drive: LoopDrive, path: Path, offset: int) -> None:
    """Change the byte of the image that is byte `offset` of the file; twice is nothing."""
    place = on_device(path, offset)
    with drive.image.open("r+b") as image:
        image.seek(place)
        (byte,) = image.read(1)
        image.seek(place)
        image.write(bytes([byte ^ 0x40]))
