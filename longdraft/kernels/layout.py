"""How a page's keys and values lie in memory. Nothing outside ``kernels`` and ``kv/store.py`` indexes storage."""

from __future__ import annotations

from collections.abc import Callable
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
        """The tokens at ``slots [N]``, or for each head those at ``slots [N, G]``, as ``[N, G, D]``."""
        return storage[slots // self.page_size, _heads(slots), slots % self.page_size]

    def read_pages_k(self, storage: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """All keys of ``pages [P]`` as ``[P * page_size, G, D]``."""
        return storage[pages].transpose(1, 2).flatten(0, 1)

    def bounds_k(self, storage: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The smallest and the largest key of each page, by channel, in all layers: ``[L, P, G, 2, D]``."""
        keys = storage[:, pages]  # [L, P, G, page_size, D]
        return torch.stack([keys.amin(dim=3), keys.amax(dim=3)], dim=3)

    # Keys and values lie alike.
    write_k = write_v = write
    read_k = read_v = read

    def block_index(self, pages: torch.Tensor) -> torch.Tensor:
        """``pages [B, G', P]`` (G' is G or 1) → flat block numbers for ``gather``, in the order [B, G, P]."""
        heads = torch.arange(self.num_kv_heads, device=pages.device)
        return (pages * self.num_kv_heads + heads[:, None]).flatten()

    def gather(self, storage: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Copy whole blocks, one per entry of ``blocks``, to ``out [len(blocks), page_size * D]``."""
        torch.index_select(storage.view(-1, self.page_size * self.head_dim), 0, blocks, out=out)


@dataclass(frozen=True)
class BlockedLayout:
    """Pages as the native kernels read them: K with its tokens side by side in 16 lanes, V row by row.

    float32    K [P, G, D, 16]         V [P, G, 16, D]
    pairs      K [P, G, D / 2, 16, 2]  V [P, G, 8, D, 2]     two neighbours of a sum in one word
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    pairs: bool

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Storage shape of one layer's K (or V)."""
        return (num_pages, self.num_kv_heads, self.page_size * self.head_dim)

    def write_k(self, storage: torch.Tensor, slots: torch.Tensor, k: torch.Tensor) -> None:
        """Store ``k [N, G, D]`` at ``slots [N]``."""
        page, offset = slots // self.page_size, slots % self.page_size
        keys = self._keys(storage)
        keys[page, :, :, offset] = k.to(storage.dtype).contiguous().view(keys.dtype)

    def write_v(self, storage: torch.Tensor, slots: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``v [N, G, D]`` at ``slots [N]``."""
        page, offset, step = slots // self.page_size, slots % self.page_size, 1 + self.pairs
        self._values(storage)[page, :, offset // step, :, offset % step] = v.to(storage.dtype)

    def read_k(self, storage: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The keys at ``slots [N]``, or for each head those at ``slots [N, G]``, as ``[N, G, D]``."""
        keys = self._keys(storage)[slots // self.page_size, _heads(slots), :, slots % self.page_size]
        return keys.view(storage.dtype)

    def read_pages_k(self, storage: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """All keys of ``pages [P]`` as ``[P * page_size, G, D]``."""
        return self._keys(storage[pages]).permute(0, 3, 1, 2).contiguous().view(storage.dtype).flatten(0, 1)

    def bounds_k(self, storage: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The smallest and the largest key of each page, by channel, in all layers: ``[L, P, G, 2, D]``."""
        keys = storage[:, pages].unflatten(-1, (-1, self.page_size, 1 + self.pairs))
        return torch.stack([_over(keys, torch.minimum), _over(keys, torch.maximum)], dim=3).flatten(4)

    def read_v(self, storage: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The values at ``slots [N]``, or for each head those at ``slots [N, G]``, as ``[N, G, D]``."""
        offset, step = slots % self.page_size, 1 + self.pairs
        return self._values(storage)[slots // self.page_size, _heads(slots), offset // step, :, offset % step]

    def _keys(self, storage: torch.Tensor) -> torch.Tensor:
        """``[P, G, D / step, page_size]``: a pair is one word, which is moved at once."""
        words = storage.view(torch.int32) if self.pairs else storage
        return words.view(-1, self.num_kv_heads, self.head_dim // (1 + self.pairs), self.page_size)

    def _values(self, storage: torch.Tensor) -> torch.Tensor:
        step = 1 + self.pairs
        return storage.view(-1, self.num_kv_heads, self.page_size // step, self.head_dim, step)


Layout = PlainLayout | BlockedLayout


def _over(keys: torch.Tensor, better: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The smallest or the largest over dimension 4, of 16: three times as fast as ``amin``, whose lanes lie apart."""
    while keys.shape[4] > 1:
        keys = better(*keys.chunk(2, dim=4))
    return keys.squeeze(4)


def _heads(slots: torch.Tensor) -> torch.Tensor | slice:
    """The index that goes with the slots' pages: all heads, or each head with its own column of slots."""
    return slice(None) if slots.dim() == 1 else torch.arange(slots.shape[1], device=slots.device)
