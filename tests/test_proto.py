"""The committed stubs are what the pinned generator writes, and the package asks for runtimes that can load them."""

import re
import tomllib
from pathlib import Path

import gen_proto

from testkit.repository import ROOT

FOLDER = ROOT / "proto" / "colibri" / "v1"


def floors() -> dict[str, str]:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return dict(dependency.split(">=") for dependency in dependencies)


def stubs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*_pb2*") if path.suffix in {".py", ".pyi"}}


def test_the_stubs_are_up_to_date(tmp_path: Path) -> None:
    gen_proto.generate(tmp_path)
    fresh, committed = stubs(tmp_path / "colibri" / "v1"), stubs(FOLDER)
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def test_the_floors_equal_the_generator() -> None:
    for package in ("grpcio", "grpcio-health-checking", "grpcio-status"):
        assert floors()[package] == gen_proto.pinned_version()
    written_by = {
        re.findall(r"Protobuf Python Version: ([\d.]+)", text)[0]
        for text in stubs(FOLDER).values()
        if "Ver" in text and "Protobuf Python Version" in text
    }
    assert written_by == {floors()["protobuf"]}


def test_every_message_can_be_made() -> None:
    from colibri.v1 import admin_service_pb2, inference_service_pb2, types_pb2

    for module in (types_pb2, inference_service_pb2, admin_service_pb2):
        for name in module.DESCRIPTOR.message_types_by_name:
            assert getattr(module, name)().SerializeToString() == b""
