"""BENCH=decode: whole tokens against the bytes that a token must read from memory and from the drives.

value is tokens per second of one sequence; the ceiling is one over max(touched / RAM bandwidth, missed / drive
bandwidth), both measured in the same run, RAM between the tokens. Touched are all dense matrices but the embedding,
top_k experts of every layer and the KV so far; missed is what the run read from the stripes per token: nothing unless
--slots leaves experts out.
python_share is the time between core calls while the daemon streams to a client in another process, over the time of a
token; at PYTHON_LIMIT or above it the benchmark ends with 1.
"""

import argparse
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ceilings import Ram, disk_rate
from randommodel import OlmoeShape, packed
from report import result, table
from streaming import python_share
from touched import touched_bytes

from colibri.core.container import Container, open_container
from colibri.core.core import Model, ModelOptions, Row, Sampling

PROMPT = 64
PYTHON_LIMIT = 0.02


def bench_options(container: Container, *, slots: int, threads: int, activation: str, isa: str) -> ModelOptions:
    slots = slots or sum(layer.experts for layer in container.manifest.expert_layers)
    return ModelOptions(
        expert_slots=slots, kv_pages=32, max_context=1024, pass_tokens=PROMPT, threads=threads,
        activation="i8" if activation == "i8" else "i16", isa=isa,
    )  # fmt: skip


def warm(model: Model, vocab: int, layers: int) -> list[int]:
    """Make the sequence's prompt and touch experts until most are resident; returns a prompt."""
    prompt = [(17 * i + 3) % min(vocab, 260) for i in range(PROMPT)]
    with (
        closing(model.sequence()) as seq,
        closing(model.prefill(seq, prompt, Sampling(temperature=1.0, seed=layers))) as cursor,
    ):
        model.step([], [cursor])
        if cursor.error:
            raise cursor.error
    return prompt


@dataclass
class Round:
    """What one sequence's decoding took: seconds per token, and bytes and experts read from the stripes."""

    times: list[float]
    missed_bytes: int = 0
    loads: int = 0


def decode_round(model: Model, prompt: list[int], tokens: int, ram: Ram) -> Round:
    """Decode `tokens` tokens of one sequence, with a RAM sample before every eighth."""
    seen = Round([])
    with closing(model.sequence()) as seq:
        with closing(model.prefill(seq, prompt, Sampling())) as cursor:
            model.step([], [cursor])
            token = cursor.next_token
        row = Row(seq, token, Sampling(temperature=1.0, seed=7))
        for index in range(tokens):
            if index % 8 == 0:
                ram.sample()
            start = time.perf_counter()
            model.step([row], [])
            seen.times.append(time.perf_counter() - start)
            if row.error:
                raise row.error
            seen.missed_bytes += row.counts.bytes
            seen.loads += row.counts.loads
            row = Row(seq, row.next_token, Sampling(temperature=1.0, seed=7))
    return seen


def drives_rate(container: Container) -> float:
    """Bytes per second of all drives together, each stripe read alone by the independent reader."""
    return sum(disk_rate(path, min(path.stat().st_size, 1 << 30)) for path in container.stripe_paths)


def measure(container: Container, options: ModelOptions, tokens: int, ram: Ram) -> Round:
    spec = container.manifest.spec
    with Model(container, options) as model:
        model.load()
        prompt = warm(model, spec.vocab_size, len(spec.layers))
        decode_round(model, prompt, tokens, ram)  # the first round still reads experts
        return decode_round(model, prompt, tokens, ram)


def verdict(share_of_python: float) -> tuple[str, int]:
    """What the table says about Python's share, and the exit code."""
    kept = share_of_python < PYTHON_LIMIT
    said = "as it must be" if kept else "TOO MUCH: it must be"
    return f"{100 * share_of_python:.2f} %, {said} below {100 * PYTHON_LIMIT:g} %", 0 if kept else 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=decode", description=__doc__)
    parser.add_argument("--container", type=Path, help="instead of the OLMoE-shaped random model")
    parser.add_argument("--stripe", type=Path, action="append", default=[])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=0, help="experts kept in memory (default: all)")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--activation", choices=["i8", "i16"], default="i16")
    parser.add_argument("--isa", default="auto")
    options = parser.parse_args(argv)
    folder = options.container or packed(OlmoeShape(layers=options.layers))
    ram = Ram()
    with open_container(folder, options.stripe) as container:
        model_options = bench_options(
            container, slots=options.slots, threads=options.threads, activation=options.activation, isa=options.isa
        )
        seen = measure(container, model_options, options.tokens, ram)
        touched = touched_bytes(container, model_options, PROMPT + options.tokens // 2)
        drives = drives_rate(container)
    share_of_python = python_share(folder, options.stripe, tokens=options.tokens)
    # Tokens that miss differ from each other, so their mean counts; without misses the median keeps neighbours out.
    missed = seen.missed_bytes / options.tokens
    seconds = statistics.mean(seen.times) if missed else statistics.median(seen.times)
    floor = max(touched / ram.rate, missed / drives)
    said, code = verdict(share_of_python)
    table(
        f"decode, {folder.name}, {model_options.activation} activations",
        ["", "value"],
        [
            ["tokens/s", f"{1 / seconds:.2f}"],
            ["touched in memory per token", f"{touched / 1e6:.1f} MB"],
            ["RAM ceiling (median)", f"{ram.rate / 1e9:.2f} GB/s"],
            ["read from the drives per token", f"{missed / 1e6:.1f} MB"],
            ["drive ceiling", f"{drives / 1e9:.2f} GB/s"],
            ["floor of a token", f"{1e3 * floor:.1f} ms, taken {1e3 * seconds:.1f} ms"],
            ["python share", said],
        ],
    )
    result("decode", folder.name, 1 / seconds, "tok/s", 1 / floor, python_share=share_of_python,
           touched_bytes=touched, missed_bytes=missed, expert_loads=seen.loads, ram_gb_per_s=ram.rate / 1e9,
           drive_gb_per_s=drives / 1e9)  # fmt: skip
    return code
