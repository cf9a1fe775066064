"""Tells cffi what colibri.core._core is: declarations from colibri.h, code from every csrc/*.c.

Runs at build time only. What Python may see of the core is what stands in colibri.h between the two marker comments;
nothing is declared twice. A new C file in this folder is part of the next build without being listed anywhere.
"""

from pathlib import Path

from cffi import FFI

BEGIN = "/* cffi: begin */"
END = "/* cffi: end */"
# -ffp-contract=off is part of the numerics contract: gcc would otherwise fuse a*b+c in one kernel and not in another.
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
# cffi's own generated file is not free of these two.
FLAGS_FOR_GENERATED = ["-Wno-unused-parameter", "-Wno-missing-field-initializers"]

HERE = Path(__file__).resolve().parent


def public_declarations(header: str) -> str:
    """Return the part of `header` (the text of colibri.h) between the markers.

    Raises ValueError unless each marker occurs exactly once, in order.
    """
    if header.count(BEGIN) != 1 or header.count(END) != 1 or header.index(BEGIN) > header.index(END):
        raise ValueError(f"colibri.h must contain {BEGIN!r} and then {END!r}, once each")
    return header[header.index(BEGIN) + len(BEGIN) : header.index(END)]


def builder() -> FFI:
    """Return the configured cffi builder; its paths are relative to the repository root, where setuptools runs."""
    ffi = FFI()
    ffi.cdef(public_declarations((HERE / "colibri.h").read_text()))
    ffi.set_source(
        "colibri.core._core",
        '#include "colibri.h"',
        sources=sorted(f"csrc/{path.name}" for path in HERE.glob("*.c")),
        depends=sorted(f"csrc/{path.name}" for path in HERE.glob("*.h")),
        include_dirs=["csrc"],
        extra_compile_args=FLAGS + FLAGS_FOR_GENERATED,
        extra_link_args=["-pthread"],
        libraries=["m"],
        py_limited_api=True,
    )
    return ffi


ffibuilder = builder()
