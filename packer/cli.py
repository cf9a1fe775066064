"""The command line of colibri-pack: arguments, exit codes, and what is printed where.

Results go to standard output, progress and errors to standard error. Decides nothing about containers; the commands are
in commands.py.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from colibri.core.container import ContainerError
from colibri.core.errors import CoreError
from colibri.packer.commands import Stripe, run_export, run_inspect, run_pack, run_plan, run_verify
from colibri.packer.disk import REFUSALS, DriveError
from colibri.packer.errors import CheckpointError, FolderError
from colibri.packer.interrupt import Interrupted, raised
from colibri.packer.journal import JournalError
from colibri.packer.precision import CLASS_FORMATS, DEFAULT_GROUP_SIZE, GROUP_SIZES, PrecisionError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_IO = 74
EXIT_SIGNAL = 128  # plus the signal's number

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_DESCRIPTION = """\
Packs a Hugging Face checkpoint into a container that colibrid serves. DIR gets the manifest, the dense weights and
stripe 0 of the experts; each --stripe gets one more. A pack that was stopped goes on when the same command is run
again.

  colibri-pack SOURCE --out DIR [--stripe DIR[:WEIGHT] ...]
  colibri-pack plan SOURCE ...      what a pack would do: bytes per drive, what each tensor becomes
  colibri-pack inspect DIR          what a container holds
  colibri-pack verify DIR           reads every byte, names every fault
  colibri-pack export DIR --out D   back to a Hugging Face checkpoint, with the weights that the daemon computes with

(A SOURCE folder that is called like a command is given as ./plan.)
"""
_DESCRIPTIONS = {
    "pack": _DESCRIPTION,
    "plan": "Prints what a pack with these options would do, and writes nothing.",
    "inspect": "Prints what a container holds. With every --stripe given, opens all of its files too.",
    "verify": "Reads every byte of a container and names every fault.",
    "export": "Writes a container back as a Hugging Face checkpoint, with the weights that the daemon computes with.",
}
_EXIT_CODES = """\
exit codes: 0 done; 1 refused, or a fault was found (source, container or folder); 2 wrong usage; 74 a drive failed or
is full; 130 interrupted (SIGINT), 143 terminated (SIGTERM). A pack that ended with 74, 130 or 143, or was killed, goes
on when the same command is run again.
"""


# Nothing, or what begins like a number: no folder is meant by it, and if one is, it can be said.
_MEANT_AS_WEIGHT = re.compile(r"|\s*[+-]?(\.?\d|nan\b|inf)[^/]*", re.IGNORECASE)


def _stripe(text: str) -> Stripe:
    folder, colon, weight = text.rpartition(":")
    if not colon or not _MEANT_AS_WEIGHT.fullmatch(weight):
        return Stripe(Path(text), 1)
    if not folder or not weight.isdecimal() or not 0 < int(weight) < 2**32:
        raise argparse.ArgumentTypeError(
            f"{text!r}: WEIGHT is a positive 32-bit number, not {weight!r}; a path with a colon is written with its "
            f"weight, {text + ':1'!r}"
        )
    return Stripe(Path(folder), int(weight))


def _weight(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive 32-bit number")
    return int(text)


def _source(text: str) -> Path:
    path = Path(text)
    if not path.exists() and _HUB_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no folder here; if it is meant as a repository of the Hugging Face Hub: this version packs "
            "local folders only, so download it first and give its folder"
        )
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return path


def _parser(command: str) -> argparse.ArgumentParser:
    prog = "colibri-pack" if command == "pack" else f"colibri-pack {command}"
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_DESCRIPTIONS[command],
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command == "pack":
        parser.add_argument("--version", action="version", version=f"colibri-pack {version('colibri')}")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text; counts and bytes are numbers"
    )
    if command in ("pack", "plan"):
        _add_packing(parser, command)
        return parser
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
            "--shard-bytes", metavar="N", type=_weight, default=2 << 30, help="longest shard (default: 2 GiB)"
        )
    return parser


def _add_packing(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("source", metavar="SOURCE", type=_source, help="folder of the checkpoint")
    out = {"required": True} if command == "pack" else {"default": Path("DIR")}
    parser.add_argument("--out", metavar="DIR", type=Path, help="primary folder of the container", **out)
    parser.add_argument(
        "--weight", metavar="N", type=_weight, default=1, help="relative bandwidth of DIR's drive (default: 1)"
    )
    parser.add_argument(
        "--stripe",
        dest="stripes",
        metavar="DIR[:WEIGHT]",
        type=_stripe,
        action="append",
        default=[],
        help="one more drive's folder, once for each, and its relative bandwidth (default: 1)",
    )
    classes = ", ".join(CLASS_FORMATS)
    parser.add_argument(
        "--precision",
        metavar="CLASS=FORMAT,...",
        default="",
        help=f"classes {classes}, or all; formats int4, int8, bf16, f32 (default: experts=int4, the rest int8; router, "
        "norms and biases stay f32)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=DEFAULT_GROUP_SIZE,
        help=f"weights that share a scale (default: {DEFAULT_GROUP_SIZE})",
    )


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "pack": run_pack,
    "plan": run_plan,
    "inspect": run_inspect,
    "verify": run_verify,
    "export": run_export,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run colibri-pack; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words and words[0] in _COMMANDS and words[0] != "pack" else "pack"
    parser = _parser(command)
    options = parser.parse_args(words)
    try:
        with raised():
            return _COMMANDS[command](options)
    except PrecisionError as error:
        return _fail(options, str(error), EXIT_USAGE)
    except (CheckpointError, ContainerError, FolderError, JournalError, CoreError) as error:
        return _fail(options, str(error), EXIT_FAILED)
    except DriveError as error:
        return _fail(options, str(error), EXIT_IO, error.facts)
    except OSError as error:
        return _fail(options, str(error), EXIT_FAILED if error.errno in REFUSALS else EXIT_IO)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        what = "terminated" if number == signal.SIGTERM else "interrupted"
        return _fail(options, what + ("; the same command resumes" if command == "pack" else ""), EXIT_SIGNAL + number)


def _fail(options: argparse.Namespace, text: str, code: int, facts: dict[str, int] | None = None) -> int:
    print(f"colibri-pack: {text}", file=sys.stderr)
    if options.json:
        print(json.dumps({"ok": False, "error": text, "exit_code": code, **(facts or {})}))
    return code


if __name__ == "__main__":
    sys.exit(main())
