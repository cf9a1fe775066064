"""A drive whose file system refuses O_DIRECT (C17): auto reads through the page cache and says so, on refuses."""

import os
import subprocess
from pathlib import Path

import pytest

from colibri.core.container import open_container
from colibri.v1 import admin_service_pb2 as admin_pb2
from testkit.models import Tiny, some_tokens
from testkit.process import colibrid, serving, write_config
from testkit.service import tokens_of

SOURCE = Path(__file__).parent.parent / "helpers" / "testkit" / "no_direct_io.c"
PROMPT = some_tokens(90)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process for which stripe 1's file system has no O_DIRECT, and all others have."""
    library = tmp_path_factory.mktemp("no-direct-io") / "no_direct_io.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    subprocess.run([os.environ.get("CC", "gcc"), *flags, str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "NO_DIRECT_IO": "stripe-001"}


def stripe_path(tiny: Tiny, number: int) -> Path:
    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        return container.stripe_paths[number]


def answer(config: Path, **environment: str) -> tuple[list[int], list[str], str]:
    """The tokens that a daemon gives, what it calls degraded, and its log."""
    with serving(config, environment=environment) as process:
        tokens = tokens_of(process.generate(PROMPT, max_tokens=8))
        degraded = list(process.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()).degraded)
    return tokens, degraded, process.log.read_text()


def test_auto_falls_back_and_names_the_stripe(tmp_path: Path, tiny: Tiny, refusing: dict[str, str]) -> None:
    expected, degraded, log = answer(write_config(tmp_path / "usual", tiny, direct="off"))
    assert degraded == []
    assert "O_DIRECT" not in log
    tokens, degraded, log = answer(write_config(tmp_path / "refusing", tiny, direct="auto"), **refusing)
    assert tokens == expected
    remark = "the file system refuses O_DIRECT: experts are read through the page cache from stripe 1 ({})"
    assert degraded == [remark.format(stripe_path(tiny, 1))]
    (warning,) = [line for line in log.splitlines() if "O_DIRECT" in line]
    assert "warning" in warning.lower()
    assert degraded[0] in warning


@pytest.mark.parametrize(("what", "named"), [("stripe-001", "stripe 1 "), ("dense.safetensors", "")])
def test_on_refuses_and_names_the_file(
    tmp_path: Path, tiny: Tiny, refusing: dict[str, str], what: str, named: str
) -> None:
    config = write_config(tmp_path, tiny, direct="on")
    ended = colibrid("serve", "--config", str(config), **(refusing | {"NO_DIRECT_IO": what}))
    assert ended.returncode == 78, ended.stderr
    path = stripe_path(tiny, 1) if named else tiny.folders[0] / what
    shown = f"stripe 1 ({path})" if named else str(path)
    assert f"{shown}: O_DIRECT was asked for and does not work" in ended.stderr
    assert not named or ended.stderr.rstrip().endswith(os.strerror(22))


def test_off_asks_for_nothing(tmp_path: Path, tiny: Tiny, refusing: dict[str, str]) -> None:
    tokens, degraded, log = answer(write_config(tmp_path, tiny, direct="off"), **refusing)
    assert len(tokens) == 8
    assert degraded == []
    assert "O_DIRECT" not in log
