"""AdminService: what this daemon is, and how it is. Answers before the model is loaded and while the daemon drains."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from colibri.daemon.chat import TextModel
from colibri.daemon.generation import SamplingSpec
from colibri.daemon.requests import SamplingDefaults, seconds
from colibri.daemon.rpc import Rpc
from colibri.daemon.stats import StatsSource
from colibri.daemon.views import sampling_message
from colibri.v1 import admin_service_pb2 as admin_pb2

STATS_SECONDS = 1.0
MIN_STATS_SECONDS, MAX_STATS_SECONDS = 0.1, 3600.0


@dataclass(frozen=True)
class ModelFacts:
    """What a container says about its model, and what the plan made of it."""

    name: str
    architecture: str
    content_id: str
    max_context: int
    kv_bytes_per_token: int


def capability_names(services: Mapping[str, Collection[str]], text: TextModel) -> list[str]:
    """Which RPCs are built, as "Service.Method"; "chat.whole" if this model's template renders
    conversations, and "chat" if it also works in sessions."""
    names = [f"{service}.{method}" for service, methods in services.items() for method in methods]
    if text.renderer:
        names.append("chat.whole")
        if not text.problems:
            names.append("chat")
    return sorted(names)


class AdminRpcs:
    """The built methods of AdminService. `capabilities` is asked when it is needed: it lists these methods too; so is
    `degraded`, what the status line says does not work as it should. `ended` is set when nothing is left to watch."""

    def __init__(
        self,
        facts: ModelFacts,
        text: TextModel,
        capabilities: Callable[[], list[str]],
        degraded: Callable[[], Sequence[str]],
        stats: StatsSource,
        ended: asyncio.Event,
    ) -> None:
        self._facts = facts
        self._text = text
        self._capabilities = capabilities
        self._degraded = degraded
        self._stats = stats
        self._ended = ended
        self.boot_id = str(uuid.uuid4())

    def rpcs(self) -> dict[str, Rpc]:
        return {
            "GetServerInfo": Rpc(self.get_server_info, always=True),
            "WatchStats": Rpc(self.watch_stats, always=True),
        }

    async def watch_stats(
        self, request: admin_pb2.WatchStatsRequest, _: float | None
    ) -> AsyncGenerator[admin_pb2.Stats, None]:
        """A snapshot at once and one per interval, until the caller leaves or the daemon has drained."""
        interval = STATS_SECONDS
        if request.HasField("interval"):
            interval = seconds(request.interval, "interval", MIN_STATS_SECONDS, MAX_STATS_SECONDS)
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            yield await self._stats.snapshot(request.expert_heat)
            if self._ended.is_set():
                return
            due = max(due + interval, clock())  # a reader that was slow gets no burst
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), due - clock())

    async def get_server_info(
        self, _: admin_pb2.GetServerInfoRequest, __: float | None
    ) -> admin_pb2.GetServerInfoResponse:
        defaults = SamplingDefaults.of(self._text.generation_config)
        sampling = SamplingSpec(temperature=defaults.temperature, top_k=defaults.top_k, top_p=defaults.top_p)
        return admin_pb2.GetServerInfoResponse(
            version=metadata.version("colibri"),
            model=self._facts.name,
            architecture=self._facts.architecture,
            content_id=self._facts.content_id,
            vocab_size=self._text.vocab_rows,
            max_context=self._facts.max_context,
            eos_token_ids=self._text.eos_ids,
            chat_renderer=self._text.renderer,
            default_sampling=sampling_message(sampling, with_seed=False),
            capabilities=self._capabilities(),
            boot_id=self.boot_id,
            kv_bytes_per_token=self._facts.kv_bytes_per_token,
            degraded=self._degraded(),
        )
