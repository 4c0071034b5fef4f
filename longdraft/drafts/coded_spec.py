"""Self-speculation over keys and values in a format (QuantSpec, arXiv:2502.10424): any that ``kv/format`` has.

What a selection chooses is kept encoded beside the target's cache; what came later is read from the target's own pages
at full precision, a round's proposals among it: their keys and values go to the slots reserved for the step, as in
``SelfSpec``. Passes run layer by layer, as encoded tokens are decoded for each.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from longdraft.core import Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.copy_spec import CopySpec
from longdraft.drafts.self_spec import SelfSpec
from longdraft.kv.coded import CodedStore, Reading, Span
from longdraft.kv.format.base import Format, old_tokens
from longdraft.kv.select.base import TokenSelector, ViewSelector
from longdraft.kv.store import PagedStore
from longdraft.models.config import ModelConfig
from longdraft.models.feed import Feed, feed
from longdraft.models.transformer import Transformer
from longdraft.view import TableView


def old_groups(sinks: int, start: int, length: int, group: int) -> list[int]:
    """Numbers of the groups that may be encoded and hold a token of ``[0, sinks) ∪ [start, length)``.

    groups   0 ... heads | ......... | first .......... stop |
    tokens   [0, sinks)  |           |    [start ...         ... length)
    """
    stop = old_tokens(length, group) // group
    heads = min(-(-sinks // group), stop)
    first = min(max(start // group, heads), stop)
    return [*range(heads), *range(first, stop)]


class CodedViewSpec(SelfSpec):
    """The target's weights, all layers or some of them, over ``selector``'s token ranges, encoded when they are old.

    A row keeps the groups that it still reads, and encodes each group once, when it is ``LAG`` tokens behind the end.
    One that finds no room for its groups proposes nothing.
    """

    def __init__(
        self,
        model: Transformer,
        store: PagedStore,
        selector: ViewSelector,
        fmt: Format,
        layers: tuple[int, ...] | None = None,
        max_rows: int = 256,
    ) -> None:
        """``max_rows``: sequences that may run at once."""
        super().__init__(model, store, selector, layers)
        tokens = store.num_pages * store.layout.page_size
        group = fmt.group_size(store.layout.page_size)
        most = min(tokens // group, max_rows * (-(-selector.tokens_read(tokens) // group) + 1))  # two of them in part
        self.coded = CodedStore(store, fmt, most)

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``."""
        ready = [self._ready(row.seq) for row in rows]
        return [f if ok else None for f, ok in zip(super().begin(rows), ready, strict=True)]

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        lens = [f.start + len(f.tokens) for f in feeds]
        sinks, starts = self._ranges(lens)
        spans, places = [], []
        for f, start, length in zip(feeds, starts, lens, strict=True):
            coded = self.coded.get(f.row)
            tail = _tail(sinks, start, coded.start)
            spans.append(Span(f.row, list(coded.units.values()), coded.size, tail, length))
            places.append(coded.size + start - tail)  # before the tail tokens stand one by one, too, in their groups
        reading = Reading(self.coded, spans)
        view = replace(reading.view, sinks=sinks, starts=torch.tensor(places))
        return feed(self.model, self.store, feeds, lambda _: view, self.layers, decode=reading.decode)

    def follow(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``: encodes a prompt that is filled, before others may go on from it and share its groups."""
        for seq in seqs:
            if seq.num_pending == 1:
                self._ready(seq)

    def fork(self, source: Sequence, child: Sequence) -> None:
        """See ``Draft``: the child shares the groups."""
        self.coded.fork(source.id, child.id, child.num_committed)

    def release(self, seq_id: int) -> None:
        """See ``Draft``."""
        self.coded.free(seq_id)

    def bytes(self, length: int) -> int:
        """See ``Draft``."""
        return len(self._groups(length)) * self.coded.bytes_per_group

    def bytes_read(self, length: int) -> int:
        """See ``Draft``: encoded groups, and the tail."""
        sinks, (start,) = self._ranges([length + 1])
        groups, group = self._groups(length), self.coded.group
        tail = length - _tail(sinks, start, old_tokens(length, group))
        read = len(groups) * self.coded.bytes_per_group + max(0, tail) * self.store.bytes_per_token
        return read * self.running_layers // len(self.store.layers)

    def _ready(self, seq: Sequence) -> bool:
        """Whether all that a round reads of a sequence is there."""
        length = seq.num_committed
        return self.coded.hold(seq.id, self._groups(length), old_tokens(length, self.coded.group))

    def _groups(self, length: int) -> list[int]:
        """The groups that a round reads of a row with ``length`` final tokens: those that its first step sees."""
        sinks, (start,) = self._ranges([length + 1])
        return old_groups(sinks, start, length, self.coded.group)

    def _ranges(self, lens: Seq[int]) -> tuple[int, list[int]]:
        """``sinks, starts``: rows of these lengths are read in ``[0, sinks) ∪ [start, length)``."""
        view = TableView(torch.zeros(len(lens), 1, dtype=torch.int64), torch.tensor(lens), self.store.layout.page_size)
        narrow = self.selector.select(view)
        return narrow.sinks, [0] * len(lens) if narrow.starts is None else narrow.starts.tolist()


def _tail(sinks: int, start: int, encoded: int) -> int:
    """The first token that is read from a row's own pages, where groups hold tokens before ``encoded`` only.

    Sinks that are not encoded lie there; before them nothing is left out.
    """
    return max(start, encoded) if sinks <= encoded else encoded


class CodedCopySpec(CopySpec):
    """The target's weights, all layers or some of them, over the tokens that ``selector`` chooses, encoded.

    As ``CopySpec``, but nothing is copied besides the chosen tokens: those that come after are read where they are.
    """

    def __init__(
        self,
        model: Transformer,
        store: PagedStore,
        selector: TokenSelector,
        fmt: Format,
        layers: tuple[int, ...] | None = None,
        max_rows: int = 256,
    ) -> None:
        """``max_rows``: sequences that may run at once."""
        SelfSpec.__init__(self, model, store, selector, layers)
        groups = -(-selector.budget // fmt.group_size(store.layout.page_size))
        self.copies = CodedStore(store, fmt, min(max_rows * groups, store.num_pages))  # a row has a page to each group
        self.needs, self._states = selector.needs, {}

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``."""
        ready = [self._ready(row) for row in rows]
        return [f if ok else None for f, ok in zip(SelfSpec.begin(self, rows), ready, strict=True)]

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        held = [self.copies.get(f.row) for f in feeds]
        spans = [
            Span(f.row, list(c.units.values()), c.size, c.start, f.start + len(f.tokens))
            for f, c in zip(feeds, held, strict=True)
        ]
        reading = Reading(self.copies, spans)
        return feed(self.model, self.store, feeds, lambda _: reading.view, self.layers, decode=reading.decode)

    def settle(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``: nothing is held for proposals."""

    def bytes(self, length: int) -> int:
        """See ``Draft``: whole groups of chosen tokens."""
        return self.copies.groups_for(min(length, self.selector.budget)) * self.copies.bytes_per_group

    def bytes_read(self, length: int) -> int:
        """See ``Draft``: as if all were chosen, which is the case when proposals begin."""
        read = self.copies.groups_for(self.selector.tokens_read(length)) * self.copies.bytes_per_group
        return read * self.running_layers // len(self.store.layers)


def coded_page_bytes(fmt: Format, model: ModelConfig, kv_dtype: torch.dtype, page_size: int) -> int:
    """What it takes to keep a page's tokens encoded beside it, and to decode one layer of them."""
    group = fmt.group_size(page_size)
    kept = model.num_layers * model.num_kv_heads * fmt.group_bytes(group, model.head_dim, kv_dtype)
    return -(-kept * page_size // group) + page_size * model.kv_elements_per_layer * kv_dtype.itemsize
