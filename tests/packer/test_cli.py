"""The command line: exit codes, what is printed where, and that every command has its --json."""

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colibri.packer import cli
from colibri.packer.sinks import RecordSink
from colibri.packer.wording import size_text
from testkit.checkpoints import (
    TD_CONFIG,
    TQ_CONFIG,
    mtp_tensors,
    td_tensors,
    tq_tensors,
    write_checkpoint,
    write_td,
    write_tq,
)
from testkit.packing import files_of, pack_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tq(tmp_path_factory.mktemp("source") / "tq")


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def result(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def strings_of_digits(value: Any) -> list[str]:
    """All strings in a JSON value that are whole numbers."""
    if isinstance(value, dict | list):
        return [s for item in (value.values() if isinstance(value, dict) else value) for s in strings_of_digits(item)]
    return [value] if isinstance(value, str) and value.isdecimal() else []


def test_pack_inspect_verify_export(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, stripe = tmp_path / "out", tmp_path / "stripe"
    assert run(source, "--out", out, "--stripe", f"{stripe}:3", "--json") == 0
    packed = result(capsys)
    assert packed["ok"] is True
    assert [entry["weight"] for entry in packed["layout"]["stripes"]] == [1, 3]
    assert packed.pop("drive_rates") == []
    assert packed.pop("drive_warnings") == [
        f"{out} and {stripe} lie on one file system: if that is one drive, stripes on it are read no faster"
    ]
    assert run("inspect", out, "--json") == 0
    assert result(capsys) == {key: value for key, value in packed.items() if key != "ok"}
    assert sum(tensor["codes"]["bytes"] for tensor in packed["dense"]) < (out / "dense.safetensors").stat().st_size
    assert [entry["bytes"] for entry in packed["layout"]["stripes"]] == [
        (out / "stripe-000.colibri").stat().st_size,
        (stripe / "stripe-001.colibri").stat().st_size,
    ]
    assert [entry["number"] for entry in packed["layout"]["stripes"]] == [0, 1]
    assert strings_of_digits(packed) == []
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
    assert "packing: 370 of 370 KiB (100 %)" in captured.err
    assert run("inspect", out) == 0
    assert capsys.readouterr().out == captured.out
    assert run("verify", out) == 0
    assert "in order: " in capsys.readouterr().out
    assert run("export", out, "--out", tmp_path / "back", "--dtype", "bf16") == 0
    assert "as bf16 in 1 shard; the weights were rounded to bf16" in capsys.readouterr().out
    assert run("export", out, "--out", tmp_path / "f32") == 0
    assert "rounded" not in capsys.readouterr().out
    assert run(source, "--out", out) == 0
    assert capsys.readouterr().err == f"{out} is packed already; nothing to do\n"


def test_a_warning_is_told_once_and_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "tq", TQ_CONFIG, tq_tensors(), tokenizer=False)
    assert run(source, "--out", tmp_path / "out") == 0
    captured = capsys.readouterr()
    warning = "warning: no tokenizer.json in the checkpoint: the container has none, and colibrid cannot serve it"
    assert captured.err.splitlines()[0] == warning
    assert "warning" not in captured.out
    assert run("inspect", tmp_path / "out") == 0
    assert warning in capsys.readouterr().out


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
        "layers.0-1.router          exact      [4, 64]    f32           1.0 KiB     model.layers.0-1.mlp.gate.weight"
        in text
    )


def test_what_is_skipped_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        (["SOURCE", "--out", "x", "--stripe", "y:0"], "WEIGHT is a whole number from 1 to 4294967295"),
        (
            ["SOURCE", "--out", "x", "--stripe", "c/g5:1.5"],
            "not '1.5' .*written 3 and 2.*; .* with its weight, 'c/g5:1.5:1'",
        ),
        (["SOURCE", "--out", "x", "--stripe", "y:-2"], "WEIGHT is a whole number from 1 to 4294967295"),
        (["SOURCE", "--out", "x", "--stripe", "y:2e3"], "WEIGHT is a whole number from 1 to 4294967295"),
        (["SOURCE", "--out", "x", "--stripe", "y:4294967296"], "WEIGHT is a whole number from 1 to 4294967295"),
        (["SOURCE", "--out", "x", "--stripe", "y:2x"], "WEIGHT is a whole number from 1 to 4294967295"),
        (["SOURCE", "--out", "x", "--stripe", "y:nan"], "WEIGHT is a whole number from 1 to 4294967295"),
        (["SOURCE", "--out", "x", "--stripe", "y:"], "no WEIGHT stands after the colon; 'y' leaves it out"),
        (["SOURCE", "--out", "d/n1:abc"], "argument --out: 'd/n1:abc': WEIGHT is a whole number .*, not 'abc'"),
        (["SOURCE", "--out", "x", "--stripe", "y:z "], "argument --stripe: 'y:z ': WEIGHT is a whole number"),
        (["SOURCE", "--out", "x:-1"], "WEIGHT is a whole number from 1 to 4294967295, not '-1'"),
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
    assert capsys.readouterr().out.endswith("\n1 fault\n")
    (out / "manifest.json").unlink()
    for command in ("inspect", "verify"):
        assert run(command, out) == 1
        assert "holds no manifest.json" in capsys.readouterr().err
    (tmp_path / "td" / "config.json").write_text("{}")
    assert run(tmp_path / "td", "--out", tmp_path / "new", "--json") == 1
    assert result(capsys)["ok"] is False


