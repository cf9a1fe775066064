"""The errors that end a pack before anything is written: a checkpoint that is broken, or one that is not supported.

Both name the thing: file, tensor, config key, value. They are raised by the reading side (checkpoint, families) and
caught by the command line, which prints them as they are.
"""


class CheckpointError(Exception):
    """The checkpoint cannot be packed as it is; the text names file, tensor or config key."""


class CorruptCheckpointError(CheckpointError):
    """Bytes on disk contradict their own description: a cut shard, a header that lies, a stale index."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is well-formed, and asks for something that is not built."""
