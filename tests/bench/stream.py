"""BENCH=stream: decode of a model far larger than memory, against the floor and against llama.cpp. Needs root.

First a giant slice on a loop drive of 300 MB/s in a cgroup of a third and an eighth of the model's size, with both back
ends: `share` is the floor max(bytes missed / drive, bytes touched / RAM) over the time taken (bound 0.90), and the I/O
threads' CPU per GB with checksums on has bounds too. Then, on this machine's own drive, a Qwen3-MoE-shaped slice in a
cgroup of a third of its size beside llama.cpp with mmap over the same slice as GGUF: `ratio` is our warm speed over its
best (bound 8). Ceilings are read in the same cgroups by an independent reader. A comparison in which the peer, without
a limit, is far from what this machine's memory allows, is void and says so.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from giant import GIANT, PEER, SMALL, Shape
from giant_weights import token_stream
from peer import CMAKE_FLAGS, VERSION, Pair, PeerRun, Setting, peer_python, run_peer, same_slice
from report import result, table
from slicerig import BACKENDS, MB, Judged, judge, limit_for, refuse_where_impossible, slice_on_drives
from slicerun import PROMPT, Job, run

from testkit.loop_drives import group

RATE = 300 * MB
SHARE, RATIO = 0.90, 8.0
CPU_SECONDS_PER_GB = {"io_uring": 0.10, "threads": 0.16}
PEER_FLOOR = 0.15  # of the RAM ceiling, that the peer must reach without a limit for the comparison to count
SETTINGS = (Setting(2), Setting(4), Setting(2, repack=True))

Case = tuple[int, str]  # how many times the model is larger than its limit, back end


# ---- against the floor -----------------------------------------------------------------------------------------------


def throttled(shape: Shape, options: argparse.Namespace) -> dict[Case, Judged]:
    """Decode under every limit with every back end, each between two looks at the ceilings."""
    seen: dict[Case, Judged] = {}
    with slice_on_drives(shape, [RATE], options.images) as (drives, folders):
        for factor in options.factors:
            limit = limit_for(shape, factor)
            for backend in BACKENDS:
                job = Job(folders, memory_bytes=limit, io_backend=backend, tokens=options.tokens,
                          warm_tokens=options.warm_tokens)  # fmt: skip
                with group(drives, limit) as limited:
                    before = run("ceilings", job, limited)
                    decoded = run("decode", job, limited)
                    seen[factor, backend] = judge(decoded, [before, run("ceilings", job, limited)])
                rss = f"peak RSS {decoded['peak_rss_bytes'] / MB:.0f} of {limit / MB:.0f} MB"
                print(f"{factor}x, {backend}: {decoded['slots']} slots, {rss}", file=sys.stderr, flush=True)
    return seen


def show_throttled(shape: Shape, seen: dict[Case, Judged]) -> None:
    rows = [
        [
            f"{factor}x, {backend}", f"{1 / at.seconds:.2f}", f"{1e3 * at.seconds:.0f}", f"{1e3 * at.floor:.0f}",
            f"{at.share:.3f}", f"{1e3 * at.serial_floor:.0f}", f"{at.hit_share:.2f}", f"{at.missed_bytes / MB:.0f}",
            f"{at.drive_rate / MB:.0f}", f"{at.waited_share:.2f}", f"{at.cpu_per_gb:.3f}",
        ]
        for (factor, backend), at in seen.items()
    ]  # fmt: skip
    columns = ["model / limit", "tok/s", "ms", "floor ms", "share", "serial ms", "hits", "MB/token", "MB/s", "waited",
               "CPU s/GB"]  # fmt: skip
    table(f"stream, {shape.name}, one drive of {RATE // MB} MB/s", columns, rows)


# ---- against the peer ------------------------------------------------------------------------------------------------


def speed(seconds: list[float]) -> float:
    """Tokens per second of a run; 0 for one without a token."""
    return 1 / statistics.mean(seconds) if seconds else 0.0


class Comparison:
    """Rounds of ours and of the peer over the same tokens, interleaved, under one limit."""

    def __init__(self, pair: Pair, options: argparse.Namespace) -> None:
        self.pair, self._options = pair, options
        self.limit = pair.bytes // options.peer_factor
        self.warm = PROMPT + options.warm_tokens
        self.tokens = list(islice(token_stream(PEER.vocab, Job.seed), self.warm + options.tokens))
        self.ours: list[dict[str, Any]] = []
        self.judged: list[Judged] = []
        self.peers: dict[Setting, list[PeerRun]] = {}

    def round(self) -> None:
        """Ours once, then the peer with every setting that has not failed before."""
        job = Job([str(self.pair.container)], memory_bytes=self.limit, tokens=self._options.tokens,
                  warm_tokens=self._options.warm_tokens)  # fmt: skip
        with group(memory_bytes=self.limit) as limited:
            ceilings = run("ceilings", job, limited)
            self.ours.append(run("decode", job, limited))
            self.judged.append(judge(self.ours[-1], [ceilings, run("ceilings", job, limited)]))
        for setting in SETTINGS:
            before = self.peers.setdefault(setting, [])
            if before and not before[-1].seconds:
                continue
            with group(memory_bytes=self.limit) as limited:
                before.append(
                    run_peer(self.pair, "decode", self.tokens, self.warm, setting, limited, self._options.peer_seconds)
                )

    def possible_share(self) -> float:
        """What the peer reaches of the RAM ceiling with the whole model in memory: was it built and run well?"""
        with group() as free:
            runs = [
                run_peer(self.pair, "decode", self.tokens, self.warm, setting, free, self._options.peer_seconds)
                for setting in (Setting(2), Setting(2, repack=True))
            ]
        best = max(speed(seen.seconds) for seen in runs)
        return best * self.judged[0].touched_bytes / statistics.median(at.ram_rate for at in self.judged)

    def best(self) -> tuple[float, float]:
        """(warm, cold) tokens per second of the peer's best setting."""
        warm = [statistics.median(speed(seen.seconds) for seen in runs) for runs in self.peers.values() if runs]
        cold = [statistics.median(speed(seen.cold_seconds) for seen in runs) for runs in self.peers.values() if runs]
        return max(warm), max(cold)

    def show(self) -> None:
        rows = [
            [f"Colibri, round {number}", f"{speed(seen['warm_seconds']):.2f}", f"{speed(seen['seconds']):.2f}",
             f"share of the floor {at.share:.2f}, drive {at.drive_rate / MB:.0f} MB/s, {seen['slots']} slots"]
            for number, (seen, at) in enumerate(zip(self.ours, self.judged, strict=True))
        ]  # fmt: skip
        for setting, runs in self.peers.items():
            rows += [
                [f"llama.cpp, {setting}", f"{speed(seen.cold_seconds):.2f}", f"{speed(seen.seconds):.2f}", seen.failure]
                for seen in runs
            ]
        title = f"stream, {PEER.name}: {self.pair.bytes / MB:.0f} MB in {self.limit / MB:.0f} MB, own drive, tok/s"
        table(title, ["", "cold", "warm", ""], rows)


