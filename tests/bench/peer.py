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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from giant import Shape, write_giant
from peer_gguf import write_gguf
from report import cache_folder

from testkit.loop_drives import Group, cached_bytes, drop_cached

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


# ---- the same slice for both engines ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One slice in both forms."""

    container: Path
    gguf: Path

    @property
    def bytes(self) -> int:
        """Bytes of the GGUF file: the model's size, which memory limits are a fraction of."""
        return self.gguf.stat().st_size


def same_slice(shape: Shape) -> Pair:
    """The container and the GGUF file of `shape` below the benchmark cache, made at the first call."""
    folder = cache_folder() / f"{shape.name}-{shape.moe_layers}x{shape.experts}"
    pair, stamp = Pair(folder / "container", folder / "model.gguf"), folder / "shape.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != asdict(shape):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_gguf(shape, pair.gguf)
        write_giant(shape, [pair.container])
        stamp.write_text(json.dumps(asdict(shape)))
    return pair


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How the peer is run. `repack`: its weights rearranged at load for speed, in memory of its own."""

    threads: int
    ubatch: int = 512
    repack: bool = False

    def __str__(self) -> str:
        return f"{self.threads} threads, repacking {'on' if self.repack else 'off'}, ubatch {self.ubatch}"


@dataclass(frozen=True)
class PeerRun:
    """What a run gave. `failure` says why it did not finish; then `seconds` has what it did."""

    setting: Setting
    cold_seconds: list[float]
    seconds: list[float]
    failure: str = ""
    system: str = ""


def run_peer(
    pair: Pair, mode: str, tokens: Sequence[int], warm_tokens: int, setting: Setting, group: Group, seconds: float
) -> PeerRun:
    """Run llama.cpp over the slice in `group`, from a cold page cache; it ends itself after `seconds`, or is ended."""
    drop_cached(pair.gguf)
    left = cached_bytes(pair.gguf)
    if left > pair.bytes // 50:
        raise PeerError(f"{pair.gguf}: {left} bytes stay in the page cache, a cold start cannot be measured")
    job: dict[str, Any] = {
        "gguf": str(pair.gguf), "mode": mode, "tokens": list(tokens), "warm_tokens": warm_tokens, "seconds": seconds,
        "threads": setting.threads, "ubatch": setting.ubatch, "repack": setting.repack,
    }  # fmt: skip
    command = [str(peer_python()), str(CHILD), json.dumps(job)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kills, started = group.out_of_memory_kills(), time.monotonic()
    try:
        ended = group.run(command, timeout=2 * seconds + 30, env=environment)
    except subprocess.TimeoutExpired:
        return PeerRun(setting, [], [], f"not one result in {time.monotonic() - started:.0f} s")
    if group.out_of_memory_kills() > kills:
        return PeerRun(setting, [], [], "killed: out of memory")
    if ended.returncode:
        raise PeerError(f"llama.cpp ({setting}) ended with {ended.returncode}: {ended.stderr[-2000:]}")
    result = json.loads(ended.stdout.splitlines()[-1])
    failure = ""
    if result["fed"] < len(tokens):
        failure = f"stopped after {result['fed']} of {len(tokens)} tokens; warm is its last half"
    return PeerRun(setting, result["cold_seconds"], result["seconds"], failure, result["system"])


if __name__ == "__main__":
    print(peer_python())
