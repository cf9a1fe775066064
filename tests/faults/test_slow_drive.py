"""A drive that has become very slow: answers are late and right, and who has had enough gets away in bounded time."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.v1 import inference_service_pb2 as inference_pb2
from colibri.v1 import types_pb2
from testkit.loop_drives import DriveSpec, group, loop_drives, why_not
from testkit.models import Tiny, make_tiny
from testkit.process import Process, serving, write_config
from testkit.scene import greedy
from testkit.service import request, tokens_of
from testkit.watched import device, stats_of

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(120)]

Generation = types_pb2.Generation
MB = 1_000_000
ROOM = 40 << 20
PATIENCE = 8.0  # seconds; reading all experts takes twice as long
SIZES = {"num_experts": 40, "num_experts_per_tok": 2, "moe_intermediate_size": 604, "max_position_embeddings": 512}
PROMPT, TOKENS = [5, 9], 3
LONG_PROMPT = [token % 130 + 3 for token in range(3, 1200, 7)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model whose records are cut over two drives: whatever it does, it needs both."""
    folder = tmp_path_factory.mktemp("large")
    return make_tiny("qwen3_moe", folder, "all=f32", (1, 1), num_hidden_layers=2, mlp_only_layers=[], **SIZES)


@pytest.fixture
def slow(large: Tiny, tmp_path: Path) -> Iterator[Process]:
    """A daemon whose second drive reads 1 MB/s."""
    with loop_drives([DriveSpec(ROOM, MB)], under=tmp_path) as (drive,):
        primary = Path(shutil.copytree(large.folders[0], tmp_path / "primary"))
        shutil.copytree(large.folders[1], drive.folder, dirs_exist_ok=True)
        drive.prefault()
        config = write_config(tmp_path / "d", Tiny(large.checkpoint, (primary, drive.folder)), max_context=512)
        with group([drive]) as made, serving(config, popen=made.popen) as process:
            yield process


def test_answers_are_late_and_right(slow: Process, large: Tiny) -> None:
    began = time.monotonic()
    events = slow.generate(PROMPT, max_tokens=TOKENS)
    seconds = time.monotonic() - began
    assert events[-1].finished.state == Generation.STATE_SUCCEEDED
    assert tokens_of(events) == greedy(large, PROMPT, TOKENS)
    stats = stats_of(slow)
    assert seconds > 0.7 * device(stats).read_bytes / MB
    assert device(stats).latency_ms_p99 > 100 > device(stats, stripe=0).latency_ms_p99
    assert device(stats).busy_seconds > 0.5 * seconds
    assert not stats.degraded  # slow is not broken


def test_a_long_prompt_can_be_cancelled_in_bounded_time(slow: Process, large: Tiny) -> None:
    stream = begun(slow)
    name = next(stream).started.name
    began = time.monotonic()
    ended = slow.inference.CancelGeneration(inference_pb2.CancelGenerationRequest(name=name))
    assert time.monotonic() - began < PATIENCE
    assert ended.state == Generation.STATE_CANCELLED
    again = slow.generate(PROMPT, max_tokens=1)
    assert tokens_of(again) == greedy(large, PROMPT, 1)


def test_sigterm_ends_the_daemon_in_bounded_time(slow: Process) -> None:
    stream = begun(slow)
    next(stream)
    began = time.monotonic()
    assert slow.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < PATIENCE


def begun(process: Process) -> Iterator[types_pb2.GenerateEvent]:
    """The events of a request that would keep the slow drive busy for a long time."""
    stream: Iterator[types_pb2.GenerateEvent] = process.inference.Generate(request(LONG_PROMPT, max_tokens=TOKENS))
    return stream
