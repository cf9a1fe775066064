"""Which generations the daemon knows: those that run, and finished ones for as long as they can be asked for.

Owns the lookup by name and by request id, and the time after which a finished generation is forgotten. Bounded in time
and number. A session's generations can be read back from its log after that; stateless ones are gone.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from colibri.daemon.errors import GenerationNotFoundError, RequestIdReusedError
from colibri.daemon.generation import Generation


class RetainedGenerations:
    """Not thread-safe; the engine's lock covers it. `seconds`: how long after its end a generation is kept."""

    def __init__(self, seconds: float = 86400.0, max_finished: int = 1000) -> None:
        self.seconds = seconds
        self._max_finished = max_finished
        self._by_name: OrderedDict[str, Generation] = OrderedDict()
        self._by_request: dict[str, Generation] = {}

    def add(self, generation: Generation) -> None:
        self._by_name[generation.name] = generation
        self._by_request[generation.spec.request_id] = generation
        self._expire()

    def get(self, name: str) -> Generation:
        """Raises GenerationNotFoundError."""
        self._expire()
        try:
            return self._by_name[name]
        except KeyError:
            raise GenerationNotFoundError(
                f"there is no generation {name!r}, or its replay time is over", name=name
            ) from None

    def find_request(self, request_id: str, body_hash: bytes) -> Generation | None:
        """The generation that this request started. Raises RequestIdReusedError if the request had another body."""
        self._expire()
        found = self._by_request.get(request_id)
        if found is not None and found.body_hash != body_hash:
            raise RequestIdReusedError(
                f"request id {request_id} was used for another request ({found.name})",
                request_id=request_id,
                generation=found.name,
            )
        return found

    def all(self) -> list[Generation]:
        self._expire()
        return list(self._by_name.values())

    def _expire(self) -> None:
        """Looks at the oldest only: what is behind them is younger, or still running and counted later."""
        now = time.time()
        finished = [g for g in self._by_name.values() if g.finished] if self._overdue(now) else []
        excess = len(finished) - self._max_finished
        for number, generation in enumerate(finished):
            expire_time = generation.view().expire_time
            if number < excess or (expire_time is not None and expire_time <= now):
                del self._by_name[generation.name]
                if self._by_request.get(generation.spec.request_id) is generation:
                    del self._by_request[generation.spec.request_id]

    def _overdue(self, now: float) -> bool:
        if len(self._by_name) > self._max_finished:
            return True
        oldest = next((g for g in self._by_name.values() if g.finished), None)
        expire_time = oldest.view().expire_time if oldest is not None else None
        return expire_time is not None and expire_time <= now
