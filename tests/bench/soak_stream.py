"""BENCH=soak_stream: a daemon under mixed requests at 20 % residency while its drives fail at random. Needs root.

For `--minutes`, clients ask for answers that are known from an undisturbed daemon with every expert in memory, while
bytes of the stripes are flipped and put right again, and images are cut short under their loop devices (real EIO) and
restored. A request may end with DATA_LOSS, nothing else; what it said until then must be right. Bounds: `wrong_tokens`
0, no other error, anonymous memory and open files flat from the first quarter to the last. The ceiling is what the
drives allow: an independent reader's rate over the bytes that the daemon read per token.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from ceilings import disk_rate
from giant import GIANT, plan_slice, write_giant
from giant_weights import token_stream
from report import cache_folder, result, table
from slicerig import MB, refuse_where_impossible

from colibri.client import Client, Delta, Sampling, Stop
from colibri.client.errors import DataLossError, ServiceError
from colibri.v1 import admin_service_pb2
from testkit.loop_drives import DriveSpec, LoopDrive, loop_drives
from testkit.process import Process, serving

SHAPE = replace(
    GIANT, name="soak-slice", hidden=1024, experts=64, intermediate=512, moe_layers=3, heads=16, kv_heads=4,
    head_dim=64, vocab=512, dense_intermediate=2048,
)  # fmt: skip
RESIDENT = 0.2
CLIENTS, REQUESTS = 3, 24
RSS_GROWTH_BYTES, FD_GROWTH = 32 << 20, 2
FLIPPED_BYTES = 64


@dataclass(frozen=True)
class Request:
    """A question and how it is to be answered; the same seed gives the same answer."""

    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling


@dataclass
class Tally:
    """What the soak saw."""

    completed: int = 0
    lost: int = 0
    other_errors: list[str] = field(default_factory=list)
    wrong_tokens: int = 0
    tokens: int = 0
    flips: int = 0
    cuts: int = 0
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def growth(self, samples: list[int]) -> int:
        """Median of the last quarter minus that of the first; the very first samples still fill caches."""
        quarter = max(1, len(samples) // 4)
        settled = samples[quarter // 2 :]
        return int(statistics.median(settled[-quarter:]) - statistics.median(settled[:quarter]))


def requests(seed: int) -> list[Request]:
    """Short and long prompts, greedy and sampled."""
    rng, stream = random.Random(seed), token_stream(SHAPE.vocab, seed)
    made = []
    for index in range(REQUESTS):
        length = rng.choice([3, 17, 64, 200])
        sampling = Sampling(temperature=rng.choice([0.0, 0.8, 1.0]), seed=index + 1)
        made.append(Request(tuple(islice(stream, length)), rng.choice([8, 24, 48]), sampling))
    return made


async def answer(client: Client, request: Request, heard: list[int]) -> None:
    """Ask, and append the answer's tokens to `heard` as they come. Raises ServiceError."""
    stop = Stop(max_tokens=request.tokens, ignore_eos=True)
    stream = client.generate(list(request.prompt), sampling=request.sampling, stop=stop, token_ids=True)
    async for event in stream:
        if isinstance(event, Delta):
            heard += event.token_ids


async def references(address: str, wanted: list[Request]) -> list[list[int]]:
    """The answers of an undisturbed daemon."""
    answers = []
    async with Client(address) as client:
        for request in wanted:
            heard: list[int] = []
            await answer(client, request, heard)
            answers.append(heard)
    return answers


def wrong(heard: list[int], right: list[int]) -> int:
    """Tokens that differ from the reference's at their place, or should not be there."""
    return sum(a != b for a, b in zip(heard, right, strict=False)) + max(0, len(heard) - len(right))


class Soak:
    """Clients, faults and watches over one daemon, until a deadline."""

    def __init__(
        self, daemon: Process, drives: list[LoopDrive], wanted: list[Request], right: list[list[int]], seed: int
    ) -> None:
        self.tally = Tally()
        self._daemon, self._drives, self._wanted, self._right = daemon, drives, wanted, right
        self._rng = random.Random(seed)

    async def run(self, seconds: float) -> Tally:
        self._deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._ask(random.Random(number)))
            tasks.create_task(asyncio.to_thread(self._fail))
            tasks.create_task(asyncio.to_thread(self._listen))
            tasks.create_task(self._watch(seconds))
        return self.tally

    async def _ask(self, rng: random.Random) -> None:
        async with Client(self._daemon.target) as client:
            while time.monotonic() < self._deadline:
                index = rng.randrange(len(self._wanted))
                heard: list[int] = []
                try:
                    await answer(client, self._wanted[index], heard)
                    self.tally.completed += 1
                    self.tally.wrong_tokens += len(self._right[index]) - min(len(heard), len(self._right[index]))
                except DataLossError:
                    self.tally.lost += 1
                    await asyncio.sleep(0.1)
                except ServiceError as error:
                    self.tally.other_errors.append(str(error))
                    await asyncio.sleep(0.5)
                self.tally.wrong_tokens += wrong(heard, self._right[index])
                self.tally.tokens += len(heard)

    def _fail(self) -> None:
        """In a thread of its own: an fsync may take seconds, and the clients must hear the daemon's heartbeat."""
        while time.monotonic() < self._deadline:
            time.sleep(self._rng.uniform(1, 6))
            drive, lasting = self._rng.choice(self._drives), self._rng.uniform(0.3, 3)
            if self._rng.random() < 0.5:
                self.tally.flips += 1
                damage = flipped(drive, self._rng)
            else:
                self.tally.cuts += 1
                damage = drive.cut(int(drive.image.stat().st_size * self._rng.uniform(0.3, 0.9)))
            with damage:
                time.sleep(lasting)
            self._daemon.popen.send_signal(signal.SIGHUP)  # the drive is well again: use it

    def _listen(self) -> None:
        """Be the service manager: read what the daemon tells it."""
        while time.monotonic() < self._deadline:
            with suppress(TimeoutError):
                self._daemon.receiver.recv(4096)

    async def _watch(self, seconds: float) -> None:
        while time.monotonic() < self._deadline:
            if (code := self._daemon.popen.poll()) is not None:
                raise RuntimeError(f"the daemon ended with {code}: {self._daemon.log.read_text()[-2000:]}")
            self.tally.memory.append(self._daemon.status("RssAnon"))
            self.tally.files.append(len(os.listdir(f"/proc/{self._daemon.popen.pid}/fd")))
            await asyncio.sleep(min(5.0, seconds / 40))


