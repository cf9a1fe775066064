"""Packs a checkpoint inside the test's process, with everything that a test may want to bend, and compares packs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import json_format

from colibri.core.container import MANIFEST_NAME, open_container
from colibri.core.identity import manifest_digest
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk
from colibri.packer.families import resolve
from colibri.packer.plan import PackPlan, make_plan
from colibri.packer.precision import DEFAULT_GROUP_SIZE, parse_precision
from colibri.packer.progress import Reporter
from colibri.packer.restripe import plan_move, restripe
from colibri.packer.writer import SYNC_BYTES, pack
from colibri.v1 import manifest_pb2


def plan_of(
    checkpoint: Checkpoint,
    precision: str = "",
    weights: Sequence[int] = (1,),
    group_size: int = DEFAULT_GROUP_SIZE,
    *,
    mirror: bool = False,
) -> PackPlan:
    """Plan a pack of an open checkpoint."""
    return make_plan(checkpoint, resolve(checkpoint), parse_precision(precision, group_size), weights, mirror=mirror)


def pack_folder(
    source: Path,
    folders: Sequence[Path],
    *,
    precision: str = "",
    weights: Sequence[int] | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    disk: Disk | None = None,
    reporter: Reporter | None = None,
    workers: int = 2,
    sync_bytes: int = SYNC_BYTES,
    mirror: bool = False,
) -> manifest_pb2.Manifest:
    """Pack the checkpoint in `source` into `folders`, the primary first."""
    with Checkpoint.open(source) as checkpoint:
        plan = plan_of(checkpoint, precision, weights or [1] * len(folders), group_size, mirror=mirror)
        return pack(checkpoint, plan, folders, disk=disk, reporter=reporter, workers=workers, sync_bytes=sync_bytes)


def move_folder(
    old: Sequence[Path],
    folders: Sequence[Path],
    *,
    weights: Sequence[int] | None = None,
    mirror: bool = False,
    min_extent_bytes: int | None = None,
    disk: Disk | None = None,
    reporter: Reporter | None = None,
    sync_bytes: int = SYNC_BYTES,
) -> manifest_pb2.Manifest:
    """Restripe the container in `old` into `folders`, both with the primary first."""
    with open_container(old[0], old[1:]) as container:
        plan = plan_move(
            container.manifest, weights or [1] * len(folders), mirror=mirror, min_extent_bytes=min_extent_bytes
        )
        return restripe(container, plan, folders, disk=disk, reporter=reporter, workers=2, sync_bytes=sync_bytes)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a container folder, whatever its UUID and time made of them cleared away.

    The UUID is replaced by zeros in every header, the headers' own checksums too, and so is what depends on them in the
    manifest.
    """
    manifest = (
        json_format.Parse((folder / MANIFEST_NAME).read_text(), manifest_pb2.Manifest())
        if (folder / MANIFEST_NAME).exists()
        else None
    )
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if path.name == MANIFEST_NAME:
            assert manifest is not None
            assert manifest.manifest_sha256 == manifest_digest(manifest)
            manifest.manifest_sha256 = manifest.layout.uuid = ""
            manifest.layout.create_unix_seconds = 0
            data = json.dumps(json_format.MessageToDict(manifest)).encode()
        elif path.name == "dense.safetensors":
            at = data.index(b'"colibri_uuid":"') + len(b'"colibri_uuid":"')
            data = data[:at] + bytes(36) + data[at + 36 :]
        elif path.name.startswith(("stripe-", "mirror-")):
            data = data[:24] + bytes(16) + data[40:92] + bytes(4) + data[96:]
        elif path.name in ("extents.crc32c", "records.sha256"):
            data = data[:24] + bytes(16) + data[40:44] + bytes(4) + data[48:]
        found[path.name] = data
    return found


def copy_container(folders: Sequence[Path], target: Path) -> list[Path]:
    """Copy a container's folders below `target`; return the copies."""
    copies = [target / str(index) for index in range(len(folders))]
    for folder, copy in zip(folders, copies, strict=True):
        shutil.copytree(folder, copy)
    return copies
