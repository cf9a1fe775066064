"""`make demo` from the packing on: an answer, a restart, nothing computed twice, a daemon left running, and its end."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.repository import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache_home(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that holds the small model and nothing else."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "colibri").mkdir()
    (folder / "colibri" / small_model.name).symlink_to(small_model)
    yield folder
    run_demo(folder, "--stop")


def run_demo(cache_home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_home)}
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)


@pytest.fixture(scope="module")
def first(cache_home: Path) -> "subprocess.CompletedProcess[str]":
    return run_demo(cache_home)


def daemon_pid(cache_home: Path) -> int:
    (pid_file,) = cache_home.glob("colibri/demo-*/colibrid.pid")
    return int(pid_file.read_text())


def is_running(pid: int) -> bool:
    """A process that has ended, but that nobody has waited for, has an empty command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def test_the_question_is_answered_with_statistics(first: "subprocess.CompletedProcess[str]") -> None:
    assert first.returncode == 0, first.stderr
    assert "The capital of France is Paris." in first.stdout
    statistics = r"prompt \d+ tokens \(\d+ cached\), prefill [\d.]+ tok/s \| \d+ tokens, decode [\d.]+ tok/s"
    lines = re.findall(statistics + r" \| expert hits \d+/\d+ \([\d.]+ %\), [\d.]+ \w+ read on demand", first.stderr)
    assert len(lines) == 2


def test_no_earlier_position_is_computed_again(first: "subprocess.CompletedProcess[str]") -> None:
    shown = re.search(r"earlier positions: (\d+), of which computed again: 0; new in this prompt: (\d+)", first.stdout)
    assert shown is not None, first.stdout
    assert int(shown[1]) > 30
    assert 0 < int(shown[2]) < 40
    assert "(0 cached)" in first.stderr
    assert f"({shown[1]} cached)" in first.stderr


def test_it_says_how_to_go_on_and_that_works(first: "subprocess.CompletedProcess[str]", cache_home: Path) -> None:
    assert is_running(daemon_pid(cache_home))
    shown = re.search(r"To talk to it:\n +(.+)\n", first.stdout)
    assert shown is not None
    command = [*shown[1].split(), "--message", "Thank you.", "--max-tokens", "4"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_the_second_run_packs_nothing_and_stop_ends_it(
    first: "subprocess.CompletedProcess[str]", cache_home: Path
) -> None:
    assert first.returncode == 0
    again = run_demo(cache_home)
    assert again.returncode == 0, again.stderr
    assert "container: there already, and every checksum is right" in again.stdout
    assert "packing" not in again.stderr
    assert "The capital of France is Paris." in again.stdout
    pid = daemon_pid(cache_home)
    stopped = run_demo(cache_home, "--stop")
    assert stopped.returncode == 0
    assert f"kill -TERM {pid}" in stopped.stdout
    assert not is_running(pid)
    assert run_demo(cache_home, "--stop").stdout == "no daemon of the demo is running\n"


def test_a_step_that_fails_is_shown(cache_home: Path, tmp_path: Path) -> None:
    """Here the model's name in the cache is taken by something else."""
    (model,) = (cache_home / "colibri").glob("small-moe-*")
    (tmp_path / "colibri" / model.name).mkdir(parents=True)
    failed = run_demo(tmp_path)
    assert failed.returncode == 1
    assert "make_small_model.py" in failed.stderr
    assert "is not the small model made from the present inputs" in failed.stderr
    assert "Traceback" not in failed.stderr
