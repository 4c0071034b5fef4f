"""The classic draft: a smaller model with the target's tokenizer (arXiv:2211.17192) and a cache of its own.

MagicDec (arXiv:2408.11049) shows that at long context the small model's own cache becomes its cost; so its steps read a
selection of it, too: here a part of its pages, in ``small_copies.py`` copies of chosen tokens. All of the cache is kept
whatever is read of it. Beyond the small model's trained range it goes on with the first and the last tokens of the
text, at positions counted within its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

import torch
from torch.nn.functional import pad

from longdraft.capture import Capture, Seen
from longdraft.core import Proposal, Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.model_draft import ModelDraft
from longdraft.kv.select.base import ViewSelector
from longdraft.kv.select.full import Full
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, Select, feed
from longdraft.models.transformer import Transformer

CHUNK = 512  # tokens fed at once where many are missing


class DraftModel:
    """A small model and its pages, shared by all drafts that use it."""

    def __init__(self, model: Transformer, num_pages: int) -> None:
        layers = model.config.num_layers
        self.model = model
        self.store = PagedStore(layers, num_pages, model.layout, model.kv_dtype, model.device)
        self.rows = count()
        self.max_length = model.config.full_attention_length

    def feed(
        self,
        store: PagedStore,
        feeds: Seq[Feed],
        vocab_size: int,
        select: Select | None = None,
        capture: Capture | None = None,
    ) -> torch.Tensor:
        """Logits ``[R, vocab_size]`` of the target's vocabulary: cut to it, or padded with −inf.

        Ids for which the model has no embedding become its last.
        """
        last = self.model.config.vocab_size - 1
        known = [replace(f, tokens=[min(t, last) for t in f.tokens]) for f in feeds]
        logits = feed(self.model, store, known, select, capture=capture)[:, :vocab_size]
        return pad(logits, (0, vocab_size - logits.shape[-1]), value=-torch.inf)

    def form(self, tokens: int, last: int) -> Capture | None:
        """An empty form for the queries of the ``last`` ones of a pass over one row's ``tokens``; ``None`` for none."""
        if not last:
            return None
        config, asked = self.model.config, torch.arange(max(0, tokens - last), tokens, device=self.model.device)
        size = (config.num_layers, len(asked), config.num_heads, config.head_dim)
        return Capture(asked, torch.empty(size, device=self.model.device))


def agreeing(guesses: Seq[int], tokens: Seq[int]) -> int:
    """How many of the guesses stand: those before the first that is not what the text has there."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guesses, tokens, strict=False)))


@dataclass
class _State:
    """What the cache holds of a sequence: ``ids[:sinks] + ids[sinks + skip : known] + guesses``, at positions 0, 1, …

    ``guesses`` were proposed and fed; which of them stand is seen by what the sequence has become since.

        ids      0 .. sinks | ...... skip ...... | ............ known | newest tokens, not fed yet
        cache    0 .. sinks                      | sinks ..           | guesses
    """

    row: int
    skip: int = 0
    known: int = 0
    guesses: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in the cache that are certain."""
        return self.known - self.skip


