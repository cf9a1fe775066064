"""kill -9 in mid-answer: what was called durable is there, and the session goes on as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colibri.daemon.generation import GenerationState
from testkit.engine import EVER, Bench
from testkit.fake_model import continuation

HELPERS = Path(__file__).parents[1] / "helpers"


def killed(state: Path, when: str) -> tuple[str, int, int]:
    """Runs the target and kills it. Returns the generation's name, and the last durable offset and KV position that it
    told. `when`: a number of durable tokens, or "still": nothing was left to write."""
    target = subprocess.Popen(
        [sys.executable, "-P", "-m", "testkit.kill_target", str(state), "230"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HELPERS)},
    )
    assert target.stdout is not None
    name, told = target.stdout.readline().strip(), ["0", "0"]
    for line in target.stdout:
        if line == "still\n":
            break
        told = line.split()
        if when.isdigit() and int(told[0]) >= int(when):
            break
    target.kill()
    rest = [line.split() for line in target.stdout.read().splitlines() if line.count(" ") == 1]
    target.stdout.close()
    target.wait(EVER)
    durable, kv_position = map(max, zip(*([int(n) for n in line] for line in [told, *rest]), strict=True))
    return name, durable, kv_position


@pytest.mark.parametrize("when", ["1", "40", "200", "still"])
def test_what_was_called_durable_survives(tmp_path: Path, when: str) -> None:
    name, durable, kv_position = killed(tmp_path, when)
    bench = Bench(tmp_path)
    history = bench.engine.session_tokens("alpha")
    assert len(history) >= 100 + durable
    assert history == [*range(100), *continuation(range(100), len(history) - 100)]
    generation = bench.engine.get(name)
    assert generation.view().state is GenerationState.PAUSED
    assert generation.tokens() == history[100:]
    again = bench.submit([5, 6], "alpha")
    usage = again.result(EVER).usage
    assert again.tokens() == continuation([*history, 5, 6], 5)
    assert usage.cached_prompt_tokens >= kv_position
    if when == "still":
        assert len(history) - usage.cached_prompt_tokens <= 64 + 1
    bench.stop()
