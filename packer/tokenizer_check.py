"""tokenizer.json, tried at pack time: a tokenizer that the daemon could not load, or that gives ids without a row.

Owns that check alone. Refuses an unknown schema, naming the version, and an id at or beyond the embedding's rows. How
text becomes ids when serving is the daemon's business.
"""

from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.errors import CheckpointError, UnsupportedCheckpointError
from colibri.packer.safetensors_file import parse_json
from colibri.packer.wording import counted


def check_tokenizer(checkpoint: Checkpoint, rows: int) -> tuple[str, ...]:
    """Return warnings about tokenizer.json; `rows` is the number of the embedding's rows.

    Raises UnsupportedCheckpointError if the tokenizers library cannot read the file, CheckpointError if a token's id is
    not below `rows`.
    """
    path = next((path for path in checkpoint.bundled if path.name == "tokenizer.json"), None)
    if path is None:
        return ("no tokenizer.json in the checkpoint: the container has none, and colibrid cannot serve it",)
    raw = checkpoint.read_file(path)
    content = parse_json(path, raw)
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception
        version = content.get("version")
        raise UnsupportedCheckpointError(
            f"{path}: schema version {version!r} cannot be read by tokenizers {tokenizers_version}: {error}"
        ) from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    stated = _added_tokens(content)
    beyond = sorted((token_id, token) for token, token_id in {*vocabulary.items(), *stated} if token_id >= rows)
    if beyond:
        token_id, token = beyond[0]
        tokens = counted(len(beyond), "token has", "tokens have")
        raise CheckpointError(
            f"{path}: {tokens} no row in the embedding, which has {rows}: {token!r} has id {token_id}"
        )
    return tuple(
        f"tokenizer.json gives {token!r} the id {token_id}, the tokenizers library gives it {vocabulary.get(token)}"
        for token, token_id in stated
        if vocabulary.get(token) != token_id
    )


def _added_tokens(content: dict[str, object]) -> list[tuple[str, int]]:
    """The added tokens and their ids as the file states them. The library numbers them anew where there are gaps."""
    entries = content.get("added_tokens")
    entries = entries if isinstance(entries, list) else []
    return [(entry["content"], entry["id"]) for entry in entries]  # the library has read these very fields
