"""The pages to which the target paid attention when it last verified (arXiv:2602.07223, arXiv:2512.01278).

A verify pass computes the attention of every token over the whole cache anyway. How much of it went to each page is
what the next proposals will most likely need, so the choice follows the text without a pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from longdraft.capture import MASS_EVERY, Needs, Seen
from longdraft.kv.select.base import PageMemory, PageSelector
from longdraft.kv.store import PagedStore


@dataclass(frozen=True)
class Verified(PageSelector):
    """The pages with the most attention of the latest final tokens, each token's say ``decay`` times that of the next.

    Every ``MASS_EVERY``-th token of the text is asked, by its position: the last ``window`` tokens of a prompt make the
    first choice; after that accepted tokens count.
    """

    window: int = 32
    decay: float = 0.9

    @property
    def needs(self) -> Needs:
        """See ``PageSelector``."""
        return Needs(page_mass=self.window)

    def memory(self, store: PagedStore) -> PageMasses:
        """See ``PageSelector``."""
        return PageMasses(store, self.decay)

    def page_note_bytes(self, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> int:
        """See ``PageSelector``: one number for each KV head."""
        return num_kv_heads * torch.float32.itemsize


@dataclass
class _Mass:
    """What the final tokens up to position ``stop`` gave each page: float32 ``[L, G, P]``."""

    stop: int
    mass: torch.Tensor


class PageMasses(PageMemory):
    """Each row's decayed sum of its tokens' page masses.

    Tokens are added one at a time, in their order: what is known depends on the text alone, not on how it came in
    chunks of a prompt or rounds of proposals.
    """

    def __init__(self, store: PagedStore, decay: float) -> None:
        self.store, self.decay = store, decay
        self._rows: dict[int, _Mass] = {}

    def observe(self, row: int, seen: Seen) -> None:
        """See ``PageMemory``. What is known already is passed over; after a gap all is forgotten."""
        if seen.page_mass is None:  # too much for the pass
            return
        known = self._rows.get(row)
        if known is None or known.stop < seen.start:
            shape = (len(self.store.layers), self.store.layout.num_kv_heads, 0)
            known = _Mass(seen.start, torch.zeros(shape, device=self.store.k.device))
        if seen.stop <= known.stop:
            return
        pages = self.store.pages_for(seen.stop)
        mass = pad(known.mass, (0, pages - known.mass.shape[-1])).clone()  # forks may share what is known
        for position, new in enumerate(seen.since(known.stop).page_mass.unbind(1), known.stop):
            if position % MASS_EVERY == 0:
                mass.mul_(self.decay**MASS_EVERY).add_(new[..., :pages])
        self._rows[row] = _Mass(seen.stop, mass)

    def rate(self, row: int, pages: int) -> torch.Tensor | None:
        """See ``PageMemory``."""
        return self._rows[row].mass[..., :pages] if row in self._rows else None

    def fork(self, source: int, child: int, length: int) -> None:
        """See ``PageMemory``: shared unless tokens that are not the child's have had their say."""
        known = self._rows.get(source)
        if known and known.stop <= length + 1:
            self._rows[child] = known

    def release(self, row: int) -> None:
        """See ``PageMemory``."""
        self._rows.pop(row, None)
