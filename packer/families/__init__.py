"""One strict file per model family: its config becomes a ModelSpec, its tensor names become roles.

The only place in the product where Hugging Face names of tensors and config keys occur. `resolve` is the entry; a new
family is one file with a FAMILY and one line in resolve.FAMILIES.
"""

from colibri.packer.families.names import dense_name, expert_name
from colibri.packer.families.resolve import FAMILIES, resolve

__all__ = ["FAMILIES", "dense_name", "expert_name", "resolve"]
