"""BENCH=prefill: prompt tokens per second with every expert resident, against int8 multiply-add throughput.

The ceiling is arithmetic: multiply-adds per second of the widest integer instruction of the kernels (maddubs + paddw
for int8, maddwd + paddd for int16 activations), measured in the same run on as many threads, over those of a token.
"""

import argparse
import statistics
import time
from contextlib import closing
from pathlib import Path

from ceilings import Compute
from randommodel import OlmoeShape, packed
from report import result, table

from colibri.core.container import Container, open_container
from colibri.core.core import Model, ModelOptions, Sampling


def multiply_adds(container: Container) -> int:
    """Multiply-adds of one prompt token's matrix products (the head runs for the last token only)."""
    manifest = container.manifest
    total = sum(t.rows * t.cols for t in manifest.dense if t.rows > 1 and t.layer >= 0)
    for layer in manifest.expert_layers:
        total += manifest.spec.layers[layer.layer].moe.top_k * sum(part.rows * part.cols for part in layer.parts)
    return total


def prefill_seconds(model: Model, prompt: list[int]) -> float:
    with closing(model.sequence()) as seq:
        start = time.perf_counter()
        for first in range(0, len(prompt), 512):
            with closing(model.prefill(seq, prompt[first : first + 512], Sampling())) as cursor:
                model.step([], [cursor])
                if cursor.error:
                    raise cursor.error
        return time.perf_counter() - start


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=prefill", description=__doc__)
    parser.add_argument("--container", type=Path, help="instead of the OLMoE-shaped random model")
    parser.add_argument("--stripe", type=Path, action="append", default=[])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--activation", choices=["i8", "i16"], default="i16")
    options = parser.parse_args(argv)
    folder = options.container or packed(OlmoeShape(layers=options.layers))
    with open_container(folder, options.stripe) as container:
        slots = sum(layer.experts for layer in container.manifest.expert_layers)
        model_options = ModelOptions(
            expert_slots=slots, kv_pages=options.prompt // 64 + 2, max_context=options.prompt + 64, pass_tokens=512,
            activation="i8" if options.activation == "i8" else "i16",
        )  # fmt: skip
        with Model(container, model_options) as model:
            model.load()
            vocab = min(container.manifest.spec.vocab_size, 260)
            prompt = [(31 * i + 7) % vocab for i in range(options.prompt)]
            prefill_seconds(model, prompt)  # reads the experts
            compute = Compute(threads=model.stats().threads, activation=options.activation)
            times = []
            for _ in range(options.rounds):
                compute.sample()
                times.append(prefill_seconds(model, prompt))
        work = multiply_adds(container)
    rate = options.prompt / statistics.median(times)
    table(
        f"prefill, {folder.name}, {options.prompt} tokens, {options.activation} activations",
        ["", "value"],
        [
            ["tokens/s (median)", f"{rate:.1f}"],
            ["multiply-adds per token", f"{work / 1e9:.3f} G"],
            ["reached", f"{rate * work / 1e9:.1f} G/s"],
            ["ceiling (median)", f"{compute.rate / 1e9:.1f} G/s"],
        ],
    )
    result("prefill", folder.name, rate, "tok/s", compute.rate / work, prompt_tokens=options.prompt)
    return 0
