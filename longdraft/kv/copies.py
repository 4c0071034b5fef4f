"""Copies of chosen tokens of another store's rows, with a growing tail. Owns the small store that they lie in.

    slots of a copy    0 ......... size | size ................................................
    hold               chosen tokens    | tail: the tokens from position ``start`` on
                       other ones for   |   [start, known) final: copied from the source, or kept as they are,
                       each layer, head |   the rest a draft's own, tentative ones

Keys carry their rotary positions, and all that is chosen lies before the tail; so a row of copies is read as any short
row is, by its slots alone: every kernel serves it, and one plan serves all layers, whatever was chosen in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from longdraft.kv.store import PagedStore


@dataclass
class Copy:
    """What the copies of one row are; see the module's picture. Any number of chosen tokens, the same for all heads."""

    size: int
    start: int
    known: int

    def place(self, position: int) -> int:
        """Where the token at ``position``, one of the tail, lies in the copy."""
        return self.size + position - self.start


class Copies:
    """Rows of ``source`` in a store of ``num_pages`` pages with the same layout.

    They go by the ids that they have in the source, or by those that ``source_row`` turns into these.
    """

    def __init__(self, source: PagedStore, num_pages: int, source_row: Callable[[int], int] = int) -> None:
        self.source, self._source_row = source, source_row
        self.store = PagedStore(len(source.layers), num_pages, source.layout, source.k.dtype, source.k.device)
        self._rows: dict[int, Copy] = {}

    def get(self, row: int) -> Copy | None:
        """The copy of a row, if there is one."""
        return self._rows.get(row)

    def open(self, row: int, size: int, length: int, room: int) -> bool:
        """Begin a copy of a row of ``length`` tokens anew; ``False``, and no copy, if pages for it are lacking.

        ``size`` tokens must be filled in; ``room`` more can be reserved at once.
        """
        self.free(row)
        if not self.store.reserve(row, 0, size + room):
            return False
        self._rows[row] = Copy(size, length, length)
        return True

    def fill(self, row: int, chosen: torch.Tensor) -> None:
        """Copy the tokens at positions ``chosen [L, G, size]``, all below the length that the copy was opened with."""
        copy = self._rows[row]
        if copy.size:
            slots = self.source.slots(self._source_row(row), 0, copy.start)[chosen.cpu()]
            self._move(slots.transpose(1, 2), self.store.slots(row, 0, copy.size))

    def reserve(self, row: int, length: int, extra: int) -> bool:
        """Room for the row's tail up to ``length`` and ``extra`` tokens beyond; ``False`` if pages are lacking."""
        copy = self._rows[row]
        return self.store.reserve(row, copy.place(copy.known), length - copy.known + extra)

    def catch_up(self, lengths: Mapping[int, int]) -> None:
        """Copy what each row has gained up to its ``length``, over whatever lies in its tail; room is reserved."""
        behind = {row: length for row, length in lengths.items() if length > self._rows[row].known}
        if not behind:
            return
        sources, targets = [], []
        for row, length in behind.items():
            copy = self._rows[row]
            sources.append(self.source.slots(self._source_row(row), copy.known, length))
            targets.append(self.store.slots(row, copy.place(copy.known), copy.place(length)))
            copy.known = length
        self._move(torch.cat(sources).expand(len(self.source.layers), -1), torch.cat(targets))

    def keep(self, row: int, count: int) -> None:
        """The first ``count`` of a row's tentative tokens are final, as they are."""
        self._rows[row].known += count

    def settle(self, row: int) -> None:
        """Give back the pages of a row that hold tentative tokens only."""
        if copy := self._rows.get(row):
            self.store.truncate(row, copy.place(copy.known))

    def free(self, row: int) -> None:
        """Forget a row; one without a copy is fine."""
        if self._rows.pop(row, None):
            self.store.free(row)

    def _move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """``sources``: slots ``[L, n]``, or ``[L, n, G]`` by head, to ``targets [n]`` of every layer, in two copies."""
        layout, store = self.store.layout, self.store
        step = torch.arange(len(store.layers)) * layout.page_size * store.num_pages  # all layers, seen as one
        targets = (targets + step[:, None]).flatten().to(store.k.device)
        k, v = self.source.gather(sources)
        layout.write_k(store.k.flatten(0, 1), targets, k)
        layout.write_v(store.v.flatten(0, 1), targets, v)
