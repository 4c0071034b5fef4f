"""Which tokens of its cache a draft reads: the interface of every selection.

A selection is a choice alone: it copies nothing. The three kinds differ in what they choose by, and what. A
``ViewSelector`` needs nothing but lengths and narrows the view of every step; a ``TokenSelector`` looks at keys and at
what the target's passes said, chooses once in a while, and the draft keeps copies of what was chosen; a
``PageSelector`` rates the target's own pages by what it remembers of each, and the draft reads the best in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from longdraft.capture import Needs, Seen
from longdraft.kv.select.keys import Keys
from longdraft.kv.store import PagedStore
from longdraft.view import KVView, TableView


@dataclass(frozen=True)
class Selector(ABC):
    """At most ``budget`` tokens per KV head; the newest token of a row is always among them."""

    budget: int

    def tokens_read(self, length: int) -> int:
        """How many cached tokens per KV head a draft step reads of a row of ``length`` tokens, at most."""
        return min(length, self.budget)


class ViewSelector(Selector):
    """Narrows the full view of some rows: a pure function of the view."""

    @abstractmethod
    def select(self, view: TableView) -> KVView:
        """``view`` of all tokens → what the draft reads."""


@dataclass(frozen=True)
class TokenSelector(Selector):
    """Chooses single tokens, per layer and KV head, by what passes of the target said of the latest tokens.

    A choice holds while the tokens that came after it, which are all read, fit in the budget beside it; it is made anew
    sooner if ``refresh`` says so.
    """

    refresh: int | str = 0  # as in DraftConfig

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What it chooses by."""

    @abstractmethod
    def choose(self, seen: Seen, keys: Keys, count: int) -> torch.Tensor:
        """Positions ``[L, G, count]`` of a row's tokens, ascending, each once per head; ``count`` is at most their
        number. A pure function of its arguments.
        """


class PageMemory(ABC):
    """What a page selection remembers of the rows of a store, by the ids that they have there."""

    @abstractmethod
    def observe(self, row: int, seen: Seen) -> None:
        """What passes of the target said of tokens of a row that are final."""

    def follow(self, row: int, pages: int) -> None:  # noqa: B027 - nothing to do is a choice
        """So many first pages of a row are full and final; what is remembered of them may be made now."""

    @abstractmethod
    def rate(self, row: int, pages: int) -> torch.Tensor | None:
        """``[L, G, pages]``: how much the row's first pages, all full and final, are worth to each layer and KV head.

        ``None`` if nothing is known to rate them by.
        """

    @abstractmethod
    def fork(self, source: int, child: int, length: int) -> None:
        """``child`` shares the first ``length`` tokens of ``source``, and the id of the next."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Forget a row; one that is not known is fine."""


@dataclass(frozen=True)
class PageSelector(Selector):
    """Rates pages, per layer and KV head; the draft reads the best besides the first and the last ones.

    The pages of the first ``sinks`` and the last ``recent`` tokens are always read, as far as the budget allows: sinks
    take at most half of it, the recent ones at most half of what is left after them and a round's own pages, which are
    read even if the budget is smaller.
    """

    sinks: int = 16
    recent: int = 32
    refresh: int | str = 1  # as in DraftConfig

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What it rates by."""

    @abstractmethod
    def memory(self, store: PagedStore) -> PageMemory:
        """A memory for the rows of ``store``, empty."""

    @abstractmethod
    def page_note_bytes(self, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> int:
        """Bytes that are remembered of a page in one layer."""


def top(rating: torch.Tensor, count: int) -> torch.Tensor:
    """``[L, G, count]`` of the N that ``rating [L, G, N]`` rates: the best, ascending; ties to the lower number."""
    bits = (rating.float() + 0.0).view(torch.int32)  # as integers, floats keep their order, the negative ones backwards
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = order - torch.arange(rating.shape[-1], device=rating.device)  # no two alike, and far cheaper than a sort
    return keys.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
