"""`make bench BENCH=kernels`: the matrix product of one thread, shape by shape, beside a 4-stream read in the same run.

`value` is the rate of the int4 product of one token (the experts' format and the default activations, 2048 x 7168), in
GB/s of packed weights; `ceiling` the plain read measured between its repetitions. ARGS="--isa generic" for the others.
"""

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import report

from testkit.repository import ROOT

SOURCE = Path(__file__).with_name("kernels.c")
PARTS = ["kernels", "kernels_generic", "kernels_avx2", "kernels_avx2_ops", "ops", "tiles", "error"]
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
HEADLINE = ("int4a/i16", 2048, 7168, 1)


@dataclass(frozen=True)
class Line:
    """One shape's rates: weights and ceiling in GB/s, products in 1e9 multiply-adds per second."""

    name: str
    rows: int
    cols: int
    tokens: int
    weights: float
    ceiling: float
    products: float


def measure(isa: str) -> list[Line]:
    """Build the program, run it, return its lines. Raises CalledProcessError where gcc or the CPU refuses."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "kernels"
        sources = [str(SOURCE), *(str(ROOT / "csrc" / f"{part}.c") for part in PARTS)]
        subprocess.run(["gcc", *FLAGS, "-I", str(ROOT / "csrc"), *sources, "-o", str(program), "-lm"], check=True)
        output = subprocess.run([program, isa], check=True, capture_output=True, text=True).stdout
    lines = []
    for text in output.splitlines():
        name, *numbers = text.split()
        rows, cols, tokens = map(int, numbers[:3])
        lines.append(Line(name, rows, cols, tokens, *map(float, numbers[3:])))
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kernels", description=__doc__)
    parser.add_argument("--isa", default="auto", choices=["auto", "generic", "avx2"])
    arguments = parser.parse_args(argv)
    lines = measure(arguments.isa)
    columns = ["weights/activations", "rows x cols", "tokens", "GB/s", "4-stream read", "share", "G mult-adds/s"]
    shown = [
        [
            line.name,
            f"{line.rows} x {line.cols}",
            str(line.tokens),
            f"{line.weights:.2f}",
            f"{line.ceiling:.1f}",
            f"{line.weights / line.ceiling:.0%}",
            f"{line.products:.1f}",
        ]
        for line in lines
    ]
    report.table(f"Matrix product, one thread, isa {arguments.isa}", columns, shown)
    head = next(line for line in lines if (line.name, line.rows, line.cols, line.tokens) == HEADLINE)
    report.result("kernels", "2048x7168 int4a/i16", head.weights, "GB/s", head.ceiling, isa=arguments.isa)
    return 0
