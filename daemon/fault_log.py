"""What the log says when the core fails a generation: one ERROR for each damaged expert or dead drive, and no flood.

Owns the pacing. A broken expert fails every generation that meets it, perhaps many in a second, and a drive that is
gone fails all of its experts: the first failure is logged, and then one in each `period` with the number of those that
were held back. Sits between the engine's thread, which alone calls it, and the journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from colibri.core.errors import StorageError
from colibri.daemon.core_errors import fault_place
from colibri.daemon.journal import IO_ERROR, fields_of

log = logging.getLogger("colibri.daemon.engine")

PERIOD_SECONDS = 60.0
MAX_KNOWN = 4096  # failures whose time is remembered; above that the oldest is forgotten


@dataclass
class _Seen:
    logged: float
    held_back: int = 0


class FaultLog:
    """`clock` is in seconds and never goes back."""

    def __init__(self, period: float = PERIOD_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._period = period
        self._clock = clock
        self._seen: dict[str, _Seen] = {}  # longest silent first

    def failed(self, generation: str, error: Exception) -> None:
        """Logs why a generation failed, unless the same expert, the same file that cannot be read, or (without
        either) the same text was just logged."""
        text = str(error)
        place = fault_place(text)
        if isinstance(error, StorageError) and place.file is not None:
            key = place.file
        elif place.expert is not None:
            key = f"layer {place.layer} expert {place.expert}"
        else:
            key = text
        now = self._clock()
        seen = self._seen.get(key)
        if seen is not None and now - seen.logged < self._period:
            seen.held_back += 1
            return
        more = f" ({seen.held_back} more since it was last logged)" if seen is not None and seen.held_back else ""
        extra = fields_of("generation-failed", IO_ERROR if place.file else "", place, generation=generation)
        log.error("%s failed: %s%s", generation, text, more, extra=extra)
        self._seen.pop(key, None)
        self._seen[key] = _Seen(now)
        if len(self._seen) > MAX_KNOWN:
            del self._seen[next(iter(self._seen))]
