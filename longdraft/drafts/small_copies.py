"""A small model over chosen tokens of its own cache (MagicDec, arXiv:2408.11049, with SnapKV): its standalone drafts.

    the small model's cache    0 ....................... | filled up to the choice, at full attention
    a sequence's copy          chosen ones of these      | all tokens since, as the draft fed them; guesses

A step reads the copy alone, and the budget bounds that. When it is full, or ``refresh`` says so, a pass over the whole
cache takes in the tokens since; the model's own queries of the last of them are what the next choice is made by.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from longdraft.capture import NOTHING
from longdraft.core import Proposal, Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.copy_spec import CopySpec
from longdraft.drafts.small_model import DraftModel, SmallModel, agreeing
from longdraft.kv.select.base import TokenSelector
from longdraft.kv.select.full import Full
from longdraft.models.feed import Feed


class SmallCopies(CopySpec):
    """``CopySpec`` with a ``DraftModel`` in the target's place, whose cache follows the text by itself.

    Tokens keep their positions in the text, so drafting ends where the model's range does.
    """

    def __init__(self, draft: DraftModel, selector: TokenSelector, vocab_size: int, max_rows: int = 256) -> None:
        """``vocab_size``: the target's; ``max_rows``: sequences that may run at once."""
        super().__init__(draft.model, draft.store, selector, max_rows=max_rows)
        self.draft, self.vocab_size = draft, vocab_size
        self.cache = SmallModel(draft, Full(selector.budget), vocab_size, selector.needs.queries, self.observe)
        self.needs = NOTHING  # of the target
        self._fed: dict[int, list[int]] = {}  # by sequence id: what lies in its copy behind the tokens that are final

    # --- the draft's interface

    def propose(self, rows: Seq[DraftRow], *, sampled: bool) -> Proposal:
        """See ``Draft``."""
        proposal = super().propose(rows, sampled=sampled)
        for row, tokens in zip(rows, proposal.tokens, strict=True):
            if tokens:
                known = self.copies.get(row.seq.id).known
                self._fed[row.seq.id] = [*row.seq.ids[known:], *tokens[:-1]]  # the last one was not fed
        return proposal

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``: one token after a refusal, two where all proposals stood, more after a rest."""
        self.settle([row.seq for row in rows])  # all give back what was refused before any of them asks for more
        return [self._feed(row.seq) if self._ready(row) else None for row in rows]

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        return self.draft.feed(self.copies.store, feeds, self.vocab_size)

    def follow(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``."""
        self.cache.follow(seqs)

    def settle(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``: what was guessed right stays."""
        for seq in seqs:
            if copy := self.copies.get(seq.id):
                new = seq.ids[copy.known : len(seq.ids) - 1]  # the newest token is always fed again
                self.copies.keep(seq.id, agreeing(self._fed.pop(seq.id, []), new))
        super().settle(seqs)

    def fork(self, source: Sequence, child: Sequence) -> None:
        """See ``Draft``: the child shares the pages of the cache, and makes a choice of its own."""
        self.cache.fork(source, child)
        super().fork(source, child)

    def release(self, seq_id: int) -> None:
        """See ``Draft``."""
        super().release(seq_id)
        self.cache.release(seq_id)
        self._fed.pop(seq_id, None)

    def bytes(self, length: int) -> int:
        """See ``Draft``: the whole cache, and the copies."""
        return self.cache.bytes(length) + super().bytes(min(length, self.draft.max_length))

    def bytes_read(self, length: int) -> int:
        """See ``Draft``: copies. Besides, each choice reads the cache twice: to take in what is new, and to rate."""
        return super().bytes_read(min(length, self.draft.max_length))

    # --- the choice

    def _store_row(self, seq_id: int) -> int:
        return self.cache.row(seq_id)

    def _ready(self, row: DraftRow) -> bool:
        return row.seq.num_committed + row.gamma <= self.draft.max_length and super()._ready(row)

    def _choose(self, row: DraftRow) -> bool:
        return self.cache.fill(row.seq) and super()._choose(row)

    def _feed(self, seq: Sequence) -> Feed:
        copy = self.copies.get(seq.id)
        place = copy.place(copy.known)
        return Feed(seq.id, place, seq.ids[copy.known :], 1, shift=copy.known - place)
