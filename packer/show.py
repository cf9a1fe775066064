"""What colibri-pack prints: manifests, plans, reports and verdicts, as text for people and as JSON for programs.

Pure: takes manifests and plans, gives strings and plain values. JSON is one object on standard output.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from colibri.core.container_stripes import mirror_folder
from colibri.core.striping import extents_per_record
from colibri.packer.check_records import State
from colibri.packer.layer_rows import grouped
from colibri.packer.outputs import stripe_copies
from colibri.packer.plan import PackPlan
from colibri.packer.precision import format_name
from colibri.packer.verify import Verdict
from colibri.packer.weights import Weights
from colibri.packer.wording import counted, size_text
from colibri.v1 import manifest_pb2


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as left-aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def manifest_json(manifest: manifest_pb2.Manifest) -> dict[str, Any]:
    """Return a manifest as it stands in manifest.json."""
    fields: dict[str, Any] = json_format.MessageToDict(manifest, preserving_proto_field_name=True)
    return fields


def manifest_values(manifest: manifest_pb2.Manifest) -> dict[str, Any]:
    """Return a manifest as in manifest.json, but for its 64-bit fields: protobuf's JSON form has them as strings, here
    they are numbers, like every count and size that colibri-pack prints; and fields at 0 or empty are there."""
    fields: dict[str, Any] = json_format.MessageToDict(
        manifest, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _make_numbers(manifest.DESCRIPTOR, fields)
    return fields


_INT64 = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def _make_numbers(message: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        field: FieldDescriptor = message.fields_by_name[name]
        if field.cpp_type in _INT64:
            fields[name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None:
            for item in value if isinstance(value, list) else [value]:
                _make_numbers(field.message_type, item)


def manifest_text(manifest: manifest_pb2.Manifest, *, warnings: bool = True) -> str:
    """Return what a person wants to know of a container; without the warnings if they have been told already."""
    layout, spec = manifest.layout, manifest.spec
    dense = sum(_tensor_bytes(tensor) for tensor in manifest.dense)
    experts = sum(layer.experts * layer.record_bytes for layer in manifest.expert_layers)
    count = sum(layer.experts for layer in manifest.expert_layers)
    lines = [
        f"model       {manifest.source.name} ({spec.family}), {counted(len(spec.layers), 'layer')}, "
        f"{len(manifest.expert_layers)} with experts",
        f"content_id  {manifest.content_id}",
        f"uuid        {layout.uuid}, by {layout.created_by}",
        f"dense       {size_text(dense)} in {counted(len(manifest.dense), 'tensor')}",
        f"experts     {size_text(experts)} in {counted(count, 'record')}",
        "",
        _stripes_text(manifest),
        "",
        report_text(manifest.report),
    ]
    lines += _skipped(manifest) + (_warnings(manifest) if warnings else [])
    return "\n".join(lines)


def _stripes_text(manifest: manifest_pb2.Manifest) -> str:
    stripes = manifest.layout.stripes
    if not any(stripe.mirrored for stripe in stripes):
        return table(
            [("stripe", "weight", "bytes"), *((str(s.number), str(s.weight), size_text(s.bytes)) for s in stripes)]
        )
    rows = [("stripe", "weight", "bytes", "mirror")]
    for s in stripes:
        place = f"beside stripe {mirror_folder(s.number, len(stripes))}" if s.mirrored else "none"
        rows.append((str(s.number), str(s.weight), size_text(s.bytes), place))
    return table(rows)


def report_text(reports: Iterable[manifest_pb2.ClassReport]) -> str:
    """Return what quantisation cost each class."""
    rows = [("class", "format", "values", "relative RMS", "became zero", "worst tensor")]
    for report in reports:
        rows.append(
            (
                report.tensor_class,
                format_name(report.format),
                str(report.values),
                f"{100 * report.relative_rms:.3f} %",
                f"{100 * report.zeroed_share:.3f} %",
                f"{report.worst_tensor} ({100 * report.worst_relative_rms:.3f} %)",
            )
        )
    zero = [
        f"{counted(r.zero_experts, 'expert has', 'experts have')} no weight other than zero"
        for r in reports
        if r.zero_experts
    ]
    return "\n".join([table(rows), *zero])


def _skipped(manifest: manifest_pb2.Manifest) -> list[str]:
    return [f"skipped by rule {s.rule}: {counted(len(s.names), 'tensor')} ({s.reason})" for s in manifest.skipped]


def _warnings(manifest: manifest_pb2.Manifest) -> list[str]:
    return [f"warning: {text}" for text in manifest.warnings]


def plan_json(plan: PackPlan, folders: Sequence[Path]) -> dict[str, Any]:
    """Return a plan: what each drive holds, what each tensor becomes, what is left out."""
    manifest = plan.manifest
    return {
        "drives": [
            {
                "folder": str(folder),
                "stripe": s.number,
                "weight": s.weight,
                "stripe_bytes": s.bytes,
                "mirror_bytes": mirror,
                "need_bytes": need,
            }
            for folder, s, mirror, need in zip(
                folders, manifest.layout.stripes, _mirror_bytes(manifest.layout), plan.folder_bytes, strict=True
            )
        ],
        "source_bytes": plan.source_bytes,
        "dense_bytes": plan.dense_file_bytes,
        "experts_bytes": sum(layer.experts * layer.record_bytes for layer in manifest.expert_layers),
        "tensors": [
            {
                "name": tensor.name,
                "class": tensor.tensor_class,
                "format": format_name(tensor.format),
                "rows": tensor.rows,
                "cols": tensor.cols,
                "bytes": _tensor_bytes(tensor),
                "source": list(tensor.source_names),
            }
            for tensor in manifest.dense
        ],
        "expert_layers": [_layer_json(layer) for layer in manifest.expert_layers],
        "skipped": [{"rule": s.rule, "reason": s.reason, "names": list(s.names)} for s in manifest.skipped],
        "warnings": list(manifest.warnings),
    }


UNKNOWN_WEIGHTS = (
    "No weights are given: where the folders lie on different file systems, the drives are measured when the pack "
    "begins,\nand get shares by that."
)


def drives_json(weights: Weights, warnings: Sequence[str]) -> dict[str, Any]:
    """Return what was measured of the drives, in bytes per second, and what is in vain about their folders."""
    rates = [
        {"folder": str(rate.folder), "alone": round(rate.alone), "together": round(rate.together)}
        for rate in weights.rates
    ]
    return {"drive_rates": rates, "drive_warnings": list(warnings)}


def _layer_json(layer: manifest_pb2.ExpertLayer) -> dict[str, Any]:
    split = layer.striping.HasField("split")
    return {
        "layer": layer.layer,
        "experts": layer.experts,
        "format": format_name(layer.parts[0].format),
        "record_bytes": layer.record_bytes,
        "bytes": layer.experts * layer.record_bytes,
        "striping": "split" if split else "whole",
        "extents_per_record": extents_per_record(layer),
        "source": layer.source_pattern,
    }


def _mirror_bytes(layout: manifest_pb2.Layout) -> list[int]:
    """Bytes of the mirror in each folder."""
    sizes = [0] * len(layout.stripes)
    for copy in stripe_copies(layout):
        sizes[copy.folder] += copy.bytes if copy.mirror else 0
    return sizes


_NEEDS = (
    "needs at most: free space that the pack asks for. The stripe and mirror, in the first folder also the dense "
    "weights,\ntables and bundled files, and some room for the journal."
)


def plan_text(plan: PackPlan, folders: Sequence[Path], warnings: Sequence[str] = ()) -> str:
    """Return a plan for people; `warnings` are those about its folders."""
    manifest = plan.manifest
    mirrors = _mirror_bytes(manifest.layout)
    drives: list[tuple[str, ...]] = [("folder", "weight", "stripe", "mirror", "needs at most")]
    rows = zip(folders, manifest.layout.stripes, mirrors, plan.folder_bytes, strict=True)
    for folder, stripe, mirror, need in rows:
        drives.append((str(folder), str(stripe.weight), *map(size_text, (stripe.bytes, mirror, need))))
    stripes_bytes = sum(stripe.bytes for stripe in manifest.layout.stripes)
    drives.append(("total", "", *map(size_text, (stripes_bytes, sum(mirrors), sum(plan.folder_bytes)))))
    if not any(mirrors):
        drives = [(*row[:3], row[4]) for row in drives]
    tables = [table(drives), _NEEDS, "", table(_dense_rows(manifest)), "", table(_layer_rows(manifest)), ""]
    notes = _skipped(manifest) + _warnings(manifest) + [f"warning: {text}" for text in warnings]
    return "\n".join([*tables, *notes]).rstrip()


def _dense_rows(manifest: manifest_pb2.Manifest) -> list[tuple[str, ...]]:
    rows = []
    for tensor in manifest.dense:
        shape = f"[{tensor.rows}, {tensor.cols}]"
        source = ", ".join(tensor.source_names)
        form, size = format_name(tensor.format), size_text(_tensor_bytes(tensor))
        rows.append((tensor.name, tensor.tensor_class, shape, form, size, source))
    return [("tensor", "class", "shape", "becomes", "bytes each", "from"), *grouped(rows)]


def _layer_rows(manifest: manifest_pb2.Manifest) -> list[tuple[str, ...]]:
    rows = []
    for layer in map(_layer_json, manifest.expert_layers):
        numbers = (f"layers.{layer['layer']}.experts", str(layer["experts"]), layer["format"])
        sizes = (size_text(layer["record_bytes"]), size_text(layer["bytes"]))
        rows.append((*numbers, *sizes, layer["striping"], layer["source"]))
    return [("layer", "experts", "becomes", "record", "per layer", "striping", "from"), *grouped(rows)]


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict."""
    return {
        "ok": not verdict.faults,
        "content_id": verdict.manifest.content_id,
        "uuid": verdict.manifest.layout.uuid,
        "checked_bytes": verdict.checked_bytes,
        "faults": verdict.faults,
        "experts": {state.value: count for state, count in verdict.experts.items()},
        "tensors": {state.value: count for state, count in verdict.tensors.items()},
    }


def tallies_text(verdict: Verdict) -> str:
    """Return how much is intact, damaged and lost, on two lines."""
    rows = []
    for what, counts in (("experts", verdict.experts), ("dense tensors", verdict.tensors)):
        states = [f"{count} {state.value}" for state, count in counts.items() if count or state is not State.UNCHECKED]
        rows.append(f"{what}: {', '.join(states)}")
    return "\n".join(rows)


def _tensor_bytes(tensor: manifest_pb2.DenseTensor) -> int:
    return tensor.codes.bytes + tensor.scales.bytes + tensor.mins.bytes
