"""`make bench BENCH=name ARGS="..."`: runs main(argv) of tests/bench/<name>.py: a table, then one JSON line last."""

import importlib
import sys
from pathlib import Path

from memory import WATCH

NOT_BENCHES = {"run", "report", "memory", "ceilings", "randommodel", "streaming", "touched"} | {
    *("giant", "giant_weights", "slicerig", "slicerun", "peer", "peer_child", "peer_gguf"),
}


def names() -> list[str]:
    """The benchmarks there are: every module of this folder that is not a helper."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in NOT_BENCHES)


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in names():
        print(f"usage: make bench BENCH=<{' | '.join(names())}> [ARGS=...]", file=sys.stderr)
        return 2
    with WATCH:
        return int(importlib.import_module(argv[0]).main(argv[1:]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
