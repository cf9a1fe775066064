"""What contradicts itself is refused at open, by layer and field or role, before anything is allocated."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from colibri.core.container import Container, open_container
from colibri.core.core import MemoryPlan, Model, ModelOptions, plan
from colibri.core.errors import CoreError, InvalidError, UnsupportedError
from colibri.v1 import manifest_pb2
from testkit.models import OPTIONS, Tiny, opened

Change = Callable[[manifest_pb2.Manifest], object]


@pytest.fixture
def container(tiny_int4: Tiny) -> Iterator[Container]:
    with open_container(tiny_int4.folders[0], tiny_int4.folders[1:]) as opened_container:
        yield opened_container


def moe(manifest: manifest_pb2.Manifest) -> manifest_pb2.MoeFfnSpec:
    return manifest.spec.layers[1].moe


def gqa(manifest: manifest_pb2.Manifest) -> manifest_pb2.GqaSpec:
    return manifest.spec.layers[2].gqa


def tensor(manifest: manifest_pb2.Manifest, name: str) -> manifest_pb2.DenseTensor:
    return next(tensor for tensor in manifest.dense if tensor.name == name)


def set_fields(message: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(message, name, value)


def drop(manifest: manifest_pb2.Manifest, name: str) -> None:
    manifest.dense.remove(tensor(manifest, name))


CHANGES: dict[str, Change] = {
    "vocab_size is 0": lambda m: set_fields(m.spec, vocab_size=0),
    "hidden_size is 4294967295": lambda m: set_fields(m.spec, hidden_size=2**32 - 1),
    "layers is 0": lambda m: m.spec.ClearField("layers"),
    "norm_eps is nan": lambda m: set_fields(m.spec, norm_eps=float("nan")),
    "residual_scale is 0": lambda m: set_fields(m.spec, residual_scale=0),
    "logits_divisor is -1": lambda m: set_fields(m.spec, logits_divisor=-1),
    "layer 2: kv_heads is 7": lambda m: set_fields(gqa(m), kv_heads=7),
    "layer 2: heads is 6, must be a multiple of kv_heads": lambda m: set_fields(gqa(m), kv_heads=4),
    "layer 2: head_dim is 0": lambda m: set_fields(gqa(m), head_dim=0),
    "layer 2: rope is 9": lambda m: set_fields(gqa(m), rope=9),
    "layer 2: attention scale is 0": lambda m: set_fields(gqa(m), scale=0),
    "layer 2: clip_qkv is -3": lambda m: set_fields(gqa(m), clip_qkv=-3),
    "rope dims is 3, must be even": lambda m: odd_rope(m),
    "a rope of 40 dims has 3 frequencies": lambda m: set_fields(m.spec.ropes[0], dims=40),
    "layer 1: top_k is 9": lambda m: set_fields(moe(m), top_k=9),
    "layer 1: top_k is 5, exceeds the experts of top_groups groups": lambda m: set_fields(moe(m), top_k=5),
    "layer 1: groups is 0": lambda m: set_fields(moe(m), groups=0),
    "layer 1: experts is 8, must be a multiple of groups": lambda m: set_fields(moe(m), groups=3),
    "layer 1: top_groups is 5": lambda m: set_fields(moe(m), top_groups=5),
    "layer 1: routed_scale is inf": lambda m: set_fields(moe(m), routed_scale=float("inf")),
    "layer 1: shared_output_gate is 1": lambda m: set_fields(
        moe(m), shared_intermediate_size=0, shared_output_gate=True
    ),
    "layer 1: attention is not set": lambda m: m.spec.layers[1].ClearField("attention"),
    "layer 1: ffn is not set": lambda m: m.spec.layers[1].ClearField("ffn"),
    "tensor layers.1.q is missing": lambda m: drop(m, "layers.1.q"),
    "tensor embedding is missing": lambda m: drop(m, "embedding"),
    "tensor layers.1.router_select_bias is missing": lambda m: drop(m, "layers.1.router_select_bias"),
    "tensor layers.2.k is there twice": lambda m: m.dense.append(tensor(m, "layers.2.k")),
    "tensor layers.0.router is not part of the spec": lambda m: m.dense.add(
        role=manifest_pb2.TENSOR_ROLE_ROUTER, layer=0
    ),
    "tensor head is not part of the spec": lambda m: set_fields(m.spec, tied_embeddings=True),
    "tensor q: layer 3 is not in -1..2": lambda m: set_fields(tensor(m, "layers.2.q"), layer=3),
    "layer 0: tensor role 5 is not known": lambda m: m.dense.add(role=5, layer=0),
    r"tensor layers.1.o is \[61, 72\], the spec wants \[60, 72\]": lambda m: set_fields(
        tensor(m, "layers.1.o"), rows=61
    ),
    "tensor layers.1.o: scales have 7 bytes": lambda m: set_fields(tensor(m, "layers.1.o").scales, bytes=7),
    "tensor layers.1.o: codes have .* at offset 18446744073709551615": lambda m: set_fields(
        tensor(m, "layers.1.o").codes, offset=2**64 - 1
    ),
    "tensor final_norm must be f32": lambda m: set_fields(
        tensor(m, "final_norm").format, codes=manifest_pb2.TensorFormat.CODES_BF16
    ),
    "tensor layers.1.o: .*": lambda m: set_fields(tensor(m, "layers.1.o").format, group_size=12),
    "layer 2 is a MoE layer of the spec, but its expert layer is missing": lambda m: m.expert_layers.pop(),
    "expert layer 2 is not a MoE layer": lambda m: set_fields(m.spec.layers[2].dense, intermediate_size=44),
    "layer 1 experts: down is .* the spec wants": lambda m: set_fields(m.expert_layers[0].parts[2], rows=61),
    "layer 1 experts: up of .* does not fit a record": lambda m: set_fields(m.expert_layers[0].parts[1], offset=64),
    "layer 1 experts: parts are": lambda m: set_fields(
        m.expert_layers[0].parts[1], kind=manifest_pb2.RecordPart.KIND_GATE_BIAS
    ),
    "lies outside its stripe file": lambda m: set_fields(m.layout.stripes[1], bytes=8192),
}


def odd_rope(manifest: manifest_pb2.Manifest) -> None:
    manifest.spec.ropes[0].dims = 3
    del manifest.spec.ropes[0].inv_freq[1:]


@pytest.mark.parametrize("words", CHANGES)
def test_a_manifest_that_contradicts_itself_is_refused(container: Container, words: str) -> None:
    CHANGES[words](container.manifest)
    for call in (plan, Model):
        with pytest.raises((InvalidError, UnsupportedError), match=words):
            call(container, OPTIONS)


OPTION_CHANGES: dict[str, dict[str, Any]] = {
    "option expert_slots is 0": {"expert_slots": 0},
    "option ring_slots is 1": {"ring_slots": 1},
    "option kv_pages is 0": {"kv_pages": 0},
    "option max_rows is 0": {"max_rows": 0},
    "option max_prefills is 0": {"max_prefills": 0},
    "option pass_tokens is 0": {"pass_tokens": 0},
    "option max_context is 321, must be 1..320": {"max_context": 321},
    "option threads is 5000": {"threads": 5000},
    "option kv_dtype is 'f64'": {"kv_dtype": "f64"},
    "option activation is 'i4'": {"activation": "i4"},
    "option direct is 'maybe'": {"direct": "maybe"},
    "option io_backend is 'mmap'": {"io_backend": "mmap"},
    "option io_depth is 257": {"io_depth": 257},
    "option verify is 'sometimes'": {"verify": "sometimes"},
    "banned token 139 is not in 0..138": {"banned_tokens": (139,)},
    "does not fit": {"kv_pages": -1},
    "does not fit its field": {"expert_slots": 2**64},
}


@pytest.mark.parametrize("words", OPTION_CHANGES)
def test_an_option_that_cannot_be_honoured_is_refused(container: Container, words: str) -> None:
    options = replace(OPTIONS, **OPTION_CHANGES[words])
    for call in (plan, Model):
        with pytest.raises(CoreError, match=words):
            call(container, options)


def many_experts(manifest: manifest_pb2.Manifest, top_k: int) -> None:
    set_fields(moe(manifest), experts=65536, groups=1, top_groups=1, top_k=top_k)


@pytest.mark.parametrize(
    ("top_k", "options", "words"),
    [
        (256, {"pass_tokens": 2**24}, "option pass_tokens is 16777216, must be 1..16777215: layer 1 takes 256 experts"),
        (65536, {"max_rows": 65536}, "option max_rows is 65536, must be 1..65535: layer 1 takes 65536 experts"),
    ],
)
def test_more_pairs_of_token_and_expert_than_32_bits_count_are_refused(
    container: Container, top_k: int, options: dict[str, Any], words: str
) -> None:
    many_experts(container.manifest, top_k)
    for call in (plan, Model):
        with pytest.raises(InvalidError, match=words):
            call(container, replace(OPTIONS, **options))
    ((name, most),) = options.items()
    with pytest.raises(
        InvalidError, match="layer 1 experts: there are 8, the spec wants 65536"
    ):  # nothing else is wrong
        plan(container, replace(OPTIONS, **{name: most - 1}))


def test_an_instruction_set_that_is_not_there_is_refused(container: Container) -> None:
    with pytest.raises(UnsupportedError, match='isa: "pentium" is not available'):
        Model(container, replace(OPTIONS, isa="pentium"))


def test_memory_that_cannot_be_had_is_an_error(container: Container) -> None:
    with pytest.raises(MemoryError):
        Model(container, replace(OPTIONS, expert_slots=2**30 - 1, ring_slots=2))


def parts_of(memory: MemoryPlan) -> int:
    return (
        memory.dense_bytes
        + memory.kv_bytes
        + memory.slots_bytes
        + memory.ring_bytes
        + memory.prefill_bytes
        + memory.buffers_bytes
    )


def test_the_plan_adds_up_and_follows_the_options(container: Container) -> None:
    small = plan(container, OPTIONS)
    assert parts_of(small) == small.total_bytes
    assert small.slots_bytes == OPTIONS.expert_slots * small.slot_bytes
    assert small.ring_bytes == OPTIONS.ring_slots * small.slot_bytes
    assert small.slot_bytes == max(layer.record_bytes for layer in container.manifest.expert_layers)
    assert small.kv_bytes == OPTIONS.kv_pages * small.kv_page_bytes
    assert small.kv_page_bytes == 3 * 2 * 2 * 64 * 12 * 2  # layers, k and v, KV heads, positions, head_dim, f16
    more = plan(container, replace(OPTIONS, expert_slots=9, kv_pages=26, pass_tokens=129))
    assert more.slots_bytes == 9 * small.slot_bytes
    assert more.kv_bytes == 26 * small.kv_page_bytes
    assert more.prefill_bytes > small.prefill_bytes
    assert more.dense_bytes == small.dense_bytes


def test_the_plan_is_what_is_taken(container: Container) -> None:
    options: ModelOptions = replace(OPTIONS, expert_slots=10000, kv_pages=500)
    memory = plan(container, options)
    before = anonymous_bytes()
    with Model(container, options) as model:
        model.load()
        taken = anonymous_bytes() - before
    assert memory.total_bytes > 64 << 20
    assert abs(taken - memory.total_bytes) < 16 << 20


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def test_the_layout_of_a_page_is_told(tiny_int4: Tiny) -> None:
    with opened(tiny_int4, kv_dtype="f32") as model:
        sections = model.kv_layout()
        assert [section.layer for section in sections] == [0, 1, 2]
        assert {(section.kind, section.dtype) for section in sections} == {(1, "f32")}
        ends = [section.offset + section.bytes for section in sections]
        assert [section.offset for section in sections] == [0, *ends[:-1]]
        assert ends[-1] == model.kv_page_bytes
