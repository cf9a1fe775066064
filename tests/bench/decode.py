"""BENCH=decode: whole tokens with every expert resident, against the bytes that a token must read from memory.

value is tokens per second of one sequence; the ceiling is RAM bandwidth (measured between the tokens of the same run)
over the bytes one token touches: all dense matrices but the embedding, top_k experts of every layer, the KV so far.
python_share is the time between core calls while the daemon streams to a client in another process, over the time of a
token.
"""

import argparse
import statistics
import time
from contextlib import closing
from pathlib import Path

from ceilings import Ram
from randommodel import OlmoeShape, packed
from report import result, table
from streaming import python_share

from colibri.core.container import Container, open_container
from colibri.core.core import Model, ModelOptions, Row, Sampling, plan
from colibri.v1 import manifest_pb2

PROMPT = 64


def touched_bytes(container: Container, options: ModelOptions, positions: int) -> int:
    """Bytes of weights and KV that one token at `positions` must read."""
    manifest = container.manifest
    stored = plan(container, options)
    embedding = next(t for t in manifest.dense if t.role == manifest_pb2.TENSOR_ROLE_EMBEDDING)
    dense = sum(t.codes.bytes + t.scales.bytes + t.mins.bytes for t in manifest.dense)
    if not manifest.spec.tied_embeddings:
        dense -= embedding.codes.bytes + embedding.scales.bytes
    experts = sum(
        manifest.spec.layers[layer.layer].moe.top_k * sum(part.bytes for part in layer.parts)
        for layer in manifest.expert_layers
    )
    return dense + experts + stored.kv_page_bytes * positions // 64


def resident_options(container: Container, *, threads: int, activation: str, isa: str) -> ModelOptions:
    slots = sum(layer.experts for layer in container.manifest.expert_layers)
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


def decode_times(model: Model, prompt: list[int], tokens: int, ram: Ram) -> list[float]:
    """Seconds per token of one sequence, with a RAM sample every eighth token."""
    times: list[float] = []
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
            times.append(time.perf_counter() - start)
            if row.error:
                raise row.error
            row = Row(seq, row.next_token, Sampling(temperature=1.0, seed=7))
    return times


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=decode", description=__doc__)
    parser.add_argument("--container", type=Path, help="instead of the OLMoE-shaped random model")
    parser.add_argument("--stripe", type=Path, action="append", default=[])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--activation", choices=["i8", "i16"], default="i16")
    parser.add_argument("--isa", default="auto")
    options = parser.parse_args(argv)
    folder = options.container or packed(OlmoeShape(layers=options.layers))
    with open_container(folder, options.stripe) as container:
        model_options = resident_options(
            container, threads=options.threads, activation=options.activation, isa=options.isa
        )
        spec = container.manifest.spec
        with Model(container, model_options) as model:
            model.load()
            prompt = warm(model, spec.vocab_size, len(spec.layers))
            ram = Ram()
            decode_times(model, prompt, options.tokens, ram)  # the first round still reads experts
            before = model.stats()
            times = decode_times(model, prompt, options.tokens, ram)
            after = model.stats()
        touched = touched_bytes(container, model_options, PROMPT + options.tokens // 2)
    share_of_python = python_share(folder, options.stripe, tokens=options.tokens)
    median = statistics.median(times)
    loads = after.expert_loads - before.expert_loads
    table(
        f"decode, {folder.name}, {model_options.activation} activations",
        ["", "value"],
        [
            ["tokens/s (median)", f"{1 / median:.2f}"],
            ["bytes per token", f"{touched / 1e6:.1f} MB"],
            ["read rate", f"{touched / median / 1e9:.2f} GB/s"],
            ["RAM ceiling (median)", f"{ram.rate / 1e9:.2f} GB/s"],
            ["experts read from the drive in the measured round", str(loads)],
            ["python share", f"{100 * share_of_python:.2f} %"],
        ],
    )
    result("decode", folder.name, 1 / median, "tok/s", ram.rate / touched, python_share=share_of_python,
           bytes_per_token=touched, expert_loads=loads, ram_gb_per_s=ram.rate / 1e9)  # fmt: skip
    return 0
