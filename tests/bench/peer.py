"""The peer that streaming is held against: llama.cpp, built natively from llama-cpp-python's source, outside the clone.

Owns its virtual environment under the benchmark cache (built once per version and flags, pinned) and the children that
run in it. Nothing of the peer is ever imported here: it lives in processes of its own, under the same memory limit as
the product, and answers in JSON lines (peer_child.py).
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from report import cache_folder

VERSION = "0.3.36"
CMAKE_FLAGS = ("-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release", "-DMTMD_BUILD=OFF", "-DLLAVA_BUILD=OFF")
CHILD = Path(__file__).with_name("peer_child.py")


class PeerError(RuntimeError):
    """The peer cannot be built or did not do what it was asked; the text says which and shows its last words."""


def _recipe() -> dict[str, object]:
    """What the build depends on; another recipe means another build."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"version": VERSION, "flags": list(CMAKE_FLAGS), "python": python, "machine": os.uname().machine}


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def peer_python() -> Path:
    """The interpreter that has llama_cpp; builds it at the first call (one core, many minutes). Raises PeerError."""
    folder = cache_folder() / "llama"
    with _only_one(cache_folder() / ".llama.lock"):
        stamp = folder / "recipe.json"
        if not stamp.exists() or json.loads(stamp.read_text()) != _recipe():
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder)
            stamp.write_text(json.dumps(_recipe()))
    return folder / "bin" / "python"


def _build(folder: Path) -> None:
    print(f"building llama-cpp-python {VERSION} with {' '.join(CMAKE_FLAGS)} (once)", file=sys.stderr, flush=True)
    environment = os.environ | {
        "CMAKE_ARGS": " ".join(CMAKE_FLAGS),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "1"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    environment.pop("PYTHONPATH", None)
    package = f"llama-cpp-python=={VERSION}"
    log = folder.with_name("llama-build.log")
    with log.open("wb") as output:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "pip"), "install", "--no-cache-dir", "--no-binary", "llama-cpp-python", package],
        ):
            done = subprocess.run(
                ["nice", "-n", "19", *command], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            if done.returncode:
                last = log.read_text(errors="replace")[-2000:]
                raise PeerError(f"{' '.join(command)} ended with {done.returncode}; see {log}: {last}")


if __name__ == "__main__":
    print(peer_python())
