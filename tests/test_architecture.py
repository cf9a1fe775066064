"""Code depends downwards only: this parses every import of the product and fails on an upward or sideways arrow."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.repository import PACKAGES, ROOT, relative, source_files

# Who may know whom. Itself is always allowed.
BELOW = {
    "colibri.v1": set(),
    "colibri.core": {"colibri.v1"},
    "colibri.packer": {"colibri.core", "colibri.v1"},
    "colibri.daemon": {"colibri.core", "colibri.v1"},
    "colibri.client": {"colibri.v1"},
}
OUR_MODULE = re.compile(rf"({'|'.join(map(re.escape, BELOW))})(\.\w+)*")
# The core deals in bytes: no text, no network, no model hub. The client is light enough to install without the rest.
FOREIGN_TO = {
    "colibri.core": {"grpc", "huggingface_hub", "jinja2", "rich", "safetensors", "socket", "tokenizers"},
    "colibri.client": {"cffi", "huggingface_hub", "jinja2", "numpy", "safetensors", "systemd", "tokenizers"},
    "colibri.packer": {"grpc", "systemd"},
    "colibri.daemon": {"huggingface_hub", "safetensors"},
}


def module_name(package: str, path: Path) -> str:
    parts = path.relative_to(ROOT / PACKAGES[package]).with_suffix("").parts
    return ".".join((package, *parts))


def imported_names(tree: ast.AST, module: str) -> Iterator[str]:
    """Yield the absolute dotted names that `tree` imports, by statement or by a string that names a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OUR_MODULE.fullmatch(node.value):
            yield node.value


def violations(package: str, module: str, source: str) -> list[str]:
    found = []
    for name in imported_names(ast.parse(source), module):
        target = ".".join(name.split(".")[:2])
        if name.startswith("colibri.") and target != package and target not in BELOW[package]:
            found.append(f"{module} imports {name}")
        if name.split(".")[0] in FOREIGN_TO.get(package, set()):
            found.append(f"{module} imports {name}, which {package} must do without")
    return found


@pytest.mark.parametrize("package", BELOW)
def test_imports_point_downwards(package: str) -> None:
    files = list(source_files(".py", under=PACKAGES[package]))
    assert files
    assert [v for path in files for v in violations(package, module_name(package, path), path.read_text())] == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("colibri.daemon", "from colibri.packer import layout"),
        ("colibri.daemon", "from colibri import packer"),
        ("colibri.packer", "def late():\n    import colibri.daemon.plan"),
        ("colibri.packer", "from ..daemon import plan"),
        ("colibri.client", "import colibri.core.core"),
        ("colibri.core", "from colibri.packer.families import mixtral"),
        ("colibri.client", "import importlib\nimportlib.import_module('colibri.daemon.service')"),
        ("colibri.core", "import socket"),
    ],
)
def test_an_upward_arrow_is_found(package: str, source: str) -> None:
    assert violations(package, f"{package}.example", source)


WRAPPER = {
    f"csrc/{name}.py" for name in ("build_core", "core", "core_options", "drives", "errors", "tensors", "traces")
}


def test_only_the_wrapper_touches_the_compiled_module() -> None:
    for package, folder in PACKAGES.items():
        for path in source_files(".py", under=folder):
            names = imported_names(ast.parse(path.read_text()), module_name(package, path))
            if any(name.startswith("colibri.core._core") for name in names):
                assert relative(path) in WRAPPER, f"{relative(path)} imports _core"


def test_every_installed_package_is_known_here() -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    mapped = {name: folder for name, folder in folders.items() if name.count(".") == 1 and name != "colibri.units"}
    assert mapped == PACKAGES


def test_every_folder_with_python_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {packages["package-dir"][name] for name in packages["packages"]}
    holding = {relative(path.parent) for folder in PACKAGES.values() for path in source_files(".py", under=folder)}
    assert holding <= folders


def test_namespace_packages_stay_namespaces() -> None:
    assert not (ROOT / "proto" / "colibri" / "__init__.py").exists()
    assert not (ROOT / "systemd" / "__init__.py").exists(), "it would hide systemd-python"


def test_the_repository_root_is_not_importable() -> None:
    assert str(ROOT) not in [str(Path(entry).resolve()) for entry in sys.path]