class SmallModel(ModelDraft):
    """Drafts by a ``DraftModel`` over ``selector``'s view of its own cache, which a prompt fills at full attention.

    ``selector`` bounds what a step reads, not what is held: the cache keeps every token up to the model's range.
    """

    def __init__(
        self,
        draft: DraftModel,
        selector: ViewSelector,
        vocab_size: int,
        window: int = 0,
        observe: Callable[[Sequence, Seen], None] | None = None,
    ) -> None:
        """``observe`` is told the queries of the last ``window`` tokens of every pass at full attention."""
        self.draft, self.selector, self.vocab_size = draft, selector, vocab_size
        self._window, self._observe = window, observe
        self._states: dict[int, _State] = {}  # by sequence id

    # --- the draft's interface

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``: one token after a refusal, two where all proposals stood, more after a rest."""
        for row in rows:
            self._state(row.seq)
        self.settle([row.seq for row in rows])  # all give back what was refused before any of them asks for more
        states = [self._current(row) for row in rows]
        for row, state in zip(rows, states, strict=True):
            if state and len(row.seq.ids) - state.known > self._catch_up:
                self._fill(row.seq, state, len(row.seq.ids) - 1)
        feeds: list[Feed | None] = []
        for row, state in zip(rows, states, strict=True):
            feeds.append(state and Feed(state.row, state.length, row.seq.ids[state.known :], 1))
        return feeds

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        return self.draft.feed(self.draft.store, feeds, self.vocab_size, self.selector.select)

    def propose(self, rows: Seq[DraftRow], *, sampled: bool) -> Proposal:
        """See ``Draft``."""
        longest = max(1, self.draft.max_length // 2)  # with a window of the other half this fits at any length
        rows = [replace(row, gamma=min(row.gamma, longest)) for row in rows]
        proposal = super().propose(rows, sampled=sampled)
        for row, tokens in zip(rows, proposal.tokens, strict=True):
            if tokens:
                state = self._states[row.seq.id]
                state.known, state.guesses = len(row.seq.ids), tokens[:-1]  # the last one was not fed
        return proposal

    def follow(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``: fills the cache beside the target's, as far as the small model's range goes."""
        for seq in seqs:
            self.fill(seq)

    def fill(self, seq: Sequence) -> bool:
        """Take in the sequence's committed tokens at full attention; whether all of them are in the cache then."""
        if isinstance(self.selector, Full) and len(seq.ids) > self.draft.max_length:
            return False  # it will never be drafted
        state = self._state(seq)
        self._settle(seq, state)
        stop = min(seq.num_committed, self.draft.max_length)
        if not state.skip and state.known < stop and self._reserve(state, stop - state.known):
            self._fill(seq, state, stop)
        return state.known >= seq.num_committed

    def row(self, seq_id: int) -> int:
        """The row in the model's store of a sequence that is known."""
        return self._states[seq_id].row

    def settle(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``."""
        for seq in seqs:
            if state := self._states.get(seq.id):
                self._settle(seq, state)
                self._reserve(state, 0)

    def fork(self, source: Sequence, child: Sequence) -> None:
        """See ``Draft``: the child shares the pages."""
        if state := self._states.get(source.id):
            self._settle(source, state)
            copy = _State(next(self.draft.rows), state.skip, min(state.known, len(child.ids) - 1))
            if copy.length > (self._sinks if copy.skip else 0):
                self.draft.store.fork(state.row, copy.row, copy.length)
                self._states[child.id] = copy

    def release(self, seq_id: int) -> None:
        """See ``Draft``."""
        if state := self._states.pop(seq_id, None):
            self.draft.store.free(state.row)

    def bytes(self, length: int) -> int:
        """See ``Draft``."""
        return min(length, self.draft.max_length) * self.draft.store.bytes_per_token

    def bytes_read(self, length: int) -> int:
        """See ``Draft``."""
        return self.selector.tokens_read(min(length, self.draft.max_length)) * self.draft.store.bytes_per_token

    # --- its cache

    @property
    def _sinks(self) -> int:
        return getattr(self.selector, "sinks", 0)

    @property
    def _catch_up(self) -> int:
        """Most tokens that one selected step may feed: each must still see itself in the window."""
        return max(1, min(CHUNK, self.selector.tokens_read(2**31) - self._sinks))

    def _state(self, seq: Sequence) -> _State:
        if seq.id not in self._states:
            self._states[seq.id] = _State(next(self.draft.rows))
        return self._states[seq.id]

    def _current(self, row: DraftRow) -> _State | None:
        """The row's state with room for its missing tokens and its proposals; ``None`` if there is none."""
        state, size = self._states[row.seq.id], self.draft.max_length
        needed = len(row.seq.ids) - state.known + row.gamma - 1
        if state.length + needed > size:
            if not self._rebase(row.seq, state):
                return None
            needed = len(row.seq.ids) - state.known + row.gamma - 1
        return state if self._reserve(state, needed) else None

    def _settle(self, seq: Sequence, state: _State) -> None:
        """Keep the guesses that the sequence now has, forget the others."""
        if state.known >= len(seq.ids):  # proposed for a step that failed
            state.known, state.guesses = len(seq.ids) - 1, []
        new = seq.ids[state.known : len(seq.ids) - 1]  # the newest token is always fed again: its logits are wanted
        state.known += agreeing(state.guesses, new)
        state.guesses = []

    def _rebase(self, seq: Sequence, state: _State) -> bool:
        """Past the range: keep the sinks' entries and feed the window anew right behind them; whether that is possible.

        The whole cache has no such short form: a draft that reads everything ends at its range.
        """
        if isinstance(self.selector, Full) or self.draft.max_length < 2:
            return False
        keep = min(self.selector.budget, self.draft.max_length // 2)  # the other half is left to grow into
        sinks = min(self._sinks, keep // 2)
        if state.length < sinks:
            if not self._reserve(state, sinks - state.length):
                return False
            self._fill(seq, state, sinks)
        state.skip = len(seq.ids) - keep
        state.known = sinks + state.skip
        return True

    def _reserve(self, state: _State, extra: int) -> bool:
        store = self.draft.store
        if state.length:
            store.truncate(state.row, state.length)
        return store.reserve(state.row, state.length, extra)

    def _fill(self, seq: Sequence, state: _State, stop: int) -> None:
        """Feed ``ids[known:stop]`` at full attention; their pages are reserved."""
        while state.known < stop:
            tokens = seq.ids[state.known : min(stop, state.known + CHUNK)]
            form = self.draft.form(len(tokens), self._window)
            fed = [Feed(state.row, state.length, tokens, 0)]
            self.draft.feed(self.draft.store, fed, self.vocab_size, capture=form)
            state.known += len(tokens)
            if form and self._observe:
                n = len(form.tokens)
                self._observe(seq, form.part(0, n, state.length - n))
