"""Prints the requirements of one optional extra of pyproject.toml, one per line, for `pip install -r`.

Installing `.[extra]` would compile the core once more for nothing.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extra: str) -> list[str]:
    """Return the requirement strings of `extra`; KeyError if pyproject.toml has no such extra."""
    extras: dict[str, list[str]] = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    return extras[extra]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
