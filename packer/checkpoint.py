"""A Hugging Face checkpoint in a local folder: config.json, safetensors shards, tokenizer files.

Owns the folder: everything is checked when it is opened, tensor bytes are read when asked for, in pieces, with pread.
Refuses what is broken (CheckpointError) and knows nothing of what a tensor means; that is families'. Links, relative
ones too, are followed from any working directory as the file system follows them.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from colibri.packer.errors import CheckpointError
from colibri.packer.open_files import DEFAULT_MAX_OPEN_FILES, DEFAULT_PIECE_BYTES, OpenFiles
from colibri.packer.safetensors_file import DTYPE_BITS, TensorInfo
from colibri.packer.shards import Shards, collect, read_json

# Files that travel into the container as they are, where the checkpoint has them.
BUNDLED_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class Checkpoint:
    """An open checkpoint. Use as a context manager; reading is safe from several threads.

    `config` is config.json as parsed, `bundled` the tokenizer and config files that are present, `tensors` every tensor
    that counts, `unindexed` those in a shard that the index leaves out, `files` the shards in name order.
    """

    def __init__(self, folder: Path, files: OpenFiles, config: dict[str, object], shards: Shards) -> None:
        self.folder = folder
        self.config: Mapping[str, object] = MappingProxyType(config)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(shards.tensors)
        self.unindexed: Mapping[str, Path] = MappingProxyType(shards.unindexed)
        self.files = shards.files
        self.ignored_copies = shards.ignored_copies
        self.warnings = shards.warnings
        self.bundled = tuple(path for path in (folder / name for name in BUNDLED_NAMES) if _is_there(path))
        self._open_files = files

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        max_open_files: int = DEFAULT_MAX_OPEN_FILES,
    ) -> Self:
        """Open and check the checkpoint in `folder`; nothing of the tensors' bytes is read yet.

        At most `piece_bytes` are asked of the system at once, at most `max_open_files` descriptors are held. Raises
        CheckpointError naming the file at fault.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not a folder")
        folder = folder.absolute()  # the working directory may change before the last read
        files = OpenFiles(piece_bytes=piece_bytes, max_open_files=max_open_files)
        try:
            config = read_json(files, folder / "config.json")
            return cls(folder, files, config, collect(files, folder))
        except BaseException:
            files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor; reads afterwards raise ValueError."""
        self._open_files.close()

    def file_bytes(self, path: Path) -> int:
        """Return the length of `path`, one of `files` or `bundled`."""
        return self._open_files.size(path)

    def read_file(self, path: Path) -> bytes:
        """Return the whole of `path`, one of `bundled`."""
        content = bytearray(self._open_files.size(path))
        self._open_files.read_into(path, 0, memoryview(content))
        return bytes(content)

    def read_into(
        self, name: str, buffer: bytearray | memoryview, *, start_element: int = 0, n_elements: int | None = None
    ) -> None:
        """Read elements [start_element, start_element + n_elements) of tensor `name`, by default all that follow.

        `buffer` is writable, C-contiguous and exactly as many bytes long. Raises KeyError for an unknown tensor,
        ValueError for a range or buffer that does not fit, CheckpointError naming file and offset when reading fails.
        """
        tensor = self.tensors[name]
        bits = DTYPE_BITS[tensor.dtype]
        total = tensor.bytes * 8 // bits
        if n_elements is None:
            n_elements = total - start_element
        if start_element < 0 or n_elements < 0 or start_element + n_elements > total:
            raise ValueError(f"{name}: elements [{start_element}, +{n_elements}) of {total}")
        if start_element * bits % 8 or n_elements * bits % 8:
            raise ValueError(f"{name}: {tensor.dtype} elements [{start_element}, +{n_elements}) are not whole bytes")
        view = memoryview(buffer).cast("B")
        if view.nbytes != n_elements * bits // 8:
            raise ValueError(f"{name}: a buffer of {view.nbytes} bytes for {n_elements * bits // 8}")
        if view.nbytes:
            self._open_files.read_into(tensor.file, tensor.offset + start_element * bits // 8, view)

    def read(self, name: str, rows: slice = slice(None)) -> memoryview:
        """Return the bytes of rows `rows` (of the first dimension, step 1) of tensor `name`; see read_into."""
        tensor = self.tensors[name]
        if not tensor.shape:
            raise ValueError(f"{name}: a scalar has no rows")
        begin, end, step = rows.indices(tensor.shape[0])
        if step != 1:
            raise ValueError(f"{name}: rows with step {step}")
        per_row = tensor.bytes * 8 // DTYPE_BITS[tensor.dtype] // max(1, tensor.shape[0])
        elements = max(0, end - begin) * per_row
        buffer = bytearray(elements * DTYPE_BITS[tensor.dtype] // 8)
        self.read_into(name, buffer, start_element=begin * per_row, n_elements=elements)
        return memoryview(buffer)


def _is_there(path: Path) -> bool:
    # A dangling link counts as present, so that reading it names the link instead of leaving the file out.
    return path.exists() or path.is_symlink()
