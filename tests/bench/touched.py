"""What one token must read from memory: the denominator of every decode benchmark's RAM floor."""

from colibri.core.container import Container
from colibri.core.core import ModelOptions, plan
from colibri.v1 import manifest_pb2


def touched_bytes(container: Container, options: ModelOptions, positions: int) -> int:
    """Bytes of weights and KV that one token at `positions` must read."""
    manifest = container.manifest
    stored = plan(container, options)
    embedding = next(t for t in manifest.dense if t.role == manifest_pb2.TENSOR_ROLE_EMBEDDING)
    dense = sum(t.codes.bytes + t.scales.bytes + t.mins.bytes for t in manifest.dense)
    if not manifest.spec.tied_embeddings:
        dense -= embedding.codes.bytes + embedding.scales.bytes
    experts = sum(
        manifest.spec.layers[layer.layer].moe.top_k * sum(part.bytes for part in layer.parts)
        for layer in manifest.expert_layers
    )
    return dense + experts + stored.kv_page_bytes * positions // 64
