"""How groups of tokens in a format lie in the pages of a cache: arithmetic, and bytes in and out.

    a page         | its K block, its V block: ``page_size`` tokens at full precision | spill |
    ``pages`` ones | the bytes of one group: ``group`` tokens in the format                   |

So one pool serves both: a page that is given back by tokens at full precision may next be part of a group. Each KV head
has its share of a page to itself. What the format needs beyond a page's blocks is its spill, kept beside all pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch.nn.functional import pad

from longdraft.kv.format.base import LAG, Format, old_tokens


@dataclass(frozen=True)
class Packing:
    """``format`` beside pages of ``page_size`` tokens whose K and V are of type ``dtype``."""

    format: Format
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @cached_property
    def group(self) -> int:
        """Tokens to a group: the fewest that make whole pages, and fill one once they are encoded."""
        tokens = self.format.group_size(self.page_size)
        while self._group_bytes(tokens) < self._block_bytes:
            tokens += self.page_size
        return tokens

    @cached_property
    def pages(self) -> int:
        """Pages that a group lies in."""
        return self._group_bytes(self.group) // self._block_bytes

    @property
    def span(self) -> int:
        """Pages that a group's tokens take at full precision."""
        return self.group // self.page_size

    @cached_property
    def spill(self) -> int:
        """Bytes of one KV head beside a page's blocks."""
        return -(-(self._group_bytes(self.group) - self.pages * self._block_bytes) // self.pages)

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes in one layer for one KV head, its spill included."""
        return self._block_bytes + self.spill

    @property
    def held(self) -> int:
        """Tokens that a page holds at most."""
        return -(-self.group // self.pages)

    def seen(self, position: int) -> int:
        """How many groups a query at ``position`` sees encoded; behind them it sees K and V as they were computed.

        It depends on nothing else: so neither proposals nor the chunks of a prompt show in what is computed.
        """
        return old_tokens(position, self.group) // self.group

    def takes(self, length: int) -> int:
        """Pages that a row takes at most while it grows to ``length`` tokens."""
        # At full precision: from the first token that is not old to the last that a pass feeds.
        window = -(-(LAG + self.group - 1 + LAG) // self.page_size)
        return self.pages * self.seen(length - 1) + min(-(-length // self.page_size), window)

    def longest(self, num_pages: int) -> int:
        """The longest row that fits in so many pages."""
        most = num_pages * self.held + LAG + self.group
        return bisect_right(range(most), num_pages, key=self.takes) - 1

    def pack(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """A format's ``parts [n, G, *shape]`` → bytes of the groups' pages: K, V, spill, ``[n * pages, G, bytes]``."""
        flat = torch.cat([x.contiguous().flatten(2).view(torch.uint8) for x in parts], dim=2)
        flat = pad(flat, (0, self.pages * self.page_bytes - flat.shape[2]))
        flat = flat.unflatten(2, (self.pages, -1)).transpose(1, 2).flatten(0, 1)
        block = self._block_bytes // 2
        return flat.split((block, block, self.spill), dim=2)

    def unpack(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``pack``, undone."""
        flat = torch.cat(list(blocks), dim=2).unflatten(0, (-1, self.pages)).transpose(1, 2).flatten(2)
        kinds = self.format.parts(self.group, self.head_dim, self.dtype)
        sizes = [prod(part.shape) * part.dtype.itemsize for part in kinds]
        parts = flat[..., : sum(sizes)].split(sizes, dim=2)
        own = [x.clone(memory_format=torch.contiguous_format) for x in parts]  # to begin where its type may
        return [x.view(y.dtype).unflatten(2, y.shape) for x, y in zip(own, kinds, strict=True)]

    @property
    def _block_bytes(self) -> int:
        """Bytes of one KV head in a page of K and one of V."""
        return 2 * self.page_size * self.head_dim * self.dtype.itemsize

    def _group_bytes(self, tokens: int) -> int:
        return self.format.group_bytes(tokens, self.head_dim, self.dtype)
