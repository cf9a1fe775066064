"""The command colibrid: plan, check, usage and exit codes, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from colibri.daemon import check
from colibri.daemon.config import Config, load_config
from colibri.daemon.endpoint import Endpoint
from colibri.daemon.store.folder import StateFolder
from testkit.models import Tiny
from testkit.packing import pack_folder
from testkit.process import colibrid, write_config


def config_of(folder: Path, tiny: Tiny, **keys: object) -> Config:
    return load_config({}, write_config(folder, tiny, **keys), {})


def failed(findings: list[check.Finding]) -> dict[str, str]:
    return {finding.name: finding.detail for finding in findings if not finding.ok}


def test_plan_prints_the_table_or_one_json_object(tmp_path: Path, tiny: Tiny) -> None:
    config = str(write_config(tmp_path, tiny))
    shown = colibrid("plan", "--config", config)
    assert shown.returncode == 0, shown.stderr
    for part in ("dense weights", "keys and values", "expert slots", "prefill pass", "left", "streamed from 2 stripes"):
        assert part in shown.stdout
    flags = ("--expert-slots", "3", "--io-backend", "threads", "--io-depth", "7", "--verify", "first", "--scrub", "2.5")
    plan = json.loads(colibrid("plan", "--json", "--config", config, *flags).stdout)
    assert plan["reading"] == (
        "experts read with io_backend threads (io_depth 7), direct auto, verify first; lookahead auto; pins auto "
        "(heat_half_life default); scrub 2.5 MB/s"
    )
    assert (plan["expert_slots"], plan["experts"], plan["fits"]) == (3, 16, True)
    assert plan["planned_bytes"] == sum(row["bytes"] for row in plan["rows"])


def test_plan_and_serve_refuse_what_does_not_fit_with_the_table_and_exit_78(tmp_path: Path, tiny: Tiny) -> None:
    config = str(write_config(tmp_path, tiny, memory="70MiB"))
    for command in ("plan", "serve"):
        refused = colibrid(command, "--config", config)
        assert refused.returncode == 78
        assert "this does not fit even with one expert slot" in refused.stderr
        assert "missing" in refused.stderr
        assert "keys and values" in refused.stderr
        assert refused.stderr.startswith("colibrid:\ndense weights  "), "the table keeps its columns"
    as_json = colibrid("plan", "--json", "--config", config)
    assert as_json.returncode == 78
    plan = json.loads(as_json.stdout)
    assert (plan["ok"], plan["fits"]) == (False, False)
    assert plan["planned_bytes"] == sum(row["bytes"] for row in plan["rows"]) == 70 * (1 << 20) - plan["left_bytes"]
    assert plan["error"].startswith("this does not fit")
    assert "\n" not in plan["error"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--version",), 0, "colibrid 0."),
        ((), 2, "usage"),
        (("serve", "--no-such-flag"), 2, "usage"),
        (("plan", "--container", "/c"), 78, "listen is not set"),
        (("plan", "--container", "/c", "--max-context", "many"), 78, "--max-context: 'many': a whole number"),
        (("plan", "--config", "/nonexistent/x.toml"), 78, "/nonexistent/x.toml: No such file"),
        (("serve", "--container", "/nonexistent", "--listen", "0.0.0.0:1", "--state", "/s"), 78, "not a loopback"),
    ],
)
def test_usage_and_configuration_errors(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = colibrid(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_is_named(tmp_path: Path, tiny: Tiny) -> None:
    config = write_config(tmp_path, tiny, expert_slot=3)
    done = colibrid("check", "--config", str(config))
    assert done.returncode == 78
    assert f"{config}: unknown key 'expert_slot'" in done.stderr


def test_check_passes_what_serve_would_take(tmp_path: Path, tiny: Tiny) -> None:
    config = str(write_config(tmp_path, tiny))
    done = colibrid("check", "--json", "--config", config)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    names = [finding["name"] for finding in report["findings"]]
    assert names == ["container", "reading", "state", "listen", "text", "memory"]
    assert "16 experts in 2 layers on 2 stripes" in report["findings"][0]["detail"]
    assert not (tmp_path / "state").exists(), "check makes nothing"


def test_check_exits_78_and_names_what_is_wrong(tmp_path: Path, tiny: Tiny) -> None:
    done = colibrid("check", "--config", str(write_config(tmp_path, tiny, container="/nonexistent/model")))
    assert done.returncode == 78
    assert "FAIL container" in done.stdout
    assert "/nonexistent: No such file or directory" in done.stdout


def test_a_missing_stripe_is_named(tmp_path: Path, tiny: Tiny) -> None:
    findings = failed(check.run_checks(config_of(tmp_path, tiny, stripes=[])))
    assert list(findings) == ["container"]
    assert "stripe" in findings["container"]


def test_a_container_without_its_tokenizer_is_named(tmp_path: Path, tiny: Tiny) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny.folders[0], copy)
    (copy / "tokenizer.json").unlink()
    findings = failed(check.run_checks(config_of(tmp_path, tiny, container=str(copy))))
    assert "tokenizer.json" in " ".join(findings.values())


def test_folders_that_cannot_be_written_are_named(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "file").write_text("")
    keys = {"state": str(tmp_path / "file" / "state"), "listen": f"unix:{tmp_path}/file/d.sock"}
    findings = failed(check.run_checks(config_of(tmp_path / "x", tiny, **keys)))
    assert set(findings) == {"state", "listen"}
    for detail in findings.values():
        assert str(tmp_path / "file") in detail


def test_c20_the_folder_that_may_not_be_written_is_named(tiny: Tiny) -> None:
    """As the service's user: root, who may write everywhere, steps down for this."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o500)
        config = config_of(folder / "x", tiny, state=str(folder / "closed" / "s"))
        user = os.geteuid()
        os.seteuid(65534 if user == 0 else user)
        try:
            findings = failed(check.run_checks(config))
        finally:
            os.seteuid(user)
        assert f"{folder}/closed: may not be entered by uid" in findings["state"]


