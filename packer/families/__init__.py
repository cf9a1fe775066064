"""One strict file per model family: its config becomes a ModelSpec, its tensor names become roles.

The only place in the product where Hugging Face names of tensors and config keys occur.
"""
