"""How a benchmark ends: one flat JSON line whose first keys are the agreed ones, numbers as numbers."""

import json
import os
import subprocess
import sys

from testkit.repository import ROOT

BENCH = ROOT / "tests" / "bench"
KEYS = ["bench", "model", "value", "unit", "ceiling", "share", "peak_rss_bytes", "commit"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{BENCH}{os.pathsep}{ROOT / 'tests' / 'helpers'}"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)


def test_the_last_line_has_the_agreed_keys_and_is_flat() -> None:
    ended = run("-c", "from report import result; result('decode', 'm', 3.0, 'tok/s', 12.0, python_share=0.01)")
    assert ended.returncode == 0, ended.stderr
    line = json.loads(ended.stdout.splitlines()[-1])
    assert list(line) == [*KEYS, "python_share"]
    assert (line["bench"], line["model"], line["unit"]) == ("decode", "m", "tok/s")
    assert (line["value"], line["ceiling"], line["share"], line["python_share"]) == (3.0, 12.0, 0.25, 0.01)
    assert type(line["peak_rss_bytes"]) is int
    assert line["peak_rss_bytes"] > 1 << 20
    assert isinstance(line["commit"], str)
    assert line["commit"]


def test_an_unknown_benchmark_names_those_there_are() -> None:
    ended = run(str(BENCH / "run.py"), "nothing")
    assert ended.returncode == 2
    assert ended.stdout == ""
    for name in ("decode", "prefill", "pack"):
        assert name in ended.stderr
