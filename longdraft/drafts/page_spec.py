"""Self-speculation over chosen pages (MagicDec, arXiv:2408.11049, with page selections): the target's own, in place.

    pages of a row   0 .... | sinks .................... | first ... the newest token's ... the proposals'
    what is read     all    | ``count`` of these, others | all, and those that come until the next choice
                            | for each layer and KV head |

Nothing is copied: the draft's tentative keys and values go to the slots reserved for the step, as in ``SelfSpec``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from longdraft.capture import Seen
from longdraft.core import Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.refresh import Since, spare
from longdraft.drafts.self_spec import SelfSpec
from longdraft.kernels.threads import one_thread
from longdraft.kv.select.base import PageSelector, top
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, Select, feed
from longdraft.models.transformer import Transformer
from longdraft.view import PagesView


@dataclass(frozen=True)
class Split:
    """See the module's picture: pages ``[0, sinks)``, ``count`` of ``[sinks, first)``, and all from ``first`` on."""

    sinks: int
    first: int
    count: int


def budget_pages(selector: PageSelector, length: int, gamma: int, size: int) -> tuple[int, int]:
    """Pages that a round may read, and how many of them its own tokens lie in: the newest and all proposals but one.

    These are read whatever the budget is.
    """
    own = -(-(length + gamma) // size) - length // size
    return max(selector.budget // size, own), own


def split(selector: PageSelector, length: int, gamma: int, size: int) -> Split:
    """How the budget of a row of ``length`` final tokens is spent on pages of ``size`` when a choice is made."""
    total, own = budget_pages(selector, length, gamma, size)
    newest, left = length // size, total - own
    sinks = min(-(-selector.sinks // size), total // 2, left, newest)
    left = max(0, left - sinks - -(-spare(selector.refresh, selector.budget, gamma) // size))
    recent = min(newest - max(0, length - selector.recent) // size, -(-left // 2), newest - sinks)
    first = newest - recent
    return Split(sinks, first, min(left - recent, first - sinks))


@dataclass
class _Choice:
    """What is read of a row, and how that came about."""

    pages: torch.Tensor  # [L, G, K] int64, on the CPU: numbers of the row's pages, ascending, all below ``first``
    first: int
    since: Since
    blind: bool  # nothing was known to choose by


class PageSpec(SelfSpec):
    """The target's weights, all layers or some of them, over the pages that ``selector`` rates highest.

    A sequence of which nothing is known to rate by (a fork of one without this draft) reads its first and last pages.
    """

    def __init__(
        self, model: Transformer, store: PagedStore, selector: PageSelector, layers: tuple[int, ...] | None = None
    ) -> None:
        self.model, self.store, self.selector, self.layers = model, store, selector, layers
        self.memory, self.needs = selector.memory(store), selector.needs
        self._states: dict[int, _Choice] = {}  # by sequence id
        self._numbers = torch.empty(0)  # [L, B, G, K]: the pages that a round's rows read in its last step
        self._places: dict[int, int] = {}  # sequence id → its place among these rows

    def begin(self, rows: Seq[DraftRow]) -> list[Feed | None]:
        """See ``ModelDraft``."""
        started = time.perf_counter()
        with one_thread():
            for row in rows:
                if self._outdated(row):
                    self._states[row.seq.id] = self._choose(row)
            self._list(rows)
        self.select_s += time.perf_counter() - started
        return super().begin(rows)

    def run(self, feeds: Seq[Feed]) -> torch.Tensor:
        """See ``ModelDraft``."""
        return feed(self.model, self.store, feeds, self._select_for([f.row for f in feeds]), self.layers)

    def follow(self, seqs: Seq[Sequence]) -> None:
        """See ``Draft``."""
        for seq in seqs:
            self.memory.follow(seq.id, seq.num_committed // self.store.layout.page_size)

    def observe(self, seq: Sequence, seen: Seen) -> None:
        """See ``Draft``."""
        with one_thread():
            self.memory.observe(seq.id, seen)

    def fork(self, source: Sequence, child: Sequence) -> None:
        """See ``Draft``: the child knows the same, and makes a choice of its own."""
        self.memory.fork(source.id, child.id, child.num_committed)

    def release(self, seq_id: int) -> None:
        """See ``Draft``."""
        self._states.pop(seq_id, None)
        self.memory.release(seq_id)

    def note_bytes(self, length: int) -> int:
        """See ``Draft``: what is remembered of pages, and the queries."""
        layout, config = self.store.layout, self.model.config
        page = self.selector.page_note_bytes(layout.num_kv_heads, layout.head_dim, self.store.k.dtype)
        query = config.num_heads * config.head_dim * torch.float32.itemsize
        noted = page * self.store.pages_for(length) + query * min(length, self.needs.queries)
        return noted * config.num_layers

    # --- the choice

    def _outdated(self, row: DraftRow) -> bool:
        choice, length = self._states.get(row.seq.id), row.seq.num_committed
        if choice is None:
            return True
        due = choice.since.due(self.selector.refresh, row.seq.stats)
        total, _ = budget_pages(self.selector, length, row.gamma, self.store.layout.page_size)
        reads = choice.pages.shape[2] + self.store.pages_for(length + row.gamma) - choice.first
        return due or choice.blind or reads > total

    def _choose(self, row: DraftRow) -> _Choice:
        cut = split(self.selector, row.seq.num_committed, row.gamma, self.store.layout.page_size)
        heads = (len(self.store.layers), self.store.layout.num_kv_heads, -1)
        middle, blind = torch.arange(cut.first - cut.count, cut.first).expand(heads), False
        if 0 < cut.count < cut.first - cut.sinks:
            rating = self.memory.rate(row.seq.id, cut.first)
            if rating is not None:
                middle = top(rating[..., cut.sinks :], cut.count).cpu() + cut.sinks
            blind = rating is None
        pages = torch.cat([torch.arange(cut.sinks).expand(heads), middle], dim=2)
        return _Choice(pages, cut.first, Since.now(row.seq.stats), blind)

    # --- what a round reads

    def _list(self, rows: Seq[DraftRow]) -> None:
        """Note the pages of all steps of a round: what a step has not reached yet shows it nothing."""
        listed = [self.pages_read(row.seq.id, row.seq.num_committed + row.gamma) for row in rows]
        self._numbers = pad_sequence([x.movedim(2, 0) for x in listed], padding_value=-1).permute(2, 1, 3, 0)
        self._places = {row.seq.id: place for place, row in enumerate(rows)}

    def pages_read(self, seq_id: int, length: int) -> torch.Tensor:
        """``[L, G, K]``: numbers of all pages that the first ``length`` tokens of a sequence are read in, ascending."""
        choice = self._states[seq_id]
        rest = torch.arange(choice.first, self.store.pages_for(length))
        return torch.cat([choice.pages, rest.expand(*choice.pages.shape[:2], -1)], dim=2)

    def _select_for(self, rows: Seq[int]) -> Select:
        places = [self._places[row] for row in rows]
        with one_thread():
            numbers = self._numbers if len(places) == len(self._places) else self._numbers[:, places]
        return lambda view: PagesView(view.tables, numbers, view.lens, view.page_size)
