"""A batch → logits, and a batch's rows → proposals. The only place where the engine touches the model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import takewhile
from operator import or_

import torch

from longdraft.capture import NOTHING
from longdraft.config import AutoDraft, DraftConfig, draft_key
from longdraft.core import Batch, Choice, Proposal, Row, Sequence, Status
from longdraft.drafts.base import Draft, DraftRow
from longdraft.drafts.registry import Beside, make
from longdraft.engine.control import Control, OwnDrafts
from longdraft.engine.observe import Observation
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer

MOST_LOGITS = 1 << 28  # bytes of a step's logits that are kept for the next one's
MOST_IDLE = 8  # drafts that are kept though they know no sequence: what they are made of may take memory


class Runner:
    """Runs batches of one model over one store, and the drafts that its sequences ask for."""

    def __init__(
        self,
        model: Transformer,
        store: PagedStore,
        small: Mapping[str, Beside] | None = None,
        max_rows: int = 256,
        control: Control | None = None,
    ) -> None:
        """``small``: models loaded to draft for ``model``, by name; ``max_rows``: sequences that may run at once."""
        self.model, self.store, self.small, self.max_rows = model, store, dict(small or {}), max_rows
        self.control = control or OwnDrafts()
        self._drafts: dict[DraftConfig, Draft] = {}  # the one asked for last comes last
        self._users: defaultdict[DraftConfig, set[int]] = defaultdict(set)  # sequences that a draft may know
        self._select_s = 0.0  # of drafts that are gone
        self._observation: Observation | None = None  # of the pass that is not followed up yet
        self._logits = torch.empty(0, model.config.vocab_size)  # memory for a step's
        self.choose_s = 0.0  # what the last choice took

    def choose(self, seqs: Seq[Sequence]) -> list[Choice]:
        """What control chooses for the decoding rows of a step, once the draft that it asks has said its guesses."""
        started = time.perf_counter()
        choices = self.control.choose(seqs, self._guesses(seqs))
        self.choose_s = time.perf_counter() - started
        return choices

    def _guesses(self, seqs: Seq[Sequence]) -> dict[int, list[int]]:
        config, rows = self.control.asked, [seq for seq in seqs if isinstance(seq.draft, AutoDraft)]
        if config is None or not rows:
            return {}
        self._users[draft_key(config)].update(seq.id for seq in rows)
        asked = [DraftRow(seq, config.gamma) for seq in rows]
        tokens = self.draft(config).propose(asked, sampled=False).tokens
        return {seq.id: guess for seq, guess in zip(rows, tokens, strict=True)}

    def propose(self, batch: Batch) -> tuple[Batch, dict[int, torch.Tensor]]:
        """The batch with proposals for the rows that have a draft and room, one group per draft and rule.

        Also the drafts' log-probabilities ``[len(proposal), V]`` by sequence id, for the maximal rule.
        """
        groups: dict[DraftConfig, list[int]] = defaultdict(list)
        for i, row in enumerate(batch.rows):
            for config in row.choice.dropped:
                self.draft(config).release(row.seq.id)
                self._users[draft_key(config)].discard(row.seq.id)
            if row.room and row.choice.draft:
                self.draft_of(row.seq, row.choice.draft)
                groups[_any_gamma(row.choice.draft)].append(i)
        rows, log_q, draft_s = list(batch.rows), {}, {}
        for config, members in groups.items():
            started = time.perf_counter()
            drafted = [DraftRow(rows[i].seq, rows[i].room) for i in members]
            proposal = self.draft(config).propose(drafted, sampled=config.sampling_rule == "maximal")
            draft_s[config] = seconds = time.perf_counter() - started
            for n, i in enumerate(members):
                rows[i] = self._with_proposal(rows[i], proposal.tokens[n])
                rows[i].seq.stats.draft_s += seconds
            log_q |= _by_row(proposal, [rows[i] for i in members])
        return replace(batch, rows=rows, draft_s=draft_s), log_q

    @property
    def select_s(self) -> float:
        """Seconds that all drafts have spent on choosing what to read."""
        return self._select_s + sum(draft.select_s for draft in self._drafts.values())

    def check(self, config: DraftConfig) -> DraftConfig:
        """``config``, if such a draft can be made here; ``InvalidValueError`` otherwise."""
        self.draft(config)
        return config

    def draft(self, config: DraftConfig) -> Draft:
        """The draft object of a config, made when there is none; γ and the rule are the rows' business.

        A new one makes those go that know no sequence and were asked for longest ago, if they are more than
        ``MOST_IDLE``.
        """
        key = draft_key(config)
        if draft := self._drafts.pop(key, None):
            self._drafts[key] = draft
            return draft
        draft = make(key, self.model, self.store, self.small, self.max_rows)
        idle = [other for other in self._drafts if not self._users[other]]
        for other in idle[: max(0, len(idle) - MOST_IDLE)]:
            self._select_s += self._drafts.pop(other).select_s
            del self._users[other]
        self._drafts[key] = draft
        return draft

    def draft_of(self, seq: Sequence, config: DraftConfig) -> Draft:
        """A draft of a sequence, which it may know from now on: it stays until that is released."""
        self._users[draft_key(config)].add(seq.id)
        return self.draft(config)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[R, V]`` of the batch's wanted tokens, in row order; the fed tokens' K and V are in the store.

        They may be overwritten by the next step's.
        """
        feeds = [
            Feed(row.seq.id, row.seq.num_committed, row.tokens, row.num_logits, row.num_scored) for row in batch.rows
        ]
        told = {row.choice.told for row in batch.rows}
        all_needs = {configs: reduce(or_, (self.draft(c).needs for c in configs), NOTHING) for configs in told}
        needs = [all_needs[row.choice.told] for row in batch.rows]
        for row in batch.rows:
            for config in row.choice.told:
                self._users[draft_key(config)].add(row.seq.id)
        self._observation = observation = Observation(self.model, batch.rows, needs)
        out = self._room(sum(f.num_first + f.num_logits for f in feeds))
        return feed(self.model, self.store, feeds, capture=observation.capture, out=out)

    def follow(self, batch: Batch) -> None:
        """After a step has been committed: let the drafts of its sequences take in, or give up, what is final now."""
        groups: dict[DraftConfig, list[Sequence]] = defaultdict(list)
        observation, self._observation = self._observation, None
        for row in batch.rows:
            if row.seq.status is Status.RUNNING:
                for config in row.choice.told:
                    groups[draft_key(config)].append(row.seq)
        for config, seqs in groups.items():
            draft = self.draft(config)
            for seq in seqs:
                for seen in observation.of(seq, draft.needs) if observation else ():
                    draft.observe(seq, seen)
            draft.follow(seqs) if batch.prefill else draft.settle(seqs)

    def fork(self, source: Sequence, child: Sequence) -> None:
        """Let ``child`` share what its drafts know of ``source``, if that has them, too."""
        self.control.fork(source, child)
        known = {draft_key(config) for config in self.control.told(source)}
        for config in self.control.told(child):
            if draft_key(config) in known:
                self.draft_of(child, config).fork(source, child)

    def release(self, seq: Sequence) -> None:
        """Let the drafts forget a sequence."""
        self.control.release(seq.id)
        for key, draft in self._drafts.items():
            draft.release(seq.id)
            self._users[key].discard(seq.id)

    def _room(self, rows: int) -> torch.Tensor | None:
        """``[rows, V]`` for the logits of a fused pass, in the same memory at every step, unless they are very many.

        Proposals make the number of rows differ from step to step, and for each new size the system may have to find
        memory once more: milliseconds for a dozen rows.
        """
        vocab = self.model.config.vocab_size
        most = MOST_LOGITS // (vocab * torch.float32.itemsize)
        if not self.model.fused or rows > most:
            return None
        if rows > len(self._logits):
            self._logits = torch.empty(min(most, max(rows, 2 * len(self._logits))), vocab)
        return self._logits[:rows]

    def _with_proposal(self, row: Row, tokens: list[int]) -> Row:
        """``row`` with the proposed tokens that there is room for, up to the first that the target does not know."""
        vocab = self.model.config.vocab_size
        kept = tuple(takewhile(lambda token: 0 <= token < vocab, tokens[: row.room]))
        return replace(row, proposal=kept, num_logits=row.num_logits + len(kept))


@lru_cache(maxsize=256)
def _any_gamma(config: DraftConfig) -> DraftConfig:
    """What rows have in common that are drafted for together: all but γ."""
    return replace(config, gamma=1)


def _by_row(proposal: Proposal, rows: list[Row]) -> dict[int, torch.Tensor]:
    """The distributions of the tokens that were kept, by sequence id."""
    if proposal.log_q is None:
        return {}
    parts = proposal.log_q.split([len(tokens) for tokens in proposal.tokens])
    return {row.seq.id: part[: len(row.proposal)] for row, part in zip(rows, parts, strict=True)}
