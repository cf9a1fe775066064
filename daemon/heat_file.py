"""Learned routing heat in the state folder: which experts decoding used of late, so that a restart need not learn it.

Owns the file `heat.bin` (a header with version, content id and count, then one f32 in 0..1 per expert, layer-major,
and a CRC-32C over all of it). Replaced whole, so that a crash leaves the old file or the new one. What is damaged, of
another version or of another content is never used: it goes to quarantine, with a warning, and the daemon learns anew.
It only ever decides speed.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri.core.tensors import crc32c
from colibri.daemon.journal import QUARANTINE, fields_of
from colibri.daemon.store.files import Quarantine, read_all, write_atomic

log = logging.getLogger("colibri.daemon.heat")

HEAT_FILE = "heat.bin"
VERSION = 1
_MAGIC = b"COLHEAT\x01"
_HEADER = struct.Struct("<8sIIQ32s")  # magic, version, 0, count, content id
_CRC = struct.Struct("<I")

Heat = npt.NDArray[np.float32]


class BadHeatError(ValueError):
    """A heat file that must not be used; the text says why."""


def encode(heat: Heat, content_id: str) -> bytes:
    """The file's bytes."""
    body = _HEADER.pack(_MAGIC, VERSION, 0, heat.size, bytes.fromhex(content_id)) + heat.astype("<f4").tobytes()
    return body + _CRC.pack(crc32c(body))


def decode(data: bytes, content_id: str, experts: int) -> Heat:
    """The heat of `experts` experts. Raises BadHeatError."""
    if len(data) < _HEADER.size + _CRC.size or data[:8] != _MAGIC:
        raise BadHeatError("it is no heat file")
    _, version, reserved, count, content = _HEADER.unpack_from(data)
    if version != VERSION or reserved:
        raise BadHeatError(f"it has version {version}; this program knows {VERSION}")
    if len(data) != _HEADER.size + 4 * count + _CRC.size:
        raise BadHeatError(f"it has {len(data)} bytes, its header says {count} experts")
    (stored,) = _CRC.unpack_from(data, len(data) - _CRC.size)
    if stored != crc32c(data[: -_CRC.size]):
        raise BadHeatError("it fails its checksum")
    if content.hex() != content_id:
        raise BadHeatError(f"it belongs to content {content.hex()[:16]}, this daemon serves {content_id[:16]}")
    if count != experts:
        raise BadHeatError(f"it has {count} experts, this model {experts}")
    heat = np.frombuffer(data, "<f4", count, _HEADER.size).astype(np.float32)
    if not ((heat >= 0) & (heat <= 1)).all():  # false for NaN too
        raise BadHeatError("it holds numbers that are no heat")
    return heat


class HeatFile:
    """The file in one state folder. Used by one thread at a time."""

    def __init__(self, folder: Path, quarantine: Quarantine, content_id: str, experts: int) -> None:
        self.path = folder / HEAT_FILE
        self._quarantine = quarantine
        self._content_id = content_id
        self._experts = experts

    def load(self) -> Heat | None:
        """What was stored, None where nothing usable is. Raises nothing: without it the daemon works as well."""
        limit = _HEADER.size + 4 * self._experts + _CRC.size
        try:
            data = read_all(self.path, max(limit, 1 << 26))
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s; pins are learned anew", self.path, error)
            return None
        try:
            return decode(data, self._content_id, self._experts)
        except BadHeatError as error:
            self._set_aside(str(error))
            return None

    def _set_aside(self, reason: str) -> None:
        extra = fields_of("quarantine", QUARANTINE, file=self.path)
        log.warning("%s is not used: %s; pins are learned anew", self.path, reason, extra=extra)
        try:
            self._quarantine.move(self.path, reason)
        except OSError as error:
            log.warning("%s cannot be moved to quarantine: %s", self.path, error)

    def save(self, heat: Heat) -> None:
        """Replaces the file. Raises OSError; then the old one stays."""
        write_atomic(self.path, encode(heat, self._content_id))