def test_a_file_in_the_socket_s_place_is_named(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "d.sock").write_text("precious")
    findings = failed(check.run_checks(config_of(tmp_path, tiny)))
    assert findings == {"listen": f"{tmp_path}/d.sock exists and is not a socket"}
    assert (tmp_path / "d.sock").read_text() == "precious"


def test_a_budget_that_is_too_small_is_a_finding_with_the_table(tmp_path: Path, tiny: Tiny) -> None:
    findings = failed(check.run_checks(config_of(tmp_path, tiny, memory="70MiB")))
    assert list(findings) == ["memory"]
    assert "keys and values" in findings["memory"]
    shown = check.as_text([check.Finding("memory", False, findings["memory"])]).splitlines()
    assert shown[0].split() == ["FAIL", "memory"]
    assert shown[1].startswith("  dense weights  ")


@pytest.mark.parametrize("held", ["socket", "state"])
def test_check_says_who_holds_the_socket_or_the_state_folder_and_exits_75(
    tmp_path: Path, tiny: Tiny, held: str
) -> None:
    config = write_config(tmp_path, tiny)
    if held == "socket":
        release = Endpoint(load_config({}, config, {}).listen).release
    else:
        release = StateFolder(tmp_path / "state", "c", "m").close
    busy = colibrid("check", "--json", "--config", str(config))
    wrong_too = colibrid("check", "--config", str(config), "--container", "/nonexistent/model")
    release()
    assert (busy.returncode, wrong_too.returncode) == (75, 78)
    (found,) = [finding for finding in json.loads(busy.stdout)["findings"] if not finding["ok"]]
    assert found["name"] == ("listen" if held == "socket" else "state")
    assert found["temporary"] is True
    assert found["detail"].endswith(f" is in use by process {os.getpid()}")
    assert colibrid("check", "--config", str(config)).returncode == 0, "a lock that was given back is free"


def test_a_folder_that_fails_itself_is_said_once(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "state").write_text("")
    detail = failed(check.run_checks(config_of(tmp_path, tiny)))["state"]
    assert detail.count(f"{tmp_path}/state") == 1
    assert detail == f"state folder {tmp_path}/state: Not a directory"


