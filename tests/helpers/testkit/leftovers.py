"""What a test that uses drives, cgroups and processes may leave behind, and must not."""

import os
import subprocess
from pathlib import Path

from testkit.loop_drives import CGROUPS


def leftovers(folder: Path) -> list[str]:
    """Mounts and loop devices below `folder`, cgroups and child processes of this process, each in a line."""
    name = f"colibri-rig-{os.getpid()}-"
    mounts = [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    groups = [f"cgroup {path}" for path in CGROUPS.glob(f"**/{name}*") if path.is_dir()]
    return mounts + _loops(folder) + groups + _children()


def _loops(folder: Path) -> list[str]:
    """Loop devices whose image lies below `folder`, one that is deleted by now included."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            image = backing.read_text().strip()
        except OSError:  # detached meanwhile
            continue
        if str(folder) in image:
            found.append(f"loop device {backing.parts[3]} {image}")
    return found


def _children() -> list[str]:
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True, check=False
    )
    lines = [line.strip() for line in listed.stdout.splitlines()]
    return [f"process {line}" for line in lines if " --ppid " not in line and "resource_tracker" not in line]
