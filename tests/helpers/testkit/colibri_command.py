"""The `colibri` command in a process of its own, against a fake daemon."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.fake_daemon import FakeDaemon, fake_daemon


@dataclass
class Result:
    code: int | None
    out: str
    err: str


async def spawn(daemon: FakeDaemon | None, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if name != "COLIBRI_ADDR"}
    if daemon is not None:
        environment["COLIBRI_ADDR"] = daemon.address
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "colibri.client.cli", *arguments, env=environment, **(pipes | options)
    )


async def colibri(daemon: FakeDaemon | None, *arguments: str, stdin: str | bytes = "") -> Result:
    process = await spawn(daemon, *arguments)
    given = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = await asyncio.wait_for(process.communicate(given), 60)
    return Result(process.returncode, out.decode(), err.decode())


def run(folder: Path, body: Callable[[FakeDaemon], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with fake_daemon(folder) as daemon:
            await asyncio.wait_for(body(daemon), 120)

    asyncio.run(whole())
