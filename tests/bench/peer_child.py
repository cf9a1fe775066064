"""Runs in the peer's own interpreter: llama.cpp over a GGUF file, fed token by token; the last line is a JSON result.

`python peer_child.py JOB` with JOB a JSON object: gguf, mode ("decode" or "prefill"), tokens, warm_tokens, threads,
ubatch, repack, seconds. Imports nothing of Colibri. A run stops by itself after `seconds`, with what it has.
"""

import json
import sys
import time
from typing import Any

import llama_cpp as peer  # type: ignore[import-not-found]


def _context(job: dict[str, Any]) -> Any:
    peer.llama_backend_init()
    model_options = peer.llama_model_default_params()
    model_options.load_mode = peer.LLAMA_LOAD_MODE_MMAP
    model_options.use_extra_bufts = job["repack"]
    model = peer.llama_model_load_from_file(job["gguf"].encode(), model_options)
    if not model:
        raise RuntimeError(f"{job['gguf']}: llama.cpp does not load it")
    options = peer.llama_context_default_params()
    options.n_ctx = len(job["tokens"]) + 64
    options.n_batch = max(job["ubatch"], 32)
    options.n_ubatch = max(job["ubatch"], 32)
    options.n_threads = options.n_threads_batch = job["threads"]
    context = peer.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError("llama.cpp makes no context")
    return context


def _feed(context: Any, tokens: list[int]) -> float:
    """Seconds that llama.cpp takes for these tokens, appended to what it has seen."""
    array = (peer.llama_token * len(tokens))(*tokens)
    start = time.perf_counter()
    code = peer.llama_decode(context, peer.llama_batch_get_one(array, len(tokens)))
    peer.llama_synchronize(context)
    if code:
        raise RuntimeError(f"llama_decode returned {code}")
    return time.perf_counter() - start


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Feed the tokens and return the seconds of each piece."""
    started = time.perf_counter()
    context = _context(job)
    loaded = time.perf_counter() - started
    pieces = [[token] for token in job["tokens"]]
    if job["mode"] == "prefill":
        size = job["ubatch"]
        pieces = [job["tokens"][first : first + size] for first in range(0, len(job["tokens"]), size)]
    seconds: list[float] = []
    for piece in pieces:
        if time.perf_counter() - started > job["seconds"]:
            break
        seconds.append(_feed(context, piece))
    # A run that ended early has seen the whole model many times over by its second half.
    cold = job["warm_tokens"] if len(seconds) == len(pieces) else min(job["warm_tokens"], len(seconds) // 2)
    info = peer.llama_print_system_info()
    return {
        "load_seconds": loaded,
        "cold_seconds": seconds[:cold],
        "seconds": seconds[cold:],
        "fed": sum(len(piece) for piece in pieces[: len(seconds)]),
        "system": info.decode(errors="replace").strip(),
        "version": peer.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
