"""Who proposes tokens: the interface of every draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from longdraft.core import Proposal, Sequence


@dataclass(frozen=True)
class DraftRow:
    """A sequence whose newest token is not in the cache yet, and how many tokens to propose after it (at least 1).

    Pages for that token and the proposals are reserved.
    """

    seq: Sequence
    gamma: int


class Draft(ABC):
    """Proposes tokens for sequences of a target. State, where there is any, is kept by sequence id."""

    @abstractmethod
    def propose(self, rows: Seq[DraftRow], *, sampled: bool) -> Proposal:
        """Up to ``gamma`` tokens per row, possibly none.

        ``sampled``: draw from an independent stream and return the distributions, as the maximal rule needs.
        """

    def bytes(self, length: int) -> int:
        """Memory that a sequence of ``length`` tokens takes beyond the target's own cache."""
        return 0

    def bytes_read(self, length: int) -> int:
        """KV bytes that proposing one token reads for a sequence of ``length`` tokens."""
        return 0