@contextmanager
def flipped(drive: LoopDrive, rng: random.Random) -> Iterator[None]:
    """While inside, some bytes of the drive's stripe are wrong."""
    path = next((drive.folder / "container").glob("stripe-*.colibri"))
    with path.open("r+b", buffering=0) as file:
        offset = rng.randrange(4096, path.stat().st_size - FLIPPED_BYTES)
        good = os.pread(file.fileno(), FLIPPED_BYTES, offset)
        try:
            os.pwrite(file.fileno(), bytes(byte ^ 0xFF for byte in good), offset)
            os.fsync(file.fileno())
            yield
        finally:
            os.pwrite(file.fileno(), good, offset)
            os.fsync(file.fileno())


def read_bytes(daemon: Process) -> int:
    """Bytes that the daemon has read from all its drives."""
    stats = next(iter(daemon.admin.WatchStats(admin_service_pb2.WatchStatsRequest())))
    return sum(device.read_bytes for device in stats.devices)


def write_config(folder: Path, containers: list[Path], expert_slots: int) -> Path:
    folder.mkdir()
    values = {
        "container": str(containers[0]), "stripes": [str(path) for path in containers[1:]],
        "listen": f"unix:{folder}/d.sock", "state": str(folder / "state"), "memory": "1GiB", "max_context": 1024,
        "expert_slots": expert_slots, "log_level": "error",
    }  # fmt: skip
    path = folder / "colibri.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=soak_stream", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the faults; printed")
    parser.add_argument("--images", type=Path, help="folder for the drives' images, about 400 MB")
    options = parser.parse_args(argv)
    if refuse_where_impossible("soak_stream"):
        return 1
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    every, wanted = SHAPE.moe_layers * SHAPE.experts, requests(1)
    specs = [DriveSpec(size + (16 << 20)) for size in plan_slice(SHAPE, [1, 1]).folder_bytes]
    with (
        loop_drives(specs, options.images or cache_folder()) as drives,
        tempfile.TemporaryDirectory() as temporary,
    ):
        folders = [drive.folder / "container" for drive in drives]
        write_giant(SHAPE, folders, [1, 1])
        for drive in drives:
            drive.prefault()
        with serving(write_config(Path(temporary) / "reference", folders, every)) as daemon:
            right = asyncio.run(references(daemon.target, wanted))
        with serving(write_config(Path(temporary) / "soak", folders, int(RESIDENT * every))) as daemon:
            soak = Soak(daemon, drives, wanted, right, options.seed)
            tally = asyncio.run(soak.run(60 * options.minutes))
            read = read_bytes(daemon)
        stripes = [next(folder.glob("stripe-*.colibri")) for folder in folders]
        drive_rate = sum(disk_rate(path, path.stat().st_size) for path in stripes)
    return report(options, tally, read, drive_rate)


def report(options: argparse.Namespace, tally: Tally, read: int, drive_rate: float) -> int:
    """Show the tally; returns the exit code."""
    memory, files = tally.growth(tally.memory), tally.growth(tally.files)
    rows = [
        ["requests completed", str(tally.completed)],
        ["ended with DATA_LOSS", str(tally.lost)],
        ["other errors", f"{len(tally.other_errors)} {tally.other_errors[:1]}"],
        ["bytes flipped, images cut", f"{tally.flips}, {tally.cuts} times"],
        ["tokens, wrong ones", f"{tally.tokens}, {tally.wrong_tokens}"],
        ["anonymous memory", f"{max(tally.memory) / MB:.0f} MB at most, grew by {memory / MB:.1f} MB"],
        ["open files", f"{max(tally.files)} at most, grew by {files}"],
    ]
    table(f"soak_stream, {SHAPE.name}, {options.minutes:g} minutes, seed {options.seed}", ["", "value"], rows)
    rate = tally.tokens / (60 * options.minutes)
    ceiling = drive_rate / (read / tally.tokens) if read and tally.tokens else 0.0
    result("soak_stream", SHAPE.name, rate, "tok/s", ceiling, wrong_tokens=tally.wrong_tokens, seed=options.seed,
           completed=tally.completed, data_loss=tally.lost, other_errors=len(tally.other_errors), flips=tally.flips,
           cuts=tally.cuts, rss_growth_bytes=memory, fd_growth=files, minutes=options.minutes)  # fmt: skip
    good = tally.wrong_tokens == 0 and not tally.other_errors and tally.completed and tally.flips + tally.cuts
    return int(not (good and memory <= RSS_GROWTH_BYTES and files <= FD_GROWTH))
