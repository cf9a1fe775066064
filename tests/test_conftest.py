"""The rule about skipped tests holds: it fails a session that skips, and spares what the list names."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.repository import ROOT

CASES = {
    "by_mark": "import pytest\n@pytest.mark.skip\ndef test_it(): pass\n",
    "while_running": "import pytest\ndef test_it(): pytest.skip('no')\n",
    "whole_module": "import pytest\npytest.skip('no', allow_module_level=True)\n",
    "expected_failure": "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n",
}
WORKERS = ("-n", "2")  # as the Makefile runs them


def run_session(folder: Path, code: str, allowed: str = "", *options: str) -> "subprocess.CompletedProcess[str]":
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "allowed_skips.txt").write_text(allowed)
    (folder / "test_case.py").write_text(code)
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        *options,
        str(folder),
    ]
    # conftest.py loads a plugin of testkit, which pytest finds through pyproject.toml in the real tree.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/helpers{os.pathsep}{ROOT}/tools"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", CASES)
def test_an_unlisted_skip_fails_the_session_as_root_only(tmp_path: Path, case: str) -> None:
    result = run_session(tmp_path, CASES[case])
    assert (result.returncode != 0) == (os.geteuid() == 0), result.stdout
    assert ("SKIPPED WITHOUT LEAVE" in result.stdout) == (os.geteuid() == 0)


def test_a_listed_skip_is_allowed(tmp_path: Path) -> None:
    result = run_session(tmp_path, CASES["by_mark"], "test_case.py::test_it  # shown here\n")
    assert result.returncode == 0, result.stdout


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    result = run_session(tmp_path, CASES["by_mark"], "test_case.py::test_it\n")
    assert result.returncode != 0
    assert "gives no reason" in result.stdout + result.stderr


class TestWorkers:
    def test_a_listed_skip_is_allowed(self, tmp_path: Path) -> None:
        result = run_session(tmp_path, CASES["by_mark"], "test_case.py::test_it  # shown here\n", *WORKERS)
        assert result.returncode == 0, result.stdout

    def test_an_unlisted_skip_fails_the_session_as_root_only(self, tmp_path: Path) -> None:
        result = run_session(tmp_path, CASES["by_mark"], "", *WORKERS)
        assert (result.returncode != 0) == (os.geteuid() == 0), result.stdout

    def test_a_file_stays_together_and_so_do_the_files_of_the_small_model(self, tmp_path: Path) -> None:
        files = ["tests/law1/test_small_model.py", "tests/tools/test_demo.py", *(f"test_{n}.py" for n in range(3))]
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            kind = "model" if file.startswith("tests/") else file
            code = "".join(f"def test_{name}(worker_id): print('ran', {kind!r}, worker_id)\n" for name in "abcd")
            (tmp_path / file).write_text(code)
        result = run_session(tmp_path, "def test_it(): pass\n", "", *WORKERS, "-rP")
        ran = {line.strip() for line in result.stdout.splitlines() if line.startswith("ran ")}
        assert len(ran) == 4, result.stdout  # each kind on one worker
        assert len({line.split()[-1] for line in ran}) == 2

    def test_a_file_that_uses_the_small_model_must_be_listed(self, tmp_path: Path) -> None:
        result = run_session(tmp_path, "def test_it(small_model): pass\n")
        assert result.returncode != 0
        assert "test_case.py::test_it uses small_model: name its file in SMALL_MODEL_FILES" in result.stderr


@pytest.mark.parametrize("options", [(), WORKERS])
def test_ctrl_c_works_in_what_tests_start_also_where_it_was_ignored(tmp_path: Path, options: tuple[str, ...]) -> None:
    code = (
        "import signal, subprocess, sys\n"
        "def test_it():\n"
        "    code = 'import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code]) == b'False\\n'\n"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = run_session(tmp_path, code, "", *options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.returncode == 0, result.stdout
