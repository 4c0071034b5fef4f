"""Self-speculation over copies of chosen tokens (MagicDec, arXiv:2408.11049, with SnapKV): any choice of tokens.

The target's pages hold all heads of neighbouring tokens together; reading single tokens from them costs whole pages.
So what a selection chooses for a row is copied once to a small cache of the same layout, at the tokens' own rotary
positions, and the draft runs over that. Behind the chosen ones come all tokens since, the target's own keys and values
once they are final. When they no longer fit in the budget the choice is made anew, by the latest queries.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from longdraft.capture import Seen
from longdraft.config import MAX_GAMMA
from longdraft.core import Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.refresh import Since, spare
from longdraft.drafts.self_spec import SelfSpec
from longdraft.kv.copies import Copies
from longdraft.kv.select.base import TokenSelector
from longdraft.kv.select.keys import StoredKeys
from longdraft.kv.select.streaming_llm import first_and_last
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer


@dataclass
class _State:
    """What is known of a sequence: the target's latest queries, and how its copy came about."""

    seen: Seen | None = None
    since: Since = field(default_factory=Since)  # the choice
    blind: bool = False  # it was made without queries


class CopySpec(SelfSpec):
    """The target's weights, all layers or some of them, over copies of what ``selector`` chooses.

    Nothing is written to the target's pages. A sequence of which no query is known (a fork of one without this draft)
    reads its first and last tokens until there is one. One that finds no page for its copy proposes nothing.
    """

    def __init__(
        self,
        model: Transformer,
        store: PagedStore,
        selector: TokenSelector,
        layers: tuple[int, ...] | None = None,
        max_rows: int = 256,
    ) -> None:
        """``max_rows``: sequences that may run at once; each has room for its budget while the target has pages."""
        self.model, self.store, self.selector, self.layers = model, store, selector, layers
        pages = min(max_rows * store.pages_for(copied_tokens(selector)), store.pages_for(store.capacity))
        self.copies = Copies(store, pages, self._store_row)
        self.needs = selector.needs
        self._states: dict[int, _State] = {}  # by sequence id

    # --- the draft's interface

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``: the newest token is all that a copy lacks once it has caught up with the target."""
        self.settle([row.seq for row in rows])  # all give back what was refused before any of them asks for more
        ready = [self._ready(row) for row in rows]
        self.copies.catch_up({row.seq.id: row.seq.num_committed for row, ok in zip(rows, ready, strict=True) if ok})
        return [self._feed(row.seq) if ok else None for row, ok in zip(rows, ready, strict=True)]

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        return feed(self.model, self.copies.store, feeds, None, self.layers)

    def observe(self, seq: Sequence, seen: Seen) -> None:
        """See ``Draft``."""
        state = self._states.setdefault(seq.id, _State())
        keep = self.selector.needs.tokens
        state.seen = state.seen.then(seen, keep) if state.seen else seen.last(keep)

    def settle(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``."""
        for seq in seqs:
            self.copies.settle(seq.id)

    def fork(self, source: Sequence, child: Sequence) -> None:
        """See ``Draft``: the child knows the same queries, and makes a choice of its own."""
        state = self._states.get(source.id)
        if state and state.seen:
            self._states[child.id] = _State(state.seen.until(child.num_committed))

    def release(self, seq_id: int) -> None:
        """See ``Draft``."""
        self._states.pop(seq_id, None)
        self.copies.free(seq_id)

    def bytes(self, length: int) -> int:
        """See ``Draft``: whole pages of copies, proposals included."""
        store = self.copies.store
        copied = store.pages_for(min(length + MAX_GAMMA, copied_tokens(self.selector))) * store.layout.page_size
        return copied * store.bytes_per_token

    def note_bytes(self, length: int) -> int:
        """See ``Draft``: the queries of the observation window."""
        config = self.model.config
        return min(length, self.selector.needs.queries) * config.num_layers * config.num_heads * config.head_dim * 4

    # --- the copies

    def _store_row(self, seq_id: int) -> int:
        """The row of ``store`` that holds a sequence."""
        return seq_id

    def _ready(self, row: DraftRow) -> bool:
        """Whether the row has a copy that serves, and room in it for this round."""
        seq, state = row.seq, self._states.setdefault(row.seq.id, _State())
        if self._outdated(row, state) and not self._choose(row):
            return False
        return self.copies.reserve(seq.id, seq.num_committed, row.gamma)

    def _outdated(self, row: DraftRow, state: _State) -> bool:
        copy, due = self.copies.get(row.seq.id), state.since.due(self.selector.refresh, row.seq.stats)
        if copy is None or due or (state.blind and state.seen):
            return True
        return copy.place(row.seq.num_committed) + row.gamma > max(self.selector.budget, row.gamma)

    def _choose(self, row: DraftRow) -> bool:
        """Make the choice for a row and copy it; whether there was room."""
        started, state = time.perf_counter(), self._states[row.seq.id]
        length, budget = row.seq.num_committed, self.selector.budget
        tail = row.gamma + spare(self.selector.refresh, budget, row.gamma)
        count = min(length, max(0, budget - tail))
        if not self.copies.open(row.seq.id, count, length, row.gamma):
            return False
        if state.seen and 0 < count < length:
            keys = StoredKeys(self.store, self._store_row(row.seq.id), length)
            chosen = self.selector.choose(state.seen, keys, count)
        else:
            chosen = first_and_last(length, count)
            chosen = chosen.expand(len(self.store.layers), self.store.layout.num_kv_heads, -1)
        self.copies.fill(row.seq.id, chosen)
        state.since, state.blind = Since.now(row.seq.stats), state.seen is None
        self.select_s += time.perf_counter() - started
        return True

    def _feed(self, seq: Sequence) -> Feed:
        place = self.copies.get(seq.id).place(seq.num_committed)
        return Feed(seq.id, place, [seq.ids[-1]], 1, shift=seq.num_committed - place)


def copied_tokens(selector: TokenSelector) -> int:
    """Most tokens of a row that are copied or tentative at any time: the budget, or the longest proposal."""
    return max(selector.budget, MAX_GAMMA)
