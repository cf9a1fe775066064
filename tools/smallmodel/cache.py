"""Where finished small models are kept, and how one gets there whole or not at all.

Owns the cache key, the lock and the publishing rename. A model is built in a directory of a temporary name, every
file is synced, and the directory is renamed at the end: a directory of the final name is a finished model, whatever
killed its maker. Refuses to build over something that it did not build.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from smallmodel.calibration import SELF_WRITTEN, pydoc_text

RECORD = "small_model.json"
"""The file in a finished model that says what it was made from and the size and SHA-256 of every other file."""
NOT_INPUTS = {"__init__", "cache", "cli", "evaluate"}
"""Modules that do not take part in the conversion: a change to them does not make the model another one."""
Record = dict[str, object]


def cache_root() -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/colibri; a relative XDG_CACHE_HOME is ignored, as its specification says."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "colibri"


def cached_path(key: str) -> Path:
    """Where the model with cache key `key` is or would be."""
    return cache_root() / f"small-moe-{key[:16]}"


def cache_key(gguf: Path) -> str:
    """SHA-256 over everything that the bytes of the model depend on."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        if source.stem not in NOT_INPUTS:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(SELF_WRITTEN.read_bytes())
    digest.update(pydoc_text(held_out=False).encode())
    with gguf.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    for package in ("gguf", "numpy", "tokenizers"):
        digest.update(f"{package} {importlib.metadata.version(package)}\0".encode())
    digest.update(arithmetic_fingerprint())
    return digest.hexdigest()


def arithmetic_fingerprint() -> bytes:
    """SHA-256 of what this machine's BLAS and numpy make of fixed matrices.

    Both pick their kernels by CPU (numpy for exp, sums and square roots), and kernels differ in the last bits. A cache
    that is shared between machines must not hand out a model that the machine at hand would have made otherwise."""
    rng = np.random.Generator(np.random.PCG64(0))
    a = rng.standard_normal((512, 576), dtype=np.float32)
    b = rng.standard_normal((576, 768), dtype=np.float32)
    product = a @ b
    gram = (product.T @ product).astype(np.float64) + np.eye(768)
    digest = hashlib.sha256(product.tobytes() + gram.tobytes() + np.linalg.inv(gram).tobytes())
    for result in (np.exp(a), a.sum(axis=1), np.square(a).mean(axis=0), a.std(axis=1), np.sqrt(np.abs(a))):
        digest.update(result.tobytes())
    return digest.digest()


def read_record(directory: Path) -> Record | None:
    """The record of a finished model, or None if `directory` is not one or a file's size is not the recorded one."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        sizes = {name: entry["bytes"] for name, entry in record["files"].items()}
        whole = all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if whole else None


def write_record(directory: Path, key: str) -> None:
    """Record the files of the finished model in `directory`."""
    files = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            files[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    record = {"key": key, "files": files}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def obtain(target: Path, key: str, build: Callable[[Path], None], waiting: Callable[[], None]) -> bool:
    """See to it that `target` is the finished model of `key`; return whether it had to be built.

    `build` fills an empty directory. `waiting` is called before waiting for another process that builds the same
    target. Raises FileExistsError if `target` is something else, and lets pass what `build` raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock"), waiting):
        record = read_record(target)
        if record is not None and record.get("key") == key:
            return False
        if os.path.lexists(target):
            raise FileExistsError(
                f"{target} exists, but is not the small model made from the present inputs, or is damaged; remove it"
            )
        partial = target.with_name(f".{target.name}.partial")
        if partial.exists():  # left by a maker that was killed; we hold the lock, so it is nobody's
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            build(partial)
            write_record(partial, key)
            _sync_tree(partial)
            partial.rename(target)
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return True


@contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the exclusive lock of `path`. The file stays: removing it would let two holders in."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _sync_tree(directory: Path) -> None:
    for path in directory.iterdir():
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
