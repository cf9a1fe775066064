"""The errors by which a pack is refused: a checkpoint that is broken, one that is not supported, a folder.

All name the thing: file, tensor, config key, value, folder. They are raised by the reading side (checkpoint, families)
and by what opens the folders, and caught by the command line, which prints them as they are.
"""


class CheckpointError(Exception):
    """The checkpoint cannot be packed as it is; the text names file, tensor or config key."""


class CorruptCheckpointError(CheckpointError):
    """Bytes on disk contradict their own description: a cut shard, a header that lies, a stale index."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is well-formed, and asks for something that is not built."""


class FolderError(Exception):
    """A folder that must not or cannot be written into as it is; the text names the path component and says why."""
