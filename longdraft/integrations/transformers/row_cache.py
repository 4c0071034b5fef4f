"""A transformers cache whose rows end where they like: what is written is written over, and nothing is ever moved.

    column of a row    0 .............. prompt | prompt ............ end ........
    holds              padding and its prompt  | its own tokens, one by one | what is to be written over

In a stock cache all rows have one length, so rows of which different numbers of drafted tokens stand cannot share it.
The columns are those that plain decoding would fill, so the stock cache can be given back as plain decoding leaves it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE = 4  # room is added for one part in so many of what a cache holds, so that it seldom has to be moved


class RowLayer(DynamicLayer):
    """Keys and values ``[B, G, capacity, D]`` of one layer; ``places`` says where a pass writes and what it reads."""

    def __init__(self, places: RowCache) -> None:
        super().__init__()
        self.places = places

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, G, n, D]`` to the columns of the pass; all columns of the pass, old and new."""
        self.keys, self.values = self._put(self.keys, key_states), self._put(self.values, value_states)
        self.is_initialized = True
        return self.keys[:, :, : self.places.width], self.values[:, :, : self.places.width]

    def get_seq_length(self) -> int:
        """Columns that the pass reads."""
        return self.places.width

    def _put(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = new.shape
        capacity = 0 if held is None else held.shape[2]
        if capacity < self.places.width:  # zeros, since what a mask hides must still be finite
            grown = new.new_zeros(batch, heads, self.places.width * (SPARE + 1) // SPARE, dim)
            if held is not None:
                grown[:, :, :capacity] = held
            held = grown
        columns = self.places.columns.to(new.device)
        held[torch.arange(batch, device=new.device)[:, None], :, columns] = new.transpose(1, 2)
        return held


class RowCache(Cache):
    """``num_layers`` of them. ``at`` says before each pass which columns it is about."""

    columns: torch.Tensor  # [B, n]
    width: int = 0

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])

    def at(self, columns: torch.Tensor) -> RowCache:
        """The next pass writes row b's tokens to ``columns[b]`` and reads no column behind the last of all rows'."""
        self.columns, self.width = columns, int(columns.max()) + 1
        return self

    def take(self, stock: DynamicCache) -> None:
        """All that a stock cache holds; it is left empty."""
        for layer, theirs in zip(self.layers, stock.layers, strict=False):
            if theirs.is_initialized:
                layer.keys, layer.values, layer.is_initialized = theirs.keys, theirs.values, True
                theirs.reset()

    def give(self, stock: DynamicCache, width: int) -> None:
        """Fill a stock cache with the first ``width`` columns."""
        while len(stock.layers) < len(self.layers):
            stock.layers.append(DynamicLayer())
        for layer, theirs in zip(self.layers, stock.layers, strict=True):
            theirs.lazy_initialization(layer.keys, layer.values)
            theirs.keys, theirs.values = layer.keys[:, :, :width], layer.values[:, :, :width]

    def copies(self, columns: torch.Tensor, room: int) -> RowCache:
        """A cache of copies, of the columns ``[L or 1, B, G or 1, C]``, with room for so many tokens behind them."""
        copies = RowCache(len(self.layers))
        batch, heads, capacity, _ = self.layers[0].keys.shape
        starts = capacity * torch.arange(batch * heads).view(batch, heads, 1)
        places = (starts + pad(columns, (0, room))).flatten(1).expand(len(self.layers), -1)  # any will do for the room
        for layer, own, at in zip(self.layers, copies.layers, places, strict=True):
            at = at.to(layer.keys.device)
            chosen = (x.flatten(0, 2).index_select(0, at) for x in (layer.keys, layer.values))
            own.keys, own.values = (x.view(batch, heads, -1, x.shape[-1]) for x in chosen)
        copies.width = columns.shape[-1]
        return copies
