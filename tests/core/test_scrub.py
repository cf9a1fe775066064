"""A scrub reads every copy of every extent once, from where it stopped, and names what it finds to the byte."""

import os
from collections import Counter
from pathlib import Path

import pytest

from colibri.core.container import Container, open_container
from colibri.core.direct_file import BUFFER_BYTES, DirectFile
from colibri.core.scrub import Finding, Position, Scrub
from colibri.core.tensors import crc32c
from testkit.checkpoints import write_td
from testkit.container_damage import flip
from testkit.packing import copy_container, pack_folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A container over three drives, every stripe mirrored; not to be changed."""
    root = tmp_path_factory.mktemp("container")
    folders = [root / name for name in ("a", "b", "c")]
    pack_folder(write_td(root / "td"), folders, weights=[2, 1, 1], mirror=True)
    return folders


@pytest.fixture
def folders(original: list[Path], tmp_path: Path) -> list[Path]:
    return copy_container(original, tmp_path)


def opened(folders: list[Path]) -> Container:
    return open_container(folders[0], folders[1:])


def findings(folders: list[Path]) -> list[Finding]:
    with opened(folders) as container, Scrub(container) as scrub:
        return [step.finding for step in scrub if step.finding]


def test_every_copy_of_every_extent_is_read_once(folders: list[Path]) -> None:
    with opened(folders) as container, Scrub(container) as scrub:
        steps = list(scrub)
        assert [step.finding for step in steps if step.finding] == []
        read = Counter[Path]()
        for step in steps:
            read[step.path] += step.bytes
        for number, path in enumerate(container.stripe_paths):
            mirror = container.mirror_paths[number]
            assert mirror is not None
            assert read.pop(path) == read.pop(mirror) == path.stat().st_size - 4096
        assert not read
        assert scrub.total_bytes == scrub.done_bytes == sum(step.bytes for step in steps)


def test_a_damaged_extent_is_named_with_drive_file_offset_layer_and_expert(folders: list[Path]) -> None:
    with opened(folders) as container:
        extent = container.extents(0)[5, 0]
        stripe, offset = int(extent["stripe"]), int(extent["file_offset"])
        mirror = container.mirror_paths[stripe]
        assert mirror is not None
    flip(mirror, offset + 4095)
    (found,) = findings(folders)
    assert (found.path, found.stripe, found.mirror) == (mirror, stripe, True)
    assert (found.layer, found.expert, found.offset, found.bytes) == (1, 5, offset, int(extent["bytes"]))
    assert str(found).startswith(f"{mirror}: layer 1, expert 5: {extent['bytes']} bytes at offset {offset}: CRC-32C is")


def test_what_a_drive_no_longer_gives_is_a_finding_and_the_rest_is_still_read(folders: list[Path]) -> None:
    with opened(folders) as container, Scrub(container) as scrub:
        path = container.stripe_paths[1]
        first = next(scrub)
        os.truncate(path, 4096 + 100)
        rest = list(scrub)
        lost = [step.finding for step in (first, *rest) if step.finding]
        on_it = [step for step in rest if step.path == path]
    assert {finding.path for finding in lost} == {path}
    assert len(lost) == len(on_it) > 1
    assert all("cannot be read: the file ends before offset" in finding.problem for finding in lost)


def test_a_stopped_scrub_goes_on_where_it_was(folders: list[Path]) -> None:
    with opened(folders) as container, Scrub(container) as whole:
        everything = [(step.path, step.bytes) for step in whole]
    for stop in (0, 1, 5, len(everything) - 1):
        with opened(folders) as container:
            with Scrub(container) as first:
                before = [next(first) for _ in range(stop)]
                text = first.position.text()
            with Scrub(container, Position.parse(text)) as second:
                assert second.done_bytes + sum(size for _, size in rest_of(second)) == second.total_bytes
            with Scrub(container, Position.parse(text)) as second:
                read = {(step.path, step.bytes) for step in before} | set(rest_of(second))
        assert read == set(everything)


def rest_of(scrub: Scrub) -> list[tuple[Path, int]]:
    return [(step.path, step.bytes) for step in scrub]


def test_a_position_of_another_container_or_at_the_end_begins_anew(folders: list[Path]) -> None:
    with opened(folders) as container:
        with Scrub(container) as scrub:
            steps = len(list(scrub))
            end = scrub.position
        for position in (end, Position("another", 3), Position(end.uuid, 10**12)):
            with Scrub(container, position) as scrub:
                assert len(list(scrub)) == steps


@pytest.mark.parametrize("text", ["", "3", "uuid", "uuid x", "uuid -1", " 5"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no position of a scrub"):
        Position.parse(text)


def test_a_lost_stripe_is_scrubbed_in_its_mirror(folders: list[Path]) -> None:
    (folders[1] / "stripe-001.colibri").unlink()
    with opened(folders) as container, Scrub(container) as scrub:
        paths = [step.path.name for step in scrub]
        assert scrub.done_bytes == scrub.total_bytes
    assert "mirror-001.colibri" in paths
    assert "stripe-001.colibri" not in paths


class TestDirectFile:
    def test_it_reads_any_size_in_pieces(self, tmp_path: Path) -> None:
        data = os.urandom(BUFFER_BYTES + 3 * 4096)
        (tmp_path / "file").write_bytes(data)
        with DirectFile(tmp_path / "file") as file:
            assert file.read(4096, len(data) - 4096) == data[4096:]
            assert file.crc32c(0, len(data)) == crc32c(data)
            assert [len(piece) for piece in file.pieces(0, len(data))] == [BUFFER_BYTES, 3 * 4096]

    def test_the_end_of_the_file_is_an_error_that_says_where(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(4096 * 2 + 1))
        with DirectFile(tmp_path / "file") as file, pytest.raises(EOFError, match="ends before offset 12288"):
            file.read(0, 4096 * 3)

    def test_it_does_without_where_the_file_system_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = os.urandom(8192)
        (tmp_path / "file").write_bytes(data)
        real = os.open

        def refusing(path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real(path, flags)

        monkeypatch.setattr(os, "open", refusing)
        with DirectFile(tmp_path / "file") as file:
            assert not file.direct
            assert file.read(0, 8192) == data
