"""Learned heat on disk: comes back as it was, and is never taken from a file that is not this model's."""

from __future__ import annotations

import errno
import json
import logging
import struct
from pathlib import Path

import numpy as np
import pytest

from colibri.daemon.heat_file import HEAT_FILE, HeatFile, encode
from colibri.daemon.store import files
from colibri.daemon.store.files import Quarantine

MINE, OTHER = "ab" * 32, "cd" * 32
HEAT = np.linspace(0, 0.5, 24, dtype=np.float32)


@pytest.fixture
def stored(tmp_path: Path) -> HeatFile:
    return HeatFile(tmp_path, Quarantine(tmp_path / "quarantine"), MINE, HEAT.size)


def kept(folder: Path) -> list[Path]:
    return [path for path in (folder / "quarantine").iterdir() if not path.name.endswith(".json")]


def test_heat_comes_back_bit_by_bit(stored: HeatFile) -> None:
    assert stored.load() is None
    stored.save(HEAT)
    found = stored.load()
    assert found is not None
    assert found.tobytes() == HEAT.tobytes()
    stored.save(HEAT * 2)
    assert np.array_equal(stored.load(), HEAT * 2)  # type: ignore[arg-type]


def spoilt(kind: str) -> bytes:
    good = encode(HEAT, MINE)
    if kind == "torn":
        return good[:-9]
    if kind == "empty":
        return b""
    if kind == "flipped":
        return good[:60] + bytes([good[60] ^ 1]) + good[61:]
    if kind == "other content":
        return encode(HEAT, OTHER)
    if kind == "other count":
        return encode(HEAT[:-1], MINE)
    if kind == "later version":
        return good[:8] + struct.pack("<I", 2) + good[12:]
    return encode(
        np.full(HEAT.size, {"not a number": np.nan, "below zero": -1.0, "above one": 1.5}[kind], np.float32), MINE
    )


REASONS = {
    "torn": "its header says 24 experts",
    "empty": "no heat file",
    "flipped": "fails its checksum",
    "other content": f"belongs to content {OTHER[:16]}, this daemon serves {MINE[:16]}",
    "other count": "it has 23 experts, this model 24",
    "later version": "version 2; this program knows 1",
    "not a number": "no heat",
    "below zero": "no heat",
    "above one": "no heat",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_is_not_this_model_s_heat_is_set_aside_with_a_warning_and_kept(
    stored: HeatFile, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    data = spoilt(kind)
    (tmp_path / HEAT_FILE).write_bytes(data)
    assert stored.load() is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(tmp_path / HEAT_FILE) in warnings[0]
    assert REASONS[kind] in warnings[0]
    (copy,) = kept(tmp_path)
    assert copy.read_bytes() == data
    note = json.loads(copy.with_name(copy.name + ".reason.json").read_text())
    assert REASONS[kind] in note["reason"]
    assert stored.load() is None, "the next start meets nothing"
    assert len(kept(tmp_path)) == 1
    stored.save(HEAT)
    assert stored.load() is not None


def test_a_save_that_fails_leaves_the_old_heat(stored: HeatFile, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.save(HEAT)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            stored.save(HEAT * 2)
    assert np.array_equal(stored.load(), HEAT)  # type: ignore[arg-type]
    assert [path.name for path in stored.path.parent.iterdir() if path.is_file()] == [HEAT_FILE]


def test_every_place_where_a_write_can_be_cut_gives_no_heat_or_the_whole(tmp_path: Path) -> None:
    good = encode(HEAT, MINE)
    for length in range(len(good)):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / HEAT_FILE).write_bytes(good[:length])
        assert HeatFile(folder, Quarantine(folder / "quarantine"), MINE, HEAT.size).load() is None
