"""The keys of a row, as a token selection sees them: read layer by layer, or asked where attention would go."""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft.kernels import native
from longdraft.kernels.attention.mass import attention_mass
from longdraft.kv.store import PagedStore


class Keys:
    """All keys of a row, by layer; ``read(layer)`` gives them as ``[S, G, D]``."""

    def __init__(self, read: Callable[[int], torch.Tensor]) -> None:
        self._read = read

    def __call__(self, layer: int) -> torch.Tensor:
        """``[S, G, D]``."""
        return self._read(layer)

    def mass(self, queries: torch.Tensor, start: int) -> torch.Tensor:
        """``[L, G, S]`` float32: the attention that ``queries [L, n, H, D]`` pay to each token, summed over queries and
        over the heads of a KV group. They stand at the positions ``start``, ``start + 1``, …, and see what is before.
        """
        positions = torch.arange(start, start + queries.shape[1], device=queries.device)
        return torch.stack([attention_mass(q, self(layer), positions) for layer, q in enumerate(queries)])


class StoredKeys(Keys):
    """Those of the first ``length`` tokens of a store's row."""

    def __init__(self, store: PagedStore, row: int, length: int) -> None:
        self.store, self.length = store, length
        self._pages = store.pages(row, 0, store.pages_for(length)).to(store.k.device)
        super().__init__(self._read_layer)

    def _read_layer(self, layer: int) -> torch.Tensor:
        kv, pages = self.store.at(layer, self._pages)
        return self.store.layout.read_pages_k(kv.k, pages)[: self.length]

    def mass(self, queries: torch.Tensor, start: int) -> torch.Tensor:
        """See ``Keys``."""
        if self.store.format or not native.can_rate(self.store.layout, self.store.k):
            return super().mass(queries, start)
        return native.token_mass(queries, start, self.store.k, self.store.layout, self._pages)[..., : self.length]
