"""colibri.core: the C core (colibri.core._core) and its thin typed wrapper.

Owns bytes, disks and arithmetic; refuses text, Hugging Face names and the network. Nothing in the product lies below it
but the contracts in colibri.v1.
"""
