"""One measured run of the core over a slice, as a process of its own, so that cgroups can hold it to drives and memory.

`python slicerun.py MODE JOB` with MODE ceilings, decode or prefill and JOB a JSON object (`Job`); the last line of its
output is the JSON result. The tokens come from giant_weights.token_stream and are fed to the model whatever it samples,
so that every run routes alike. `ceilings` touches none of the product's code.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from testkit.loop_drives import Group

RESERVE_BYTES = 64 << 20  # of a memory limit: page tables, the loader's page cache, thread stacks
CEILING_BYTES = 512 << 20  # read from every drive
CREDIT_BYTES = 96 << 20
RAM_CEILING_BYTES = 128 << 20
PROMPT = 8


@dataclass(frozen=True)
class Job:
    """`folders`: the container's, the primary first. `slots` 0: as many as `memory_bytes` leaves room for beside the
    ring, which is the daemon's for that many; else all."""

    folders: list[str]
    slots: int = 0
    memory_bytes: int = 0
    io_backend: str = "auto"
    lookahead: str = "auto"
    tokens: int = 32
    warm_tokens: int = 32
    rounds: int = 1
    seed: int = 7
    threads: int = 0


class RunError(RuntimeError):
    """A run that did not give a result; the text has its last words."""


def run(mode: str, job: Job, group: Group | None, timeout: float = 1800) -> dict[str, Any]:
    """Run `mode` in a process of `group` (None: without limits) and return its result. Raises RunError."""
    import subprocess

    command = [sys.executable, __file__, mode, json.dumps(asdict(job))]
    if group is None:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    else:
        ended = group.run(command, timeout=timeout)
    if ended.returncode:
        killed = f", {group.out_of_memory_kills()} kills for memory" if group else ""
        raise RunError(f"{mode} ended with {ended.returncode}{killed}: {ended.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


# ---- in the process of its own ---------------------------------------------------------------------------------------


def _ceilings(job: Job) -> dict[str, Any]:
    """RAM and drive rates of the independent reader, bytes per second; drives one after the other."""
    from ceilings import Ram, disk_rate

    ram = Ram(size_bytes=RAM_CEILING_BYTES)
    for _ in range(9):
        ram.sample()
    stripes = [next(Path(folder).glob("stripe-*.colibri")) for folder in job.folders]
    drives = []
    for path in stripes:
        size = min(path.stat().st_size, CEILING_BYTES)
        block = min(4 << 20, size // 8 & ~4095)
        disk_rate(path, min(size, CREDIT_BYTES), block)  # a throttled drive that idled gives its first bytes at once
        drives.append(disk_rate(path, size, block))
    return {"ram_rate": ram.rate, "drive_rates": drives}


def _options(container: Any, job: Job, **more: Any) -> Any:
    """ModelOptions for the job; slots as many as fit."""
    from colibri.core.core import ModelOptions, plan
    from colibri.daemon.machine import anonymous_bytes
    from colibri.daemon.plan import ring_for

    def of(slots: int) -> Any:
        settings: dict[str, Any] = {
            "io_backend": job.io_backend, "lookahead": job.lookahead, "threads": job.threads, **more
        }  # fmt: skip
        return ModelOptions(expert_slots=slots, ring_slots=ring_for(slots), **settings)

    every = sum(layer.experts for layer in container.manifest.expert_layers)
    slots = job.slots or every
    if job.memory_bytes and not job.slots:
        room = job.memory_bytes - anonymous_bytes() - RESERVE_BYTES
        while slots and plan(container, of(slots)).total_bytes > room:
            slots -= 1
        if not slots:
            raise RunError(f"{job.memory_bytes} bytes leave no room for an expert: {plan(container, of(1))}")
    return of(slots)


def _drive_stats(model: Any) -> list[dict[str, Any]]:
    return [asdict(stats) for stats in model.drive_stats()]


def _open(job: Job) -> Any:
    from colibri.core.container import open_container

    folders = [Path(folder) for folder in job.folders]
    return open_container(folders[0], folders[1:])


def _decode(job: Job) -> dict[str, Any]:
    """Decode warm_tokens, then `tokens` that are measured: seconds, expert uses and bytes of each."""
    from giant_weights import token_stream
    from touched import touched_bytes

    from colibri.core.core import Model, Row, Sampling

    length = PROMPT + job.warm_tokens + job.tokens
    with _open(job) as container:
        options = _options(
            container,
            job,
            kv_pages=length // 64 + 2,
            max_context=length + 64,
            pass_tokens=PROMPT,
        )
        stream = list(islice(token_stream(container.manifest.spec.vocab_size, job.seed), length))
        with Model(container, options) as model:
            model.load()
            with closing(model.sequence()) as seq:
                with closing(model.prefill(seq, stream[:PROMPT], Sampling())) as cursor:
                    model.step([], [cursor])
                    if cursor.error:
                        raise cursor.error
                seconds: list[float] = []
                warm: list[float] = []
                hits = loads = 0
                for index, token in enumerate(stream[PROMPT:]):
                    if index == job.warm_tokens:
                        before, drives_before = model.stats(), _drive_stats(model)
                    row = Row(seq, token, Sampling())
                    start = time.perf_counter()
                    model.step([row], [])
                    if row.error:
                        raise row.error
                    (seconds if index >= job.warm_tokens else warm).append(time.perf_counter() - start)
                    if index >= job.warm_tokens:
                        hits, loads = hits + row.counts.hits, loads + row.counts.loads
            after, drives_after = model.stats(), _drive_stats(model)
            touched = touched_bytes(container, options, PROMPT + job.warm_tokens + job.tokens // 2)
    return _report(options, before, after, drives_before, drives_after) | {
        "seconds": seconds, "warm_seconds": warm, "hits": hits, "loads": loads, "touched_bytes": touched,
        "lookahead": _lookahead(before, after),
    }  # fmt: skip


def _lookahead(before: Any, after: Any) -> dict[str, int]:
    """The growth of lookahead's counters; "active": whether it was left on."""
    names = ("predicted", "right", "loads", "bytes", "wasted_bytes", "late", "saved_us", "us")
    grown = {name: getattr(after, f"lookahead_{name}") - getattr(before, f"lookahead_{name}") for name in names}
    return grown | {"active": after.lookahead_active}


def _report(
    options: Any, before: Any, after: Any, drives_before: Sequence[Any], drives_after: Sequence[Any]
) -> dict[str, Any]:
    """What both modes say: the counters' growth over the measured part."""
    import resource

    read = after.expert_bytes - before.expert_bytes
    wasted = after.lookahead_wasted_bytes - before.lookahead_wasted_bytes
    cpu = sum(drive["cpu_us"] for drive in drives_after) - sum(drive["cpu_us"] for drive in drives_before)
    return {
        "slots": options.expert_slots,
        "threads": after.threads,
        "backend": drives_after[0]["backend"],
        "wait_us": after.wait_us - before.wait_us,
        "compute_us": after.compute_us - before.compute_us,
        "read_bytes": read,
        "needed_bytes": read - wasted,
        "io_cpu_us": cpu,
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _prefill(job: Job) -> dict[str, Any]:
    """Prefill a prompt of `tokens` tokens in one pass, `rounds` times; seconds and bytes of each."""
    from giant_weights import token_stream

    from colibri.core.core import Model, Sampling

    with _open(job) as container:
        options = _options(
            container, job, kv_pages=job.tokens // 64 + 2, max_context=job.tokens + 64, pass_tokens=job.tokens
        )
        prompt = list(islice(token_stream(container.manifest.spec.vocab_size, job.seed), job.tokens))
        rounds = []
        with Model(container, options) as model:
            model.load()
            before, drives_before = model.stats(), _drive_stats(model)
            for _ in range(job.rounds):
                read = model.stats().expert_bytes
                with closing(model.sequence()) as seq, closing(model.prefill(seq, prompt, Sampling())) as cursor:
                    start = time.perf_counter()
                    model.step([], [cursor])
                    seconds = time.perf_counter() - start
                    if cursor.error:
                        raise cursor.error
                rounds.append({"seconds": seconds, "missed_bytes": model.stats().expert_bytes - read})
            after, drives_after = model.stats(), _drive_stats(model)
        every = sum(layer.experts * layer.record_bytes for layer in container.manifest.expert_layers)
    return _report(options, before, after, drives_before, drives_after) | {
        "rounds": rounds, "expert_bytes": every,
    }  # fmt: skip


MODES = {"ceilings": _ceilings, "decode": _decode, "prefill": _prefill}

if __name__ == "__main__":
    print(json.dumps(MODES[sys.argv[1]](Job(**json.loads(sys.argv[2])))))
