"""What the machine and the cgroup leave: made-up /proc and /sys trees of both cgroup versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colibri.daemon.machine import anonymous_bytes, available_memory, cgroup_limits

MIB = 1 << 20
V2 = "30 1 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 1 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal: 8 kB\nMemAvailable:   4194304 kB\n")
    write(tmp_path, "proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    write(tmp_path, "proc/self/cgroup", "")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def group(root: Path, folder: str, limit: str, used: int, cache: int) -> None:
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 0\nshmem 5\n")


def test_without_cgroups_it_is_what_the_kernel_says(root: Path) -> None:
    found = available_memory(root)
    assert (found.bytes, found.source) == (4 << 30, "MemAvailable of /proc/meminfo")


def test_the_tightest_cgroup_up_to_the_root_counts(root: Path) -> None:
    write(root, "proc/self/mountinfo", V2)
    write(root, "proc/self/cgroup", "0::/system.slice/colibrid.service\n")
    group(root, "sys/fs/cgroup/system.slice/colibrid.service", str(900 * MIB), 100 * MIB, 40 * MIB)
    group(root, "sys/fs/cgroup/system.slice", str(500 * MIB), 300 * MIB, 50 * MIB)
    assert [limit.bytes for limit in cgroup_limits(root)] == [840 * MIB, 250 * MIB]
    assert available_memory(root).bytes == 250 * MIB
    assert "memory.max" in available_memory(root).source


def test_max_is_no_limit(root: Path) -> None:
    write(root, "proc/self/mountinfo", V2)
    write(root, "proc/self/cgroup", "0::/a\n")
    group(root, "sys/fs/cgroup/a", "max", 100, 0)
    assert cgroup_limits(root) == []


def test_version_one(root: Path) -> None:
    write(root, "proc/self/mountinfo", V1)
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/x\n")
    for name, value in [("limit_in_bytes", 256 * MIB), ("usage_in_bytes", 50 * MIB)]:
        write(root, f"sys/fs/cgroup/memory/x/memory.{name}", f"{value}\n")
    write(root, "sys/fs/cgroup/memory/x/memory.stat", f"total_inactive_file {10 * MIB}\ninactive_file 1\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    assert [limit.bytes for limit in cgroup_limits(root)] == [216 * MIB]


def test_in_a_container_the_path_starts_at_the_mounted_part(root: Path) -> None:
    write(root, "proc/self/mountinfo", V2.replace(" / /sys", " /docker/abc /sys"))
    write(root, "proc/self/cgroup", "0::/docker/abc/inner\n")
    group(root, "sys/fs/cgroup/inner", str(100 * MIB), 0, 0)
    group(root, "sys/fs/cgroup", str(300 * MIB), 0, 0)
    assert [limit.bytes for limit in cgroup_limits(root)] == [100 * MIB, 300 * MIB]


def test_a_group_outside_what_is_mounted_falls_back_to_the_top(root: Path) -> None:
    write(root, "proc/self/mountinfo", V2)
    write(root, "proc/self/cgroup", "0::/elsewhere\n")
    group(root, "sys/fs/cgroup", str(300 * MIB), 0, 0)
    assert [limit.bytes for limit in cgroup_limits(root)] == [300 * MIB]


def test_more_in_use_than_allowed_leaves_nothing(root: Path) -> None:
    write(root, "proc/self/mountinfo", V2)
    write(root, "proc/self/cgroup", "0::/a\n")
    group(root, "sys/fs/cgroup/a", str(MIB), 2 * MIB, 0)
    assert available_memory(root).bytes == 0


def test_this_machine_answers() -> None:
    assert available_memory().bytes > 0
    before = anonymous_bytes()
    block = bytearray(os.urandom(1)) * (32 * MIB)
    assert anonymous_bytes() - before > 30 * MIB
    assert len(block) == 32 * MIB
