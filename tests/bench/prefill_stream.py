"""BENCH=prefill_stream: a 2,048-token prompt through a model three times larger than memory. Needs root.

`share` is the floor max(reading every expert once, the resident prefill's own time) over the time taken, for a giant
slice on a loop drive of 300 MB/s (bound 0.9). The resident time is that of the same prompt with every expert in memory
and no limit, the mean of a run before and one after; the reading time counts the experts that the prompt needs.
`reads_per_pass` is what was read over that: 1 if every expert was read at most once. `ratio` is our speed over
llama.cpp's with its best ubatch, on this machine's own drive with a Qwen3-MoE-shaped slice in a cgroup of a third of
its size.
"""

import argparse
import statistics
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from giant import GIANT, PEER, SMALL, Shape
from giant_weights import token_stream
from peer import PeerRun, Setting, peer_python, run_peer, same_slice
from report import result, table
from slicerig import BACKENDS, MB, limit_for, refuse_where_impossible, slice_on_drives
from slicerun import Job, run

from testkit.loop_drives import group

RATE = 300 * MB
SHARE = 0.9
SETTINGS = (Setting(2, 512), Setting(2, 2048), Setting(2, 512, repack=True))


@dataclass(frozen=True)
class Measured:
    """One back end's prefill under the limit. Seconds, bytes, bytes per second."""

    seconds: float
    read_bytes: float
    drive_rate: float
    resident_seconds: float
    needed_bytes: float

    @property
    def reading_seconds(self) -> float:
        return self.needed_bytes / self.drive_rate

    @property
    def floor(self) -> float:
        return max(self.reading_seconds, self.resident_seconds)

    @property
    def share(self) -> float:
        return self.floor / self.seconds


def seconds_of(prefilled: dict[str, Any]) -> float:
    """Median seconds of a run's rounds."""
    return statistics.median(float(one["seconds"]) for one in prefilled["rounds"])


def bytes_of(prefilled: dict[str, Any]) -> float:
    return statistics.median(float(one["missed_bytes"]) for one in prefilled["rounds"])


def throttled(shape: Shape, options: argparse.Namespace) -> dict[str, Measured]:
    """Prefill under the limit with every back end, with everything resident before and after each."""
    limit = limit_for(shape, options.factor)
    measured = {}
    with slice_on_drives(shape, [RATE], options.images) as (drives, folders):
        resident = [all_in_memory(folders, options)]
        for backend in BACKENDS:
            job = Job(folders, memory_bytes=limit, io_backend=backend, tokens=options.prompt, rounds=options.rounds)
            with group(drives, limit) as limited:
                before = run("ceilings", job, limited)
                prefilled = run("prefill", job, limited)
                after = run("ceilings", job, limited)
            resident.append(all_in_memory(folders, options))
            alone = statistics.mean(one["seconds"] for one in resident[-2:])
            rate = statistics.median(sum(ceiling["drive_rates"]) for ceiling in (before, after))
            needed = resident[0]["needed_bytes"]
            measured[backend] = Measured(seconds_of(prefilled), bytes_of(prefilled), rate, alone, needed)
    return measured


def all_in_memory(folders: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Two rounds: the first reads the experts that the prompt needs, without any limit; the second has them all."""
    first, second = run("prefill", Job(folders, tokens=options.prompt, rounds=2), None)["rounds"]
    return {"needed_bytes": first["missed_bytes"], "seconds": second["seconds"]}


def show(shape: Shape, prompt: int, measured: dict[str, Measured]) -> None:
    rows = [
        [
            backend, f"{prompt / at.seconds:.1f}", f"{at.seconds:.2f}", f"{at.reading_seconds:.2f}",
            f"{at.resident_seconds:.2f}", f"{at.share:.3f}", f"{at.read_bytes / at.needed_bytes:.2f}",
            f"{at.drive_rate / MB:.0f}",
        ]
        for backend, at in measured.items()
    ]  # fmt: skip
    columns = ["back end", "tok/s", "s", "reading s", "resident s", "share", "reads", "MB/s"]
    table(f"prefill_stream, {shape.name}, {prompt} tokens", columns, rows)


def against_peer(options: argparse.Namespace) -> dict[str, float]:
    """Ours and the peer over the same prompt under the same limit; returns the named results."""
    peer_python()
    pair = same_slice(replace(PEER, moe_layers=options.peer_layers))
    limit = pair.bytes // options.factor
    prompt = list(islice(token_stream(PEER.vocab, Job.seed), options.prompt))
    with group(memory_bytes=limit) as limited:
        job = Job([str(pair.container)], memory_bytes=limit, tokens=options.prompt, rounds=1)
        ours = options.prompt / seconds_of(run("prefill", job, limited))
    peers: list[PeerRun] = []
    for setting in SETTINGS:
        with group(memory_bytes=limit) as limited:
            peers.append(run_peer(pair, "prefill", prompt, 0, setting, limited, options.peer_seconds))
    speeds = [_fed(seen, options.prompt) / sum(seen.seconds) if seen.seconds else 0.0 for seen in peers]
    rows = [["Colibri", f"{ours:.1f}", ""]]
    rows += [
        [f"llama.cpp, {seen.setting}", f"{speed:.1f}", seen.failure] for seen, speed in zip(peers, speeds, strict=True)
    ]
    table(f"prefill_stream, {PEER.name}: {pair.bytes / MB:.0f} MB in {limit / MB:.0f} MB", ["", "tok/s", ""], rows)
    best = max(speeds)
    return {"ratio": ours / best if best else 0.0, "ours_tok_per_s": ours, "peer_tok_per_s": best}


def _fed(seen: PeerRun, prompt: int) -> int:
    """Tokens that a run of the peer took, all but in its last piece whole ubatches."""
    return min(prompt, len(seen.seconds) * seen.setting.ubatch)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=prefill_stream", description=__doc__)
    parser.add_argument("--only", choices=["floor", "peer"], help="one of the two parts; the other's keys are left out")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--factor", type=int, default=3, help="model size over memory limit")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--images", type=Path, help="folder for the drive's image, about 6 GB")
    parser.add_argument("--peer-layers", type=int, default=PEER.moe_layers)
    parser.add_argument("--peer-seconds", type=float, default=300, help="after which a run of the peer ends itself")
    parser.add_argument(
        "--small", action="store_true", help="a slice of a few megabytes: tries the rig, proves nothing"
    )
    options = parser.parse_args(argv)
    if refuse_where_impossible("prefill_stream"):
        return 1
    more: dict[str, float | int | str] = {"prompt_tokens": options.prompt}
    value = ceiling = 0.0
    good = True
    if options.only != "peer":
        shape = SMALL if options.small else GIANT
        measured = throttled(shape, options)
        show(shape, options.prompt, measured)
        worst = min(measured.values(), key=lambda at: at.share)
        value, ceiling, good = options.prompt / worst.seconds, options.prompt / worst.floor, worst.share >= SHARE
        more |= {f"share_{backend}": at.share for backend, at in measured.items()}
        more |= {
            "reads_per_pass": worst.read_bytes / worst.needed_bytes, "resident_seconds": worst.resident_seconds,
            "reading_seconds": worst.reading_seconds,
        }  # fmt: skip
    if options.only != "floor":
        more |= against_peer(options)
        if options.only == "peer":
            value = ceiling = float(more["ours_tok_per_s"])
    result(
        "prefill_stream",
        PEER.name if options.only == "peer" else (SMALL if options.small else GIANT).name,
        value,
        "tok/s",
        ceiling,
        **more,
    )
    return int(not good)
