"""The command line: exit codes, what is printed where, and that every command has its --json."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colibri.packer import cli
from testkit.checkpoints import write_td, write_tq
from testkit.packing import files_of, pack_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def result(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_pack_inspect_verify_export(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, stripe = tmp_path / "out", tmp_path / "stripe"
    assert run(source, "--out", out, "--stripe", f"{stripe}:3", "--json") == 0
    packed = result(capsys)
    assert packed["ok"] is True
    assert [entry["weight"] for entry in packed["layout"]["stripes"]] == ["1", "3"]
    assert run("inspect", out, "--json") == 0
    assert result(capsys) == {key: value for key, value in packed.items() if key != "ok"}
    assert run("verify", out, "--stripe", stripe, "--json") == 0
    verdict = result(capsys)
    assert (verdict["ok"], verdict["faults"], verdict["content_id"]) == (True, [], packed["content_id"])
    assert run("export", out, "--stripe", stripe, "--out", tmp_path / "back", "--json") == 0
    assert result(capsys)["shards"] == ["model-00001-of-00001.safetensors"]


def test_text_for_people(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(source, "--out", out) == 0
    captured = capsys.readouterr()
    for word in ("content_id", "experts    int4 g64 asym", "attention  int8 g64 sym", "relative RMS"):
        assert word in captured.out
    assert "packing: 0 of 0 MiB (100 %)" in captured.err
    assert run("inspect", out) == 0
    assert capsys.readouterr().out == captured.out
    assert run("verify", out) == 0
    assert "in order: " in capsys.readouterr().out
    assert run("export", out, "--out", tmp_path / "back", "--dtype", "bf16") == 0
    assert "as bf16 in 1 shards" in capsys.readouterr().out
    assert run(source, "--out", out) == 0
    assert "is packed already; nothing to do" in capsys.readouterr().err


def test_plan_writes_nothing_and_says_all(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, stripe = tmp_path / "out", tmp_path / "stripe"
    assert run("plan", source, "--out", out, "--stripe", stripe, "--precision", "head=f32", "--json") == 0
    plan = result(capsys)
    assert list(tmp_path.iterdir()) == []
    assert [drive["folder"] for drive in plan["drives"]] == [str(out), str(stripe)]
    assert {t["name"]: t["format"] for t in plan["tensors"]}["head"] == "f32"
    assert {t["class"] for t in plan["tensors"]} == {"embedding", "head", "exact", "attention"}
    assert [layer["striping"] for layer in plan["expert_layers"]] == ["whole", "whole"]
    assert run(source, "--out", out, "--stripe", stripe, "--precision", "head=f32") == 0
    for drive, folder in zip(plan["drives"], (out, stripe), strict=True):
        assert (folder / f"stripe-00{drive['stripe']}.colibri").stat().st_size == drive["stripe_bytes"]
        assert sum(path.stat().st_size for path in folder.iterdir()) <= drive["need_bytes"]
    capsys.readouterr()
    assert run("plan", source) == 0
    text = capsys.readouterr().out
    assert (
        "layers.1.router          exact      [4, 64]    f32           1.0 KiB  model.layers.1.mlp.gate.weight" in text
    )


def test_what_is_skipped_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from testkit.checkpoints import TD_CONFIG, mtp_tensors, td_tensors, write_checkpoint

    config = {**TD_CONFIG, "num_nextn_predict_layers": 1}
    source = write_checkpoint(tmp_path / "td", config, td_tensors() | mtp_tensors())
    assert run("plan", source, "--json") == 0
    skipped = result(capsys)["skipped"]
    assert [entry["rule"] for entry in skipped] == ["mtp_layer"]
    assert len(skipped[0]["names"]) == len(mtp_tensors())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["SOURCE"], "required: --out"),
        (["SOURCE", "--out", "x", "--group-size", "48"], "invalid choice"),
        (["SOURCE", "--out", "x", "--stripe", "y:0"], "WEIGHT is a positive 32-bit number"),
        (["SOURCE", "--out", "x", "--weight", "-1"], "expected one argument|no positive"),
        (["SOURCE", "--out", "x", "--nonsense"], "unrecognized arguments"),
        (["SOURCE", "--out", "x", "--prec", "all=f32"], "unrecognized arguments"),
        (["no-such-folder", "--out", "x"], "'no-such-folder' is no folder"),
        (["Qwen/Qwen3-30B-A3B", "--out", "x"], "this version packs local folders only"),
        (["export", "x"], "required: --out"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_2(
    source: Path,
    words: list[str],
    match: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(*(source if word == "SOURCE" else word for word in words))
    assert caught.value.code == 2
    import re

    assert re.search(match, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("precision", "match"),
    [
        ("attention=int5", "format is not one of int4, int8, bf16, f32"),
        ("router=int8", "not CLASS=FORMAT with a class of experts"),
        ("head", "not CLASS=FORMAT"),
        ("head=f32,head=int8", "class head stands twice"),
    ],
)
def test_a_precision_that_does_not_exist_is_2(
    source: Path, tmp_path: Path, precision: str, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, "--out", tmp_path / "out", "--precision", precision, "--json") == 2
    captured = capsys.readouterr()
    assert match in captured.err
    assert json.loads(captured.out)["exit_code"] == 2


def test_a_class_beats_all(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--precision", "head=int4, all=f32", "--group-size", 32, "--json")
    assert run("plan", source, "--out", tmp_path, *words) == 0
    plan = result(capsys)
    formats = {tensor["name"]: tensor["format"] for tensor in plan["tensors"]}
    assert (formats["head"], formats["layers.0.q"]) == ("int4 g32 asym", "f32")
    assert plan["expert_layers"][0]["format"] == "f32"


def test_faults_and_refusals_are_1(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    pack_folder(source, [out])
    assert run(write_td(tmp_path / "td"), "--out", out) == 1
    assert "a finished container of another source" in capsys.readouterr().err
    stripe = out / "stripe-000.colibri"
    stripe.write_bytes(stripe.read_bytes()[:-1] + b"\xff")
    assert run("verify", out, "--json") == 1
    verdict = result(capsys)
    assert verdict["ok"] is False
    assert "layer 1, expert 3" in verdict["faults"][0]
    assert run("verify", out) == 1
    assert "1 faults" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    for command in ("inspect", "verify"):
        assert run(command, out) == 1
        assert "holds no manifest.json" in capsys.readouterr().err
    (tmp_path / "td" / "config.json").write_text("{}")
    assert run(tmp_path / "td", "--out", tmp_path / "new", "--json") == 1
    assert result(capsys)["ok"] is False


def test_a_drive_that_refuses_is_74(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, "--out", tmp_path / "no" / "drive") == 74
    assert f"{tmp_path}/no: No such file" in capsys.readouterr().err


def test_interrupted_is_130(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "pack", interrupted)
    assert run(source, "--out", tmp_path / "out") == 130


def test_a_terminal_gets_a_bar(source: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-P", "-m", "colibri.packer.cli", str(source), "--out", str(tmp_path / "out")]
    child = subprocess.Popen(command, stderr=slave, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    seen = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(master)
    assert child.wait() == 0
    assert b"packing" in seen
    assert b"100%" in seen
    assert files_of(tmp_path / "out")


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["verify", "--help"], ["plan", "--help"]):
        with pytest.raises(SystemExit) as caught:
            run(*words)
        assert caught.value.code == 0
        assert "exit codes: 0 done; 1 refused" in capsys.readouterr().out
