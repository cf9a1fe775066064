"""A plan names every kind of tensor once, with the layers that have it."""

import pytest

from colibri.packer.layer_rows import grouped, layers_text


@pytest.mark.parametrize(("layers", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([0, 2, 3, 4, 7], "0,2-4,7")])
def test_runs_of_layers(layers: list[int], text: str) -> None:
    assert layers_text(layers) == text


def test_rows_that_differ_in_their_layer_only_are_one() -> None:
    rows = [("embedding", "int8", "embed.weight")]
    for layer in range(12):
        form = "f32" if layer == 5 else "int8"
        rows += [(f"layers.{layer}.{name}", form, f"model.layers.{layer}.{name}.weight") for name in ("q", "k")]
    rows.append(("head", "int8", "odd {name} {}"))
    assert grouped(rows) == [
        ("embedding", "int8", "embed.weight"),
        ("layers.0-4,6-11.q", "int8", "model.layers.0-4,6-11.q.weight"),
        ("layers.0-4,6-11.k", "int8", "model.layers.0-4,6-11.k.weight"),
        ("layers.5.q", "f32", "model.layers.5.q.weight"),
        ("layers.5.k", "f32", "model.layers.5.k.weight"),
        ("head", "int8", "odd {name} {}"),
    ]


def test_a_tensor_that_comes_from_another_layer_stands_alone() -> None:
    rows = [(f"layers.{n}.q", f"model.layers.{n + 1}.q") for n in range(3)]
    assert grouped(rows) == rows
