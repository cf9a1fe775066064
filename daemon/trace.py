"""`colibrid trace replay`: what a recorded routing trace says about cache sizes, cache policies and drives.

Owns the command's arguments, its table and its JSON. The replaying itself is the core's, which runs the cache that
serves. Needs no model and no configuration. Refuses a damaged trace and sizes that the model cannot have.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from colibri.core.errors import CoreError, InvalidError
from colibri.core.traces import POLICIES, Trace

OURS = "ours"
ONLINE = [name for name in POLICIES if name not in ("pins", "Belady")]
COLUMNS = [*ONLINE, "pins", OURS, "Belady"]
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True)
class Drives:
    """What a forecast assumes: what all drives deliver together, and a step's arithmetic that no read hides."""

    megabytes_per_second: float
    compute_ms: float

    def steps_per_second(self, bytes_per_step: float) -> float:
        """Inverse of reads plus arithmetic; 0 where neither takes time."""
        seconds = bytes_per_step / (1e6 * self.megabytes_per_second) + self.compute_ms / 1e3
        return 1 / seconds if seconds else 0.0


@dataclass(frozen=True)
class Outcome:
    """A policy at a size, over the counted part of the trace."""

    hit_rate: float
    loads: int
    bytes_per_step: float
    steps_per_second: float | None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], epilog: str) -> None:
    """Add `trace` with its own commands to those of colibrid."""
    trace = commands.add_parser("trace", help="look into recorded routing traces", epilog=epilog)
    actions = trace.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "what other cache sizes, policies and drives would have made of a trace"
    replay = actions.add_parser("replay", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
    replay.add_argument("file", metavar="FILE", help="recorded with `colibrid serve --trace FILE`")
    text = "experts in memory, a number or a percentage; repeatable (default: as recorded)"
    replay.add_argument("--slots", action="append", default=[], metavar="N", help=text)
    text = "part at the start that policies learn from and that is not counted (default: 0.5)"
    replay.add_argument("--learn", type=_share, default=0.5, metavar="SHARE", help=text)
    replay.add_argument("--drives", type=_rates, metavar="MB/s,...", help="forecast tok/s for drives of these rates")
    replay.add_argument("--record-bytes", type=_positive, metavar="BYTES", help="of an expert (default: as recorded)")
    text = "arithmetic of a step that no read hides, for the forecast (default: 0)"
    replay.add_argument("--compute-ms", type=_milliseconds, default=0.0, metavar="MS", help=text)
    replay.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns the exit code."""
    try:
        with Trace(options.file) as trace:
            report = make_report(trace, options)
    except (CoreError, ValueError) as error:
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        else:
            print(f"colibrid: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, InvalidError | ValueError) else EXIT_FAILED
    print(json.dumps(report) if options.json else as_text(report))
    return EXIT_OK


def make_report(trace: Trace, options: argparse.Namespace) -> dict[str, Any]:
    """Replay everything that was asked for. Raises InvalidError for a trace without decoding or a size out of range."""
    info = trace.info
    if not info.accesses:
        raise InvalidError(f"{options.file}: no decode steps in this trace")
    sizes = [_slots(text, info.records) for text in options.slots] or [min(info.cache_slots, info.records)]
    drives = Drives(sum(options.drives), options.compute_ms) if options.drives else None
    count_from = min(int(info.accesses * options.learn), info.accesses - 1)
    results = [
        {"slots": slots, "share": slots / info.records, "policies": compare(trace, slots, count_from, drives, options)}
        for slots in sizes
    ]
    exact = trace.replay(info.cache_slots) if info.cache_slots <= info.records else None
    return {
        "ok": True,
        "trace": asdict(info),
        "learn": options.learn,
        "drives": asdict(drives) if drives else None,
        "recorded_slots": asdict(exact) if exact and exact.is_exact else None,
        "results": results,
    }


def compare(
    trace: Trace, slots: int, count_from: int, drives: Drives | None, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Every policy's outcome with `slots`, over the accesses from `count_from` on."""
    info = trace.info
    record_bytes = options.record_bytes or info.model_bytes / info.records
    loads = {name: trace.policy_loads(name, slots, count_from) for name in POLICIES}
    loads[OURS] = trace.replay(slots, count_from).counted_loads
    counted = info.accesses - count_from
    steps = max(info.steps * counted / info.accesses, 1)
    outcomes = {}
    for name in COLUMNS:
        per_step = loads[name] * record_bytes / steps
        speed = drives.steps_per_second(per_step) if drives else None
        outcomes[name] = asdict(Outcome(1 - loads[name] / counted, loads[name], per_step, speed))
    return outcomes


# ---- text -----------------------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    info, exact, drives = report["trace"], report["recorded_slots"], report["drives"]
    ending = "" if info["is_complete"] else ", cut off"
    lines = [
        f"{info['steps']} decode steps, {info['layers']} layers, {info['records']} experts; "
        f"{info['accesses']} uses by decoding, {info['prefill_uses']} by prompts{ending}",
        f"recorded with {info['cache_slots']} slots and {info['ring_slots']} in the ring: "
        f"{info['live_hits']} hits, {info['live_loads']} loads",
    ]
    if exact:
        lines.append(f"replayed the same way: {exact['hits']} hits, {exact['loads']} loads")
    lines += ["", f"hit rates in %, the first {100 * report['learn']:g} % of the uses not counted", _head()]
    lines += [_row(result, lambda outcome: f"{100 * outcome['hit_rate']:.1f}") for result in report["results"]]
    if drives:
        assumed = f"{drives['megabytes_per_second']:g} MB/s from all drives, {drives['compute_ms']:g} ms of arithmetic"
        lines += ["", f"tokens per second of one sequence: {assumed} that no read hides", _head()]
        lines += [_row(result, lambda outcome: f"{outcome['steps_per_second']:.2f}") for result in report["results"]]
    return "\n".join(lines)


def _head() -> str:
    return f"{'slots':<16}" + "".join(f"{name:>12}" for name in COLUMNS)


def _row(result: dict[str, Any], show: Any) -> str:
    name = f"{result['slots']} ({100 * result['share']:.1f} %)"
    return f"{name:<16}" + "".join(f"{show(result['policies'][column]):>12}" for column in COLUMNS)


# ---- arguments ------------------------------------------------------------------------------------------------------


def _slots(text: str, records: int) -> int:
    """A number of slots, also as a percentage of all experts (at least 1)."""
    try:
        slots = max(1, round(float(text[:-1]) / 100 * records)) if text.endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        raise InvalidError(f"--slots {text}: neither a number nor a percentage") from error
    if not 1 <= slots <= records:
        raise InvalidError(f"--slots {text}: must be 1..{records}, the experts of this trace")
    return slots


def _positive(text: str) -> int:
    number = int(text)
    if not 0 < number < 2**40:
        raise argparse.ArgumentTypeError(f"{text} is not a size")
    return number


def _milliseconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a time")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..1, 1 left out")
    return number


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if not all(0 < rate < 1e9 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: every drive needs a rate above 0")
    return rates
