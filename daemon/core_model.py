"""The real core behind the engine's ModelPort.

Owns the translation between the two vocabularies (SamplingSpec and Sampling, dtype names and numbers) and nothing else;
the model is opened, loaded and closed by whoever made it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import cast

from colibri.core.core import Model, ModelOptions, Prefill, Row, Sampling, Sequence
from colibri.core.core_options import KV_DTYPES
from colibri.daemon.generation import SamplingSpec
from colibri.daemon.model_port import PageSection, PrefillPort, RowPort, SequencePort


class CoreModel:
    """Implements ModelPort. `options` are those that `model` was opened with."""

    def __init__(self, model: Model, options: ModelOptions, content_id: str) -> None:
        self.model = model
        self.content_id = content_id
        self.vocab_size = model.vocab_size
        self.max_context = options.max_context
        self.kv_pages = options.kv_pages
        self.max_rows = options.max_rows
        self.max_prefills = options.max_prefills
        self.pass_tokens = options.pass_tokens
        self.kv_page_bytes = model.kv_page_bytes
        self.numerics_id = model.numerics_id

    def page_sections(self) -> tuple[PageSection, ...]:
        layout = self.model.kv_layout()
        return tuple(PageSection(s.layer, s.kind, KV_DTYPES[s.dtype], s.offset, s.bytes) for s in layout)

    def sequence(self) -> SequencePort:
        return self.model.sequence()

    def row(self, sequence: SequencePort, token: int, sampling: SamplingSpec) -> RowPort:
        return Row(cast(Sequence, sequence), token, _sampling(sampling))

    def prefill(self, sequence: SequencePort, tokens: list[int], sampling: SamplingSpec) -> PrefillPort:
        return self.model.prefill(cast(Sequence, sequence), tokens, _sampling(sampling))

    def step(self, rows: Items[RowPort], prefills: Items[PrefillPort], budget_us: int | None) -> None:
        self.model.step(cast(Items[Row], rows), cast(Items[Prefill], prefills), budget_us)


def _sampling(spec: SamplingSpec) -> Sampling:
    return Sampling(spec.temperature, spec.top_k, spec.top_p, spec.seed)
