"""How numbers read in what colibri-pack prints: sizes with a binary unit, and nouns that agree with their count.

Pure functions, below everything that prints or raises.
"""

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return "1 fault", "2 faults"; `plural` where an s at the end does not make it."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def size_text(count: float) -> str:
    """Return a size in bytes with the unit that fits it."""
    size, index = float(count), 0
    while size >= 1024 and index + 1 < len(_UNITS):
        size, index = size / 1024, index + 1
    return f"{size:.1f} {_UNITS[index]}" if index else f"{size:.0f} B"


def done_text(done: int, total: int) -> str:
    """Return "362 of 575 MiB (63 %)": both in one unit, that in which `total` has at least two digits."""
    shift = 20 if total >= 10 << 20 else 10 if total >= 10 << 10 else 0
    share = 100.0 * done / total if total else 100.0
    return f"{done / 2**shift:.0f} of {total / 2**shift:.0f} {_UNITS[shift // 10]} ({share:.0f} %)"


def need_text(need: int, free: int) -> str:
    """Return both in MiB, rounded away from each other: what does not fit never reads as if it did."""
    return (
        f"needs {math.ceil(need / 2**20 * 10) / 10:.1f} MiB more, "
        f"the file system has {math.floor(free / 2**20 * 10) / 10:.1f} MiB left"
    )
