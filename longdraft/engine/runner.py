"""A batch → logits, and a batch's rows → proposals. The only place where the engine touches the model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile

import torch

from longdraft.capture import NOTHING
from longdraft.config import DraftConfig
from longdraft.core import Batch, Proposal, Row, Sequence, Status
from longdraft.drafts.base import Draft, DraftRow
from longdraft.drafts.registry import Beside, make
from longdraft.engine.observe import Observation
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer


class Runner:
    """Runs batches of one model over one store, and the drafts that its sequences ask for."""

    def __init__(
        self,
        model: Transformer,
        store: PagedStore,
        small: Mapping[str, Beside] | None = None,
        max_rows: int = 256,
    ) -> None:
        """``small``: models loaded to draft for ``model``, by name; ``max_rows``: sequences that may run at once."""
        self.model, self.store, self.small, self.max_rows = model, store, dict(small or {}), max_rows
        self._drafts: dict[DraftConfig, Draft] = {}
        self._observation: Observation | None = None  # of the pass that is not followed up yet

    def propose(self, batch: Batch) -> tuple[Batch, dict[int, torch.Tensor]]:
        """The batch with proposals for the rows that have a draft and room, one group per draft and rule.

        Also the drafts' log-probabilities ``[len(proposal), V]`` by sequence id, for the maximal rule.
        """
        groups: dict[DraftConfig, list[int]] = defaultdict(list)
        for i, row in enumerate(batch.rows):
            if row.room and row.seq.draft:
                groups[_any_gamma(row.seq.draft)].append(i)
        rows, log_q = list(batch.rows), {}
        for config, members in groups.items():
            started = time.perf_counter()
            drafted = [DraftRow(rows[i].seq, rows[i].room) for i in members]
            proposal = self.draft(config).propose(drafted, sampled=config.sampling_rule == "maximal")
            seconds = time.perf_counter() - started
            for n, i in enumerate(members):
                rows[i] = self._with_proposal(rows[i], proposal.tokens[n])
                rows[i].seq.stats.draft_s += seconds
            log_q |= _by_row(proposal, [rows[i] for i in members])
        return replace(batch, rows=rows), log_q

    @property
    def select_s(self) -> float:
        """Seconds that all drafts have spent on choosing what to read."""
        return sum(draft.select_s for draft in self._drafts.values())

    def check(self, config: DraftConfig) -> DraftConfig:
        """``config``, if such a draft can be made here; ``InvalidValueError`` otherwise."""
        self.draft(config)
        return config

    def draft(self, config: DraftConfig) -> Draft:
        """The draft object of a config, made when first asked for; γ and the rule are the rows' business."""
        key = _key(config)
        if key not in self._drafts:
            self._drafts[key] = make(key, self.model, self.store, self.small, self.max_rows)
        return self._drafts[key]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[R, V]`` of the batch's wanted tokens, in row order; the fed tokens' K and V are in the store."""
        feeds = [
            Feed(row.seq.id, row.seq.num_committed, row.tokens, row.num_logits, row.num_scored) for row in batch.rows
        ]
        needs = [self.draft(row.seq.draft).needs if row.seq.draft else NOTHING for row in batch.rows]
        self._observation = observation = Observation(self.model, batch.rows, needs)
        return feed(self.model, self.store, feeds, capture=observation.capture)

    def follow(self, batch: Batch) -> None:
        """After a step has been committed: let the drafts of its sequences take in, or give up, what is final now."""
        groups: dict[DraftConfig, list[Sequence]] = defaultdict(list)
        observation, self._observation = self._observation, None
        for row in batch.rows:
            if row.seq.draft and row.seq.status is Status.RUNNING:
                groups[_key(row.seq.draft)].append(row.seq)
        for config, seqs in groups.items():
            draft = self.draft(config)
            for seq in seqs:
                for seen in observation.of(seq) if observation else ():
                    draft.observe(seq, seen)
            draft.follow(seqs) if batch.prefill else draft.settle(seqs)

    def fork(self, source: Sequence, child: Sequence) -> None:
        """Let ``child`` share what its draft knows of ``source``, if that has the same draft."""
        if child.draft and source.draft and _key(child.draft) == _key(source.draft):
            self.draft(child.draft).fork(source, child)

    def release(self, seq: Sequence) -> None:
        """Let the drafts forget a sequence."""
        for draft in self._drafts.values():
            draft.release(seq.id)

    def _with_proposal(self, row: Row, tokens: list[int]) -> Row:
        """``row`` with the proposed tokens that there is room for, up to the first that the target does not know."""
        vocab = self.model.config.vocab_size
        kept = tuple(takewhile(lambda token: 0 <= token < vocab, tokens[: row.room]))
        return replace(row, proposal=kept, num_logits=row.num_logits + len(kept))


@lru_cache(maxsize=256)
def _any_gamma(config: DraftConfig) -> DraftConfig:
    """What rows have in common that are drafted for together: all but γ."""
    return replace(config, gamma=1)


@lru_cache(maxsize=256)
def _key(config: DraftConfig) -> DraftConfig:
    """What a draft object is made from: γ and the rule are the rows' business."""
    return replace(config, gamma=1, sampling_rule="coupled")


def _by_row(proposal: Proposal, rows: list[Row]) -> dict[int, torch.Tensor]:
    """The distributions of the tokens that were kept, by sequence id."""
    if proposal.log_q is None:
        return {}
    parts = proposal.log_q.split([len(tokens) for tokens in proposal.tokens])
    return {row.seq.id: part[: len(row.proposal)] for row, part in zip(rows, parts, strict=True)}
