"""Who proposes tokens: the interface of every draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from longdraft.capture import NOTHING, Needs, Seen
from longdraft.core import Proposal, Sequence


@dataclass(frozen=True)
class DraftRow:
    """A sequence whose newest token is not in the cache yet, and how many tokens to propose after it (at least 1).

    Pages of the target's store for that token and the proposals are reserved.
    """

    seq: Sequence
    gamma: int


class Draft(ABC):
    """Proposes tokens for sequences of a target.

    State, where there is any, is kept by sequence id. ``seq.ids`` only ever grows, so a state is brought up to date by
    looking at what was added since: nobody says which proposals were accepted, and a draft that sat
    out some rounds catches up by itself.
    """

    needs: Needs = NOTHING  # what it wants to be told of the target's passes
    select_s: float = 0.0  # seconds spent so far on choosing what to read, a part of proposing

    @abstractmethod
    def propose(self, rows: Seq[DraftRow], *, sampled: bool) -> Proposal:
        """Up to ``gamma`` tokens per row, possibly none.

        ``sampled``: draw from an independent stream and return the distributions, as the maximal rule needs.
        """

    def observe(self, seq: Sequence, seen: Seen) -> None:  # noqa: B027 - for those that need nothing
        """After a pass of the target: what it said, as ``needs`` asked, of tokens of ``seq`` that are final now.

        Comes before ``follow`` and ``settle``; refused proposals are not in it. Chunks of a prompt give parts of what
        was asked for, which join on to each other.
        """

    def follow(self, seqs: Seq[Sequence]) -> None:  # noqa: B027 - nothing to do is a choice
        """After a prefill step of the target: take in the sequences' first ``num_committed`` tokens.

        Optional: a draft that does nothing here catches up at its first proposal.
        """

    def settle(self, seqs: Seq[Sequence]) -> None:  # noqa: B027
        """After proposals were verified: give back what refused ones hold, unless the next proposal does that."""

    def fork(self, source: Sequence, child: Sequence) -> None:  # noqa: B027
        """``child`` goes on from ``source``'s ids: share the state, or leave it to be built anew."""

    def release(self, seq_id: int) -> None:  # noqa: B027
        """Forget a sequence that ended or was preempted; one that is not known is fine."""

    def bytes(self, length: int) -> int:
        """Memory for what is proposed from, of a sequence of ``length`` tokens, beyond the target's own cache."""
        return 0

    def note_bytes(self, length: int) -> int:
        """Memory for what a choice is made by (queries, summaries), of a sequence of ``length`` tokens."""
        return 0

    def bytes_read(self, length: int) -> int:
        """KV bytes that proposing one token reads for a sequence of ``length`` tokens."""
        return 0
