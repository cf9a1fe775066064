"""The arguments of colibri-pack's commands: how folders with weights, sizes and rates are written, and what each takes.

Only parses; the commands are in commands.py and drive_commands.py.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from colibri.core.container_files import ALIGN
from colibri.packer.layout import MIN_EXTENT_BYTES
from colibri.packer.precision import CLASS_FORMATS, DEFAULT_GROUP_SIZE, GROUP_SIZES

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_MIRROR = "keep a second copy of every stripe on the next drive: it costs as much space again, and a drive may fail"


@dataclass(frozen=True)
class Drive:
    """A folder for a stripe, and its drive's relative bandwidth if it was given."""

    folder: Path
    weight: int | None = None


def drive(text: str) -> Drive:
    """Read DIR[:WEIGHT]. What stands behind the last colon is meant as a weight, unless it goes on with a `/` or the
    whole is a folder that exists. Raises ArgumentTypeError."""
    folder, colon, weight = text.rpartition(":")
    if not colon or "/" in weight:
        return Drive(Path(text))
    if not folder or not weight.isdecimal() or not 0 < int(weight) < 2**32:
        if Path(text).is_dir():
            return Drive(Path(text))
        raise argparse.ArgumentTypeError(f"{text!r}: {_why_no_weight(folder, weight)}")
    return Drive(Path(folder), int(weight))


def _why_no_weight(folder: str, weight: str) -> str:
    if not folder:
        return "no folder stands before the colon"
    if not weight:
        return f"no WEIGHT stands after the colon; {folder!r} leaves it out"
    return (
        f"WEIGHT is a whole number from 1 to {2**32 - 1}, not {weight!r} (1.5 to 1 is written 3 and 2); a path with a "
        f"colon is written with its weight, {folder + ':' + weight + ':1'!r}"
    )


def positive(text: str) -> int:
    """Read a positive 32-bit number. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 0 < int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive 32-bit number")
    return int(text)


def layer_expert(text: str) -> tuple[int, int]:
    """Read LAYER:EXPERT. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYER:EXPERT, two numbers")
    return int(match[1]), int(match[2])


def extent_bytes(text: str) -> int:
    """Read a size in bytes, a multiple of 4096, "128KiB" or "1MiB" too. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d{1,12})(KiB|MiB)?", text)
    size = int(match[1]) * {None: 1, "KiB": 1 << 10, "MiB": 1 << 20}[match[2]] if match else 0
    if not size or size % ALIGN:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive multiple of {ALIGN} bytes, such as 128KiB")
    return size


def source(text: str) -> Path:
    """Read the folder of a checkpoint. Raises ArgumentTypeError."""
    path = Path(text)
    if not path.exists() and _HUB_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no folder here; if it is meant as a repository of the Hugging Face Hub: this version packs "
            "local folders only, so download it first and give its folder"
        )
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return path


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add what `command` takes beside --json."""
    if command in ("pack", "plan"):
        _add_packing(parser, command)
        return
    parser.add_argument("container", metavar="DIR", type=Path, help="the container's primary folder")
    parser.add_argument(
        "--stripe",
        dest="stripes",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="a further stripe's folder, once for each (default: none)",
    )
    if command == "export":
        parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="new or empty folder")
        parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of the weights (default: f32)")
        parser.add_argument(
            "--shard-bytes", metavar="N", type=positive, default=2 << 30, help="longest shard (default: 2 GiB)"
        )
    if command == "restripe":
        parser.add_argument(
            "--to",
            metavar="DIR[:WEIGHT]",
            type=drive,
            action="append",
            required=True,
            help="a new folder, the first becomes the primary one, and its drive's relative bandwidth, a whole number. "
            "Where no weight is given at all and the folders lie on different file systems, the drives are measured; "
            "else it is 1",
        )
        add_placement(parser, None)
    if command == "repair":
        parser.add_argument(
            "--source",
            metavar="CHECKPOINT",
            type=source,
            help="the checkpoint that the container was packed from, for what no mirror holds",
        )
        parser.add_argument(
            "--only",
            metavar="LAYER:EXPERT",
            type=layer_expert,
            action="append",
            help="look at this expert only, once for each that scrub, verify or the daemon has named (default: all)",
        )
    if command == "scrub":
        parser.add_argument(
            "--rate", metavar="MB/S", type=positive, default=0, help="read no faster than this (default: no bound)"
        )


def add_placement(parser: argparse.ArgumentParser, min_extent: int | None) -> None:
    """Add what says how records are laid out, beside folders and weights; `min_extent` None is the container's own."""
    if min_extent is None:
        parser.add_argument(
            "--mirror",
            action=argparse.BooleanOptionalAction,
            help=f"{_MIRROR}; --no-mirror leaves it out (default: as the container has it)",
        )
    else:
        parser.add_argument("--mirror", action="store_true", help=_MIRROR)
    told = f"{min_extent >> 10}KiB" if min_extent else "as the container has it"
    parser.add_argument(
        "--min-extent",
        metavar="BYTES",
        type=extent_bytes,
        default=min_extent,
        help=f"cut experts into pieces of no less than this, else leave them whole (default: {told})",
    )


def _add_packing(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("source", metavar="SOURCE", type=source, help="folder of the checkpoint")
    parser.add_argument(
        "--out",
        metavar="DIR[:WEIGHT]",
        type=drive,
        help="primary folder of the container, and its drive's relative bandwidth, a whole number",
        required=command == "pack",
    )
    parser.add_argument(
        "--stripe",
        dest="stripes",
        metavar="DIR[:WEIGHT]",
        type=drive,
        action="append",
        default=[],
        help="one more drive's folder, once for each, and its relative bandwidth, a whole number. Where no weight is "
        "given at all and the folders lie on different file systems, the drives are measured; else the default is 1",
    )
    add_placement(parser, MIN_EXTENT_BYTES)
    parser.add_argument(
        "--precision",
        metavar="CLASS=FORMAT,...",
        default="",
        help=f"classes {', '.join(CLASS_FORMATS)}, or all; formats int4, int8, bf16, f32 (default: experts=int4, the "
        "rest int8; router, norms and biases stay f32)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=DEFAULT_GROUP_SIZE,
        help=f"weights that share a scale (default: {DEFAULT_GROUP_SIZE})",
    )
