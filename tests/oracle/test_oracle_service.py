"""The oracle once more, through everything: colibrid as a process of its own, asked over gRPC on a Unix socket."""

from pathlib import Path

from testkit.models import make_tiny, some_tokens
from testkit.oracle import greedy_by, reference_model
from testkit.process import serving, write_config
from testkit.service import tokens_of

NEW_TOKENS = 32


def test_the_tokens_that_arrive_are_those_of_transformers(tmp_path: Path) -> None:
    tiny = make_tiny("qwen2_moe", tmp_path / "model")
    prompt = some_tokens(70)
    expected = greedy_by(reference_model(tiny.checkpoint), prompt, NEW_TOKENS)
    config = write_config(tmp_path / "daemon", tiny, kv_dtype="f32", max_context=128, expert_slots=5, pass_tokens=32)
    with serving(config) as process:
        events = process.generate(prompt, max_tokens=NEW_TOKENS)
        assert tokens_of(events) == expected
        assert events[-1].finished.usage.expert_loads > 5  # so some of them were evicted
