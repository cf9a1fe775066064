"""A daemon as a process of its own whose every token is TEXT_BYTES of text: streams are large, the model is not.

Usage: python -m testkit.wordy_daemon FOLDER. Serves on FOLDER/d.sock, prints `ready`, and stops when its input ends.
"""

import asyncio
import sys
from pathlib import Path

from testkit.service import VOCAB, ScriptedModel, daemon
from testkit.tiny_tokenizer import added_ids

TEXT_BYTES = 5000
CONTEXT = 8192
WORD = added_ids(VOCAB)["<note>"]


def make_wordy(tokenizer_json: Path) -> None:
    tokenizer_json.write_text(tokenizer_json.read_text().replace("<note>", "x" * TEXT_BYTES))


async def serve(folder: Path) -> None:
    # One token at a time leaves the model, slowly enough for a message of its own each.
    model = ScriptedModel(script=[WORD], max_context=CONTEXT, kv_pages=4 * CONTEXT // 64, item_seconds=0.0002)
    async with daemon(folder, model, change_tokenizer=make_wordy):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
