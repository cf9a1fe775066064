"""Drives with a known speed and a known memory limit, from what every Linux has: loop devices and cgroups. Needs root.

Owns everything it makes: images, loop devices, mounts, cgroups. They go in reverse order when a context ends, however
it ends: return, exception, SIGINT or SIGTERM. Touches no device and no group that it did not make. Images are read into
the page cache, so that the limit is the only limit; throttling and memory count only for processes started by
Group.popen or Group.run, not for the one that makes them. cgroup v1 and v2 both work; what is mounted is used.
"""

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import numpy as np

CGROUPS = Path("/sys/fs/cgroup")
BLOCK_BYTES = 4 << 20
SLACK_BYTES = 64 << 20  # of an image, for the file system itself
_BUSY_SECONDS = 10.0


class RigError(RuntimeError):
    """The machine did not do what a rig needs; the text has the command and its words."""


def why_not() -> str:
    """Why loop drives cannot be made here; "" where they can. What a test skips with."""
    if os.geteuid() != 0:
        return "loop devices and cgroups need root"
    if not Path("/dev/loop-control").exists() or not shutil.which("losetup") or not shutil.which("mkfs.ext4"):
        return "no loop devices, losetup or mkfs.ext4"
    if _hierarchy("blkio", "io") is None or _hierarchy("memory", "memory") is None:
        return "no cgroup hierarchy with blkio (io) and memory"
    return ""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RigError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM unwinds like SIGINT while a rig stands, so that it is taken down. Only the main thread can arrange it."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM: a clean-up that has begun ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Undo(contextlib.ExitStack):
    """A stack of clean-ups that all run, undisturbed, even if one of them fails; the first failure is raised."""

    def __exit__(self, *details: Any) -> bool:
        with _undisturbed():
            return bool(super().__exit__(*details))

    def make(self, do: Any, undo: Any) -> Any:
        """Run `do` and remember `undo`, with no signal between the two."""
        with _undisturbed():
            made = do()
            self.callback(undo, made)
        return made


# ---- drives ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DriveSpec:
    """A drive to be made: room for `bytes` of files, reads at most `read_bps` bytes per second (0: no limit)."""

    bytes: int
    read_bps: int = 0


@dataclass(frozen=True)
class LoopDrive:
    """A mounted loop device: `folder` is its root, `number` is "major:minor", as cgroups want it."""

    image: Path
    device: Path
    folder: Path
    number: str
    read_bps: int

    def prefault(self) -> None:
        """Write out what is dirty and read the whole image into the page cache of whoever calls."""
        with self.image.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            buffer = bytearray(BLOCK_BYTES)
            while file.readinto(buffer):
                pass

    def seal(self) -> None:
        """Make the file system read-only, so that nothing but reads reaches the image from here on."""
        _run("mount", "-o", "remount,ro", str(self.folder))

    def unmount(self) -> None:
        """Take the file system away from under whoever uses it, as a pulled cable does."""
        _run("umount", "--lazy", str(self.folder))

    @contextlib.contextmanager
    def cut(self, keep_bytes: int) -> Iterator[None]:
        """While inside, reads beyond `keep_bytes` of the image fail with EIO; afterwards all is as it was."""
        size = self.image.stat().st_size
        with self.image.open("rb") as file:
            file.seek(keep_bytes)
            tail = file.read()
        try:
            os.truncate(self.image, keep_bytes)
            yield
        finally:
            with _undisturbed(), self.image.open("r+b") as file:
                file.seek(keep_bytes)
                file.write(tail)
                file.truncate(size)
                os.fsync(file.fileno())


def _attach(image: Path) -> Path:
    return Path(_run("losetup", "--find", "--show", "--direct-io=off", str(image)))


def _detach(device: Path) -> None:
    _run("losetup", "--detach", str(device))


def _unmount(folder: Path) -> None:
    deadline = time.monotonic() + _BUSY_SECONDS
    while os.path.ismount(folder):
        try:
            _run("umount", str(folder))
        except RigError:
            if time.monotonic() > deadline:  # someone still has a file open: it goes when they do
                _run("umount", "--lazy", str(folder))
                return
            time.sleep(0.1)


