"""How a page's keys and values lie in memory. Nothing outside ``kernels`` and ``kv/store.py`` indexes storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PlainLayout:
    """Pages as ``[P, G, page_size, D]``: each KV head's block of one page is contiguous."""

    page_size: int
    num_kv_heads: int
    head_dim: int

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Storage shape of one layer's K (or V)."""
        return (num_pages, self.num_kv_heads, self.page_size, self.head_dim)

    def write(self, storage: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Store ``x [N, G, D]`` at ``slots [N]``."""
        storage[slots // self.page_size, :, slots % self.page_size] = x.to(storage.dtype)

    def read(self, storage: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The tokens at ``slots [N]`` as ``[N, G, D]``."""
        return storage[slots // self.page_size, :, slots % self.page_size]

    def block_index(self, pages: torch.Tensor) -> torch.Tensor:
        """``pages [B, G', P]`` (G' is G or 1) → flat block numbers for ``gather``, in the order [B, G, P]."""
        heads = torch.arange(self.num_kv_heads, device=pages.device)
        return (pages * self.num_kv_heads + heads[:, None]).flatten()

    def gather(self, storage: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Copy whole blocks, one per entry of ``blocks``, to ``out [len(blocks), page_size * D]``."""
        torch.index_select(storage.view(-1, self.page_size * self.head_dim), 0, blocks, out=out)
