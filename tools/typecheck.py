"""Runs mypy over the product, the tools and the tests.

The product's folders have other names than its packages (csrc is colibri.core), and the import finder of an editable
install is code, which mypy does not run. So this makes a tree of links, build/mypy/colibri/<package>, from the table
in pyproject.toml, and shows mypy that.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mypy"


def link_packages() -> None:
    """Make build/mypy/colibri hold one link per package of pyproject.toml, and nothing else."""
    folders: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    (TREE / "colibri").mkdir(parents=True, exist_ok=True)
    for stale in (TREE / "colibri").iterdir():
        stale.unlink()
    for package, folder in folders.items():
        if package.count(".") == 1 and any((ROOT / folder).glob("*.py")):
            (TREE / package.replace(".", "/")).symlink_to(ROOT / folder)


def check(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "mypy", *arguments], cwd=ROOT, check=False).returncode


def main() -> int:
    link_packages()
    scripts = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tools").glob("*.py"))]
    return check("--no-error-summary", "-p", "colibri") or check("--no-error-summary", *scripts, "tests")


if __name__ == "__main__":
    sys.exit(main())
