"""What has been written since the last journal line, and when the next one is due: after so many bytes or seconds.

Owns the order of sync and journal line, also when an error or a signal ends the pack: what is complete by then is kept.
Sits between the encoded pieces and the sinks that lay them out in the files.
"""

import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from colibri.packer.disk import DriveError
from colibri.packer.encode import EncodedPiece
from colibri.packer.journal import Done, DoneDense, DoneRecord, Journal
from colibri.packer.outputs import Outputs
from colibri.packer.sinks import DenseSink, RecordSink
from colibri.v1 import manifest_pb2

SYNC_SECONDS = 10.0  # a small container takes less than SYNC_BYTES in all, and a slow machine long for those


class Batch:
    """A context manager: at its end, whatever ends it, the complete tensors and records are in the journal.

    Signals must be held back while it is open (interrupt.held): an exception out of the blue could come between a line
    and the note that it is written.
    """

    def __init__(
        self,
        manifest: manifest_pb2.Manifest,
        outputs: Outputs,
        journal: Journal,
        sync_bytes: int,
        sync_seconds: float,
    ) -> None:
        self._dense, self._records = DenseSink(manifest, outputs), RecordSink(manifest, outputs)
        self._outputs = outputs
        self._journal = journal
        self._sync_bytes, self._sync_seconds = sync_bytes, sync_seconds
        self._committing = False
        self._renew()

    def _renew(self) -> None:
        self._fresh, self._size, self._since = Done(), 0, time.monotonic()

    def feed(self, encoded: EncodedPiece) -> None:
        """Write a piece, and a line for what is complete if one is due. Raises DriveError."""
        done = self._records.feed(encoded) if encoded.piece.tiled else self._dense.feed(encoded)
        self.keep(done, len(encoded.codes))

    def keep(self, done: DoneDense | DoneRecord | None, size: int) -> None:
        """Note `size` bytes that were written and what they completed, with a line if one is due. Raises DriveError."""
        if isinstance(done, DoneDense):
            self._fresh.dense.append(done)
        elif done is not None:
            self._fresh.records.append(done)
        self._size += size
        if self._size >= self._sync_bytes or time.monotonic() - self._since >= self._sync_seconds:
            self._commit()

    def _commit(self) -> None:
        if not self._fresh.dense and not self._fresh.records:
            return
        self._committing = True
        self._outputs.sync()
        self._journal.append(self._fresh)
        self._committing = False
        self._renew()

    def __enter__(self) -> Self:
        self._renew()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._commit()
        elif not self._committing:
            # Not again if it was syncing or the journal that failed: after a failed fsync the next one may claim that
            # all is well. And a drive that fails here too has nothing to add to the error that ends the pack.
            with suppress(DriveError):
                self._commit()
