"""`colibri-pack repair`: sets a damaged container right, in place and to the bit, from mirrors and its checkpoint.

Goes through the whole container: bundled files, dense weights, tables, then every copy of every extent; rebuilds what
is damaged or lost and names what it cannot. Holds the shared locks only, so a daemon may go on serving: nothing is ever
written over but bytes that fail their checksum, with bytes that pass it, and whoever reads such an extent meanwhile
checks it before use. Two repairs at a time are refused. Repeating it, also after a kill, goes on where it was. The
manifest has no second copy: without it there is nothing to go by.
"""

import fcntl
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from colibri.core.container import DENSE_NAME, MANIFEST_NAME, ContainerError
from colibri.core.container_folders import ContainerFolders
from colibri.core.container_stripes import STRIPE_FILE
from colibri.core.container_survey import EXTENTS_NAME, RECORDS_NAME, Survey
from colibri.core.striping import layer_extents
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.disk import Disk, require_readable
from colibri.packer.folders import Need, require_room
from colibri.packer.places import Place, find_places
from colibri.packer.progress import Reporter, Silent
from colibri.packer.rebuild import Rebuilder
from colibri.packer.repair_files import DenseRepair, repair_bundled
from colibri.packer.repair_stripes import Repairs, StripeRepair, records_of
from colibri.packer.repair_tables import TableRepair
from colibri.packer.verify import total_bytes
from colibri.v1 import manifest_pb2


def repair(
    primary: Path,
    stripes: Sequence[Path],
    checkpoint: Checkpoint | None = None,
    *,
    only: Collection[tuple[int, int]] | None = None,
    disk: Disk | None = None,
    reporter: Reporter | None = None,
) -> Repairs:
    """Repair the container in `primary` and the folders `stripes`, empty ones for stripes that are lost.

    `only` names the experts to look at, as (layer, expert), where it is known that nothing else is damaged. Raises
    ContainerError for a damaged manifest or a file of another container, CheckpointError for a checkpoint that is
    broken or another model, FolderError, DriveError for what the drives refuse.
    """
    disk, reporter = disk or Disk(), reporter or Silent()
    with ContainerFolders(primary, stripes, partial=True) as folders, _alone(folders.paths[0]):
        manifest = folders.manifest
        rebuilder = None if checkpoint is None else Rebuilder(checkpoint, manifest)
        names = [DENSE_NAME, EXTENTS_NAME, RECORDS_NAME, *(file.name for file in manifest.files)]
        for path in (*(folders.paths[0] / name for name in names), *_stripe_files(folders.paths)):
            require_readable(path)
        places, unplaced = find_places(folders.paths, manifest)
        _require_room(disk, places)
        repairs = Repairs()
        repairs.remains += [*folders.warnings, *unplaced]
        if only is None:
            repair_bundled(folders.paths[0], manifest, rebuilder, repairs, disk)
            DenseRepair(folders.paths[0], manifest, rebuilder, repairs, disk).run(reporter)
        survey = Survey(folders.paths, manifest)
        if only is not None:
            _refuse_more_than(only, manifest, places, survey)
        tables = TableRepair(manifest, places, rebuilder, disk).run(
            folders.paths[0], survey.extent_crcs, survey.record_digests, repairs
        )
        if tables is not None:
            work = StripeRepair(manifest, places, rebuilder, repairs, disk)
            work.prepare(lambda: records_of(manifest, *tables))
            records = records_of(manifest, *tables)
            work.run((r for r in records if only is None or (r.layer, r.expert) in only), reporter)
        return repairs


def _stripe_files(folders: Sequence[Path]) -> Iterator[Path]:
    """Every stripe and mirror, whatever is in it."""
    return (folder / name for folder in folders for name in os.listdir(folder) if STRIPE_FILE.fullmatch(name))


def looked_at_bytes(manifest: manifest_pb2.Manifest, only: Collection[tuple[int, int]] | None = None) -> int:
    """Return how many bytes a repair reads where nothing is lost."""
    if only is None:
        return total_bytes(manifest)
    total = 0
    for layer in manifest.expert_layers:
        for expert, row in enumerate(layer_extents(layer)):
            if (layer.layer, expert) in only:
                total += sum(
                    int(e["bytes"]) * (2 if manifest.layout.stripes[int(e["stripe"])].mirrored else 1) for e in row
                )
    return total


def _refuse_more_than(
    only: Collection[tuple[int, int]], manifest: manifest_pb2.Manifest, places: Sequence[Place], survey: Survey
) -> None:
    """Refuse experts that do not exist, and damage that goes beyond experts. Raises ContainerError."""
    experts = {layer.layer: layer.experts for layer in manifest.expert_layers}
    for layer, expert in sorted(only):
        if not 0 <= expert < experts.get(layer, 0):
            raise ContainerError(f"layer {layer}, expert {expert}: the container has no such expert")
    found = [f"{place.path}: {place.problem}" for place in places if place.problem]
    if survey.extent_crcs is None or survey.record_digests is None:
        found.append("a table is missing or damaged")
    if found:
        raise ContainerError(f"more than single experts is damaged: repair all of it. {'; '.join(found)}")


@contextmanager
def _alone(primary: Path) -> Iterator[None]:
    """Keep other repairs out, and nobody else: the lock is on the manifest, which only repairs lock."""
    path = primary / MANIFEST_NAME
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ContainerError(f"{primary} is being repaired by another process") from error
        yield
    finally:
        os.close(fd)


def _require_room(disk: Disk, places: Sequence[Place]) -> None:
    """Lost and cut files will take their full size."""
    wanting = [place for place in places if place.problem]
    require_room(disk, [Need(place.path.parent, place.copy.bytes, (place.work,)) for place in wanting])
