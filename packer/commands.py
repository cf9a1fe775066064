"""The commands of colibri-pack, one function each: options in, work done, exit code out.

Joins the parts (checkpoint, families, plan, writer, verify, export) and prints through show.py.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colibri.core.container import open_container
from colibri.core.container_folders import ContainerFolders
from colibri.core.container_survey import read_manifest
from colibri.packer import show
from colibri.packer.arguments import Drive
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.export import export, exported_bytes
from colibri.packer.families import resolve
from colibri.packer.folders import by_file_system, check_folders, made_folders, shared_drive_warnings
from colibri.packer.plan import PackPlan, make_plan
from colibri.packer.precision import parse_precision
from colibri.packer.progress import reporter
from colibri.packer.remains import Remains
from colibri.packer.verify import total_bytes, verify
from colibri.packer.weights import choose_weights, given_weights, known_weights
from colibri.packer.wording import counted, size_text
from colibri.packer.writer import check_pack, pack, refuse_source


def run_pack(options: argparse.Namespace) -> int:
    """Pack, or go on with a pack."""
    drives, folders = [options.out, *options.stripes], _folders(options)
    with Checkpoint.open(options.source) as checkpoint:
        plan = _plan(options, checkpoint, given_weights(drives) or [1] * len(drives))
        refuse_source(checkpoint, folders)
        with made_folders(folders):
            weights = choose_weights(drives)
            if weights.values != [stripe.weight for stripe in plan.manifest.layout.stripes]:
                plan = _plan(options, checkpoint, weights.values)
            drive_warnings = [*weights.warnings, *shared_drive_warnings(folders, plan.manifest.layout)]
            with reporter("packing", plan.source_bytes, sys.stderr) as progress:
                for note in weights.notes():
                    progress.note(note)
                for warning in (*plan.manifest.warnings, *drive_warnings):
                    progress.note(f"warning: {warning}")
                manifest = pack(checkpoint, plan, folders, reporter=progress)
    if options.json:
        print_json({"ok": True, **show.drives_json(weights, drive_warnings), **show.manifest_values(manifest)})
    else:
        print(show.manifest_text(manifest, warnings=False))  # told before the work began
    return 0


def run_plan(options: argparse.Namespace) -> int:
    """Print what a pack would do; refuse what it would refuse, as far as that can be known without writing."""
    placed = options.out is not None
    options.out = options.out or Drive(Path("DIR"))
    drives, folders = [options.out, *options.stripes], _folders(options)
    with Checkpoint.open(options.source) as checkpoint:
        check_folders(folders if placed else folders[1:])
        given = given_weights(drives) or (known_weights(folders) if placed else None)
        unknown = given is None and len(drives) > 1
        plan = _plan(options, checkpoint, given or [1] * len(drives))
        if placed:
            check_pack(checkpoint, plan, folders, room=not unknown or len(by_file_system(folders)) == 1)
        warnings = shared_drive_warnings(folders, plan.manifest.layout) if placed else []
    if options.json:
        print_json({**show.plan_json(plan, folders), "weights_unknown": unknown, "drive_warnings": warnings})
    else:
        print(show.plan_text(plan, folders, warnings) + ("\n\n" + show.UNKNOWN_WEIGHTS if unknown else ""))
    return 0


def run_inspect(options: argparse.Namespace) -> int:
    """Print what a container holds; with its stripes given, also look at all its files: 1 if one is damaged or lost."""
    manifest = read_manifest(options.container)
    faults: list[str] = []
    if options.stripes:
        with ContainerFolders(options.container, options.stripes, partial=True) as folders:
            remains = Remains(folders)
        faults = remains.faults
        for kind, texts in (("fault", faults), ("warning", remains.warnings)):
            for text in texts:
                print(f"{kind}: {text}", file=sys.stderr)
    if options.json:
        print_json(show.manifest_values(manifest))
    else:
        print(show.manifest_text(manifest))
    return 1 if faults else 0


def run_verify(options: argparse.Namespace) -> int:
    """Check every byte; 1 if anything is wrong."""
    manifest = read_manifest(options.container)
    with reporter("verifying", total_bytes(manifest), sys.stderr) as progress:
        verdict = verify(options.container, options.stripes, progress)
    if options.json:
        print_json(show.verdict_json(verdict))
    elif verdict.faults:
        print("\n".join([*verdict.faults, show.tallies_text(verdict), counted(len(verdict.faults), "fault")]))
    else:
        print(f"in order: {size_text(verdict.checked_bytes)} checked, content_id {manifest.content_id}")
    return 1 if verdict.faults else 0


def run_export(options: argparse.Namespace) -> int:
    """Write a checkpoint."""
    with open_container(options.container, options.stripes) as container:
        total = exported_bytes(container.manifest, options.dtype)
        with reporter("exporting", total, sys.stderr) as progress:
            for warning in container.warnings:
                progress.note(f"warning: {warning}")
            shards = export(container, options.out, progress, dtype=options.dtype, shard_bytes=options.shard_bytes)
    if options.json:
        told = {"ok": True, "out": str(options.out), "shards": shards, "bytes": total, "dtype": options.dtype}
        print_json({**told, "rounded": options.dtype == "bf16"})
    else:
        rounded = "; the weights were rounded to bf16, f32 keeps those of the daemon" if options.dtype == "bf16" else ""
        print(f"{options.out}: {size_text(total)} as {options.dtype} in {counted(len(shards), 'shard')}{rounded}")
    return 0


def _plan(options: argparse.Namespace, checkpoint: Checkpoint, weights: Sequence[int]) -> PackPlan:
    precision = parse_precision(options.precision, options.group_size)
    return make_plan(
        checkpoint,
        resolve(checkpoint),
        precision,
        weights,
        mirror=options.mirror,
        min_extent_bytes=options.min_extent,
    )


def _folders(options: argparse.Namespace) -> list[Path]:
    return [drive.folder for drive in (options.out, *options.stripes)]


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))