def test_what_the_container_lost_is_a_warning_with_drive_and_file(tmp_path: Path, tiny: Tiny) -> None:
    folders = [tmp_path / f"drive{number}" for number in range(len(tiny.folders))]
    pack_folder(tiny.checkpoint, folders, mirror=True)
    lost = folders[1] / "stripe-001.colibri"
    os.truncate(lost, lost.stat().st_size // 2)
    config = write_config(tmp_path, tiny, container=str(folders[0]), stripes=[str(folders[1])])
    done = colibrid("check", "--config", str(config))
    assert done.returncode == 0, done.stdout
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARN container ")]
    assert any(str(lost) in line for line in warnings), done.stdout
    report = json.loads(colibrid("check", "--json", "--config", str(config)).stdout)
    told = [finding["warning"] for finding in report["findings"] if finding["name"] == "container"]
    assert told == [False, *[True] * len(warnings)]
    assert report["ok"] is True


def test_little_room_for_the_state_is_a_warning_since_serve_starts(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "MIN_FREE_BYTES", 1 << 62)
    findings = check.run_checks(config_of(tmp_path, tiny))
    assert check.exit_code(findings) == 0
    (state,) = [finding for finding in findings if finding.name == "state"]
    assert (state.ok, state.warning) == (True, True)
    assert "sessions may soon not be stored any more" in state.detail
    assert "\nWARN state " in check.as_text(findings)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("container", "is the same folder as container {0}"),
        ("container/deep/state", "lies inside container {0}"),
        ("link", "is the same folder as container {0}"),
        ("stripe", "is the same folder as stripe folder {1}"),
        ("stripe/state", "lies inside stripe folder {1}"),
    ],
)
def test_a_state_folder_in_the_container_is_refused_by_all_commands(
    tmp_path: Path, tiny: Tiny, place: str, said: str
) -> None:
    folders = [tmp_path / "container", tmp_path / "stripe"]
    for folder, source in zip(folders, tiny.folders, strict=True):
        shutil.copytree(source, folder)
    (tmp_path / "link").symlink_to(folders[0])
    before = sorted(tmp_path.rglob("*"))
    keys = {"container": str(folders[0]), "stripes": [str(folders[1])], "state": str(tmp_path / place)}
    config = write_config(tmp_path / "x", tiny, **keys)
    checked, served = colibrid("check", "--config", str(config)), colibrid("serve", "--config", str(config))
    assert (checked.returncode, served.returncode) == (78, 78)
    text = f"state folder {tmp_path / place} {said.format(*folders)}; give the state a folder of its own"
    assert f"FAIL state      {text}" in checked.stdout
    assert text in served.stderr
    assert [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "x" not in (path, *path.parents)] == before


def test_a_container_where_the_state_folder_cleans_up_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    inside = tmp_path / "state" / "pages" / "model"
    shutil.copytree(tiny.folders[0], inside)
    findings = failed(check.run_checks(config_of(tmp_path, tiny, container=str(inside))))
    assert f"container {inside} lies in {tmp_path}/state/pages" in findings["state"]


def test_check_tells_a_folder_that_is_there_from_one_that_will_be_made(tmp_path: Path, tiny: Tiny) -> None:
    keys = {"state": str(tmp_path / "a" / "state"), "listen": f"unix:{tmp_path}/b/d.sock"}
    config = config_of(tmp_path / "x", tiny, **keys)

    def details() -> dict[str, str]:
        return {finding.name: finding.detail for finding in check.run_checks(config)}

    found = details()
    assert f"{tmp_path}/a/state will be made, {tmp_path} is writable" in found["state"]
    assert found["listen"] == f"socket {tmp_path}/b/d.sock: its folder will be made, {tmp_path} is writable"
    (tmp_path / "a" / "state").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    found = details()
    assert f"{tmp_path}/a/state is writable" in found["state"]
    assert found["listen"] == f"socket {tmp_path}/b/d.sock: its folder is writable"
