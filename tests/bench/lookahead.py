"""BENCH=lookahead: does reading before the router has chosen pay, and does `auto` find out? Needs root.

Decodes the same tokens of a slice with several MoE layers in a cgroup of a third of its size with lookahead off, on and
auto, interleaved: on this machine's own drive, and on a loop drive of 300 MB/s. `on_over_off` and `auto_over_off` are
speeds over that without lookahead, medians over the rounds. auto is measured after its first trial has ended, and its
`auto_over_off` has a bound (0.95: rounds of the same setting differ by that): it must not lose what `on` loses. Recall
is that of the slice's random router, whose residual stream changes little from layer to layer: an upper bound.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from giant import PEER, SMALL, Shape, write_giant
from report import cache_folder, result, table
from slicerig import MB, Judged, judge, limit_for, refuse_where_impossible, slice_on_drives
from slicerun import Job, run

from testkit.loop_drives import LoopDrive, group

RATE = 300 * MB
MODES = ("off", "on", "auto")
LEAST_AUTO = 0.95


@dataclass(frozen=True)
class Seen:
    judged: Judged
    counters: dict[str, int]

    @property
    def speed(self) -> float:
        return 1 / self.judged.seconds

    @property
    def recall(self) -> float:
        """Part of the predicted experts that the router then chose."""
        return self.counters["right"] / self.counters["predicted"] if self.counters["predicted"] else 0.0

    @property
    def wasted(self) -> float:
        """Part of the bytes read ahead that nobody used."""
        return self.counters["wasted_bytes"] / self.counters["bytes"] if self.counters["bytes"] else 0.0


@contextmanager
def on_own_drive(shape: Shape) -> Iterator[tuple[list[LoopDrive], list[str]]]:
    """The slice below the benchmark cache, made at the first call."""
    folder = cache_folder() / f"{shape.name}-{shape.moe_layers}x{shape.experts}" / "lookahead"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        write_giant(shape, [folder])
    yield [], [str(folder)]


def rounds(shape: Shape, drives: Sequence[LoopDrive], folders: list[str], options: Any) -> dict[str, list[Seen]]:
    """Decode with every mode, interleaved, each round with its own look at the ceilings."""
    seen: dict[str, list[Seen]] = {mode: [] for mode in MODES}
    limit = limit_for(shape, 3)
    job = Job(folders, memory_bytes=limit, tokens=options.tokens, warm_tokens=options.warm)
    for _ in range(options.rounds):
        with group(drives, limit) as limited:
            ceilings = [run("ceilings", job, limited)]
            for mode in MODES:
                decoded = run("decode", replace(job, lookahead=mode), limited)
                seen[mode].append(Seen(judge(decoded, ceilings), decoded["lookahead"]))
                print(f"lookahead {mode}: {seen[mode][-1].speed:.2f} tok/s", file=sys.stderr, flush=True)
    return seen


def show(title: str, seen: dict[str, list[Seen]]) -> None:
    rows = [
        [
            mode, f"{one.speed:.2f}", f"{one.judged.share:.3f}", f"{one.judged.waited_share:.2f}", f"{one.recall:.2f}",
            f"{one.counters['bytes'] / MB:.0f}", f"{one.wasted:.2f}", f"{one.counters['saved_us'] / 1e6:.2f}",
            str(bool(one.counters["active"])),
        ]
        for mode, runs in seen.items() for one in runs
    ]  # fmt: skip
    columns = ["lookahead", "tok/s", "share", "waited", "recall", "MB ahead", "wasted", "stalls saved s", "left on"]
    table(title, columns, rows)


def over_off(seen: dict[str, list[Seen]], mode: str) -> float:
    """Median over the rounds of the speed with `mode` over that without lookahead."""
    return statistics.median(a.speed / b.speed for a, b in zip(seen[mode], seen["off"], strict=True))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=lookahead", description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--warm", type=int, default=224, help="tokens before; a trial of auto takes 192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["own", "throttled"])
    parser.add_argument("--images", type=Path, help="folder for the drive's image, about 3 GB")
    parser.add_argument(
        "--small", action="store_true", help="a slice of a few megabytes: tries the rig, proves nothing"
    )
    options = parser.parse_args(argv)
    if refuse_where_impossible("lookahead"):
        return 1
    shape = SMALL if options.small else PEER
    more: dict[str, float | int | str] = {}
    last: dict[str, list[Seen]] = {}
    for place in ("own", "throttled"):
        if options.only in (None, place):
            made = on_own_drive(shape) if place == "own" else slice_on_drives(shape, [RATE], options.images)
            with made as (drives, folders):
                last = rounds(shape, drives, folders, options)
            show(f"lookahead, {shape.name}, {place} drive", last)
            more |= {f"{mode}_over_off_{place}": over_off(last, mode) for mode in MODES[1:]}
            more[f"recall_{place}"] = statistics.median(one.recall for one in last["on"])
    best = statistics.median(one.speed for one in last["auto"])
    floor = statistics.median(1 / one.judged.floor for one in last["auto"])
    result("lookahead", shape.name, best, "tok/s", floor, **more)
    return int(any(float(value) < LEAST_AUTO for name, value in more.items() if name.startswith("auto_over_off")))
