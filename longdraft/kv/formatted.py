"""A paged store that keeps its old tokens in a format: the target's own cache, smaller and lossy.

    tokens of a row    0 ...... group | ...... 2 group | ...................... length
    lie                encoded, each in some pages of its own | at full precision, in ``PagedStore``'s pages
    its table          GONE ... GONE  | GONE ... GONE  | page 7 | page 2 | page 9

A query at position q sees those groups encoded that end at least ``LAG`` tokens before it, and all else as it was
computed (``Packing.seen``). A pass feeds a row at most ``LAG`` tokens, so whatever is encoded is final: that is done
once, and never taken back. Groups that only later queries of a pass see encoded are there in both forms for a while.

Readers go by numbers of pages that cover both forms. Below ``num_pages`` these are pages; behind, page j of the group
whose first page is p has the number num_pages + p * (pages of tokens in a group) + j. What a pass reads is decoded to a
scratch storage, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from longdraft.kernels.layout import Layout
from longdraft.kv.decoded import Decoded
from longdraft.kv.format.base import LAG, Format
from longdraft.kv.groups import read_groups
from longdraft.kv.packing import Packing
from longdraft.kv.store import PagedStore
from longdraft.view import NEVER, Decode, KVView, LayerKV

GONE = -1  # in a table: these tokens are encoded


@dataclass
class _Groups:
    """The pages of each of a row's first groups, of which ``coded`` are encoded; those of a prompt are held ahead."""

    pages: list[list[int]] = field(default_factory=list)
    coded: int = 0


