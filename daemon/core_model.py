"""The real model behind the engine: fits colibri.core's Model to ModelPort.

Owns nothing but the translation: sampling specs, page sections, the facts of the open model. The engine drives it; the
core does the work.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import cast

from colibri.core import core
from colibri.daemon.generation import SamplingSpec
from colibri.daemon.model_port import PageSection, PrefillPort, RowPort, SequencePort

_DTYPE_NUMBERS = {"f16": 1, "f32": 2}  # CL_KV_* of csrc/colibri.h


class CoreModel:
    """Implements ModelPort over an open and loaded core.Model; `options` are those that it was opened with."""

    def __init__(self, model: core.Model, options: core.ModelOptions, content_id: str) -> None:
        self._model = model
        self._options = options
        self.content_id = content_id
        self.vocab_size = model.vocab_size
        self.max_context = model.max_context
        self.kv_pages = options.kv_pages
        self.max_rows = options.max_rows
        self.max_prefills = options.max_prefills
        self.pass_tokens = options.pass_tokens
        self.kv_page_bytes = model.kv_page_bytes
        self.numerics_id = model.numerics_id

    def page_sections(self) -> tuple[PageSection, ...]:
        return tuple(
            PageSection(section.layer, section.kind, _DTYPE_NUMBERS[section.dtype], section.offset, section.bytes)
            for section in self._model.kv_layout()
        )

    def sequence(self) -> SequencePort:
        return self._model.sequence()

    def row(self, sequence: SequencePort, token: int, sampling: SamplingSpec) -> RowPort:
        return core.Row(cast(core.Sequence, sequence), token, _sampling(sampling))

    def prefill(self, sequence: SequencePort, tokens: list[int], sampling: SamplingSpec) -> PrefillPort:
        return self._model.prefill(cast(core.Sequence, sequence), tokens, _sampling(sampling))

    def step(self, rows: Items[RowPort], prefills: Items[PrefillPort], budget_us: int | None) -> None:
        self._model.step(cast("list[core.Row]", rows), cast("list[core.Prefill]", prefills), budget_us)


def _sampling(spec: SamplingSpec) -> core.Sampling:
    return core.Sampling(temperature=spec.temperature, top_k=spec.top_k, top_p=spec.top_p, seed=spec.seed)
