"""The small real model as a fixture, for every test that needs a model which really answers.

`small_model` is the one that most tests want: the user's cached model if there is one, else a fresh build, which is
then put into the cache for the next run. `fresh_small_model` always builds, with an empty cache, once per session;
only the tests of the maker itself need it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testkit.repository import ROOT

MAKER = ROOT / "tools" / "make_small_model.py"
BUILD_TIMEOUT_S = 3000
"""A build takes two to three minutes on two idle cores; a busy machine needs several times that."""


@dataclass
class FreshBuild:
    """What was seen while the model was built into an empty cache."""

    path: Path
    killed_after: str
    """The progress line on which the first attempt was killed."""
    left_by_kill: list[str]
    """Names in the cache directory after the kill."""
    progress: str
    """stderr of the build that succeeded."""
    seconds: float
    rival_path: Path
    """What a second process printed that was started while the first was building."""
    rival_progress: str


def start_maker(cache_home: Path, stderr: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the maker with its cache below `cache_home` and its progress lines going to the file `stderr`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_home)}
    with stderr.open("w") as progress:
        command = [sys.executable, str(MAKER), *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=progress, text=True)


def wait_for_line(process: "subprocess.Popen[str]", stderr: Path, text: str) -> str:
    """Return the first line of `stderr` that starts with `text`, as soon as it is complete."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        for line in stderr.read_text().splitlines(keepends=True):
            if line.startswith(text) and line.endswith("\n"):
                return line.strip()
        if ended:
            break
        time.sleep(0.05)
    raise AssertionError(f"no line {text!r} from process {process.args!r}:\n{stderr.read_text()}")


def kill_early(cache_home: Path, stderr: Path) -> str:
    """Start a build and kill it when its second layer is done; return the progress line of that layer."""
    process = start_maker(cache_home, stderr)
    try:
        return wait_for_line(process, stderr, "layer  2")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()  # also closes its pipe


def build_with_rival(cache_home: Path, folder: Path) -> tuple[Path, Path, float]:
    """Build, while a second process asks for the same; return the paths both print and the seconds it took."""
    started = time.monotonic()
    first = start_maker(cache_home, folder / "first.txt")
    wait_for_line(first, folder / "first.txt", "making")
    rival = start_maker(cache_home, folder / "rival.txt")
    outputs = []
    for name, process in (("first", first), ("rival", rival)):
        text, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
        assert process.returncode == 0, (folder / f"{name}.txt").read_text()
        outputs.append(Path(text.strip()))
    return outputs[0], outputs[1], time.monotonic() - started


@pytest.fixture(scope="session")
def fresh_small_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshBuild]:
    """A build into an empty cache: one attempt that is killed, then two processes at once."""
    folder = tmp_path_factory.mktemp("small-model")
    cache_home = folder / "cache"
    line = kill_early(cache_home, folder / "killed.txt")
    left = sorted(path.name for path in (cache_home / "colibri").iterdir())
    path, rival_path, seconds = build_with_rival(cache_home, folder)
    yield FreshBuild(
        path=path,
        killed_after=line,
        left_by_kill=left,
        progress=(folder / "first.txt").read_text(),
        seconds=seconds,
        rival_path=rival_path,
        rival_progress=(folder / "rival.txt").read_text(),
    )
    shutil.rmtree(cache_home)  # 600 MB that pytest would keep for three sessions


@pytest.fixture(scope="session")
def small_model(request: pytest.FixtureRequest) -> Path:
    """Folder of the small real model's checkpoint."""
    # Imported here: every session loads this plugin, few build the model.
    from smallmodel import cache
    from smallmodel.source import find_gguf

    key = cache.cache_key(find_gguf())
    target = cache.cached_path(key)
    if cache.read_record(target) is None:
        fresh: FreshBuild = request.getfixturevalue("fresh_small_model")
        cache.obtain(target, key, lambda folder: copy_model(fresh.path, folder), lambda: None)
    return target


def copy_model(source: Path, folder: Path) -> None:
    """Copy the files of a finished model, without its record, into the existing `folder`."""
    from smallmodel.cache import RECORD

    for path in source.iterdir():
        if path.name != RECORD:
            shutil.copyfile(path, folder / path.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that may have to wait for the build the time that it takes."""
    for item in items:
        if {"small_model", "fresh_small_model"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(2 * BUILD_TIMEOUT_S), append=False)
