"""The commands of colibri-pack that look after the drives of a container, one function each: options in, exit code out.

Beside commands.py, which packs, shows and exports.
"""

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from colibri.core.container import open_container
from colibri.core.container_survey import read_manifest
from colibri.core.scrub import Finding
from colibri.packer import show
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.commands import print_json
from colibri.packer.folders import made_folders, shared_drive_warnings
from colibri.packer.progress import reporter
from colibri.packer.repair import looked_at_bytes, repair
from colibri.packer.repair_stripes import Repairs
from colibri.packer.restripe import moved_bytes, plan_move, refuse_own_folders, restripe
from colibri.packer.scrub import Pace, scrub
from colibri.packer.verify import stripes_bytes
from colibri.packer.weights import choose_weights, given_weights
from colibri.packer.wording import counted, size_text


def run_restripe(options: argparse.Namespace) -> int:
    """Move a container to other drives or weights, or go on with that."""
    folders = [drive.folder for drive in options.to]
    with open_container(options.container, options.stripes) as container:
        place = {"mirror": options.mirror, "min_extent_bytes": options.min_extent}
        plan = plan_move(container.manifest, given_weights(options.to) or [1] * len(folders), **place)
        refuse_own_folders(container, folders)
        with made_folders(folders):
            weights = choose_weights(options.to)
            plan = plan_move(container.manifest, weights.values, **place)
            warnings = [*weights.warnings, *shared_drive_warnings(folders, plan.manifest.layout)]
            with reporter("moving", moved_bytes(plan.manifest), sys.stderr) as progress:
                for note in (*weights.notes(), *(f"warning: {text}" for text in (*container.warnings, *warnings))):
                    progress.note(note)
                manifest = restripe(container, plan, folders, reporter=progress)
    if options.json:
        print_json({"ok": True, **show.drives_json(weights, warnings), **show.manifest_values(manifest)})
    else:
        print(show.manifest_text(manifest, warnings=False))
        print(f"\nThe container in {options.container} is as it was; it is no longer needed.")
    return 0


def run_repair(options: argparse.Namespace) -> int:
    """Set a container right; 1 if something remains."""
    total = looked_at_bytes(read_manifest(options.container), options.only)
    with ExitStack() as stack:
        checkpoint = None if options.source is None else stack.enter_context(Checkpoint.open(options.source))
        with reporter("repairing", total, sys.stderr) as progress:
            done = repair(options.container, options.stripes, checkpoint, only=options.only, reporter=progress)
    if options.json:
        print_json(show_repairs(done))
    else:
        lines = [*done.fixed, *map(str, done.extents), *done.remains]
        work = counted(len(done.fixed) + len(done.extents), "repair")
        verdict = f"{counted(len(done.remains), 'fault remains', 'faults remain')}" if done.remains else "in order"
        print("\n".join([*lines, f"{verdict}: {size_text(done.checked_bytes)} checked, {work}"]))
    return 1 if done.remains else 0


def show_repairs(done: Repairs) -> dict[str, Any]:
    """Return what a repair did, as it is printed for programs."""
    extents = [
        {
            "file": str(item.path),
            "offset": item.offset,
            "bytes": item.bytes,
            "layer": item.layer,
            "expert": item.expert,
            "from": item.origin,
        }
        for item in done.extents
    ]
    told = {"ok": not done.remains, "checked_bytes": done.checked_bytes, "extents": extents}
    return {**told, "fixed": done.fixed, "remains": done.remains}


def run_scrub(options: argparse.Namespace) -> int:
    """Read every expert at a bounded rate; 1 if anything is damaged or a second copy is lost."""
    total = stripes_bytes(read_manifest(options.container))
    with reporter("scrubbing", total, sys.stderr) as progress:
        done = scrub(options.container, options.stripes, Pace(options.rate * 1_000_000), progress)
    told = done.told
    if options.json:
        lists = {"faults": done.faults, "warnings": done.warnings, "findings": list(map(finding_json, done.findings))}
        print_json({"ok": not told, "read_bytes": done.read_bytes, **lists})
    elif not told:
        print(f"in order: {size_text(done.read_bytes)} of stripes read")
    else:
        verdict = f"{counted(len(told), 'fault')}; `colibri-pack repair` rebuilds what is damaged"
        print("\n".join([*told, f"{size_text(done.read_bytes)} of stripes read", verdict]))
    return 1 if told else 0


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as it is printed for programs."""
    return {
        "file": str(finding.path),
        "stripe": finding.stripe,
        "mirror": finding.mirror,
        "offset": finding.offset,
        "bytes": finding.bytes,
        "layer": finding.layer,
        "expert": finding.expert,
        "problem": finding.problem,
    }
