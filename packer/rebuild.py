"""Makes single records and dense tensors of a container again from its checkpoint, by the quantiser that made them.

The bits are defined (docs/numerics.md), so what comes out is what was packed, or the checkpoint is another one; every
result is compared with the container's SHA-256 before it is given. Refuses a checkpoint that is another model. Memory
is bounded by one record, or by one tensor's scales.
"""

import hashlib
from collections.abc import Iterator

from colibri.core.tensors import Format
from colibri.packer.checkpoint import Checkpoint
from colibri.packer.encode import TILE_ROWS, EncodedPiece, Piece, cut_rows, encode
from colibri.packer.errors import CheckpointError
from colibri.packer.families import resolve
from colibri.packer.layout import PART_KINDS
from colibri.v1 import manifest_pb2


class Rebuilder:
    """A checkpoint that stands behind a container."""

    def __init__(self, checkpoint: Checkpoint, manifest: manifest_pb2.Manifest) -> None:
        """Raises CheckpointError for another model than the manifest's."""
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._model = resolve(checkpoint)
        same = (
            self._model.spec == manifest.spec
            and [tensor.name for tensor in self._model.dense] == [tensor.name for tensor in manifest.dense]
            and [layer.layer for layer in self._model.expert_layers] == [e.layer for e in manifest.expert_layers]
        )
        if not same:
            raise CheckpointError(f"{checkpoint.folder} is another model than the one in the container")

    def record(self, layer_index: int, expert: int, digest: bytes) -> bytes | None:
        """Return the record, or None if what the checkpoint gives has another SHA-256 than `digest`.

        Raises CheckpointError.
        """
        data = self.unproved(layer_index, expert)
        return data if hashlib.sha256(data).digest() == digest else None

    def unproved(self, layer_index: int, expert: int) -> bytes:
        """Return the record as the checkpoint has it; whether it is the container's is for the caller to prove.

        Raises CheckpointError.
        """
        source, layer = self._model.expert_layers[layer_index], self._manifest.expert_layers[layer_index]
        data = bytearray(layer.record_bytes)
        for index, (kind, part) in enumerate(zip(PART_KINDS, layer.parts, strict=True)):
            form, matrix = Format.from_proto(part.format), source.matrices(expert, kind)
            tile_bytes = part.bytes // -(-part.rows // TILE_ROWS)
            label = f"layers.{layer.layer}.experts.{expert}"
            for begin, end in cut_rows(part.rows, part.cols):
                piece = Piece(expert, index, label, matrix, form, part.cols, begin, end, tiled=True)
                codes = encode(self._checkpoint, piece).codes
                at = part.offset + begin // TILE_ROWS * tile_bytes
                data[at : at + len(codes)] = codes
        return bytes(data)

    def tensor(self, index: int) -> Iterator[EncodedPiece] | None:
        """Return the pieces of a dense tensor, or None if they have another SHA-256 than the manifest says.

        Quantises twice rather than hold a large tensor. Raises CheckpointError.
        """
        digest, rest = hashlib.sha256(), [bytearray(), bytearray()]
        for encoded in self._pieces(index):
            digest.update(encoded.codes)
            rest[0] += encoded.scales
            rest[1] += encoded.mins
        for data in rest:
            digest.update(data)
        return self._pieces(index) if digest.hexdigest() == self._manifest.dense[index].sha256 else None

    def _pieces(self, index: int) -> Iterator[EncodedPiece]:
        source = self._model.dense[index]
        form = Format.from_proto(self._manifest.dense[index].format)
        for begin, end in cut_rows(source.rows, source.cols):
            piece = Piece(index, 0, source.name, source.source, form, source.cols, begin, end, tiled=False)
            yield encode(self._checkpoint, piece)

    def bundled(self, file: manifest_pb2.BundledFile) -> bytes | None:
        """Return a bundled file, or None if the checkpoint has none that equals it. Raises CheckpointError."""
        for path in self._checkpoint.bundled:
            if path.name == file.name:
                content = self._checkpoint.read_file(path)
                return content if hashlib.sha256(content).hexdigest() == file.sha256 else None
        return None
