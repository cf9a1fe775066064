"""Prints what pyproject.toml requires, or what one of its optional extras does, one per line, for `pip install -r`.

Installing `.` or `.[extra]` would compile the core as well.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extra: str | None) -> list[str]:
    """Return the requirement strings of the project, or of `extra`; KeyError if pyproject.toml has no such extra."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found: list[str] = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1] if len(sys.argv) > 1 else None)))
