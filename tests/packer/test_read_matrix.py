"""Cutting matrices out of source tensors: every layout, any range of rows, and no more bytes than those rows span."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.model_source import MatrixRows, SourceSlice, read_matrix

E, R, C = 3, 10, 7
F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]

CUBE: F32 = np.arange(E * R * C, dtype=np.float32).reshape(E, R, C)
SHEET: F16 = np.arange(R * C, dtype=np.float16).reshape(R, C)
LINE: F32 = np.arange(C, dtype=np.float32)
ARRAYS: dict[str, npt.NDArray[np.floating]] = {"cube": CUBE, "sheet": SHEET, "line": LINE[None]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrices")
    (path / "config.json").write_text(json.dumps({}))
    save_file({"cube": CUBE, "sheet": SHEET, "line": LINE, "ids": np.arange(4)}, path / "model.safetensors")
    return path


def as_array(block: MatrixRows) -> npt.NDArray[np.floating]:
    dtype = {"F32": np.float32, "F16": np.float16}[block.source_type]
    flat = np.frombuffer(block.buffer, dtype)
    return np.array([flat[row * block.row_stride :][: block.cols] for row in range(block.rows)]).reshape(-1, block.cols)


def matrix(source: SourceSlice) -> npt.NDArray[np.floating]:
    """The same cut in numpy."""
    whole: npt.NDArray[np.floating] = ARRAYS[source.tensor]
    whole = whole if source.expert is None else whole[source.expert]
    whole = whole.T if source.transposed else whole
    begin, end = source.rows or (0, len(whole))
    return whole[begin : end : source.row_step]


@st.composite
def slices(draw: st.DrawFn) -> SourceSlice:
    tensor = draw(st.sampled_from(["cube", "sheet", "line"]))
    expert = draw(st.integers(0, E - 1)) if tensor == "cube" else None
    transposed = draw(st.booleans()) if tensor != "line" else False
    height = 1 if tensor == "line" else C if transposed else R
    rows = None
    if draw(st.booleans()):
        begin = draw(st.integers(0, height - 1))
        rows = (begin, draw(st.integers(begin + 1, height)))
    return SourceSlice(tensor, rows, expert, transposed, draw(st.sampled_from([1, 2, 3])))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=slices(), data=st.data())
def test_any_range_of_rows_equals_numpy(folder: Path, source: SourceSlice, data: st.DataObject) -> None:
    expected = matrix(source)
    begin = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(begin, len(expected)))
    with Checkpoint.open(folder, piece_bytes=data.draw(st.sampled_from([3, 1 << 20]))) as checkpoint:
        block = read_matrix(checkpoint, source, begin, end)
    assert (block.rows, block.cols) == (end - begin, expected.shape[1])
    assert np.array_equal(as_array(block), expected[begin:end])


@pytest.mark.parametrize(
    ("source", "rows", "most"),
    [
        (SourceSlice("cube", None, 1), (2, 4), 2 * C * 4),
        (SourceSlice("cube", (5, 10), 2), (0, 2), 2 * C * 4),
        (SourceSlice("cube", None, 0, row_step=2), (0, 2), 3 * C * 4),
        (SourceSlice("cube", None, 1, transposed=True), (2, 4), 2 * R * 4),
        (SourceSlice("sheet", None, None, transposed=True, row_step=2), (0, 2), 3 * R * 2),
    ],
)
def test_no_more_is_read_than_the_rows_span(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: SourceSlice, rows: tuple[int, int], most: int
) -> None:
    with Checkpoint.open(folder) as checkpoint:
        read: list[int] = []
        whole = checkpoint.read_into

        def counted(name: str, buffer: memoryview, *, start_element: int = 0, n_elements: int | None = None) -> None:
            read.append(memoryview(buffer).nbytes)
            whole(name, buffer, start_element=start_element, n_elements=n_elements)

        monkeypatch.setattr(checkpoint, "read_into", counted)
        read_matrix(checkpoint, source, *rows)
    assert sum(read) == most


@pytest.mark.parametrize(
    ("source", "begin", "end"),
    [
        (SourceSlice("cube", None, 0), 0, R + 1),
        (SourceSlice("cube", None, 0), -1, 2),
        (SourceSlice("cube", None, 0), 3, 2),
        (SourceSlice("cube", (2, 5), 0), 0, 4),
        (SourceSlice("cube", None, 0, row_step=2), 0, R // 2 + 1),
        (SourceSlice("sheet", None, None, transposed=True), 0, C + 1),
        (SourceSlice("line", None, None), 0, 2),
    ],
)
def test_rows_outside_the_matrix(folder: Path, source: SourceSlice, begin: int, end: int) -> None:
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ValueError, match="are outside"):
        read_matrix(checkpoint, source, begin, end)


def test_only_floats_can_be_cut(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ValueError, match="dtype I64"):
        read_matrix(checkpoint, SourceSlice("ids", None, None), 0, 1)
