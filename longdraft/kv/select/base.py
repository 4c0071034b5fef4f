"""Which tokens of its cache a draft reads: the interface of every selection.

A selection is a choice alone: it owns no state and copies nothing. The two kinds differ in what they choose by. A
``ViewSelector`` needs nothing but lengths and narrows the view of every step; a ``TokenSelector`` looks at keys and at
what the target's passes said, chooses once in a while, and the draft keeps copies of what was chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longdraft.capture import Needs, Seen
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
    def choose(self, seen: Seen, keys: Callable[[int], torch.Tensor], count: int) -> torch.Tensor:
        """Positions ``[L, G, count]`` of a row's tokens, ascending, each once per head.

        ``keys(layer)`` are all keys of the row, ``[S, G, D]``, and ``count ≤ S``. A pure function of its arguments.
        """
