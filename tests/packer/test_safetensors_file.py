"""Hostile safetensors headers: each lie is refused with the file's name, and nothing but CheckpointError comes out."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from colibri.packer.errors import CorruptCheckpointError
from colibri.packer.open_files import OpenFiles
from colibri.packer.safetensors_file import DTYPE_BITS, MAX_HEADER_BYTES, TensorInfo, read_header

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def build(header: object, data: bytes = bytes(24)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def read(folder: Path, content: bytes) -> dict[str, TensorInfo]:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    with OpenFiles() as files:
        return read_header(files, path)


def refusal(folder: Path, content: bytes) -> str:
    with pytest.raises(CorruptCheckpointError) as caught:
        read(folder, content)
    assert "x.safetensors" in str(caught.value)
    return str(caught.value)


def changed(**entry: object) -> dict[str, object]:
    return {"t": {**ENTRY, **entry}}


def test_a_good_header(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "t": ENTRY,
        "empty": {**ENTRY, "shape": [0, 3], "data_offsets": [24, 24]},
    }
    tensors = read(tmp_path, build(header))
    start = 8 + len(json.dumps(header))
    assert tensors["t"] == TensorInfo("t", "F32", (2, 3), tmp_path / "x.safetensors", start, 24)
    assert tensors["empty"].bytes == 0


def test_every_dtype_that_the_library_writes_is_known(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16]
    dtypes += [torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
    dtypes += [torch.uint16, torch.uint32, torch.uint64, torch.complex64]
    tensors = {str(dtype): torch.zeros(2, 3).to(dtype) for dtype in dtypes}
    read_back = read(tmp_path, save(tensors))
    assert {name: info.bytes for name, info in read_back.items()} == {
        name: tensor.element_size() * 6 for name, tensor in tensors.items()
    }
    assert {info.dtype for info in read_back.values()} <= DTYPE_BITS.keys()


@pytest.mark.parametrize("size", range(8))
def test_files_shorter_than_the_length_itself(tmp_path: Path, size: int) -> None:
    assert f"{size} bytes long, too short" in refusal(tmp_path, bytes(size))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_length_beyond_the_limit(tmp_path: Path, length: int) -> None:
    assert f"header of {length} bytes" in refusal(tmp_path, struct.pack("<Q", length) + b"{}")


def test_a_length_beyond_the_file(tmp_path: Path) -> None:
    assert "cut inside its header" in refusal(tmp_path, struct.pack("<Q", 3) + b"{}")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b'{"\xff": 1}', "not UTF-8 at byte 2"),
        (b"", "does not begin with '{'"),
        (b" {}", "does not begin with '{'"),
        (b"[]", "does not begin with '{'"),
        (b'{"t"', "not valid JSON"),
        (b"{} x", "not valid JSON"),
        (b'{"t": NaN}', "NaN is not a JSON number"),
        (b'{"t": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"t": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"t": 1, "t": 2}', "'t' occurs twice"),
        (b'{"\\ud800": 1}', "surrogates not allowed"),
        (b'{"__metadata__": {"a": 1}}', "__metadata__"),
        (b'{"__metadata__": []}', "__metadata__"),
    ],
)
def test_headers_that_are_no_json_object(tmp_path: Path, header: bytes, text: str) -> None:
    assert text in refusal(tmp_path, build(header))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"t": []}, "exactly dtype, shape and data_offsets"),
        ({"t": {**ENTRY, "more": 1}}, "exactly dtype, shape and data_offsets"),
        ({"t": {"dtype": "F32", "shape": [2, 3]}}, "exactly dtype, shape and data_offsets"),
        (changed(dtype="F31"), "unknown dtype 'F31'"),
        (changed(dtype=["F32"]), "unknown dtype"),
        (changed(shape=3), "not a list of sizes"),
        (changed(shape=[2, -3]), "not a list of sizes"),
        (changed(shape=[2.0, 3]), "not a list of sizes"),
        (changed(shape=[True, 6]), "not a list of sizes"),
        (changed(shape=[1 << 63, 3]), "not a list of sizes"),
        (changed(shape=[1 << 40, 1 << 40]), "more than 2^63 bytes"),
        (changed(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0]), "more than 2^63 bytes"),
        (changed(data_offsets=[0]), "not two sizes"),
        (changed(data_offsets=[0, "24"]), "not two sizes"),
        (changed(data_offsets=[24, 0]), "give -24"),
        (changed(data_offsets=[0, 20]), "takes 24 bytes"),
        (changed(shape=[2, 4]), "takes 32 bytes"),
        (changed(dtype="F4", shape=[3], data_offsets=[0, 2]), "whole bytes"),
        (changed(data_offsets=[8, 32]), "a hole before it"),
        ({"t": ENTRY, "u": ENTRY}, "an overlap before it"),
        ({"t": ENTRY, "u": {**ENTRY, "data_offsets": [23, 47]}}, "an overlap before it"),
        ({"t": ENTRY, "u": {**ENTRY, "data_offsets": [24, 48]}}, "cut: "),
        ({}, "24 bytes behind the last tensor"),
    ],
)
def test_entries_that_lie(tmp_path: Path, header: dict[str, Any], text: str) -> None:
    assert text in refusal(tmp_path, build(header))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_either_parse_or_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    good = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0, 4), "c": torch.ones(5, dtype=torch.int8)})
    content = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(("flip", "cut", "insert"))):
            case "flip":
                content[position] = data.draw(st.integers(0, 255))
            case "cut":
                del content[position : position + data.draw(st.integers(1, 9))]
            case _:
                content[position:position] = data.draw(st.binary(min_size=1, max_size=9))
        if not content:
            break
    try:
        tensors = read(tmp_path, bytes(content))
    except CorruptCheckpointError:
        return
    # What passes is what the reference library accepts too, and covers the file exactly.
    assert set(load(bytes(content))) == set(tensors)
    end = max((info.offset + info.bytes for info in tensors.values()), default=len(content))
    assert end == len(content)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 50) | st.sampled_from(["F32", "BF16", "I8"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "t"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), _JSON | st.fixed_dictionaries(
    {"dtype": _JSON, "shape": _JSON, "data_offsets": _JSON}
)), st.integers(0, 60))  # fmt: skip
def test_any_json_either_parses_or_is_refused(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    try:
        tensors = read(tmp_path, build(header, bytes(size)))
    except CorruptCheckpointError:
        return
    assert sum(info.bytes for info in tensors.values()) == size
