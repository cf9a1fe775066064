"""Python's share of a token while the daemon streams: the time between two core steps over the time of a whole token.

Run as a script, this file is the daemon (with its counters written to a file when it ends); `python_share` starts it as
a process of its own and is the client, so that server and client do not share an interpreter.
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from colibri.client import Client, Sampling, ServerLostError, Stop, UnavailableError

READY_TIMEOUT_S = 900


async def _stream(address: str, tokens: int) -> int:
    """Ask for `tokens` tokens of nonsense and follow the stream; returns how many arrived."""
    async with Client(address) as client:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                await client.server_info()
                arrived = 0
                stop = Stop(max_tokens=tokens, ignore_eos=True)
                async for event in client.generate("the end of the first", sampling=Sampling(seed=5), stop=stop):
                    arrived = max(arrived, event.next_offset)
                return arrived
            except (UnavailableError, ServerLostError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)


def python_share(container: Path, stripes: list[Path], tokens: int) -> float:
    """Start the daemon on `container`, stream twice (the first run reads the experts), and return the share."""
    with tempfile.TemporaryDirectory() as folder:
        socket, counters = Path(folder) / "socket", Path(folder) / "counters.json"
        command = [sys.executable, __file__, str(counters), str(container), str(socket), str(Path(folder) / "state")]
        daemon = subprocess.Popen([*command, *map(str, stripes)])
        try:
            for _ in range(2):
                arrived = asyncio.run(_stream(f"unix:{socket}", tokens))
                if arrived != tokens:
                    raise RuntimeError(f"{arrived} of {tokens} tokens arrived")
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(120)
        seen: dict[str, int] = json.loads(counters.read_text())
    return seen["between_ns"] / (seen["between_ns"] + seen["core_ns"])


def _serve(argv: list[str]) -> int:
    from colibri.daemon import cli
    from colibri.daemon.engine_api import EngineApi
    from colibri.daemon.generation import LoopWake
    from colibri.daemon.runtime import CoreRuntime

    counters, container, socket, state, *stripes = argv

    class Recorded(CoreRuntime):
        """The daemon's runtime, which leaves its counters behind."""

        def start(self, wake: LoopWake) -> EngineApi:
            self._api = super().start(wake)
            return self._api

        def close(self) -> None:
            stats = self._api.stats()
            Path(counters).write_text(json.dumps({"core_ns": stats.core_ns, "between_ns": stats.between_ns}))
            super().close()

    setattr(cli, "CoreRuntime", Recorded)  # noqa: B010  (mypy would refuse the assignment)
    flags = ["--container", container, "--listen", f"unix:{socket}", "--state", state, "--log-level", "warning"]
    for stripe in stripes:
        flags += ["--stripes", stripe]
    return cli.main(["serve", *flags])


if __name__ == "__main__":
    raise SystemExit(_serve(sys.argv[1:]))
