"""Rows of a table that differ in their layer only, as one row: "layers.1-46.q" instead of 46.

Pure functions for show.py. Only what people read is grouped; JSON names every tensor.
"""

import re
from collections.abc import Iterable, Sequence

# A layer's number as a component of a tensor's name: "layers.7.q", "model.layers.7.self_attn.q_proj.weight".
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def grouped(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the rows, those that are equal but for the layer in their cells as one, where the first of them stood."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        layers = {int(number) for cell in row for number in _LAYER.findall(cell)}
        if len(layers) == 1:
            key = tuple(_LAYER.sub("layers.{}.", cell.replace("{", "{{").replace("}", "}}")) for cell in row)
            groups.setdefault(key, []).extend(layers)
        else:
            groups[tuple(cell.replace("{", "{{").replace("}", "}}") for cell in row)] = []
    return [tuple(cell.format(layers_text(layers)) for cell in key) for key, layers in groups.items()]


def layers_text(layers: Sequence[int]) -> str:
    """Return ascending numbers as "0,2-5,7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
