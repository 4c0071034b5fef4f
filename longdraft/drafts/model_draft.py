"""Drafting with a model, whichever weights and whatever cache: one token a step for every row that still wants one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from longdraft.core import Place, Proposal
from longdraft.drafts.base import Draft, DraftRow
from longdraft.models.feed import Feed
from longdraft.spec.next_tokens import next_tokens
from longdraft.spec.noise import COUPLED, DRAFT


class ModelDraft(Draft):
    """The loop that all drafts with weights share; a subclass says what is fed first, and runs the feeds."""

    @abstractmethod
    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """For each row the tokens that its cache lacks up to the newest one, or ``None`` if it cannot draft now."""

    @abstractmethod
    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """Logits ``[R, V]`` of the feeds, V being the target's vocabulary."""

    def propose(self, rows: Seq[DraftRow], *, sampled: bool) -> Proposal:
        """See ``Draft``."""
        tokens: list[list[int]] = [[] for _ in rows]
        log_q: list[list[torch.Tensor]] = [[] for _ in rows]
        feeds = self.begin(rows)
        for step in range(max(row.gamma for row in rows)):
            active = [i for i, f in enumerate(feeds) if f is not None and rows[i].gamma > step]
            if not active:
                break
            if step:
                for i in active:
                    feeds[i] = _next(feeds[i], tokens[i][-1])
            logits = self.run([feeds[i] for i in active])
            places = [Place(rows[i].seq, tuple(tokens[i])) for i in active]
            drawn, log_probs = next_tokens(logits, places, role=DRAFT if sampled else COUPLED, keep=sampled)
            for n, i in enumerate(active):
                tokens[i].append(drawn[n])
                if sampled:
                    log_q[i].append(log_probs[n])
        flat = [x for row in log_q for x in row]
        return Proposal(tokens, torch.stack(flat) if flat else None)


def _next(last: Feed, token: int) -> Feed:
    return replace(last, start=last.start + len(last.tokens), tokens=[token])
