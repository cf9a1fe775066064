"""A process to be killed: runs one long turn in a session and says how much of it is durable.

Usage: python -m testkit.kill_target STATE_FOLDER STOP_AFTER. Prints the generation's name, then a line `durable
kv_position` after each change. After STOP_AFTER tokens the model waits; once everything is written a line `still`
follows.
"""

import sys
import threading
from pathlib import Path

from testkit.engine import Bench
from testkit.fake_model import FakeModel


def main() -> None:
    stop_after = int(sys.argv[2])
    model = FakeModel(item_seconds=0.001)

    def wait_at_the_end() -> None:
        if model.decoded >= stop_after:
            bench.store.flush()
            print("still", flush=True)
            threading.Event().wait()

    model.before_step = wait_at_the_end
    bench = Bench(Path(sys.argv[1]), model)
    bench.engine.create_session("alpha")
    turn = bench.submit(range(100), "alpha", max_tokens=400)
    print(turn.name, flush=True)
    view = turn.view()
    while True:
        view = turn.wait_sync(view.version, 30)
        print(view.durable_offset, bench.engine.session("alpha").kv_position, flush=True)


if __name__ == "__main__":
    main()
