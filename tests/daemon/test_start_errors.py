"""What stands between a daemon and its drives: named with exit code 78, and `check` says the same as `serve`."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colibri.daemon import check
from colibri.daemon.config import Config, load_config
from colibri.daemon.opening import EXIT_CONFIG, EXIT_OK, StartError, open_model
from testkit.damage import copy_of
from testkit.models import Tiny, packed
from testkit.process import colibrid, write_config

NOBODY = 65534


def stripe_of(tiny: Tiny) -> Path:
    return tiny.folders[1] / "stripe-001.colibri"


def missing(tiny: Tiny, _: Path) -> str:
    stripe_of(tiny).unlink()
    return rf"stripe 1 of 2 is missing: no usable stripe-001\.colibri in the folders given \(.*{tiny.folders[1]}\)"


def unmounted(tiny: Tiny, _: Path) -> str:
    for path in tiny.folders[1].iterdir():
        path.unlink()
    return rf"stripe 1 of 2 is missing.*; {tiny.folders[1]} is empty: is its drive mounted\?"


def unmounted_primary(tiny: Tiny, _: Path) -> str:
    shutil.rmtree(tiny.folders[0])
    tiny.folders[0].mkdir()
    return rf"{tiny.folders[0]} holds no manifest\.json.*; {tiny.folders[0]} is empty: is its drive mounted\?"


def folder_gone(tiny: Tiny, _: Path) -> str:
    shutil.rmtree(tiny.folders[1])
    return rf"stripe folder {tiny.folders[1]}.*No such file or directory"


def truncated(tiny: Tiny, _: Path) -> str:
    size = stripe_of(tiny).stat().st_size
    os.truncate(stripe_of(tiny), size - 4096)
    return rf"{stripe_of(tiny)}: is cut short: stripe 1 is {size - 4096} bytes, its header says {size}"


def of_another_pack(tiny: Tiny, scratch: Path) -> str:
    other = packed(tiny.checkpoint, scratch / "other", "", (2, 1))
    shutil.copyfile(stripe_of(other), stripe_of(tiny))
    return rf"{stripe_of(tiny)}: belongs to container [0-9a-f-]+ \(another pack of the same model\), not to"


def damaged_header(tiny: Tiny, _: Path) -> str:
    with stripe_of(tiny).open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    return rf"{stripe_of(tiny)}: .*has a damaged header"


def swapped(tiny: Tiny, _: Path) -> str:
    shutil.copyfile(tiny.folders[0] / "stripe-000.colibri", stripe_of(tiny))
    return rf"{stripe_of(tiny)}: .*holds stripe 0 by its header: swapped with stripe-000\.colibri\?"


FAULTS: list[Callable[[Tiny, Path], str]] = [
    missing,
    unmounted,
    unmounted_primary,
    folder_gone,
    truncated,
    of_another_pack,
    damaged_header,
    swapped,
]


def configured(folder: Path, tiny: Tiny) -> tuple[Path, Config]:
    path = write_config(folder, tiny)
    return path, load_config({}, path)


def refusal(config: Config) -> StartError:
    with pytest.raises(StartError) as refused:
        open_model(config)
    return refused.value


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_named_with_exit_78_and_check_says_the_same(
    tiny: Tiny, tmp_path: Path, fault: Callable[[Tiny, Path], str]
) -> None:
    copy = copy_of(tiny, tmp_path / "drives")
    _, config = configured(tmp_path / "d", copy)
    assert check.exit_code(check.run_checks(config)) == EXIT_OK
    wanted = fault(copy, tmp_path)
    error = refusal(config)
    assert error.exit_code == EXIT_CONFIG
    assert re.search(wanted, str(error)), str(error)
    findings = check.run_checks(config)
    assert check.exit_code(findings) == EXIT_CONFIG
    assert [f.detail for f in findings if not f.ok] == [str(error)]


@contextmanager
def as_nobody() -> Iterator[None]:
    """As the service's user: root, who may read everything, steps down for this."""
    user = os.geteuid()
    os.seteuid(NOBODY if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_wrong_permissions_name_the_first_part_that_is_closed(tiny: Tiny, closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        copy = copy_of(tiny, folder / "drives")
        for path in [folder / "drives", *(folder / "drives").rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "d").mkdir(mode=0o777)
        _, config = configured(folder / "d", copy)
        (folder / "d").chmod(0o777)
        target = stripe_of(copy) if closed == "file" else copy.folders[1]
        target.chmod(0)
        with as_nobody():
            error = refusal(config)
            findings = check.run_checks(config)
        target.chmod(0o755)
    assert error.exit_code == EXIT_CONFIG
    assert str(target) in str(error)
    assert re.search(r"Permission denied|may not be (read|entered)", str(error)), str(error)
    assert [f.detail for f in findings if f.name == "container"] == [str(error)]


def test_serve_and_check_end_with_78_and_the_same_words(tiny: Tiny, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "drives")
    wanted = unmounted(copy, tmp_path)
    path, _ = configured(tmp_path / "d", copy)
    served = colibrid("serve", "--config", str(path))
    checked = colibrid("check", "--config", str(path))
    assert (served.returncode, checked.returncode) == (EXIT_CONFIG, EXIT_CONFIG)
    assert re.search(wanted, served.stderr)
    assert served.stderr.removeprefix("colibrid: ").strip() in checked.stdout
