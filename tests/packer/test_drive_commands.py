"""The commands that look after drives: exit codes, what they print, and their JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from colibri.packer import cli
from colibri.packer.scrub import Pace
from testkit.checkpoints import write_tq
from testkit.packing import pack_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def result(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_scrub_names_what_is_damaged(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, stripe = tmp_path / "out", tmp_path / "stripe"
    pack_folder(source, [out, stripe], mirror=True)
    words = ("scrub", out, "--stripe", stripe)
    assert run(*words, "--json") == 0
    told = result(capsys)
    assert told["ok"] is True
    assert told["read_bytes"] == sum(path.stat().st_size - 4096 for path in tmp_path.glob("*/*-00*.colibri"))
    mirror = out / "mirror-001.colibri"
    with open(mirror, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff\xff")
    assert run(*words, "--json") == 1
    (finding,) = result(capsys)["findings"]
    assert finding["file"] == str(mirror)
    assert (finding["stripe"], finding["mirror"], finding["layer"], finding["expert"]) == (1, True, 0, 1)
    assert (finding["offset"], finding["bytes"]) == (4096, 12288)
    mirror.unlink()
    assert run(*words) == 1
    assert f"stripe 1 has no usable mirror, only one copy of it is left: {mirror}" in capsys.readouterr().out


def test_a_scrub_reads_no_faster_than_its_rate() -> None:
    now, slept = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 9))
        now += seconds

    pace = Pace(1000, lambda: now, sleep)
    pace.spend(500)
    now += 0.2  # a read that took time
    pace.spend(500)
    now += 5.0  # a pause is not made up for
    pace.spend(500)
    pace.spend(500)
    assert slept == [0.5, 0.5, 0.5, 0.5]
    Pace(0, lambda: now, sleep).spend(10**9)
    assert len(slept) == 4


@pytest.mark.parametrize("text", ["0", "100", "4097", "1.5MiB", "-4096", "128 KiB", "9" * 13])
def test_a_min_extent_that_cannot_be_is_refused(source: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run("plan", source, f"--min-extent={text}")
    assert caught.value.code == 2
    assert "is no positive multiple of 4096 bytes, such as 128KiB" in capsys.readouterr().err


def test_min_extent_decides_whether_experts_are_cut(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, striping in (("4KiB", "split"), ("4096", "split"), ("1MiB", "whole")):
        assert run("plan", source, "--json", "--stripe", tmp_path / "b", "--min-extent", text) == 0
        assert {layer["striping"] for layer in result(capsys)["expert_layers"]} == {striping}
