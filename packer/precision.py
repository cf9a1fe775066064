"""Which number format each class of tensors gets: the defaults, and what `--precision` and `--group-size` make of them.

Policy only. The core knows the formats and makes the bytes; a class is what families say that a tensor is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from colibri.v1 import manifest_pb2

# Classes that the user may choose a format for, in the order of reports, with the formats that each may have.
CLASS_FORMATS: Mapping[str, tuple[str, ...]] = {
    "experts": ("int4", "int8", "bf16", "f32"),
    "attention": ("int4", "int8", "bf16", "f32"),
    "shared": ("int4", "int8", "bf16", "f32"),
    "ffn": ("int4", "int8", "bf16", "f32"),
    "embedding": ("int4", "int8", "bf16", "f32"),
    "head": ("int4", "int8", "bf16", "f32"),
}
EXACT = "exact"  # router, norms, biases: always f32
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64
_DEFAULTS = {name: "int4" if name == "experts" else "int8" for name in CLASS_FORMATS}


class PrecisionError(ValueError):
    """A precision that cannot be honoured; the text names class and value."""


def tensor_format(name: str, group_size: int = DEFAULT_GROUP_SIZE) -> manifest_pb2.TensorFormat:
    """Return the format called int4 (asymmetric), int8 (symmetric), bf16 or f32. Raises PrecisionError."""
    if name == "f32":
        return manifest_pb2.TensorFormat(codes=manifest_pb2.TensorFormat.CODES_F32)
    if name == "bf16":
        return manifest_pb2.TensorFormat(codes=manifest_pb2.TensorFormat.CODES_BF16)
    if name not in ("int4", "int8"):
        raise PrecisionError(f"format {name!r} is not one of int4, int8, bf16, f32")
    if group_size not in GROUP_SIZES:
        raise PrecisionError(f"group size {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
    int4 = name == "int4"
    return manifest_pb2.TensorFormat(
        codes=manifest_pb2.TensorFormat.CODES_INT4 if int4 else manifest_pb2.TensorFormat.CODES_INT8,
        group_size=group_size,
        asymmetric=int4,
        scale_format=manifest_pb2.TensorFormat.SCALE_FORMAT_F16,
        codebook=manifest_pb2.TensorFormat.CODEBOOK_UNIFORM,
    )


def format_name(form: manifest_pb2.TensorFormat) -> str:
    """Return how a format is called in tables: "int4 g64 asym", "f32"."""
    name = manifest_pb2.TensorFormat.Codes.Name(form.codes).removeprefix("CODES_").lower()
    if not form.group_size:
        return name
    return f"{name} g{form.group_size} {'asym' if form.asymmetric else 'sym'}"


@dataclass(frozen=True)
class Precision:
    """The format of every class; `names` maps class to format name."""

    names: Mapping[str, str]
    group_size: int

    def format_of(self, tensor_class: str) -> manifest_pb2.TensorFormat:
        """Return the format of a class that families name. Raises PrecisionError for one that does not exist."""
        if tensor_class == EXACT:
            return tensor_format("f32")
        if tensor_class not in self.names:
            raise PrecisionError(f"tensor class {tensor_class!r} is not one of {', '.join(self.names)}, {EXACT}")
        return tensor_format(self.names[tensor_class], self.group_size)

    def describe(self) -> str:
        """Return the policy as `--precision` takes it, every class named."""
        return ",".join(f"{name}={self.names[name]}" for name in CLASS_FORMATS)


def parse_precision(text: str = "", group_size: int = DEFAULT_GROUP_SIZE) -> Precision:
    """Read "attention=int8,head=f32"; `all=FORMAT` sets every class, and a class named beside it wins.

    Raises PrecisionError for an unknown class or format, a class named twice, or a group size that is not built.
    """
    if group_size not in GROUP_SIZES:
        raise PrecisionError(f"group size {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
    chosen: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or (name != "all" and name not in CLASS_FORMATS):
            raise PrecisionError(
                f"precision {item!r}: not CLASS=FORMAT with a class of {', '.join(CLASS_FORMATS)}, all"
            )
        if name in chosen:
            raise PrecisionError(f"precision: class {name} stands twice")
        allowed = CLASS_FORMATS["experts" if name == "all" else name]
        if value not in allowed:
            raise PrecisionError(f"precision {item!r}: format is not one of {', '.join(allowed)}")
        chosen[name] = value
    everywhere = chosen.pop("all", None)
    names = {name: chosen.get(name, everywhere or default) for name, default in _DEFAULTS.items()}
    return Precision(names, group_size)
