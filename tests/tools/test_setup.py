"""tools/setup.sh names what is missing and stops when it may not install it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testkit.repository import ROOT


@pytest.fixture
def bare_machine(tmp_path: Path) -> Path:
    """A PATH of one folder on which there is neither gcc nor pkg-config, and `id -u` says that we are not root."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "dirname", "env", "true"):
        (commands / name).symlink_to(Path(str(shutil.which(name))).resolve())
    write_command(commands / "id", "echo 1000")
    return commands


def write_command(path: Path, code: str) -> None:
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def run_setup(commands: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PATH": str(commands), "PYTHON": "python3"}
    bash = str(commands / "bash")
    return subprocess.run(
        [bash, str(ROOT / "tools" / "setup.sh")], env=environment, capture_output=True, text=True, check=False
    )


def test_missing_system_packages_are_named(bare_machine: Path) -> None:
    write_command(bare_machine / "python3", "exit 0")
    result = run_setup(bare_machine)
    assert result.returncode == 1
    assert "these system packages are missing: gcc pkg-config libsystemd-dev" in result.stderr


def test_sudo_that_asks_for_a_password_is_not_used(bare_machine: Path) -> None:
    write_command(bare_machine / "python3", "exit 0")
    write_command(bare_machine / "apt-get", "echo called >&2")
    write_command(bare_machine / "sudo", "exit 1")
    result = run_setup(bare_machine)
    assert result.returncode == 1
    assert "called" not in result.stderr
    assert "these system packages are missing" in result.stderr


def test_passwordless_sudo_installs_them(bare_machine: Path) -> None:
    write_command(bare_machine / "python3", "exit 0")
    write_command(bare_machine / "apt-get", 'echo "apt-get $*" >&2')
    write_command(bare_machine / "sudo", 'shift; exec "$@"')
    result = run_setup(bare_machine)
    assert "install -y --no-install-recommends gcc pkg-config libsystemd-dev" in result.stderr
    assert result.returncode == 1
    assert "still missing after the installation" in result.stderr


def test_an_old_python_is_refused(bare_machine: Path) -> None:
    write_command(bare_machine / "python3", 'if [ "$1" = -V ]; then echo Python 3.9.2; else exit 1; fi')
    result = run_setup(bare_machine)
    assert result.returncode == 1
    assert "needs Python 3.11 or newer, and python3 is Python 3.9.2" in result.stderr


def test_no_python_is_refused(bare_machine: Path) -> None:
    result = run_setup(bare_machine)
    assert result.returncode == 1
    assert "python3 is not there" in result.stderr
