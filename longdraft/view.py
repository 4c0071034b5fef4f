"""What attention reads, as data: all that a kernel ever sees of the cache.

A view says which cached tokens a row can see; an ``AttnPlan`` adds the step's queries. Neither knows about requests,
drafts or phases: prefill, decoding, drafting and verifying differ only in the numbers held here. There are three kinds
of view and no others; each can spell itself out page by page (``expand``), which is all that the reference kernels use.
What is chosen per head may also differ by layer: such a view has arrays with a leading layer dimension, and ``layer``
gives the one that a layer reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

NEVER = 2**62  # the position of a slot that no query may see


class KVView(Protocol):
    """What a view of B rows offers, whatever its kind. Built on the CPU."""

    lens: torch.Tensor  # [B] int64: tokens of each row's sequence, the step's own included
    page_size: int

    @property
    def layered(self) -> bool:
        """Whether each layer reads something else."""

    def layer(self, i: int) -> KVView:
        """What layer ``i`` of the network reads; the view itself where all read the same."""

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``pages [B, G', P]`` and ``positions [B, G', P * page_size]``, where G' is G, or 1 if all heads see the same.

        Slot ``s`` of a row's page list holds the token at ``positions[b, g, s]``, or nothing if that is ``NEVER``.
        Every position appears at most once per head. Of a layered view only ``layer(i)`` can be spelled out.
        """


@dataclass(frozen=True)
class TableView:
    """Rows' pages of a paged store, and at most two token ranges in them: ``[0, sinks) ∪ [starts[b], lens[b])``.

    Row ``b``'s token ``t`` lies in page ``tables[b, t // page_size]`` at offset ``t % page_size``. Entries past a row's
    last page are never followed. The ranges are token-exact: StreamingLLM needs no copy.
    """

    tables: torch.Tensor  # [B, P] int64
    lens: torch.Tensor  # [B] int64
    page_size: int
    sinks: int = 0
    starts: torch.Tensor | None = None  # [B] int64; None: all tokens from 0 on
    layered = False  # a class attribute: ranges are the same for all layers

    def layer(self, i: int) -> TableView:
        """See ``KVView``."""
        return self

    def page_numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of each sequence that hold a visible token, in order: ``number [B, P]``, and whether it is used."""
        size = self.page_size
        if self.starts is None:  # all pages: said apart, as every pass of a whole cache asks
            count = -(-self.lens // size)
            column = torch.arange(int(count.max()))
            used = column < count[:, None]
            return torch.where(used, column, 0), used
        sinks = torch.full_like(self.lens, self.sinks).minimum(self.lens)
        first = self.starts // size  # the first page of the second range; the sinks' pages before it
        before = (-(-sinks // size)).minimum(first)
        count = before + -(-self.lens // size) - first
        column = torch.arange(int(count.max()))
        number = torch.where(column < before[:, None], column, column - before[:, None] + first[:, None])
        used = column < count[:, None]
        return torch.where(used, number, number[:, :1]), used

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KVView``."""
        starts = torch.zeros_like(self.lens) if self.starts is None else self.starts
        size, sinks = self.page_size, torch.full_like(self.lens, self.sinks).minimum(self.lens)
        number, used = self.page_numbers()
        position = (number[:, :, None] * size + torch.arange(size)).flatten(1)  # [B, P * page_size]
        bounds = [x[:, None] for x in (sinks, starts, self.lens)]
        seen = ((position < bounds[0]) | (position >= bounds[1])) & (position < bounds[2])
        seen &= used.repeat_interleave(size, dim=1)
        pages = self.tables.gather(1, number)
        return pages[:, None], torch.where(seen, position, NEVER)[:, None]


@dataclass(frozen=True)
class PagesView:
    """Chosen pages per row and KV head (page selections such as Quest's): page ``numbers[b, g, i]`` of the sequence.

    Unused entries hold −1. The pages are the target's own; nothing is copied.
    """

    tables: torch.Tensor  # [B, P] int64, as in TableView
    numbers: torch.Tensor  # [B, G, K] or [L, B, G, K] int64, each page at most once per head
    lens: torch.Tensor  # [B] int64
    page_size: int

    @property
    def layered(self) -> bool:
        """See ``KVView``."""
        return self.numbers.dim() == 4

    def layer(self, i: int) -> PagesView:
        """See ``KVView``."""
        return replace(self, numbers=self.numbers[i]) if self.layered else self

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KVView``."""
        used = self.numbers >= 0
        number = self.numbers.clamp(min=0)
        pages = self.tables[:, None].expand(-1, number.shape[1], -1).gather(2, number)
        position = number[..., None] * self.page_size + torch.arange(self.page_size)
        seen = used[..., None] & (position < self.lens[:, None, None, None])
        return pages, torch.where(seen, position, NEVER).flatten(2)


@dataclass(frozen=True)
class CompactView:
    """Copies of chosen tokens per KV head in a small store of their own, in that store's pages, with a growing tail.

    ``positions`` says which token of the sequence a slot is a copy of; unused slots hold ``NEVER``.
    """

    tables: torch.Tensor  # [B, P] int64: pages of the small store
    positions: torch.Tensor  # [B, G, P * page_size] or [L, B, G, P * page_size] int64
    lens: torch.Tensor  # [B] int64: tokens of the sequence, not of the copy
    page_size: int

    @property
    def layered(self) -> bool:
        """See ``KVView``."""
        return self.positions.dim() == 4

    def layer(self, i: int) -> CompactView:
        """See ``KVView``."""
        return replace(self, positions=self.positions[i]) if self.layered else self

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KVView``."""
        pages = self.tables[:, None].expand(-1, self.positions.shape[1], -1)
        return pages, torch.where(self.positions < self.lens[:, None, None], self.positions, NEVER)


@dataclass(frozen=True)
class LayerKV:
    """One layer's storage, in the layout its store was made with."""

    k: torch.Tensor
    v: torch.Tensor


class Attention(Protocol):
    """Attention of one layer: queries ``[N, H, D]`` and a storage → ``[N, H, D]``."""

    def __call__(self, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """See above."""


class Decode(Protocol):
    """Where the pages of a plan's view lie, if they are not the cache's: a layer's number and its cache → a storage.

    It may be filled in for each layer, when that is about to read it; the step's own K and V are in the cache by then.
    """

    def __call__(self, i: int, kv: LayerKV) -> LayerKV:
        """See above."""


@dataclass(frozen=True)
class AttnPlan:
    """One step's attention: ragged queries over a view. Made once per step, used by every layer.

    Row ``b`` owns the flat tokens ``[query_starts[b], query_starts[b + 1])``, which are the last ones of its sequence,
    and attends causally: its last query stands at position ``lens[b] - 1``.
    """

    view: KVView
    query_starts: torch.Tensor  # [B + 1] int64
    slots: torch.Tensor  # [N] int64: page * page_size + offset where each new token's K/V go
    end: int | None = None  # above the rotary position of every token; None: the longest row's length
    decode: Decode | None = None  # None: the view's pages lie in the cache itself

    def layer(self, i: int) -> AttnPlan:
        """The plan of layer ``i``, where the view differs by layer."""
        return replace(self, view=self.view.layer(i))

    def decoding(self, i: int, attention: Attention) -> Attention:
        """``attention`` of layer ``i``, given where the view's pages lie instead of the layer's cache."""
        decode = self.decode
        return attention if decode is None else lambda q, kv: attention(q, decode(i, kv))

    @property
    def query_lens(self) -> torch.Tensor:
        """[B] queries per row."""
        return self.query_starts[1:] - self.query_starts[:-1]
