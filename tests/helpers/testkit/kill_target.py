"""A process to be killed: runs one long turn in a session and says how much of it is durable.

Usage: python -m testkit.kill_target STATE_FOLDER STOP_AFTER. Prints the generation's name, then a line `durable
kv_position` after each change. After STOP_AFTER tokens the model waits; once everything is written a line `still`
follows.
"""

import os
import sys
import threading
from pathlib import Path

from testkit.engine import Bench
from testkit.fake_model import FakeModel


def say(line: str) -> None:
    """One write: two threads speak here, and lines must stay whole."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    stop_after = int(sys.argv[2])
    model = FakeModel(item_seconds=0.001)

    def wait_at_the_end() -> None:
        if model.decoded >= stop_after:
            bench.store.flush()
            say("still")
            threading.Event().wait()

    model.before_step = wait_at_the_end
    bench = Bench(Path(sys.argv[1]), model)
    bench.engine.create_session("alpha")
    turn = bench.submit(range(100), "alpha", max_tokens=400)
    say(turn.name)
    view = turn.view()
    while True:
        view = turn.wait_sync(view.version, 30)
        say(f"{view.durable_offset} {bench.engine.session('alpha').kv_position}")


if __name__ == "__main__":
    main()
