"""`colibrid trace replay`: its table and its JSON against the trace, its forecast, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from colibri.core.traces import POLICIES, Trace
from colibri.daemon import cli
from testkit.models import Tiny, decode, make_tiny, opened, some_tokens
from testkit.routing_traces import write_routing

LAYERS, EXPERTS, TOP_K, STEPS, RECORD = 3, 16, 2, 200, 1_000_000


@pytest.fixture
def routing(tmp_path: Path) -> Path:
    chance = np.random.default_rng(3)
    weights = 1 / np.arange(1, EXPERTS + 1)
    ids = [[chance.choice(EXPERTS, TOP_K, False, weights / weights.sum()) for _ in range(LAYERS)] for _ in range(STEPS)]
    return write_routing(tmp_path / "routing.trace", np.array(ids), EXPERTS, record_bytes=RECORD)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = cli.main(["trace", "replay", "--json", *arguments])
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return code, document


def test_every_policy_at_every_size(routing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = as_json(capsys, str(routing), "--slots", "6", "--slots", "25%", "--learn", "0.25")
    assert code == 0
    results = report["results"]
    assert isinstance(results, list)
    assert [result["slots"] for result in results] == [6, 12]
    with Trace(routing) as trace:
        for result in results:
            assert list(result["policies"]) == list(POLICIES)
            for name, outcome in result["policies"].items():
                found = trace.policy(name, result["slots"], trace.info.accesses // 4)
                assert outcome["loads"] == found.loads
                assert outcome["hit_rate"] == pytest.approx(1 - found.loads / found.accesses)
                assert outcome["bytes_per_step"] == pytest.approx(found.loads * RECORD / found.steps)
                assert outcome["steps_per_second"] is None


def test_the_forecast_is_bytes_over_bandwidth_and_arithmetic(routing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(routing), "--slots", "6", "--learn", "0", "--drives", "100,50", "--compute-ms", "4")
    _, report = as_json(capsys, *arguments)
    _, half = as_json(capsys, *arguments, "--record-bytes", str(RECORD // 2))
    for document, size in ((report, RECORD), (half, RECORD // 2)):
        results = document["results"]
        assert isinstance(results, list)
        for outcome in results[0]["policies"].values():
            seconds = outcome["loads"] / STEPS * size / 150e6 + 4e-3
            assert outcome["steps_per_second"] == pytest.approx(1 / seconds)


def test_the_table_shows_the_same(routing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = as_json(capsys, str(routing), "--slots", "12", "--drives", "300")
    assert cli.main(["trace", "replay", str(routing), "--slots", "12", "--drives", "300"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "200 decode steps, 3 layers, 48 experts; 1200 uses by decoding, 0 by prompts"
    heads = [number for number, line in enumerate(lines) if line.startswith("slots ")]
    results = report["results"]
    assert isinstance(results, list)
    outcomes = results[0]["policies"]
    for head, shown in zip(heads, ("hit_rate", "steps_per_second"), strict=True):
        names, values = lines[head].split()[1:], lines[head + 1].replace("12 (25.0 %)", "").split()
        assert names == ["LRU", "LFU", "LFRU", "least-stale", "S3-FIFO", "pins", "ours", "Belady"]
        for name, value in zip(names, values, strict=True):
            expected = outcomes[name][shown] * (100 if shown == "hit_rate" else 1)
            assert float(value) == pytest.approx(expected, abs=0.051 if shown == "hit_rate" else 0.0051)


def test_a_recorded_run_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny: Tiny = make_tiny("qwen3_moe", tmp_path)
    with opened(tiny, expert_slots=3, ring_slots=2) as model:
        model.trace(tmp_path / "live.trace")
        decode(model, model.sequence(), some_tokens(30))
        model.trace(None)
        stats = model.stats()
    code, report = as_json(capsys, str(tmp_path / "live.trace"))
    exact, results = report["recorded"], report["results"]
    assert code == 0
    assert isinstance(exact, dict)
    assert isinstance(results, list)
    assert (exact["hits"], exact["loads"]) == (stats.expert_hits, stats.expert_loads)
    assert [result["slots"] for result in results] == [5]  # the recorded number, without --slots
    assert cli.main(["trace", "replay", str(tmp_path / "live.trace")]) == 0
    live = f"{stats.expert_hits} hits, {stats.expert_loads} loads"
    shown = capsys.readouterr().out
    assert f"in the ring: {live}" in shown
    assert f"replayed the same way: {live}" in shown


@pytest.mark.parametrize("slots", ["0", "49", "-1", "200%", "many", "nan%"])
def test_a_size_that_cannot_be_is_refused(routing: Path, capsys: pytest.CaptureFixture[str], slots: str) -> None:
    assert cli.main(["trace", "replay", str(routing), f"--slots={slots}"]) == 2
    assert f"colibrid: --slots {slots}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--drives=0", "--drives=100,-1", "--drives=fast", "--learn=1", "--compute-ms=-1", "--record-bytes=0"]
)
def test_an_argument_out_of_range_is_refused(routing: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["trace", "replay", str(routing), flag])
    assert refused.value.code == 2
    name, _, text = flag.partition("=")
    assert f"argument {name}: {text.split(',')[0]}" in capsys.readouterr().err


def test_a_damaged_trace_is_refused(routing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(routing.read_bytes())
    data[-5] ^= 1
    routing.write_bytes(data)
    assert cli.main(["trace", "replay", str(routing), "--slots", "5"]) == 1
    assert "fails its checksum" in capsys.readouterr().err
    code, report = as_json(capsys, str(routing), "--slots", "5")
    assert (code, report["ok"]) == (1, False)


def test_what_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none", tmp_path):
        assert cli.main(["trace", "replay", str(path), "--slots", "5"]) == 1
        assert str(path) in capsys.readouterr().err


def test_a_trace_without_decoding_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write_routing(tmp_path / "empty.trace", np.zeros((0, 2, 2), np.int64), 8)
    assert cli.main(["trace", "replay", str(empty), "--slots", "5"]) == 1
    assert "no decode steps in this trace" in capsys.readouterr().err
