"""How a benchmark ends: a table for people, then one flat JSON line for machines."""

import json
import os
import subprocess
from pathlib import Path

from memory import WATCH
from rich.console import Console
from rich.table import Table

from testkit.repository import ROOT


def commit() -> str:
    """The commit measured, with "+" if the tree differs from it; "unknown" outside git."""
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    shown = Table(title=title)
    for column in columns:
        shown.add_column(column, justify="right" if column != columns[0] else "left")
    for row in rows:
        shown.add_row(*row)
    Console(width=120).print(shown)


def result(
    bench: str,
    model: str,
    value: float,
    unit: str,
    ceiling: float,
    **more: float | int | str,
) -> None:
    """The last line: value and ceiling in `unit`, share = value / ceiling, and whatever else was measured.

    `peak_rss_bytes` may be given: of the processes that were measured together, if that is not this one and all its
    children.
    """
    line: dict[str, float | int | str] = {
        "bench": bench,
        "model": model,
        "value": round(value, 4),
        "unit": unit,
        "ceiling": round(ceiling, 4),
        "share": round(value / ceiling, 4) if ceiling else 0.0,
        "peak_rss_bytes": WATCH.bytes,
        "commit": commit(),
    }
    line.update({name: round(v, 4) if isinstance(v, float) else v for name, v in more.items()})
    print(json.dumps(line), flush=True)


def cache_folder() -> Path:
    """Where benchmarks keep what is dear to make: ${XDG_CACHE_HOME:-~/.cache}/colibri/bench."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "colibri" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
