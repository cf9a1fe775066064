"""Builds each program of tests/core/c with AddressSanitizer and UBSan, and runs it: the core without Python."""

import os
import subprocess
from pathlib import Path

import pytest

from testkit.repository import ROOT

FLAGS = "-std=gnu11 -O1 -g -ffp-contract=off -Wall -Wextra -Werror"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
OPS = ["ops", "kernels_generic"]
PROGRAMS: dict[str, list[str]] = {
    "test_ops": OPS,
    "test_kernels": [*OPS, "kernels", "kernels_avx2", "kernels_avx2_ops", "tiles", "error"],
    "test_quantize": ["quantize", "tiles", "error"],
    "test_sample": ["sample"],
    "test_crc32c": ["crc32c"],
}


def test_every_program_is_listed() -> None:
    assert sorted(PROGRAMS) == sorted(path.stem for path in (ROOT / "tests/core/c").glob("test_*.c"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, tmp_path: Path) -> None:
    sources = [ROOT / "tests/core/c" / f"{name}.c", *(ROOT / "csrc" / f"{part}.c" for part in PROGRAMS[name])]
    include = ["-I", str(ROOT / "csrc"), "-I", str(ROOT / "tests/core/c")]
    flags = [*FLAGS.split(), *SANITIZERS.split(), *include]
    built = ["gcc", *flags, *map(str, sources), "-o", str(tmp_path / name), "-lm"]
    subprocess.run(built, check=True, timeout=240)
    # Leaks cannot be looked for under a tracer, which some containers are; every other check stays on.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    result = subprocess.run([tmp_path / name], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
