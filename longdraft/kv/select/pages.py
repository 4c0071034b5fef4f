"""Quest (arXiv:2406.10774): the pages whose keys could match the query best, by the bounds of each channel.

A page is remembered by the smallest and the largest value that its keys have in each channel. Against a query these
bound every score of the page from above, Σ_d max(q_d · min_d, q_d · max_d), so no page with a strong key is missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.capture import Needs, Seen
from longdraft.kernels import native
from longdraft.kv.select.base import PageMemory, PageSelector
from longdraft.kv.store import PagedStore


def parts_of(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``queries [..., n, H, D]`` → ``[..., G, 2, D]``: what the bounds of each KV head's keys are multiplied by.

    max(q · min, q · max) is q · max where q > 0 and q · min elsewhere, so the queries' negative and positive parts may
    be added up before the product, over queries and the heads of a group.
    """
    grouped = queries.unflatten(-2, (kv_heads, -1))  # [..., n, G, group, D]
    return torch.stack([part.sum(dim=(-4, -2)) for part in (grouped.clamp(max=0), grouped.clamp(min=0))], dim=-2)


def page_scores(queries: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """``[G, P]``: the upper bounds of ``queries [n, H, D]`` against ``bounds [P, G, 2, D]``, summed over each group."""
    parts = parts_of(queries, bounds.shape[1])
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

    Bounds lie by page, not by row: rows that share pages share them. A row's are made as its prompt is filled, and when
    it is rated, of all pages that have become full since; what may still be taken back lies behind those. Pages that
    will be encoded get others then, and are looked at anew until they are.
    """

    def __init__(self, store: PagedStore, window: int) -> None:
        self.store, self.window = store, window
        layout = store.layout
        shape = (len(store.layers), store.num_numbers, layout.num_kv_heads, 2, layout.head_dim)
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
        self.follow(row, pages)
        table, queries = self._table(row, 0, pages), self._seen[row].queries
        if native.can_rate(self.store.layout, self.store.k):
            return native.page_scores(parts_of(queries, self.bounds.shape[2]), self.bounds, table)
        return torch.stack([page_scores(q, x[table]) for q, x in zip(queries, self.bounds, strict=True)])

    def follow(self, row: int, pages: int) -> None:
        """See ``PageMemory``."""
        known = self._known.get(row, 0)
        if known < pages:
            table = self._table(row, known, pages)
            self.bounds[:, table] = self.store.bounds(table)
            self._known[row] = min(pages, self.store.settled_pages(row))

    def fork(self, source: int, child: int, length: int) -> None:
        """See ``PageMemory``."""
        self._known[child] = min(self._known.get(source, 0), length // self.store.layout.page_size)
        if source in self._seen and (seen := self._seen[source].until(length)):
            self._seen[child] = seen

    def release(self, row: int) -> None:
        """See ``PageMemory``."""
        self._known.pop(row, None)
        self._seen.pop(row, None)

    def _table(self, row: int, first: int, stop: int) -> torch.Tensor:
        return self.store.pages(row, first, stop).to(self.bounds.device)
