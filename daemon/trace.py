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
from colibri.core.traces import POLICIES, PolicyResult, Trace, TraceInfo

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


class SizeError(ValueError):
    """A number of slots that the trace's model cannot have."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], epilog: str) -> None:
    """Add `trace` with its own commands to those of colibrid."""
    trace = commands.add_parser("trace", help="look into recorded routing traces", epilog=epilog)
    actions = trace.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "what other cache sizes, policies and drives would have made of a trace"
    replay = actions.add_parser("replay", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
    replay.add_argument("file", metavar="FILE", help="recorded with `colibrid serve --trace FILE`")
    text = "experts in memory, the ring's included, a number or a percentage; repeatable (default: as recorded)"
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
    except (CoreError, SizeError) as error:
        if options.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        else:
            print(f"colibrid: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, SizeError) else EXIT_FAILED
    print(json.dumps(report) if options.json else as_text(report))
    return EXIT_OK


def make_report(trace: Trace, options: argparse.Namespace) -> dict[str, Any]:
    """Replay everything that was asked for. Raises InvalidError for a trace without decoding, SizeError for a size."""
    info = trace.info
    if not info.accesses:
        raise InvalidError(f"{options.file}: no decode steps in this trace")
    as_recorded = min(info.cache_slots + info.ring_slots, info.records)
    sizes = [_slots(text, info.records) for text in options.slots] or [as_recorded]
    drives = Drives(sum(options.drives), options.compute_ms) if options.drives else None
    count_from = int(info.accesses * options.learn)
    results = []
    for slots in sizes:
        outcomes = {name: trace.policy(name, slots, count_from) for name in POLICIES}
        policies = {name: asdict(_outcome(found, drives, options.record_bytes)) for name, found in outcomes.items()}
        results.append({"slots": slots, "share": slots / info.records, "policies": policies})
    return {
        "ok": True,
        "trace": asdict(info),
        "learn": options.learn,
        "drives": asdict(drives) if drives else None,
        "recorded": asdict(trace.replay()) if _has_live_counts(info) else None,
        "results": results,
    }


def _has_live_counts(info: TraceInfo) -> bool:
    return info.live_hits + info.live_loads > 0


def _outcome(found: PolicyResult, drives: Drives | None, record_bytes: int | None) -> Outcome:
    per_step = (found.loads * record_bytes if record_bytes else found.bytes) / found.steps
    return Outcome(found.hit_rate, found.loads, per_step, drives.steps_per_second(per_step) if drives else None)


# ---- text -----------------------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    info, exact, drives = report["trace"], report["recorded"], report["drives"]
    ending = "" if info["is_complete"] else ", cut off"
    lines = [
        f"{info['steps']} decode steps, {info['layers']} layers, {info['records']} experts; "
        f"{info['accesses']} uses by decoding, {info['prefill_uses']} by prompts{ending}",
        f"recorded with {info['cache_slots']} slots and {info['ring_slots']} in the ring: "
        f"{info['live_hits']} hits, {info['live_loads']} loads",
    ]
    if exact:
        lines.append(f"replayed the same way: {exact['hits']} hits, {exact['loads']} loads")
    learned = f"the first {100 * report['learn']:g} % not counted"
    lines += ["", f"hit rates of decoding in %, from an empty cache, slots in all, {learned}", _head()]
    lines += [_row(result, lambda outcome: f"{100 * outcome['hit_rate']:.1f}") for result in report["results"]]
    if drives:
        assumed = f"{drives['megabytes_per_second']:g} MB/s from all drives, {drives['compute_ms']:g} ms of arithmetic"
        lines += [
            "",
            f"tokens per second of one sequence, reads of decoding alone: {assumed} that no read hides",
            _head(),
        ]
        lines += [_row(result, lambda outcome: f"{outcome['steps_per_second']:.2f}") for result in report["results"]]
    return "\n".join(lines)


def _head() -> str:
    return f"{'slots':<16}" + "".join(f"{name:>12}" for name in POLICIES)


def _row(result: dict[str, Any], show: Any) -> str:
    name = f"{result['slots']} ({100 * result['share']:.1f} %)"
    return f"{name:<16}" + "".join(f"{show(result['policies'][column]):>12}" for column in POLICIES)


# ---- arguments ------------------------------------------------------------------------------------------------------


def _slots(text: str, records: int) -> int:
    """A number of slots, also as a percentage of all experts (at least 1)."""
    try:
        slots = max(1, round(float(text[:-1]) / 100 * records)) if text.endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        raise SizeError(f"--slots {text}: neither a number nor a percentage") from error
    if not 1 <= slots <= records:
        raise SizeError(f"--slots {text}: must be 1..{records}, the experts of this trace")
    return slots


def _positive(text: str) -> int:
    number = _whole(text)
    if not 0 < number < 2**40:
        raise argparse.ArgumentTypeError(f"{text} is not a size in bytes")
    return number


def _milliseconds(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a time in ms")
    return number


def _share(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..1, 1 left out")
    return number


def _rates(text: str) -> list[float]:
    rates = [_number(part) for part in text.split(",")]
    if not all(0 < rate < 1e9 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: every drive needs a rate in MB/s above 0")
    return rates


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from error


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from error