def test_a_path_with_a_colon_is_a_path(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("x:1", "a:b"):
        (tmp_path / folder).mkdir()
    stripes = [f"{tmp_path}/g5:1.5:2", f"{tmp_path}/a:b", f"{tmp_path}/x:1/y"]
    assert run("plan", source, "--json", *(word for stripe in stripes for word in ("--stripe", stripe))) == 0
    drives = [(drive["folder"], drive["weight"]) for drive in result(capsys)["drives"]]
    assert drives[1:] == [(f"{tmp_path}/g5:1.5", 2), (f"{tmp_path}/a:b", 1), (f"{tmp_path}/x:1/y", 1)]


@pytest.mark.parametrize("command", ["pack", "export"])
def test_a_folder_that_cannot_be_used_is_1_and_its_component_named(
    source: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_folder(source, [tmp_path / "packed"])
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    words = [source] if command == "pack" else ["export", tmp_path / "packed"]
    for folder, text in (
        ("file", "/file: it is there already, and is no folder"),
        ("file/x", f"{tmp_path}/file: Not a directory"),
        ("file/x/y", f"{tmp_path}/file: is no folder"),
        ("no/drive", f"{tmp_path}/no: No such file or directory; is the drive mounted?"),
        ("loop/x", f"{tmp_path}/loop: Too many levels of symbolic links"),
        ("n" * 256, "File name too long"),
    ):
        assert run(*words, "--out", tmp_path / folder) == 1
        error = capsys.readouterr().err
        assert text in error
        assert "resume" not in error
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("where", ["making", "locking", "opening"])
def test_a_folder_that_may_not_be_written_is_1(
    source: Path,
    tmp_path: Path,
    where: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    target = {"making": "pathlib.Path.mkdir", "locking": "fcntl.flock", "opening": "colibri.packer.disk.os.open"}[where]
    out = tmp_path / "out"
    if where == "opening":
        opened = os.open
        monkeypatch.setattr(target, lambda path, *rest: refuse() if "journal" in str(path) else opened(path, *rest))
    else:
        monkeypatch.setattr(target, refuse)
    assert run(source, "--out", out) == 1
    blamed = {"making": f"{out}: {tmp_path}", "locking": out / "LOCK", "opening": f"{out}/pack.journal.*: {out}"}[where]
    assert re.search(rf"{where} {blamed}: {os.strerror(code)}", capsys.readouterr().err)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_drive_that_fails_is_full_or_can_only_be_read_is_74(
    source: Path, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    for target in ("pathlib.Path.mkdir", "os.pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(target, fail)
            assert run(source, "--out", tmp_path / "out") == 74
        assert os.strerror(code) in capsys.readouterr().err


def test_a_drive_without_room_is_74_and_its_numbers_are_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("colibri.packer.disk.Disk.free_bytes", lambda *_: 123_456)
    assert run(source, "--out", tmp_path / "out", "--json") == 74
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["free_bytes"] == 123_456
    assert told["needed_bytes"] > 1 << 20
    assert "MiB more, the file system has 0.1 MiB left" in captured.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pack_that_is_interrupted_keeps_what_is_complete(
    source: Path,
    tmp_path: Path,
    number: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = pack_folder(source, [tmp_path / "whole"])
    out, fed = tmp_path / "out", []
    feed = RecordSink.feed

    def stop_after_some(sink: RecordSink, encoded: Any) -> Any:
        record = feed(sink, encoded)
        fed.append(record)
        if sum(item is not None for item in fed) == 3 and record is not None:
            os.kill(os.getpid(), number)
        return record

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(RecordSink, "feed", stop_after_some)
        assert run(source, "--out", out) == code
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "the same command resumes" in capsys.readouterr().err
    lines = [json.loads(line[9:]) for line in (out / "pack.journal").read_text().splitlines()[1:]]
    assert sum(len(line["records"]) for line in lines) == 3
    assert sum(len(line["dense"]) for line in lines) == len(whole.dense)
    again = []

    def note(sink: RecordSink, encoded: Any) -> Any:
        again.append(encoded)
        return feed(sink, encoded)

    with monkeypatch.context() as patch:
        patch.setattr(RecordSink, "feed", note)
        assert run(source, "--out", out, "--json") == 0
    captured = capsys.readouterr()
    assert f"resuming: {len(whole.dense)} dense tensors and 3 experts done before" in captured.err
    assert min(encoded.piece.unit for encoded in again) == 3
    assert json.loads(captured.out)["content_id"] == whole.content_id
    assert files_of(out) == files_of(tmp_path / "whole")


def test_an_ignored_signal_stays_ignored(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup and background jobs of a shell begin that way."""
    feed = RecordSink.feed

    def interrupt(sink: RecordSink, encoded: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return feed(sink, encoded)

    monkeypatch.setattr(RecordSink, "feed", interrupt)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(source, "--out", tmp_path / "out") == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_does_not_resume_does_not_say_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "plan", interrupted)
    assert run("plan", source, "--out", tmp_path / "out") == 130
    assert capsys.readouterr().err == "colibri-pack: interrupted\n"


def test_a_verify_that_cannot_check_all_ends_its_progress(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_folder(source, [tmp_path / name for name in "abc"])
    (tmp_path / "a" / "records.sha256").unlink()
    assert run("verify", tmp_path / "a") == 1
    captured = capsys.readouterr()
    assert all(f"stripe {number} of 3 is missing" in captured.out for number in (1, 2))
    assert captured.out.endswith("\n3 faults\n")
    assert re.fullmatch(r"verifying: ended at \d+ of 141 KiB \(\d+ %\)\n", captured.err)


def test_a_plan_adds_up(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", source, "--out", tmp_path / "a", "--stripe", tmp_path / "b")
    assert run(*words, "--json") == 0
    drives = result(capsys)["drives"]
    assert run(*words) == 0
    text = capsys.readouterr().out
    sums = [size_text(sum(drive[key] for drive in drives)) for key in ("stripe_bytes", "need_bytes")]
    assert re.search(rf"\ntotal +{sums[0]} +{sums[1]}\nneeds at most: free space", text)


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