def against_peer(options: argparse.Namespace) -> dict[str, float | int | str]:
    """Build the peer if need be, run the rounds, show them; returns the named results."""
    peer_python()
    comparison = Comparison(same_slice(replace(PEER, moe_layers=options.peer_layers)), options)
    for _ in range(options.rounds):
        comparison.round()
    possible = comparison.possible_share()
    comparison.show()
    system = next((run.system for runs in comparison.peers.values() for run in runs if run.system), "")
    print(f"llama-cpp-python {VERSION}, {' '.join(CMAKE_FLAGS)}; {system}")
    print(f"without a limit llama.cpp reaches {possible:.2f} of the RAM ceiling")
    ours = statistics.median(speed(seen["seconds"]) for seen in comparison.ours)
    cold = statistics.median(speed(seen["warm_seconds"]) for seen in comparison.ours)
    peer_warm, peer_cold = comparison.best()
    void = possible < PEER_FLOOR
    if void:
        print(f"VOID: the peer reaches {possible:.2f} of its possible speed, at least {PEER_FLOOR} is wanted")
    return {
        "ratio": 0.0 if void or not peer_warm else ours / peer_warm,
        "ratio_cold": cold / peer_cold if peer_cold else 0.0,
        "ours_tok_per_s": ours, "peer_tok_per_s": peer_warm, "peer_share_of_ram": possible, "peer_void": int(void),
        "own_drive_share": statistics.median(at.share for at in comparison.judged),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=stream", description=__doc__)
    parser.add_argument("--only", choices=["floor", "peer"], help="one of the two parts; the other's keys are left out")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--warm-tokens", type=int, default=48)
    parser.add_argument("--factors", type=int, nargs="+", default=[3, 8], help="model size over memory limit")
    parser.add_argument("--images", type=Path, help="folder for the drive's image, about 6 GB")
    parser.add_argument("--peer-layers", type=int, default=PEER.moe_layers)
    parser.add_argument("--peer-factor", type=int, default=3)
    parser.add_argument("--peer-seconds", type=float, default=120, help="after which a run of the peer ends itself")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--small", action="store_true", help="a slice of a few megabytes: tries the rig, proves nothing"
    )
    options = parser.parse_args(argv)
    if refuse_where_impossible("stream"):
        return 1
    more: dict[str, float | int | str] = {}
    good, value, ceiling = True, 0.0, 0.0
    if options.only != "peer":
        shape = SMALL if options.small else GIANT
        seen = throttled(shape, options)
        show_throttled(shape, seen)
        worst = min(seen.values(), key=lambda at: at.share)
        value, ceiling, good = 1 / worst.seconds, 1 / worst.floor, worst.share >= SHARE
        for (factor, backend), at in seen.items():
            more |= {
                f"share_{factor}x_{backend}": at.share,
                f"serial_share_{factor}x_{backend}": at.serial_floor / at.seconds,
            }
            more[f"cpu_s_per_gb_{backend}"] = max(at.cpu_per_gb, float(more.get(f"cpu_s_per_gb_{backend}", 0)))
        good &= all(float(more[f"cpu_s_per_gb_{name}"]) <= bound for name, bound in CPU_SECONDS_PER_GB.items()
                    if f"cpu_s_per_gb_{name}" in more)  # fmt: skip
    if options.only != "floor":
        more |= against_peer(options)
        good &= float(more["ratio"]) >= RATIO
        if options.only == "peer":
            value, ceiling = (
                float(more["ours_tok_per_s"]),
                float(more["ours_tok_per_s"]) / float(more["own_drive_share"]),
            )
    result(
        "stream",
        PEER.name if options.only == "peer" else (SMALL if options.small else GIANT).name,
        value,
        "tok/s",
        ceiling,
        **more,
    )
    return int(not good)
