"""The systemd unit names options that exist, and keeps the settings that the daemon's promises rest on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from testkit.repository import ROOT

UNIT = ROOT / "systemd" / "colibrid@.service"


def settings() -> dict[str, str]:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line]
    return dict(line.split("=", 1) for line in lines)


def test_readiness_and_restart_follow_the_daemon_s_contract() -> None:
    unit = settings()
    assert unit["Type"] == "notify"
    assert unit["NotifyAccess"] == "main"
    assert unit["Restart"] == "on-failure"
    assert unit["ExecStart"].startswith("/usr/bin/colibrid serve --config ")
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert unit["ExecStartPre"].startswith("/usr/bin/colibrid check --config ")


def test_the_daemon_may_lock_and_keep_its_memory() -> None:
    unit = settings()
    assert unit["LimitMEMLOCK"] == "infinity"
    assert unit["MemorySwapMax"] == "0"
    assert unit["LimitCORE"] == "0"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    commands = {"/usr/bin/colibrid": "/bin/true", "User=colibri": "User=root", "Group=colibri": "Group=root"}
    text = UNIT.read_text()
    for ours, present_everywhere in commands.items():
        text = text.replace(ours, present_everywhere)
    (tmp_path / UNIT.name.replace("@", "@demo")).write_text(text)
    result = subprocess.run(
        [analyze, "verify", "--man=no", str(tmp_path / UNIT.name.replace("@", "@demo"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Unknown" not in result.stderr, result.stderr
    assert "Failed to parse" not in result.stderr, result.stderr


def test_the_unit_s_commands_are_the_daemon_s(tmp_path: Path) -> None:
    from colibri.daemon.cli import make_parser
    from colibri.daemon.config import load_config

    for setting in ("ExecStartPre", "ExecStart"):
        program, *arguments = settings()[setting].split()
        assert program == "/usr/bin/colibrid"
        assert make_parser().parse_args(arguments).config == Path("/etc/colibri/%i.toml")
    file = tmp_path / "model.toml"
    file.write_text('container = "/srv/colibri/model"\n')
    folders = {"STATE_DIRECTORY": "/var/lib/colibri/model", "RUNTIME_DIRECTORY": "/run/colibri/model"}
    config = load_config({}, file, folders)
    assert settings()["StateDirectory"] == "colibri/%i"
    assert settings()["RuntimeDirectory"] == "colibri/%i"
    assert config.listen.path == Path("/run/colibri/model/colibrid.sock")


def test_nothing_is_set_that_the_daemon_does_not_use() -> None:
    assert not {"CacheDirectory", "FileDescriptorStoreMax"} & set(settings())
