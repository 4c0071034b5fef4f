"""Quest (arXiv:2406.10774): the pages whose keys could match the query best, by the bounds of each channel.

A page is remembered by the smallest and the largest value that its keys have in each channel. Against a query these
bound every score of the page from above, Σ_d max(q_d · min_d, q_d · max_d), so no page with a strong key is missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.capture import Needs, Seen
from longdraft.kv.select.base import PageMemory, PageSelector
from longdraft.kv.store import PagedStore


def page_bounds(keys: torch.Tensor, page_size: int) -> torch.Tensor:
    """``keys [P * page_size, G, D]`` → ``[P, G, 2, D]``: the smallest and the largest of each page, by channel."""
    pages = keys.unflatten(0, (-1, page_size))
    return torch.stack([pages.amin(dim=1), pages.amax(dim=1)], dim=2)


def page_scores(queries: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """``[G, P]``: the upper bounds of ``queries [n, H, D]`` against ``bounds [P, G, 2, D]``, summed over each group.

    max(q · min, q · max) is q · max where q > 0 and q · min elsewhere, so the queries' negative and positive parts may
    be added up before the product.
    """
    grouped = queries.unflatten(1, (bounds.shape[1], -1))  # [n, G, group, D]
    parts = torch.stack([grouped.clamp(max=0).sum(dim=(0, 2)), grouped.clamp(min=0).sum(dim=(0, 2))], dim=1)
    return torch.einsum("pgkd,gkd->gp", bounds.to(parts.dtype), parts)


@dataclass(frozen=True)
class Pages(PageSelector):
    """The pages with the highest bounds, over the newest ``window`` final queries and the heads of a KV group."""

    window: int = 1

    @property
    def needs(self) -> Needs:
        """See ``PageSelector``."""
        return Needs(queries=self.window)

    def memory(self, store: PagedStore) -> PageBounds:
        """See ``PageSelector``."""
        return PageBounds(store, self.window)

    def page_note_bytes(self, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> int:
        """See ``PageSelector``: two values for each channel, against page_size keys and values in the cache."""
        return 2 * num_kv_heads * head_dim * kv_dtype.itemsize


class PageBounds(PageMemory):
    """The bounds of every page of a store that is full and final, and each row's newest queries.

    Bounds lie by page, not by row: rows that share pages share them. A row's are made when they are first asked for, of
    all pages that have become full since; what may still be taken back lies behind those.
    """

    def __init__(self, store: PagedStore, window: int) -> None:
        self.store, self.window = store, window
        layout = store.layout
        shape = (len(store.layers), store.num_pages, layout.num_kv_heads, 2, layout.head_dim)
        self.bounds = torch.empty(shape, dtype=store.k.dtype, device=store.k.device)  # untouched, it costs no memory
        self._known: dict[int, int] = {}  # so many of a row's first pages have their bounds
        self._seen: dict[int, Seen] = {}

    def observe(self, row: int, seen: Seen) -> None:
        """See ``PageMemory``."""
        before = self._seen.get(row)
        self._seen[row] = before.then(seen, self.window) if before else seen.last(self.window)

    def rate(self, row: int, pages: int) -> torch.Tensor | None:
        """See ``PageMemory``."""
        if row not in self._seen:
            return None
        self._update(row, pages)
        table = self._table(row, 0, pages)
        scores = [page_scores(q, x[table]) for q, x in zip(self._seen[row].queries, self.bounds, strict=True)]
        return torch.stack(scores)

    def fork(self, source: int, child: int, length: int) -> None:
        """See ``PageMemory``."""
        self._known[child] = min(self._known.get(source, 0), length // self.store.layout.page_size)
        if source in self._seen and (seen := self._seen[source].until(length)):
            self._seen[child] = seen

    def release(self, row: int) -> None:
        """See ``PageMemory``."""
        self._known.pop(row, None)
        self._seen.pop(row, None)

    def _update(self, row: int, pages: int) -> None:
        known, layout = self._known.get(row, 0), self.store.layout
        if known >= pages:
            return
        slots = self.store.slots(row, known * layout.page_size, pages * layout.page_size).to(self.bounds.device)
        table = self._table(row, known, pages)
        for layer, keys in enumerate(self.store.k):
            self.bounds[layer, table] = page_bounds(layout.read_k(keys, slots), layout.page_size)
        self._known[row] = pages

    def _table(self, row: int, first: int, stop: int) -> torch.Tensor:
        size = self.store.layout.page_size
        return (self.store.slots(row, first * size, stop * size)[::size] // size).to(self.bounds.device)
