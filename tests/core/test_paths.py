"""Which component of a path stands in the way, said once (C20)."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.core.paths import why_unreachable


def test_what_the_caller_has_named_is_left_out(tmp_path: Path) -> None:
    error = OSError(5, "Input/output error")
    assert why_unreachable(tmp_path, error) == "Input/output error"
    assert why_unreachable(tmp_path / "a", error).startswith("No such file or directory")
    assert why_unreachable(tmp_path, error, named=tmp_path / "a") == f"{tmp_path}: Input/output error"
    assert why_unreachable(tmp_path / "a", error, named=tmp_path / "b").startswith(f"{tmp_path}/a: No such file")


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """A folder that only its owner may enter, below one that everybody may."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    (base / "closed" / "inner").mkdir(parents=True)
    (base / "closed").chmod(0o700 if os.geteuid() == 0 else 0o600)
    try:
        yield base / "closed"
    finally:
        (base / "closed").chmod(0o700)
        shutil.rmtree(base)


def test_a_folder_that_may_not_be_entered_is_named(closed_folder: Path) -> None:
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    try:
        text = why_unreachable(closed_folder / "inner", PermissionError(13, "Permission denied"))
    finally:
        os.seteuid(uid)
    mode = stat.S_IMODE(closed_folder.stat().st_mode)
    assert f"{closed_folder}: may not be entered by uid" in text
    assert f"(mode {mode:04o}, owner uid {uid})" in text


def test_under_systemd_the_likely_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/home", "nobody-is-called-this", "model")
    monkeypatch.delenv("INVOCATION_ID", raising=False)
    assert "ProtectHome" not in why_unreachable(path, OSError())
    monkeypatch.setenv("INVOCATION_ID", "1")
    assert "ProtectHome=" in why_unreachable(path, OSError())


def test_a_file_that_is_gone_from_among_others_is_no_sign_of_an_unmounted_drive(tmp_path: Path) -> None:
    gone, error = tmp_path / "a", FileNotFoundError(2, "No such file or directory")
    (tmp_path / "LOCK").touch()
    assert why_unreachable(gone, error, file=True).endswith("; is the drive mounted?")
    assert why_unreachable(tmp_path / "no" / "a", error, file=True).endswith(
        "/no: No such file or directory; is the drive mounted?"
    )
    (tmp_path / "b").touch()
    assert why_unreachable(gone, error, file=True) == "No such file or directory"
    assert why_unreachable(gone, error).endswith("; is the drive mounted?")  # a folder