class FormattedStore(PagedStore):
    """See the module's docstring."""

    longest_feed = LAG

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device | str,
        fmt: Format,
    ) -> None:
        super().__init__(num_layers, num_pages, layout, dtype, device)
        self.format, self.packing = fmt, Packing(fmt, layout.page_size, layout.head_dim, dtype)
        size = (num_layers, num_pages, layout.num_kv_heads, self.packing.spill)
        spill = torch.empty(size, dtype=torch.uint8, device=device)
        self._bytes = (*(x.flatten(3).view(torch.uint8) for x in (self.k, self.v)), spill)  # each [L, P, G, bytes]
        self._groups: dict[int, _Groups] = {}
        # By a group's first page: all of them.
        self._members = torch.zeros(num_pages, self.packing.pages, dtype=torch.int64)

    # --- sizes

    @property
    def page_bytes(self) -> int:
        """See ``PagedStore``."""
        return len(self.layers) * self.layout.num_kv_heads * self.packing.page_bytes

    @property
    def bytes_per_token(self) -> int:
        """See ``PagedStore``: of a token that is encoded."""
        return -(-self.packing.pages * self.page_bytes // self.packing.group)

    def bytes_of(self, length: int) -> int:
        """See ``PagedStore``."""
        groups = self.packing.seen(length - 1)
        rest = (length - groups * self.packing.group) * super().bytes_per_token
        return groups * self.packing.pages * self.page_bytes + rest

    @property
    def capacity(self) -> int:
        """See ``PagedStore``: if all are encoded."""
        return self.num_pages * self.packing.held

    @property
    def longest(self) -> int:
        """See ``PagedStore``."""
        return self.packing.longest(self.num_pages)

    def takes(self, length: int) -> int:
        """See ``PagedStore``."""
        return self.packing.takes(length)

    # --- who holds what

    def reserve(self, row: int, length: int, extra: int) -> bool:
        """See ``PagedStore``. All tokens below ``length`` are final: what is old among them is encoded now.

        Of more tokens than a pass may feed the first become writable; for the groups of the others pages are held.
        """
        groups, table = self._groups.get(row, _Groups()), self._tables.get(row, [])
        soon = min(extra, self.longest_feed)
        fresh = max(0, self.packing.seen(length + extra - 1) - len(groups.pages))
        gone = self.packing.seen(length) * self.packing.span
        freed = sum(page != GONE and not self._pool.shared(page) for page in table[:gone])
        free = self._pool.num_free - fresh * self.packing.pages
        if free < 0 or self._lacking(row, length, soon) > free + freed:
            return False
        groups = self._groups.setdefault(row, groups)
        groups.pages += [self._new_group() for _ in range(fresh)]
        self._encode(row, groups, self.packing.seen(length + soon - 1))
        self._pool.release(page for page in table[:gone] if page != GONE)
        table[:gone] = [GONE] * min(gone, len(table))
        return super().reserve(row, length, soon)

    def _new_group(self) -> list[int]:
        pages = self._pool.take(self.packing.pages)
        self._members[pages[0]] = torch.tensor(pages)
        return pages

    def can_fork(self, row: int, length: int) -> bool:
        """See ``PagedStore``: what the next query sees at full precision must be there still."""
        return self.settled_pages(row) <= self.packing.seen(length) * self.packing.span

    def fork(self, source: int, target: int, length: int) -> None:
        """See ``PagedStore``: groups are shared as pages are."""
        groups, table = self._groups[source], self._tables[source][: self.pages_for(length)]
        shared = groups.pages[: groups.coded]  # they end before ``length`` wherever one can fork
        self._pool.share([*_flat(shared), *_there(table)])
        self._groups[target], self._tables[target] = _Groups(list(shared), groups.coded), table

    def free(self, row: int) -> None:
        """See ``PagedStore``."""
        self._pool.release(_there(self._tables.pop(row, [])))
        self._pool.release(_flat(self._groups.pop(row, _Groups()).pages))

    def check_integrity(self) -> None:
        """See ``PagedStore``."""
        held = [_there(table) for table in self._tables.values()]
        self._pool.check_integrity(held + [_flat(groups.pages) for groups in self._groups.values()])

    # --- what is read

    def cut(self, start: int, stop: int) -> list[int]:
        """See ``PagedStore``: where the queries pass the end of one more group and ``LAG``."""
        stops, group = [], self.packing.group
        while start < stop:
            start = min(stop, (self.packing.seen(start) + 1) * group + LAG)
            stops.append(start)
        return stops

    def settled_pages(self, row: int) -> int:
        """See ``PagedStore``: those that are encoded."""
        table = self._tables.get(row, [])
        return next((i for i, page in enumerate(table) if page != GONE), len(table))

    @property
    def num_numbers(self) -> int:
        """See ``PagedStore``."""
        return self.num_pages * (1 + self.packing.span)

    def pages(self, row: int, first: int, stop: int) -> torch.Tensor:
        """See ``PagedStore``: of encoded ones only where nothing else is there."""
        return self._numbers(row, self.settled_pages(row))[first:stop]

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """See ``PagedStore``; those of encoded tokens are for reading only."""
        token, size = torch.arange(start, stop), self.layout.page_size
        return self._numbers(row, self.settled_pages(row))[token // size] * size + token % size

    def slots_at(self, row: int, tokens: Iterable[int]) -> list[int]:
        """See ``slots``."""
        tokens, table, size = list(tokens), self._tables[row], self.layout.page_size
        if all(table[token // size] != GONE for token in tokens):  # as what a pass writes: no need to count groups
            return super().slots_at(row, tokens)
        numbers = self._numbers(row, self.settled_pages(row)).tolist()
        return [numbers[token // size] * size + token % size for token in tokens]

    def tables(self, rows: list[int], lens: list[int]) -> list[list[int]]:
        """See ``PagedStore``: as the last of each row's tokens sees them."""
        pairs = zip(rows, lens, strict=True)
        return [self._numbers(row, self.packing.seen(n - 1) * self.packing.span).tolist() for row, n in pairs]

    def lay_out(self, view: KVView) -> tuple[KVView, Decode]:
        """See ``PagedStore``: what the view shows is decoded, and nothing else."""
        shown = []
        for i in range(len(self.layers) if view.layered else 1):
            pages, positions = view.layer(i).expand()
            shown.append(pages[(positions != NEVER).unflatten(-1, (-1, view.page_size)).any(dim=-1)])
        decode = Decoded(self, torch.cat(shown).unique())
        return replace(view, tables=decode.place(view.tables)), decode

    def at(self, layer: int, pages: torch.Tensor) -> tuple[LayerKV, torch.Tensor]:
        """See ``PagedStore``."""
        decode = Decoded(self, pages.cpu().unique())
        return decode(layer, self.layers[layer]), decode.place(pages.cpu()).to(self.k.device)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``PagedStore``."""
        size, parts = self.layout.page_size, []
        for i, own in enumerate(slots):
            kv, pages = self.at(i, own // size)
            at = pages * size + (own % size).to(pages.device)
            parts.append((self.layout.read_k(kv.k, at), self.layout.read_v(kv.v, at)))
        return tuple(torch.cat(x) for x in zip(*parts, strict=True))

    def bounds(self, pages: torch.Tensor) -> torch.Tensor:
        """See ``PagedStore``."""
        places = (self.at(i, pages) for i in range(len(self.layers)))
        return torch.cat([self.layout.bounds_k(kv.k[None], own) for kv, own in places])

    def _numbers(self, row: int, encoded: int) -> torch.Tensor:
        """A row's pages by their numbers, the first ``encoded`` ones as parts of groups."""
        groups, count = self._groups[row], encoded // self.packing.span
        assert count <= groups.coded, "a pass reads what was reserved for it"
        first = torch.tensor([pages[0] for pages in groups.pages[:count]])
        parts = self.num_pages + first[:, None] * self.packing.span + torch.arange(self.packing.span)
        return torch.cat([parts.flatten().long(), torch.tensor(self._tables[row][encoded:], dtype=torch.int64)])

    # --- encoding and decoding

    def _encode(self, row: int, groups: _Groups, count: int) -> None:
        """Encode a row's groups up to so many, whose tokens are all at full precision still."""
        if count <= groups.coded:
            return
        size = self.packing.group
        slots = super().slots(row, groups.coded * size, count * size).to(self.k.device)
        pages = torch.tensor(_flat(groups.pages[groups.coded : count]), device=self.k.device)
        for i, kv in enumerate(self.layers):
            packed = self.packing.pack(self.format.encode(*read_groups(self.layout, kv, slots, size)))
            for kept, x in zip(self._bytes, packed, strict=True):
                kept[i, pages] = x
        groups.coded = count

    def decoded(self, layer: int, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``k, v [n, G, T, D]`` of the groups with these ``first`` pages ``[n]``."""
        pages = self._members[first].flatten().to(self.k.device)
        parts = self.packing.unpack([kept[layer, pages] for kept in self._bytes])
        return self.format.decode(parts, self.k.dtype)


def _there(table: list[int]) -> list[int]:
    return [page for page in table if page != GONE]


def _flat(groups: list[list[int]]) -> list[int]:
    return [page for pages in groups for page in pages]
