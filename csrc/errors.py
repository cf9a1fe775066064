"""The exceptions that stand for the core's error codes.

Owns the mapping from CL_* codes (colibri.h) to Python classes; each class also inherits the builtin that it resembles,
so that callers may catch either. Refuses to guess: an unknown code becomes InternalError with the code in its text.
"""

from typing import Any


class CoreError(Exception):
    """An error of the core. `code` is the CL_* number, the text names the field, file, tensor or row concerned."""

    code: int = -9


class InvalidError(CoreError, ValueError):
    """An argument or a spec that cannot be honoured."""

    code = -1


class StorageError(CoreError, OSError):
    """The operating system refused; the text names file, offset and errno."""

    code = -2


class CorruptError(CoreError):
    """Bytes that fail their checksum or contradict their description."""

    code = -3


class UnsupportedError(CoreError, NotImplementedError):
    """Understood, but not built: a format, an operation, an instruction set."""

    code = -4


class NoMemoryError(CoreError, MemoryError):
    """An allocation failed."""

    code = -5


class FullError(CoreError):
    """A planned resource is used up: KV pages, prefill workspaces."""

    code = -6


class CancelledError(CoreError):
    """The item was cancelled; its sequence kept its length."""

    code = -7


class NonFiniteError(CoreError, ArithmeticError):
    """NaN or infinity where numbers were expected. `row` and `col` where the core knows them, else -1."""

    code = -8
    row: int = -1
    col: int = -1


class InternalError(CoreError, RuntimeError):
    """A state that the core holds to be impossible, or a code that this module does not know."""

    code = -9


_BY_CODE: dict[int, type[CoreError]] = {
    cls.code: cls
    for cls in (
        InvalidError,
        StorageError,
        CorruptError,
        UnsupportedError,
        NoMemoryError,
        FullError,
        CancelledError,
        NonFiniteError,
        InternalError,
    )
}


def error_from_code(code: int, text: str) -> CoreError:
    """Return (not raise) the exception for `code` with the core's own words."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return InternalError(f"unknown core error code {code}: {text}")
    return cls(text)


def error_from(err: Any) -> CoreError | None:
    """Return the exception for a filled `cl_error` (a cffi struct), or None if its code is CL_OK."""
    code = int(err.code)
    if code == 0:
        return None
    from colibri.core._core import ffi

    return error_from_code(code, ffi.string(err.text).decode("utf-8", "replace"))
