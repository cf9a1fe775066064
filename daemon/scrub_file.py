"""How far the background scrub is, in the state folder: so that a restart goes on and knows what was found.

Owns the file `scrub.json`. It is replaced whole; one that cannot be read or is of another layout is not used, and the
scrub begins anew: all that is lost is time.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from colibri.core.scrub import Position
from colibri.daemon.store.files import read_all, write_atomic

log = logging.getLogger("colibri.daemon.scrub")

SCRUB_FILE = "scrub.json"
VERSION = 1
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class ScrubState:
    """`position`: where the pass under way goes on, None between two. `begun`: Unix time at which the last pass began,
    0 before the first. `bad`: (stripe, text) of places that were bad when they were last read."""

    position: Position | None = None
    begun: float = 0.0
    bad: tuple[tuple[int, str], ...] = ()


class ScrubFile:
    """The file in one state folder, for the layout with this UUID. Used by one thread at a time."""

    def __init__(self, folder: Path, uuid: str, stripes: int) -> None:
        self.path = folder / SCRUB_FILE
        self._uuid = uuid
        self._stripes = stripes

    def load(self) -> ScrubState:
        try:
            return self._decode(read_all(self.path, _MAX_BYTES))
        except FileNotFoundError:
            return ScrubState()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.info("%s is not used: %s; scrubbing begins anew", self.path, error)
            return ScrubState()

    def _decode(self, data: bytes) -> ScrubState:
        found = json.loads(data)
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}; this program knows {VERSION}")
        if found["layout"] != self._uuid:
            raise ValueError(f"it belongs to layout {found['layout']}, this container has {self._uuid}")
        position = Position.parse(found["position"]) if found["position"] else None
        if position is not None and position.uuid != self._uuid:
            raise ValueError(f"its position is of layout {position.uuid}")
        bad = tuple((int(stripe), str(text)) for stripe, text in found["bad"])
        if any(not 0 <= stripe < self._stripes for stripe, _ in bad):
            raise ValueError(f"it names a stripe that this container of {self._stripes} does not have")
        return ScrubState(position, float(found["begun"]), bad)

    def save(self, state: ScrubState) -> None:
        """Replaces the file. Raises OSError; then the old one stays."""
        content = {
            "version": VERSION,
            "layout": self._uuid,
            "position": state.position.text() if state.position else "",
            "begun": state.begun,
            "bad": [list(place) for place in state.bad],
        }
        write_atomic(self.path, json.dumps(content, indent=1).encode())
