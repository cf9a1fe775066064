"""The command line of colibri-pack: arguments, exit codes, and what is printed where.

Results go to standard output, progress and errors to standard error. Decides nothing about containers; the commands are
in commands.py.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from colibri.core.container import ContainerError
from colibri.core.errors import CoreError
from colibri.packer.arguments import add_arguments
from colibri.packer.commands import run_export, run_inspect, run_pack, run_plan, run_verify
from colibri.packer.disk import REFUSALS, DriveError, refusal_text
from colibri.packer.drive_commands import run_repair, run_restripe, run_scrub
from colibri.packer.errors import CheckpointError, FolderError
from colibri.packer.interrupt import Interrupted, raised
from colibri.packer.journal import JournalError
from colibri.packer.layout import LayoutError
from colibri.packer.precision import PrecisionError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_IO = 74
EXIT_SIGNAL = 128  # plus the signal's number

_DESCRIPTION = """\
Packs a Hugging Face checkpoint into a container that colibrid serves. DIR gets the manifest, the dense weights and
stripe 0 of the experts; each --stripe gets one more. A pack that was stopped goes on when the same command is run
again.

  colibri-pack SOURCE --out DIR[:WEIGHT] [--stripe DIR[:WEIGHT] ...]
  colibri-pack plan SOURCE ...      what a pack would do: bytes per drive, what each tensor becomes
  colibri-pack inspect DIR          what a container holds
  colibri-pack verify DIR           reads every byte, names every fault
  colibri-pack restripe DIR --to D  moves a container to other drives or weights
  colibri-pack repair DIR           sets right what is damaged, from mirrors or the checkpoint
  colibri-pack scrub DIR            reads the experts at leisure, names what is damaged
  colibri-pack export DIR --out D   back to a Hugging Face checkpoint, with the weights that the daemon computes with

(A SOURCE folder that is called like a command is given as ./plan.)
"""
_DESCRIPTIONS = {
    "pack": _DESCRIPTION,
    "plan": "Prints what a pack with these options would do, and writes nothing. With --out, what the pack refuses "
    "is refused, as far as that can be known without writing; without, it only says what would be needed.",
    "inspect": "Prints what a container holds. With every --stripe given, looks at all of its files too and names "
    "what is damaged or lost.",
    "verify": "Reads every byte of a container and names every fault, of one with damaged or lost files too.",
    "restripe": "Moves a container to other folders: other drives, or other weights. The checkpoint is not needed, the "
    "old container stays as it is, and sessions go on with the new one. A move that was stopped goes on when the same "
    "command is run again.",
    "repair": "Reads every byte of a container and writes anew, in place, what is damaged or lost: from the mirror, "
    "else from the checkpoint, and only what has the SHA-256 of what was packed. May run beside a daemon. For a stripe "
    "whose drive was replaced, give an empty folder on the new one with --stripe. A repair that was stopped goes on "
    "when the same command is run again.",
    "scrub": "Reads every expert of a container from its drives, no faster than it is told, and names what is "
    "damaged. May run beside a daemon.",
    "export": "Writes a container back as a Hugging Face checkpoint, with the weights that the daemon computes with.",
}
_EXIT_CODES = """\
exit codes: 0 done; 1 refused, or a fault was found (source, container or folder); 2 wrong usage; 74 a drive failed, is
full or can only be read; 130 interrupted (SIGINT), 143 terminated (SIGTERM). A pack or restripe that ended with 74, 130
or 143, or was killed, goes on when the same command is run again.
"""


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
    add_arguments(parser, command)
    return parser


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "pack": run_pack,
    "plan": run_plan,
    "inspect": run_inspect,
    "verify": run_verify,
    "restripe": run_restripe,
    "repair": run_repair,
    "scrub": run_scrub,
    "export": run_export,
}


_RESUMING = ("pack", "restripe", "repair")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run colibri-pack; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words and words[0] in _COMMANDS and words[0] != "pack" else "pack"
    parser = _parser(command)
    options = parser.parse_args(words)
    try:
        with raised():
            return _COMMANDS[command](options)
    except (LayoutError, PrecisionError) as error:
        return _fail(options, str(error), EXIT_USAGE)
    except (CheckpointError, ContainerError, FolderError, JournalError, CoreError) as error:
        return _fail(options, str(error), EXIT_FAILED)
    except DriveError as error:
        return _fail(options, str(error), EXIT_IO, error.facts)
    except OSError as error:
        return _fail(options, refusal_text(error), EXIT_FAILED if error.errno in REFUSALS else EXIT_IO)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        what = "terminated" if number == signal.SIGTERM else "interrupted"
        return _fail(
            options, what + ("; the same command resumes" if command in _RESUMING else ""), EXIT_SIGNAL + number
        )


def _fail(options: argparse.Namespace, text: str, code: int, facts: dict[str, int] | None = None) -> int:
    print(f"colibri-pack: {text}", file=sys.stderr)
    if options.json:
        print(json.dumps({"ok": False, "error": text, "exit_code": code, **(facts or {})}))
    return code


if __name__ == "__main__":
    sys.exit(main())
