"""The worked example of docs/container.md, made from a real pack: `python -m testkit.container_page` prints it.

The model is so small that its bytes fit a page, and its weights are such that the codes can be read: row r, column k
of an expert's gate is (k + 1 - r) / 16, so that int4 holds it exactly. UUID and time are fixed.
tests/packer/test_container_page.py compares the text with the page.
"""

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from uuid import UUID

import torch

from colibri.packer import making
from colibri.packer.show import manifest_json
from colibri.v1 import manifest_pb2
from testkit.checkpoints import write_checkpoint
from testkit.packing import pack_folder

UUID_TEXT = "00112233-4455-6677-8899-aabbccddeeff"
UNIX_SECONDS = 1_800_000_000
HIDDEN, WIDTH, EXPERTS, VOCAB = 16, 8, 3, 24

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "head_dim": 8,
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}

Row = tuple[int, bytes, str]


def ramp(rows: int, cols: int, shift: int = 0) -> torch.Tensor:
    """[rows, cols]: (k + 1 - r + shift) / 16."""
    return (torch.arange(cols)[None, :] + 1 + shift - torch.arange(rows)[:, None]).float() / 16


def tensors() -> dict[str, torch.Tensor]:
    """The model's weights by hub name."""
    layer = "model.layers.0."
    found = {
        "model.embed_tokens.weight": ramp(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        f"{layer}input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}self_attn.q_proj.weight": ramp(16, HIDDEN),
        f"{layer}self_attn.k_proj.weight": ramp(8, HIDDEN),
        f"{layer}self_attn.v_proj.weight": ramp(8, HIDDEN),
        f"{layer}self_attn.o_proj.weight": ramp(HIDDEN, 16),
        f"{layer}self_attn.q_norm.weight": torch.ones(8),
        f"{layer}self_attn.k_norm.weight": torch.ones(8),
        f"{layer}mlp.gate.weight": ramp(EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        prefix = f"{layer}mlp.experts.{expert}."
        found[f"{prefix}gate_proj.weight"] = ramp(WIDTH, HIDDEN, expert)
        found[f"{prefix}up_proj.weight"] = ramp(WIDTH, HIDDEN, expert)
        found[f"{prefix}down_proj.weight"] = ramp(HIDDEN, WIDTH, expert)
    return found


def make(root: Path) -> tuple[list[Path], manifest_pb2.Manifest]:
    """Pack the example below `root`; return its folders and manifest."""
    source = write_checkpoint(root / "tiny", CONFIG, tensors(), shards=1, tokenizer=False)
    folders = [root / "a", root / "b"]
    with (
        mock.patch.object(making, "uuid4", return_value=UUID(UUID_TEXT)),
        mock.patch("time.time", return_value=float(UNIX_SECONDS)),
    ):
        return folders, pack_folder(source, folders, weights=[2, 1])


def hex_table(rows: list[Row]) -> str:
    """Rows of offset, bytes and meaning as a table."""
    lines = ["| offset | bytes | what |", "|---:|---|---|"]
    lines += [f"| {offset} | `{_hex(data)}` | {what} |" for offset, data, what in rows]
    return "\n".join(lines)


def _hex(data: bytes) -> str:
    text = data[:16].hex(" ", 4 if len(data) > 8 else 1)
    return text + (" ..." if len(data) > 16 else "")


def fields(data: bytes, widths: list[tuple[int, str]], start: int = 0) -> Iterator[Row]:
    """Cut `data` from `start` on into fields of these widths."""
    offset = start
    for width, what in widths:
        yield offset, data[offset : offset + width], what
        offset += width


def stripe_section(data: bytes, size: int) -> str:
    """The header of a stripe file."""
    widths = [
        (8, '`"COLIBRI\\x01"`'),
        (4, "format version 1"),
        (4, "stripe 0"),
        (4, "of 2"),
        (4, "0: the stripe itself; 1: its mirror"),
        (16, "UUID of the pack"),
        (32, "`content_id`"),
        (8, f"size of the file, {size}"),
        (12, "zero"),
        (4, "CRC-32C of the 92 bytes before"),
    ]
    return hex_table([*fields(data, widths), (96, data[96:100], "... zero up to 4096")])


def record_section(data: bytes, layer: manifest_pb2.ExpertLayer) -> str:
    """The record of expert 0, which lies at 4096 of stripe 0."""
    rows: list[Row] = []
    for part, name in zip(layer.parts, ("gate", "up", "down"), strict=True):
        tile = 4096 + part.offset
        shape = f"{name} [{part.rows}, {part.cols}]"
        rows += fields(data, [(16, f"{shape}: scales of rows 0..7, f16"), (16, "minima of rows 0..7, f16")], tile)
        rows += fields(data, [(4, "row 0, columns 0..7: code k low, code k + 4 high"), (28, "rows 1..7")], tile + 32)
        if part.cols > 8:
            rows += fields(data, [(4, "row 0, columns 8..15"), (28, "rows 1..7")], tile + 64)
        if part.rows > 8:
            rows += fields(data, [(32, "second tile: scales and minima of rows 8..15"), (32, "codes")], tile + 64)
    end = layer.parts[-1].offset + layer.parts[-1].bytes
    rows.append((4096 + end, data[4096 + end : 4096 + end + 4], f"... zero up to {4096 + layer.record_bytes}"))
    return hex_table(rows)


def decoded(data: bytes) -> str:
    """Row 0 of expert 0's gate, by hand."""
    tile = 4096
    (scale,) = struct.unpack_from("<e", data, tile)
    (minimum,) = struct.unpack_from("<e", data, tile + 16)
    lane = data[tile + 32 : tile + 36]
    codes = [byte & 15 for byte in lane] + [byte >> 4 for byte in lane]
    values = [scale * code + minimum for code in codes]
    return (
        f"Row 0 of gate: scale `{data[tile : tile + 2].hex(' ')}` = {scale}, minimum "
        f"`{data[tile + 16 : tile + 18].hex(' ')}` = {minimum}, bytes `{lane.hex(' ')}` = codes "
        f"{', '.join(map(str, codes))}; scale * code + minimum = {', '.join(map(str, values))}."
    )


def table_section(data: bytes, entry_bytes: int, names: list[str]) -> str:
    """extents.crc32c or records.sha256."""
    widths = [
        (8, '`"COLITBL\\x01"`'),
        (4, "format version 1"),
        (4, f"bytes of an entry, {entry_bytes}"),
        (8, f"{len(names)} entries"),
        (16, "UUID of the pack"),
        (4, "CRC-32C of the entries"),
        (4, "CRC-32C of the 44 bytes before"),
    ]
    return hex_table(list(fields(data, [*widths, *((entry_bytes, name) for name in names)])))


def dense_section(data: bytes) -> str:
    """The beginning of dense.safetensors."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    shown = {name: header[name] for name in ("__metadata__", "final_norm", "embedding.codes", "embedding.scales")}
    begin = 8 + length
    first, second = header["final_norm"]["data_offsets"][0], header["embedding.codes"]["data_offsets"][0]
    rows = [
        (0, data[:8], f"length of the JSON, {length}: data begins at {begin}"),
        (8, data[8:24], "JSON, padded with spaces"),
        (begin + first, data[begin + first :][:16], "`final_norm`: 16 times 1.0"),
        (begin + second, data[begin + second :][:16], "`embedding.codes`, row 0: int8"),
    ]
    text = ",\n ".join(f'"{name}": {json.dumps(entry)}' for name, entry in shown.items())
    return f"{hex_table(rows)}\n\nOf the JSON ({len(header) - 1} entries):\n\n```json\n{{{text}}}\n```"


def manifest_section(manifest: manifest_pb2.Manifest) -> str:
    """Two excerpts of the manifest."""
    whole = manifest_json(manifest)
    shown = {"layout": whole["layout"], "striping": whole["expert_layers"][0]["striping"]}
    return "```json\n" + json.dumps(shown, indent=1) + "\n```"


def worked_example(root: Path) -> str:
    """Return the example as it stands in the page."""
    (primary, second), manifest = make(root)
    layer = manifest.expert_layers[0]
    data = {path.name: path.read_bytes() for path in [*primary.iterdir(), *second.iterdir()]}
    first = data["stripe-000.colibri"]
    sizes = [f"| `{name}` | {len(data[name])} |" for name in sorted(data) if name != "manifest.json"]
    experts = [f"layer 0, expert {expert}" for expert in range(layer.experts)]
    parts = [
        "\n".join(["| file | bytes |", "|---|---:|", *sizes]),
        f"`content_id` is `{manifest.content_id}`.",
        "From `manifest.json`:",
        manifest_section(manifest),
        "`stripe-000.colibri`, the header:",
        stripe_section(first, len(first)),
        f"and the record of expert 0, {layer.record_bytes} bytes from 4096 on:",
        record_section(first, layer),
        decoded(first),
        "`extents.crc32c` (records are whole here, so there is one extent each):",
        table_section(data["extents.crc32c"], 4, experts),
        "`records.sha256`:",
        table_section(data["records.sha256"], 32, experts),
        "`dense.safetensors`:",
        dense_section(data["dense.safetensors"]),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(worked_example(Path(folder)))
