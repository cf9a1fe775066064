"""Writes the Python stubs of every proto/colibri/v1/*.proto, with the generator pinned in requirements-proto.txt.

`make proto` runs it. The stubs are committed, so that an installation needs no generator; tests/test_proto.py runs this
into a temporary folder and compares. The generator is deliberately old: what it writes works on every newer runtime.
"""

import argparse
import importlib.metadata
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "colibri/v1"


def pinned_version() -> str:
    """Return the version of grpcio-tools that requirements-proto.txt pins."""
    lines = (ROOT / "tools" / "requirements-proto.txt").read_text().splitlines()
    pins = [line.removeprefix("grpcio-tools==") for line in lines if line.startswith("grpcio-tools==")]
    if len(pins) != 1:
        raise ValueError("tools/requirements-proto.txt must pin grpcio-tools exactly once")
    return pins[0].strip()


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` into `out`/colibri/v1.

    Raises RuntimeError if the installed generator is not the pinned one or protoc refuses an input.
    """
    installed = importlib.metadata.version("grpcio-tools")
    if installed != pinned_version():
        raise RuntimeError(f"grpcio-tools {installed} is installed, the stubs are made with {pinned_version()}")
    from grpc_tools import _protoc_compiler  # the pinned generator's only part that does not need an old protobuf

    protos = sorted(path.relative_to(ROOT / "proto") for path in (ROOT / "proto" / PACKAGE).glob("*.proto"))
    well_known = Path(_protoc_compiler.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    arguments += [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    arguments += [str(path) for path in protos]
    if _protoc_compiler.run_main([argument.encode() for argument in arguments]) != 0:
        raise RuntimeError("protoc refused its input, see above")
    drop_empty_services(out / PACKAGE)


def drop_empty_services(folder: Path) -> None:
    """Delete the `*_pb2_grpc.py` of protos that define no service: they hold nothing but a version check."""
    for path in folder.glob("*_pb2_grpc.py"):
        if "class " not in path.read_text():
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "proto", help="folder to write into (default: proto)")
    generate(parser.parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
