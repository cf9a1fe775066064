"""The worked example of docs/container.md is a real pack, byte by byte, and its model is what the page says."""

from pathlib import Path

import torch

from colibri.core.container import open_container
from colibri.packer.export import export
from colibri.packer.progress import Silent
from colibri.packer.verify import verify
from testkit.container_page import UUID_TEXT, make, worked_example
from testkit.repository import ROOT

BEGIN, END = "<!-- example: begin -->\n", "\n<!-- example: end -->"


def test_the_page_shows_the_bytes_that_a_pack_has(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "container.md").read_text()
    shown = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert shown == worked_example(tmp_path), "print it anew with: python -m testkit.container_page"


def test_the_example_is_a_container_in_order(tmp_path: Path) -> None:
    folders, manifest = make(tmp_path)
    assert manifest.layout.uuid == UUID_TEXT
    assert verify(folders[0], folders[1:], Silent()).faults == []


def test_the_gate_is_what_the_page_says(tmp_path: Path) -> None:
    folders, _ = make(tmp_path)
    with open_container(folders[0], folders[1:]) as container:
        export(container, tmp_path / "back", Silent())
    from safetensors.torch import load_file

    gate = load_file(tmp_path / "back" / "model-00001-of-00001.safetensors")[
        "model.layers.0.mlp.experts.0.gate_proj.weight"
    ]
    wanted = torch.tensor([[(k + 1 - r) / 16 for k in range(16)] for r in range(8)])
    assert torch.allclose(gate, wanted, rtol=0, atol=1e-6)
