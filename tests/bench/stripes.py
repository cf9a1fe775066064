"""BENCH=stripes: what a second and a third drive bring: decode of a giant slice on throttled loop drives. Needs root.

`two_drives` is the speed of two drives of 300 MB/s in units of one (bound 1.9); `three_unequal` the bytes per second
that drives of 300, 200 and 100 MB/s give while decoding, pauses included, over the sum of what an independent reader
gets from each in the same cgroup (bound 0.95). Few experts stay in memory, so that reading decides. Both back ends must
hold both bounds; the line names the worse of each.
"""

import argparse
from pathlib import Path

from giant import GIANT, SMALL
from report import result, table
from slicerig import BACKENDS, MB, Judged, judge, refuse_where_impossible, slice_on_drives
from slicerun import Job, run

from testkit.loop_drives import group

DRIVE_SETS = {"one": [300], "two": [300, 300], "three": [300, 200, 100]}
TWO_DRIVES, THREE_UNEQUAL = 1.9, 0.95


def measure(rates: list[int], options: argparse.Namespace) -> dict[str, Judged]:
    """Decode on drives of these rates with every back end, between two looks at the ceilings."""
    shape = SMALL if options.small else GIANT
    judged = {}
    with slice_on_drives(shape, [rate * MB for rate in rates], options.images) as (drives, folders):
        job = Job(folders, slots=options.slots, tokens=options.tokens, warm_tokens=options.warm_tokens)
        with group(drives) as limited:
            for backend in BACKENDS:
                before = run("ceilings", job, limited)
                seen = run("decode", Job(**{**job.__dict__, "io_backend": backend}), limited)
                judged[backend] = judge(seen, [before, run("ceilings", job, limited)])
    return judged


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=stripes", description=__doc__)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--warm-tokens", type=int, default=16)
    parser.add_argument("--slots", type=int, default=24, help="experts kept in memory")
    parser.add_argument("--images", type=Path, help="folder for the drives' images, about 6 GB")
    parser.add_argument(
        "--small", action="store_true", help="a slice of a few megabytes: tries the rig, proves nothing"
    )
    options = parser.parse_args(argv)
    if refuse_where_impossible("stripes"):
        return 1
    seen = {name: measure(rates, options) for name, rates in DRIVE_SETS.items()}
    rows, two, three = [], {}, {}
    for backend in BACKENDS:
        one = seen["one"][backend]
        two[backend] = one.seconds / seen["two"][backend].seconds
        three[backend] = seen["three"][backend].read_rate / seen["three"][backend].drive_rate
        for drives, sets in seen.items():
            at = sets[backend]
            rows.append([
                f"{drives}: {' + '.join(map(str, DRIVE_SETS[drives]))} MB/s", backend, f"{1 / at.seconds:.2f}",
                f"{one.seconds / at.seconds:.2f}", f"{at.read_rate / MB:.0f}", f"{at.drive_rate / MB:.0f}",
                f"{at.read_rate / at.drive_rate:.3f}", f"{at.hit_share:.2f}",
            ])  # fmt: skip
    columns = ["drives", "back end", "tok/s", "x one", "MB/s", "ceiling", "share", "hits"]
    table(f"stripes, {(SMALL if options.small else GIANT).name}, {options.slots} experts in memory", columns, rows)
    worst_two, worst_three = min(two.values()), min(three.values())
    more = {f"two_drives_{backend}": value for backend, value in two.items()}
    more |= {f"three_unequal_{backend}": value for backend, value in three.items()}
    fastest = 1 / max(at.seconds for at in seen["two"].values())
    name = (SMALL if options.small else GIANT).name
    result("stripes", name, worst_two, "x one drive", 2.0, two_drives=worst_two, three_unequal=worst_three,
           tok_per_s_two=fastest, **more)  # fmt: skip
    return int(not (worst_two >= TWO_DRIVES and worst_three >= THREE_UNEQUAL))
