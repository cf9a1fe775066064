"""Strict reading of config.json: every key is understood, or refused by name.

Owns the rules that all families share: a missing key is an error unless the caller states a documented default, a
value of the wrong type or range is an error with key and value, two spellings of one key may not differ, and a key that
nobody asked for is an error unless the family lists it as ignored, with a reason. Knows no family.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from colibri.packer.errors import CheckpointError, UnsupportedCheckpointError

MAX_SIZE = 1 << 31  # of any dimension; the spec's fields are 32 bits wide


class ConfigReader:
    """Reads each key once; `finish` then accounts for the rest. JSON null counts as absent."""

    def __init__(self, values: Mapping[str, object], file: Path, section: str = "") -> None:
        self.file = file
        self._section = section
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = {key for key, value in values.items() if value is None}
        self._known: set[str] = set()

    def refuse(self, key: str, text: str) -> NoReturn:
        """Raise UnsupportedCheckpointError for `key`."""
        raise UnsupportedCheckpointError(f"{self.file}: {self._section}{key}: {text}")

    def has(self, *keys: str) -> bool:
        """Whether one of the spellings has a value."""
        return any(key in self._values for key in keys)

    def value(self, *keys: str) -> object:
        """Return the value of the first spelling present, None if there is none. Spellings that differ are refused."""
        self._known.update(keys)
        present = [key for key in keys if key in self._values]
        for key in present[1:]:
            if not _same(self._values[key], self._values[present[0]]):
                self.refuse(key, f"{self._values[key]!r} contradicts {present[0]} {self._values[present[0]]!r}")
        return self._values[present[0]] if present else None

    def _required(self, keys: tuple[str, ...], default: object) -> object:
        value = self.value(*keys)
        if value is None and default is None:
            names = f"{keys[0]} (also spelled {', '.join(keys[1:])})" if keys[1:] else keys[0]
            raise CheckpointError(f"{self.file}: {self._section}{names} is missing and has no default")
        return default if value is None else value

    def size(self, *keys: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE - 1) -> int:
        """Return an integer within [minimum, maximum]."""
        value = self._required(keys, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.refuse(keys[0], f"{value!r} is not an integer from {minimum} to {maximum}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """Return a finite number > 0."""
        value = self._required(keys, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(keys[0], f"{value!r} is not a number")
        if not (math.isfinite(value) and value > 0):
            self.refuse(keys[0], f"{value!r} is not a finite number above 0")
        return float(value)

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._required(keys, default)
        if not isinstance(value, bool):
            self.refuse(keys[0], f"{value!r} is neither true nor false")
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._required(keys, default)
        if not isinstance(value, str):
            self.refuse(keys[0], f"{value!r} is not a string")
        return value

    def sizes(self, key: str, default: list[int]) -> list[int]:
        """Return a list of integers >= 0."""
        value = self._required((key,), default)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < MAX_SIZE for item in value):
            self.refuse(key, f"{value!r} is not a list of integers")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """Return a list of strings."""
        value = self._required((key,), default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(key, f"{value!r} is not a list of strings")
        return value

    def only(self, key: str, *supported: object, default: object) -> None:
        """Accept `key` if its value, or `default` where it is absent, is one of `supported`."""
        value = self._required((key,), default)
        if not any(_same(value, good) for good in supported):
            self.refuse(key, f"{value!r} is not supported, only {', '.join(repr(good) for good in supported)}")

    def section(self, key: str) -> "ConfigReader | None":
        """Return a reader of the object under `key`, None if there is none."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, f"{value!r} is not an object")
        return ConfigReader(value, self.file, f"{self._section}{key}.")

    def finish(self, ignored: Mapping[str, str]) -> None:
        """Refuse every key that was neither read nor listed in `ignored` (key -> why it does not matter)."""
        unknown = sorted((self._values.keys() | self._nulls) - self._known - ignored.keys())
        # A null says "not used" of a key that would matter if it had a value.
        unknown = [key for key in unknown if key not in self._nulls]
        if unknown:
            shown = ", ".join(f"{self._section}{key} = {self._values[key]!r}"[:120] for key in unknown)
            raise UnsupportedCheckpointError(f"{self.file}: keys that are not understood: {shown}")


def _same(left: object, right: object) -> bool:
    """Equal as JSON values: true is not 1, 1 is 1.0."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)