def _make_drive(undo: _Undo, folder: Path, index: int, spec: DriveSpec) -> LoopDrive:
    image, mount = folder / f"drive{index}.img", folder / f"drive{index}"
    mount.mkdir()
    with image.open("xb") as file:
        file.truncate(spec.bytes + spec.bytes // 32 + SLACK_BYTES)
    # No journal and no reserve: the file system holds read-only data, and damage is part of some tests.
    _run("mkfs.ext4", "-qF", "-m0", "-O", "^has_journal", "-E", "lazy_itable_init=0", str(image))
    device = undo.make(lambda: _attach(image), _detach)
    undo.make(lambda: _run("mount", "-o", "noatime", str(device), str(mount)), lambda _: _unmount(mount))
    number = (Path("/sys/block") / device.name / "dev").read_text().strip()
    return LoopDrive(image, device, mount, number, spec.read_bps)


@contextlib.contextmanager
def loop_drives(specs: Sequence[DriveSpec], under: Path | None = None) -> Iterator[list[LoopDrive]]:
    """Make one mounted drive per spec; images lie in a new folder below `under` (default: the temporary folder).

    Raises RigError where a device, a file system or a mount is refused.
    """
    with _signals_as_exceptions(), _Undo() as undo:
        folder = undo.make(lambda: Path(tempfile.mkdtemp(prefix="colibri-rig-", dir=under)), shutil.rmtree)
        yield [_make_drive(undo, folder, index, spec) for index, spec in enumerate(specs)]


# ---- cgroups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hierarchy:
    root: Path
    version: int


def _hierarchy(v1: str, v2: str) -> _Hierarchy | None:
    """Where a controller is: the v1 hierarchy called `v1`, or a v2 one that has `v2`."""
    if (CGROUPS / v1 / "cgroup.procs").exists():
        return _Hierarchy(CGROUPS / v1, 1)
    try:
        offered = (CGROUPS / "cgroup.controllers").read_text().split()
    except OSError:
        return None
    return _Hierarchy(CGROUPS, 2) if v2 in offered else None


@dataclass(frozen=True)
class Group:
    """Processes under limits. `folders` are the cgroup folders of this group, one per hierarchy."""

    folders: tuple[Path, ...]
    memory: Path

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process that is in the group from its first instruction on."""
        entries = " ".join(f'echo $$ > "{folder}/cgroup.procs" &&' for folder in self.folders)
        return subprocess.Popen(["sh", "-c", f'{entries} exec "$@"', "sh", *command], **options)

    def run(self, command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a process to its end and return its output; after `timeout` seconds it is killed (TimeoutExpired)."""
        pipe = subprocess.PIPE
        with self.popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def memory_bytes(self) -> int:
        """Bytes charged to the group now."""
        for name in ("memory.usage_in_bytes", "memory.current"):
            if (self.memory / name).exists():
                return int((self.memory / name).read_text())
        raise RigError(f"{self.memory} does not tell its memory")

    def out_of_memory_kills(self) -> int:
        """How often the kernel killed a process of the group."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                for line in (self.memory / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def processes(self) -> set[int]:
        """Process ids in the group, all started by it."""
        return {int(pid) for folder in self.folders for pid in (folder / "cgroup.procs").read_text().split()}


def _remove_group(folder: Path) -> None:
    """Kill what is left in a group that was made here, and remove it."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while folder.exists():
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _new_group(undo: _Undo, hierarchy: _Hierarchy, name: str, controller: str) -> Path:
    if hierarchy.version == 2:
        control = hierarchy.root / "cgroup.subtree_control"
        if controller not in control.read_text().split():
            _write(control, f"+{controller}")
    folder = hierarchy.root / name

    def make() -> Path:
        folder.mkdir(exist_ok=True)  # one v2 group serves both controllers
        return folder

    made: Path = undo.make(make, _remove_group)
    return made


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise RigError(f"writing {text!r} to {file}: {error.strerror}") from error


def _throttle(folder: Path, version: int, drive: LoopDrive) -> None:
    if version == 1:
        _write(folder / "blkio.throttle.read_bps_device", f"{drive.number} {drive.read_bps}")
    else:
        _write(folder / "io.max", f"{drive.number} rbps={drive.read_bps or 'max'}")


@contextlib.contextmanager
def group(drives: Sequence[LoopDrive] = (), memory_bytes: int = 0) -> Iterator[Group]:
    """A new group whose processes read each drive at its `read_bps`, and may use `memory_bytes` (0: any amount).

    At its end, processes that are still in it are killed. Raises RigError where a controller is missing.
    """
    blkio, memory = _hierarchy("blkio", "io"), _hierarchy("memory", "memory")
    if blkio is None or memory is None:
        raise RigError("no cgroup hierarchy with blkio (io) and memory")
    name = f"colibri-rig-{os.getpid()}-{time.monotonic_ns()}"
    with _signals_as_exceptions(), _Undo() as undo:
        for_memory = _new_group(undo, memory, name, "memory")
        for_reads = _new_group(undo, blkio, name, "io")
        for drive in drives:
            _throttle(for_reads, blkio.version, drive)
        if memory_bytes:
            limit = "memory.limit_in_bytes" if memory.version == 1 else "memory.max"
            _write(for_memory / limit, str(memory_bytes))
        yield Group(tuple({for_memory, for_reads}), for_memory)


# ---- the page cache of files that are on no loop drive ---------------------------------------------------------------


def drop_cached(path: Path) -> None:
    """Make the kernel forget a file's pages, so that the next reader pays for its own."""
    with path.open("rb") as file:
        _forget(file)


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
        pages = -(-size // mmap.PAGESIZE)
        vector = np.zeros(pages, np.uint8)
        # numpy gives the address of a read-only map; ctypes alone wants a writable one.
        address = np.frombuffer(view, np.uint8).ctypes.data
        if ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(vector.ctypes.data)
        ):
            raise OSError(ctypes.get_errno(), f"{path}: mincore")
        return mmap.PAGESIZE * int(np.count_nonzero(vector & 1))


def _forget(file: IO[bytes]) -> None:
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
