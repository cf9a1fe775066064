"""What gets built holds what it must, and nothing of ours lands outside the package `colibri`."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from colibri.core import _core
from testkit.repository import ROOT, relative, source_files

BACKEND = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(kind: str, tree: Path, out: Path) -> Path:
    """Run the build backend in `tree` and return the archive that it wrote into `out`."""
    result = subprocess.run(
        [sys.executable, "-c", BACKEND, kind, str(out)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a copy of the tree: building leaves traces, and the tree is not ours to litter."""
    tree = tmp_path_factory.mktemp("tree") / "colibri"
    hidden_or_built = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, tree, ignore=hidden_or_built)
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


def test_the_sdist_holds_every_source(unpacked: Path) -> None:
    needed = [relative(path) for path in source_files(".c", ".h", ".py", ".pyi", under="csrc")]
    for folder in ("packer", "daemon", "client", "proto"):
        needed += [relative(path) for path in source_files(".py", ".proto", under=folder)]
    needed += ["LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "setup.py", "systemd/colibrid@.service"]
    assert [name for name in needed if not (unpacked / name).is_file()] == []


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_is_complete(unpacked: Path, tmp_path: Path) -> None:
    wheel = build("wheel", unpacked, tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert "-cp311-abi3-linux_" in wheel.name
    assert {name.split("/")[0] for name in names} == {"colibri", "colibri-0.1.0.dist-info"}
    assert "colibri/__init__.py" not in names
    assert "colibri/units/__init__.py" not in names
    for name in (
        "core/_core.abi3.so",
        "core/py.typed",
        "v1/types.proto",
        "v1/types_pb2.pyi",
        "units/colibrid@.service",
    ):
        assert f"colibri/{name}" in names
    assert not any(name.endswith((".c", ".h")) for name in names)


def test_the_commands_are_installed() -> None:
    scripts = {point.name: point.value for point in importlib.metadata.distribution("colibri").entry_points}
    assert scripts == {
        "colibri": "colibri.client.__main__:main",
        "colibri-pack": "colibri.packer.__main__:main",
        "colibrid": "colibri.daemon.__main__:main",
    }


INTERRUPTED_IMPORT = """
import importlib, sys
module = sys.argv.pop(1)
parents = {module.rpartition(".")[0], module}

class Interrupt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names and name != "colibri" and name not in parents:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt)
sys.exit(importlib.import_module(module).main())
"""


@pytest.mark.parametrize("command", ["colibri", "colibri-pack", "colibrid"])
def test_ctrl_c_during_the_imports_ends_a_command_quietly(command: str) -> None:
    """The first import of anything but the way in is interrupted: that is where the waiting begins."""
    (point,) = importlib.metadata.distribution("colibri").entry_points.select(name=command)
    words = [sys.executable, "-P", "-c", INTERRUPTED_IMPORT, point.module, "--help"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "module", [f"colibri.{package}{tail}" for package in ("client", "packer", "daemon") for tail in ("", ".cli")]
)
def test_the_commands_run_as_modules(module: str) -> None:
    words = [sys.executable, "-P", "-m", module, "--version"]
    assert "colibri" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_installed_version_is_the_tree_s() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.metadata.version("colibri") == declared
    assert _core.ffi.string(_core.lib.cl_version()).decode() == declared
    assert f"## {declared}" in (ROOT / "CHANGELOG.md").read_text()
