"""A daemon under a real memory limit: it plans within, serves a model bigger than that, and nobody has to kill it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit.loop_drives import CGROUPS, group, why_not
from testkit.models import Tiny, some_tokens
from testkit.process import COMMAND, EVER, serving, write_config
from testkit.repository import ROOT
from testkit.service import request, tokens_of

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

MIB = 1 << 20
LIMIT = 256 * MIB
VOCAB = 512


@pytest.fixture(scope="module")
def slice_of_a_giant(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """230 MB of experts over two stripes."""
    sys.path.insert(0, str(ROOT / "tests" / "bench"))
    try:
        giant: Any = importlib.import_module("giant")
    finally:
        sys.path.pop(0)
    folder = tmp_path_factory.mktemp("giant")
    folders = (folder / "drive0", folder / "drive1")
    shape = dataclasses.replace(
        giant.SMALL, hidden=1024, experts=64, intermediate=512, moe_layers=4, heads=8, head_dim=64, vocab=VOCAB
    )
    giant.write_giant(shape, folders, (1, 1))
    return Tiny(folder, folders)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_model_bigger_than_its_limit_is_planned_served_and_not_killed(
    tmp_path: Path, slice_of_a_giant: Tiny, direct: str
) -> None:
    config = write_config(tmp_path, slice_of_a_giant, memory="auto", direct=direct, max_context=512, kv_tokens=2048)
    with group(memory_bytes=LIMIT) as limited:
        plan = json.loads(limited.run([*COMMAND, "plan", "--json", "--config", str(config)], timeout=EVER).stdout)
        assert str(CGROUPS) in plan["budget_source"]
        assert str(LIMIT) in plan["budget_source"]
        assert plan["planned_bytes"] <= plan["budget_bytes"] < LIMIT
        assert 0 < 3 * plan["expert_slots"] < plan["experts"]
        with serving(config, popen=limited.popen) as process:
            prompt = some_tokens(200, vocab_size=VOCAB)
            first = tokens_of(process.generate(prompt, max_tokens=24))
            calls = [process.inference.Generate(request(prompt[start:], max_tokens=24)) for start in range(6)]
            assert all(len(tokens_of(list(call))) == 24 for call in calls)
            assert tokens_of(process.generate(prompt, max_tokens=24)) == first
            planned = _planned_bytes(process.log)
            assert process.status("RssAnon") <= planned + max(planned // 50, 64 * MIB)
            assert limited.memory_bytes() <= LIMIT
        assert limited.out_of_memory_kills() == 0


def _planned_bytes(log: Path) -> int:
    """Of the memory table in a daemon's log."""
    line = next(line for line in log.read_text().splitlines() if line.startswith("planned "))
    return int(float(line.split()[1].replace(",", "")) * MIB)


def test_a_limit_that_is_too_small_is_refused_with_the_table_and_its_source(
    tmp_path: Path, slice_of_a_giant: Tiny
) -> None:
    config = write_config(tmp_path, slice_of_a_giant, memory="auto", max_context=512)
    with group(memory_bytes=96 * MIB) as limited:
        done: subprocess.CompletedProcess[str] = limited.run([*COMMAND, "serve", "--config", str(config)], timeout=EVER)
        assert done.returncode == 78, done.stderr
        assert "this does not fit even with one expert slot" in done.stderr
        assert f"= {96 * MIB} of {CGROUPS}" in done.stderr
        assert limited.out_of_memory_kills() == 0
