"""MagicDec's self-speculation (arXiv:2408.11049): the target drafts for itself over a small part of its own cache.

At long context a step's cost is reading the cache; the same weights over a few hundred tokens of it are cheap and
mostly agree. The draft's tentative keys and values go to the slots reserved for the step at their true positions, and
the verify pass overwrites them: nothing sparse stays behind, and no second cache exists.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from longdraft.core import Proposal
from longdraft.drafts.base import Draft, DraftRow
from longdraft.kv.select.base import Selector
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer
from longdraft.spec.next_tokens import next_tokens
from longdraft.spec.noise import COUPLED, DRAFT


class SelfSpec(Draft):
    """The target's weights over ``selector``'s view of the target's pages."""

    def __init__(self, model: Transformer, store: PagedStore, selector: Selector) -> None:
        self.model, self.store, self.selector = model, store, selector

    def propose(self, rows: Seq[DraftRow], *, sampled: bool) -> Proposal:
        """See ``Draft``: one token a step for every row that still wants one."""
        tokens: list[list[int]] = [[] for _ in rows]
        log_q: list[list[torch.Tensor]] = [[] for _ in rows]
        for step in range(max(row.gamma for row in rows)):
            active = [i for i, row in enumerate(rows) if row.gamma > step]
            seqs = [rows[i].seq for i in active]
            newest = [tokens[i][-1] if step else rows[i].seq.ids[-1] for i in active]
            feeds = [Feed(s.id, s.num_committed + step, [t], 1) for s, t in zip(seqs, newest, strict=True)]
            logits = feed(self.model, self.store, feeds, self.selector.select)
            drawn, log_probs = next_tokens(
                logits,
                [s.params for s in seqs],
                [s.seed for s in seqs],
                [len(s.ids) + step for s in seqs],
                role=DRAFT if sampled else COUPLED,
                keep=sampled,
            )
            for n, i in enumerate(active):
                tokens[i].append(drawn[n])
                if sampled:
                    log_q[i].append(log_probs[n])
        flat = [x for row in log_q for x in row]
        return Proposal(tokens, torch.stack(flat) if flat else None)

    def bytes_read(self, length: int) -> int:
        """See ``Draft``."""
        return self.selector.tokens_read(length) * self.store.bytes_per_token
