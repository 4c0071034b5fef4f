"""A draft with 8-bit weights of its own: LongDraft's fused pass over vLLM's pages. Imports no vLLM.

A draft step reads all weights for a token a row; in 8 bits that is half of it, and a pass is one call. It goes with the
native attention, whose pages it reads and writes. The target verifies, so rounding costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.integrations.vllm.pages import Pages
from longdraft.integrations.vllm.tables import DraftTables, Step
from longdraft.models.transformer import Transformer
from longdraft.view import LayerKV


class Twin:
    """A ``model`` of LongDraft's that drafts over vLLM's ``pages``."""

    def __init__(self, model: Transformer, max_model_len: int) -> None:
        self._model, self._end = model, max_model_len
        self._kv: list[LayerKV] = []

    @classmethod
    def load(cls, model: str, dtype: torch.dtype, max_model_len: int) -> Twin:
        """The 8-bit twin of a folder's, a file's or a cached hub model; raises what ``load_checkpoint`` raises."""
        from longdraft.checkpoint.load import load_checkpoint  # file formats: not for those who do without a twin

        checkpoint = load_checkpoint(model)
        return cls(Transformer(checkpoint.config, checkpoint.weights, dtype=dtype).quantised(), max_model_len)

    def fits(self, pages: Pages | None) -> bool:
        """Whether these are pages that the model reads; ``None``: vLLM's own attention runs."""
        return pages is not None and (pages.spec, pages.num_kv_heads) == (
            self._model.spec,
            self._model.config.num_kv_heads,
        )

    def forward(
        self, ids: torch.Tensor, step: Step, tables: DraftTables, pages: Pages, caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Logits ``[R, V]`` after ``ids [R]``; ``caches``: vLLM's, of each layer in order."""
        rows = torch.arange(len(ids) + 1)
        plan = pages.plan(tables.table, step.lengths, rows, step.slots, self._end)
        if not self._kv or self._kv[0].k.data_ptr() != caches[0].data_ptr():
            self._kv = [pages.storage(cache) for cache in caches]
        return self._model.forward(ids.long(), step.positions, plan, self._kv, rows[:-1])
