"""The rig of loop drives and cgroups: its limits hold, its faults are the kernel's, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.loop_drives import CGROUPS, DriveSpec, Group, LoopDrive, group, loop_drives, why_not
from testkit.repository import ROOT

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

MB = 1_000_000
SIZE = 48 << 20
READER = """
import os, mmap, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
buffer, start = mmap.mmap(-1, 1 << 20), time.monotonic()
for offset in range(0, int(sys.argv[2]), 1 << 20):
    os.preadv(fd, [buffer], offset)
print(time.monotonic() - start)
"""


@pytest.fixture(scope="module")
def drive() -> Iterator[LoopDrive]:
    with loop_drives([DriveSpec(SIZE, 60 * MB)]) as drives:
        (drives[0].folder / "file").write_bytes(os.urandom(1 << 20) * (SIZE >> 20))
        drives[0].prefault()
        drives[0].seal()
        yield drives[0]


@pytest.fixture
def limited(drive: LoopDrive) -> Iterator[Group]:
    with group([drive], memory_bytes=64 << 20) as made:
        yield made


def read(limited: Group, drive: LoopDrive) -> subprocess.CompletedProcess[str]:
    return limited.run([sys.executable, "-c", READER, str(drive.folder / "file"), str(SIZE)], timeout=60)


def leftovers() -> list[str]:
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "colibri-rig-" in line]
    loops = [
        line for line in subprocess.check_output(["losetup", "-a"], text=True).splitlines() if "colibri-rig" in line
    ]
    groups = [str(path) for path in CGROUPS.glob("**/colibri-rig-*") if path.is_dir()]
    return mounts + loops + groups


def test_the_drive_is_as_fast_as_asked_for(limited: Group, drive: LoopDrive) -> None:
    ended = read(limited, drive)
    assert ended.returncode == 0, ended.stderr
    rate = SIZE / float(ended.stdout)
    assert rate < 85 * MB  # the kernel gives the first tenth of a second for nothing


def test_reads_beyond_the_cut_fail_and_then_do_not(limited: Group, drive: LoopDrive) -> None:
    with drive.cut(SIZE // 2):
        ended = read(limited, drive)
        assert "Input/output error" in ended.stderr
    assert read(limited, drive).returncode == 0


def test_more_memory_than_the_limit_is_refused_by_death(limited: Group) -> None:
    ended = limited.run([sys.executable, "-c", "bytearray(200 << 20)"], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert limited.out_of_memory_kills() >= 1


def test_what_runs_too_long_is_ended(limited: Group) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        limited.run(["sleep", "60"], timeout=0.2)
    assert limited.processes() == set()


def test_a_group_takes_its_processes_with_it(drive: LoopDrive) -> None:
    with group([drive]) as made:
        process = made.popen(["sleep", "60"])
        while not made.processes():
            time.sleep(0.01)
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    before = set(leftovers())
    text = (
        "import time\nfrom testkit.loop_drives import *\n"
        "with loop_drives([DriveSpec(1 << 20, 1000000)]) as drives, group(drives) as made:\n"
        "    made.popen(['sleep', '60'])\n    print('up', flush=True)\n    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "helpers")}
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert set(leftovers()) > before
        process.send_signal(number)
        assert process.wait(30) != 0
    assert set(leftovers()) <= before
