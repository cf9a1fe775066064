"""How experts are read, seen from Python: back ends, verify modes, what drives tell, mirrors, reopening, the probe."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from colibri.core import drives
from colibri.core.container import open_container
from colibri.core.core import Model
from colibri.core.core_options import IoBackend, Verify
from colibri.core.errors import CorruptError, InvalidError, StorageError, UnsupportedError
from testkit.damage import copy_of
from testkit.models import F32, GREEDY, OPTIONS, Tiny, opened, prefill, run, same_bits, some_tokens
from testkit.packing import pack_folder

TOKENS = some_tokens(40)
BACKENDS: tuple[IoBackend, ...] = ("io_uring", "threads")


@contextmanager
def reading(tiny: Tiny, backend: IoBackend, verify: Verify = "always") -> Iterator[Model]:
    """A loaded model that keeps hardly any experts; skips where the kernel refuses io_uring."""
    options = replace(OPTIONS, expert_slots=2, ring_slots=2, io_backend=backend, verify=verify)
    with open_container(tiny.folders[0], tiny.folders[1:]) as container:
        try:
            model = Model(container, options)
        except UnsupportedError as error:
            pytest.skip(str(error))
        with model:
            model.load()
            yield model


@pytest.fixture
def expected(tiny_int4: Tiny) -> F32:
    with opened(tiny_int4) as model:
        return prefill(model, model.sequence(), TOKENS)


@pytest.fixture
def mirrored(tmp_path: Path, tiny_int4: Tiny) -> Tiny:
    """The weights of tiny_int4 on two drives, every stripe mirrored on the other one."""
    folders = (tmp_path / "a", tmp_path / "b")
    pack_folder(tiny_int4.checkpoint, folders, weights=[2, 1], mirror=True)
    return Tiny(tiny_int4.checkpoint, folders)


def flip(path: Path, start: int = 4096) -> None:
    """Change every byte of a stripe's records."""
    content = np.fromfile(path, np.uint8)
    content[start:] ^= 0x41
    with path.open("r+b") as file:
        file.write(content.tobytes())


@pytest.mark.parametrize("verify", ["always", "first", "never"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_back_end_and_verify_mode_do_not_show(
    tiny_int4: Tiny, expected: F32, backend: IoBackend, verify: Verify
) -> None:
    with reading(tiny_int4, backend, verify) as model:
        for _ in range(2):
            assert same_bits(prefill(model, model.sequence(), TOKENS), expected)
        stats = model.drive_stats()
        assert [drive.backend for drive in stats] == [backend] * len(tiny_int4.folders)
        assert sum(drive.read_bytes for drive in stats) == model.stats().expert_bytes > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_drive_tells_what_it_has_done(tiny_int4: Tiny, backend: IoBackend) -> None:
    with reading(tiny_int4, backend) as model:
        assert all(drive.reads == drive.latency_p99_us == 0 for drive in model.drive_stats())
        prefill(model, model.sequence(), TOKENS)
        for drive in model.drive_stats():
            assert drive.reads > 0
            assert drive.busy_us > 0
            assert 0 < drive.latency_p50_us <= drive.latency_p99_us
            assert (drive.errors, drive.retries, drive.checksum_errors, drive.mirror_reads) == (0, 0, 0, 0)
            assert (drive.mirror, drive.degraded, drive.last_error) == (False, False, "")
        assert sum(drive.cpu_us for drive in model.drive_stats()) > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_stripe_is_read_from_its_mirror_with_the_same_bits(
    mirrored: Tiny, expected: F32, backend: IoBackend
) -> None:
    flip(mirrored.folders[0] / "stripe-000.colibri")
    with reading(mirrored, backend) as model:
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)
        bad, good = model.drive_stats()
        assert bad.mirror
        assert bad.degraded
        assert bad.mirror_reads == bad.retries > 0
        assert "fail their checksum" in bad.last_error
        assert (good.mirror_reads, good.degraded) == (0, False)
        flip(mirrored.folders[0] / "stripe-000.colibri")  # repaired
        model.reopen_stripes()
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)
        healed = model.drive_stats()[0]
        assert (healed.degraded, healed.last_error, healed.mirror_reads) == (False, "", bad.mirror_reads)


def test_first_checks_again_what_is_read_from_a_reopened_stripe(tiny_int4: Tiny, tmp_path: Path) -> None:
    own = copy_of(tiny_int4, tmp_path)
    with reading(own, "auto", "first") as model:
        prefill(model, model.sequence(), TOKENS)
        for path in (folder / f"stripe-{number:03d}.colibri" for number, folder in enumerate(own.folders)):
            flip(path)
        model.reopen_stripes()
        with pytest.raises(CorruptError, match="fail their checksum"):
            run(model, model.prefill(model.sequence(), TOKENS, GREEDY))


def test_a_bad_mirror_under_a_bad_stripe_is_named_as_well(mirrored: Tiny) -> None:
    mirror = mirrored.folders[1] / "mirror-000.colibri"
    flip(mirrored.folders[0] / "stripe-000.colibri")
    flip(mirror)
    with reading(mirrored, "threads") as model, pytest.raises(CorruptError, match=f"its mirror \\({mirror}\\) fails"):
        run(model, model.prefill(model.sequence(), TOKENS, GREEDY))


def test_a_stripe_that_is_put_back_is_used_after_reopening(mirrored: Tiny, expected: F32) -> None:
    path = mirrored.folders[1] / "stripe-001.colibri"
    content = path.read_bytes()
    with reading(mirrored, "threads") as model:
        path.unlink()
        with pytest.raises(StorageError, match=r"stripe 1 \(.*open failed: No such file"):
            model.reopen_stripes()
        path.write_bytes((mirrored.folders[0] / "stripe-000.colibri").read_bytes())
        with pytest.raises(CorruptError, match="the file is stripe 0 of 2, expected 1 of 2"):
            model.reopen_stripes()
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)  # still from the file that is open
        path.unlink()
        path.write_bytes(content)
        model.reopen_stripes()
        assert same_bits(prefill(model, model.sequence(), TOKENS), expected)


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_the_probe_gives_bytes_per_second(tmp_path: Path, backend: IoBackend) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 << 20))
    rate = drives.probe(path, request_bytes=1 << 20, size_bytes=8 << 20, backend=backend)
    assert 1e5 < rate < 1e12


def test_a_probe_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with pytest.raises(CorruptError, match="has 8192 bytes"):
        drives.probe(path, request_bytes=1 << 20)
    with pytest.raises(InvalidError, match="multiple of 4096"):
        drives.probe(path, request_bytes=1000)
    with pytest.raises(InvalidError, match="does not fit"):
        drives.probe(path, request_bytes=-4096)
    with pytest.raises(StorageError, match="No such file"):
        drives.probe(tmp_path / "nothing", request_bytes=4096)
