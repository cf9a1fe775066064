"""What an error's text must not do."""

import re
from collections import Counter
from pathlib import Path


def paths_named_twice(text: str) -> list[str]:
    """The absolute paths that stand in `text` more than once."""
    found = Counter(re.findall(r"(?<![^\s('\"])/[^\s:;,'\"()]+", text))
    return [path for path, count in found.items() if count > 1]


def assert_says_once(text: str, path: Path) -> None:
    """`text` names `path`, and no path twice."""
    assert str(path) in text
    assert paths_named_twice(text) == [], text
