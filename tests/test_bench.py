"""How a benchmark ends: one flat JSON line whose first keys are the agreed ones, numbers as numbers."""

import json
import os
import subprocess
import sys

import pytest

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


MIB = 1 << 20
# Three children with 150 MiB each, beside each other or one after the other.
CHILDREN = """
import subprocess, sys, time
from memory import TreePeak
hold = "import sys; held = b'x' * (150 << 20); print('held', flush=True); sys.stdin.read()"
at_once = int(sys.argv[1])
with TreePeak() as peak:
    for _ in range(3 // at_once):
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children = [subprocess.Popen([sys.executable, "-c", hold], **options) for _ in range(at_once)]
        for child in children:
            child.stdout.readline()
        time.sleep(1)  # several samples
        for child in children:
            child.communicate()
print(peak.bytes)
"""


@pytest.mark.parametrize("children", [1, 3])
def test_peak_memory_is_the_sum_over_the_processes_that_run_together(children: int) -> None:
    ended = run("-c", CHILDREN, str(children))
    assert ended.returncode == 0, ended.stderr
    assert 150 * children * MIB < int(ended.stdout) < 150 * (children + 1) * MIB


@pytest.mark.parametrize(("share", "said", "code"), [(0.0199, "1.99 %, as it must be", 0), (0.02, "TOO MUCH", 1)])
def test_too_much_python_is_said_in_the_table_and_fails(share: float, said: str, code: int) -> None:
    ended = run("-c", f"from decode import verdict; print(*verdict({share}))")
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stdout
    assert "below 2 %" in ended.stdout
    assert ended.stdout.split()[-1] == str(code)


def test_an_unknown_benchmark_names_those_there_are() -> None:
    ended = run(str(BENCH / "run.py"), "nothing")
    assert ended.returncode == 2
    assert ended.stdout == ""
    for name in ("decode", "prefill", "pack"):
        assert name in ended.stderr
