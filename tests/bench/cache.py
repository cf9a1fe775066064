"""BENCH=cache: the cache's hit rates on held-out routing, against other policies and against Belady's optimum.

Traces: those beside the repository (../shared/models/traces, or --traces), decoded by one sequence and by four side by
side; and the small real model's, which this benchmark records itself while it decodes texts of the repository, their
subject changing every 256 tokens. Policies learn on the first half of a trace and are counted on the second, at 5, 12,
25 and 50 % of all experts in memory. Ours is the core's own cache, replayed.

value is the mean hit rate of ours, the ceiling Belady's. best_online_share is ours over the best of the online policies
(pins and Belady left out), the worst over all traces and sizes; belady_N is our share of Belady's at N %.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import cache_folder, commit, result, table

from colibri.core.container import open_container
from colibri.core.core import Model, ModelOptions, Row, Sampling
from colibri.core.traces import KNOWN_ONLINE, POLICIES, Trace
from testkit.repository import ROOT
from testkit.routing_traces import write_routing

SIZES = (5, 12, 25, 50)
SUBJECT_TOKENS = 256
TEXTS = [
    *("docs/container.md", "csrc/kernels_avx2.c", "daemon/scheduler.py", "LICENSE", "docs/sessions.md", "csrc/core.py"),
    *("proto/colibri/v1/manifest.proto", "docs/numerics.md", "Makefile", "csrc/quantize.c"),
]


@dataclass(frozen=True)
class Rates:
    """Hit rates in % of every policy, of one trace at one size."""

    trace: str
    size: int
    slots: int
    hits: dict[str, float]

    @property
    def best_online(self) -> float:
        return max(self.hits[name] for name in KNOWN_ONLINE)


# ---- traces ---------------------------------------------------------------------------------------------------------


def converted(archive: Path, rows: int, ring: int) -> Path:
    """The trace file of an archive of routed experts, u8 [tokens, layers, top_k], decoded by `rows` sequences."""
    target = cache_folder() / f"{archive.stem}-{archive.stat().st_mtime_ns}-{rows}x{ring}.trace"
    if not target.exists():
        with np.load(archive) as arrays:
            experts, count = arrays["experts"], int(arrays["num_experts"])
        partial = target.with_suffix(".partial")
        write_routing(partial, experts, count, rows=rows, ring=ring)
        partial.rename(target)
    return target


def small_container() -> Path:
    """The small real model, packed as colibri-pack does by default; made at the first call."""
    maker = [sys.executable, str(ROOT / "tools" / "make_small_model.py")]
    source = Path(subprocess.run(maker, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    folder = cache_folder() / f"{source.name}-packed"
    if not (folder / "manifest.json").exists():
        subprocess.run([sys.executable, "-m", "colibri.packer.cli", str(source), "--out", str(folder)], check=True)
    return folder


def mixed_text(folder: Path, tokens: int, offset: int) -> list[int]:
    """Token ids of the repository's texts by turns, the next subject every SUBJECT_TOKENS."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    subjects = [tokenizer.encode((ROOT / name).read_text()).ids for name in TEXTS]
    out: list[int] = []
    for number in range(tokens // SUBJECT_TOKENS + 1):
        turn, subject = divmod(number + offset, len(subjects))
        ids = subjects[subject]
        start = turn * SUBJECT_TOKENS % max(len(ids) - SUBJECT_TOKENS, 1)
        out += ids[start : start + SUBJECT_TOKENS]
    return out[:tokens]


def record(folder: Path, rows: int, tokens: int, ring: int) -> Path:
    """Decode `tokens` tokens of given text in each of `rows` sequences and record the routing."""
    target = cache_folder() / f"{folder.name}-{rows}x{tokens}x{ring}-{commit().rstrip('+')}.trace"
    if target.exists():
        return target
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open_container(folder, []) as container:
        experts = sum(layer.experts for layer in container.manifest.expert_layers)
        pages = rows * (tokens // 64 + 2)
        options = ModelOptions(
            expert_slots=experts // 2, kv_pages=pages, ring_slots=ring, max_rows=rows, max_context=tokens + 64
        )
        with Model(container, options) as model:
            model.load()
            model.trace(partial)
            decode(model, [mixed_text(folder, tokens, 3 * row) for row in range(rows)])
            model.trace(None)
    partial.rename(target)
    return target


def decode(model: Model, texts: list[list[int]]) -> None:
    """One step per token, all texts side by side."""
    sequences = [model.sequence() for _ in texts]
    for step in range(len(texts[0])):
        rows = [Row(seq, text[step], Sampling()) for seq, text in zip(sequences, texts, strict=True)]
        model.step(rows, [])
        for row in rows:
            if row.error:
                raise row.error
    for seq in sequences:
        seq.close()


def all_traces(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for archive in sorted(options.traces.glob("*.npz")):
        for rows in (1, 4):
            yield f"{archive.stem} x{rows}", converted(archive, rows, options.ring)
    if not options.no_small_model:
        folder = options.container or small_container()
        for rows, tokens in ((1, options.tokens), (4, options.tokens // 2)):
            yield f"{folder.name} x{rows}", record(folder, rows, tokens, options.ring)
    for path in options.trace:
        yield path.stem, path


# ---- rates ----------------------------------------------------------------------------------------------------------


def rates_of(name: str, path: Path) -> list[Rates]:
    out = []
    with closing(Trace(path)) as trace:
        half = trace.info.accesses // 2
        for size in SIZES:
            slots = max(1, round(size / 100 * trace.info.records))
            hits = {name: 100 * trace.policy(name, slots, half).hit_rate for name in POLICIES}
            out.append(Rates(name, size, slots, hits))
    return out


def show(rates: list[Rates]) -> None:
    table(
        "hit rates in %, counted on the second half of each trace",
        ["trace", "in memory", *POLICIES],
        [
            [r.trace, f"{r.slots} ({r.size} %)", *(f"{r.hits[name]:.1f}" for name in POLICIES)]
            for r in rates
        ],
    )  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="BENCH=cache", description=__doc__)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "models" / "traces",
                        help="folder of .npz archives with arrays experts and num_experts")  # fmt: skip
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a recorded trace; repeatable")
    parser.add_argument("--container", type=Path, help="instead of the small real model")
    parser.add_argument("--no-small-model", action="store_true", help="record nothing")
    parser.add_argument("--tokens", type=int, default=2048, help="recorded from the model, by one sequence")
    parser.add_argument("--ring", type=int, default=8, help="slots of the read ring beside the cache")
    options = parser.parse_args(argv)
    rates = [r for name, path in all_traces(options) for r in rates_of(name, path)]
    if not rates:
        print("BENCH=cache: no traces", file=sys.stderr)
        return 1
    show(rates)
    shares = [r.hits["ours"] / r.best_online for r in rates if r.best_online > 0]
    pins = [r.hits["ours"] / r.hits["pins"] for r in rates if r.hits["pins"] > 0]
    belady = {
        f"belady_{size}": statistics.mean(r.hits["ours"] / r.hits["Belady"] for r in rates if r.size == size)
        for size in SIZES
    }
    result("cache", "held-out routing", statistics.mean(r.hits["ours"] for r in rates), "% hits",
           statistics.mean(r.hits["Belady"] for r in rates), best_online_share=min(shares), pins_share=min(pins),
           traces=len(rates) // len(SIZES), **belady)  # fmt: skip
    return 0
