"""Which tokens of its own cache a draft reads: the interface of every selection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from longdraft.view import KVView, TableView


@dataclass(frozen=True)
class Selector(ABC):
    """Narrows the full view of some rows to at most ``budget`` tokens per KV head.

    A selector is a pure function of the view; the newest token of a row must stay visible.
    """

    budget: int

    @abstractmethod
    def select(self, view: TableView) -> KVView:
        """``view`` of all tokens → what the draft reads."""

    def tokens_read(self, length: int) -> int:
        """How many cached tokens per KV head a draft step reads of a row of ``length`` tokens."""
        return min(length, self.budget)
