"""The commands of colibri-pack that look after the drives of a container, one function each: options in, exit code out.

Beside commands.py, which packs, shows and exports.
"""

import argparse
import sys
from typing import Any

from colibri.core.container_survey import read_manifest
from colibri.core.scrub import Finding
from colibri.packer.commands import print_json
from colibri.packer.progress import reporter
from colibri.packer.scrub import Pace, scrub
from colibri.packer.verify import stripes_bytes
from colibri.packer.wording import counted, size_text


def run_scrub(options: argparse.Namespace) -> int:
    """Read every expert at a bounded rate; 1 if anything is damaged or a second copy is lost."""
    total = stripes_bytes(read_manifest(options.container))
    with reporter("scrubbing", total, sys.stderr) as progress:
        found, warnings, read = scrub(options.container, options.stripes, Pace(options.rate * 1_000_000), progress)
    ok = not found and not warnings
    if options.json:
        print_json({"ok": ok, "read_bytes": read, "findings": list(map(finding_json, found)), "warnings": warnings})
    elif ok:
        print(f"in order: {size_text(read)} of stripes read")
    else:
        lines = [*warnings, *map(str, found)]
        print("\n".join([*lines, f"{counted(len(lines), 'fault')}; `colibri-pack repair` rebuilds what is damaged"]))
    return 0 if ok else 1


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
