"""SIGINT and SIGTERM: an exception that knows its signal, and a stretch of work in which none arrives unasked.

Owns the handlers. A signal that was ignored when the process began (nohup, a shell's background job) stays ignored, and
outside of the main thread, where Python takes no signals, nothing is changed.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _handled_by(handler: Handler) -> Iterator[None]:
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: old for number in _SIGNALS if (old := signal.getsignal(number)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def raised() -> Iterator[None]:
    """Let both signals raise Interrupted wherever the block is."""

    def handler(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    with _handled_by(handler):
        yield


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Hold both signals back: the block calls what this gives where it can be stopped, which raises Interrupted.

    What came after the last call is raised when the block ends, unless another exception ends it.
    """
    came: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    def check() -> None:
        if came:
            raise Interrupted(came[0])

    with _handled_by(handler):
        yield check
    check()
