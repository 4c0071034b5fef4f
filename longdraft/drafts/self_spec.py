"""MagicDec's self-speculation (arXiv:2408.11049): the target drafts for itself over a small part of its own cache.

At long context a step's cost is reading the cache; the same weights over a few hundred tokens of it are cheap and
mostly agree. The draft's tentative keys and values go to the slots reserved for the step at their true positions, and
the verify pass overwrites them: nothing sparse stays behind, and no second cache exists.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from longdraft.drafts.base import DraftRow
from longdraft.drafts.model_draft import ModelDraft
from longdraft.kv.select.base import ViewSelector
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer


class SelfSpec(ModelDraft):
    """The target's weights, all layers or some of them, over ``selector``'s view of the target's pages."""

    def __init__(
        self, model: Transformer, store: PagedStore, selector: ViewSelector, layers: tuple[int, ...] | None = None
    ) -> None:
        self.model, self.store, self.selector, self.layers = model, store, selector, layers

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``: the newest token is all that the target's cache lacks."""
        return [Feed(row.seq.id, row.seq.num_committed, [row.seq.ids[-1]], 1) for row in rows]

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        return feed(self.model, self.store, feeds, self.selector.select, self.layers)

    def bytes_read(self, length: int) -> int:
        """See ``Draft``."""
        read = self.store.bytes_of(self.selector.tokens_read(length))
        return read * self.running_layers // len(self.store.layers)

    @property
    def running_layers(self) -> int:
        """How many of the target's layers run."""
        return len(self.store.layers) if self.layers is None else len(self.layers)
