"""Tokens of another store's rows in a format, beside that store; and what a step reads of such rows.

    tokens of a row   some, or all, of those before ``start``   | ``start`` ......... committed | tentative
    lie               here, in groups, in a format              | in the source's own pages, at full precision

Only what is final is encoded, and nothing that is encoded is ever taken back: refusing proposals touches the source's
pages alone. What is read behind ``start`` is the source's own bits.

A step decodes what it reads one layer after the other into one scratch storage, and copies the tail there from the
layer's own pages. So beside the codes there is never more at full precision than one layer of what a step reads: an
L-th of what a copy of all layers would take. The price is that each step decodes anew all that it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from longdraft.kv.format.base import Format
from longdraft.kv.groups import read_groups, write_groups
from longdraft.kv.pool import Pool
from longdraft.kv.store import PagedStore
from longdraft.view import LayerKV, TableView


@dataclass
class Coded:
    """What is encoded of one row: ``size`` tokens in ``units``, the places of groups in the store, by their numbers."""

    units: dict[int, int]
    size: int
    start: int

    def place(self, position: int) -> int:
        """Where the token at ``position``, one of the tail, stands among all that is read."""
        return self.size + position - self.start


class CodedStore:
    """Groups of ``source``'s tokens in ``fmt``, by the ids that their rows have there."""

    def __init__(self, source: PagedStore, fmt: Format, num_groups: int) -> None:
        layout, dtype, device = source.layout, source.k.dtype, source.k.device
        self.source, self.format, self.group = source, fmt, fmt.group_size(layout.page_size)
        size = (len(source.layers), num_groups, layout.num_kv_heads)
        kept = fmt.parts(self.group, layout.head_dim, dtype)
        self.parts = [torch.empty(*size, *p.shape, dtype=p.dtype, device=device) for p in kept]  # untouched, it is free
        self.pool = Pool(num_groups)
        self._rows: dict[int, Coded] = {}

    @property
    def bytes_per_group(self) -> int:
        """Bytes that a group takes over all layers."""
        return sum(part[:, :1].nbytes for part in self.parts)

    def groups_for(self, num_tokens: int) -> int:
        """Groups that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.group)

    def get(self, row: int) -> Coded | None:
        """What is encoded of a row, if it is known."""
        return self._rows.get(row)

    def hold(self, row: int, numbers: Collection[int], start: int) -> bool:
        """Have exactly these groups of a row's tokens, all before ``start``: number n begins at token ``n * group``.

        Those that are there already stay as they are. ``False``, with nothing changed, if there is no room.
        """
        old = self._rows[row].units if row in self._rows else {}
        new, gone = [n for n in numbers if n not in old], [unit for n, unit in old.items() if n not in numbers]
        if len(new) > self.pool.num_free + sum(not self.pool.shared(unit) for unit in gone):
            return False
        self.pool.release(gone)
        units = old | dict(zip(new, self.pool.take(len(new)), strict=True))
        self._rows[row] = Coded({n: units[n] for n in sorted(numbers)}, len(numbers) * self.group, start)
        if new:
            slots = torch.cat([self.source.slots(row, n * self.group, (n + 1) * self.group) for n in new])
            self._encode([units[n] for n in new], slots.expand(len(self.source.layers), -1))
        return True

    def open(self, row: int, size: int, length: int, room: int) -> bool:
        """Begin anew with ``size`` chosen ones of a row's ``length`` tokens, which must be filled in.

        ``False``, with nothing held, if there is no room. ``room`` for more is not needed: they lie in the source.
        """
        self.free(row)
        if self.groups_for(size) > self.pool.num_free:
            return False
        self._rows[row] = Coded(dict(enumerate(self.pool.take(self.groups_for(size)))), size, length)
        return True

    def fill(self, row: int, chosen: torch.Tensor) -> None:
        """Encode the tokens at positions ``chosen [L, G, size]``, in their order."""
        coded = self._rows[row]
        if coded.size:
            # The last one fills up the last group: its range stays what it is.
            missing = len(coded.units) * self.group - coded.size
            chosen = torch.cat([chosen, chosen[..., -1:].expand(*chosen.shape[:2], missing)], dim=2).cpu()
            self._encode(list(coded.units.values()), self.source.slots(row, 0, coded.start)[chosen].transpose(1, 2))

    def reserve(self, row: int, length: int, extra: int) -> bool:
        """A row's tail always has room: it lies in the source's own pages, where it is reserved."""
        return True

    def fork(self, source: int, child: int, length: int) -> None:
        """Let ``child`` share the groups of consecutive tokens among the first ``length`` ones of ``source``."""
        if source in self._rows:
            shared = {n: unit for n, unit in self._rows[source].units.items() if (n + 1) * self.group <= length}
            self.pool.share(shared.values())
            self._rows[child] = Coded(shared, len(shared) * self.group, length)

    def free(self, row: int) -> None:
        """Forget a row; one that is not known is fine."""
        if coded := self._rows.pop(row, None):
            self.pool.release(coded.units.values())

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every group is either free or held as often as it is counted."""
        self.pool.check_integrity(coded.units.values() for coded in self._rows.values())

    def _encode(self, units: list[int], slots: torch.Tensor) -> None:
        """The source's tokens at ``slots [L, n * group]``, or ``[L, n * group, G]`` by head, into n groups."""
        layout, slots = self.source.layout, slots.to(self.source.k.device)
        for i, kv in enumerate(self.source.layers):
            encoded = self.format.encode(*read_groups(layout, kv, slots[i], self.group))
            for part, x in zip(self.parts, encoded, strict=True):
                part[i, units] = x


@dataclass(frozen=True)
class Span:
    """What a step reads of a row: ``size`` tokens of ``units``, then the source's ``[start, stop)``."""

    row: int
    units: Sequence[int]
    size: int
    start: int
    stop: int


class Reading:
    """One step's reading of some rows: a ``view`` of all that is read, and how a layer's part of it is decoded.

    In the view a row's tokens stand one behind the other, first the encoded ones. Rows that share groups share their
    pages. A tail may begin within a row's last group, where tokens are no part of ``size``; such a group is not shared.
    """

    def __init__(self, store: CodedStore, spans: Sequence[Span]) -> None:
        self.store, source = store, store.source
        size, device = source.layout.page_size, source.k.device
        used = list(dict.fromkeys(unit for span in spans for unit in span.units))
        per_group = store.group // size
        first = {unit: n * per_group for n, unit in enumerate(used)}
        self.num_pages, tables, sources, targets, lens = len(used) * per_group, [], [], [], []
        for span in spans:
            table = [first[unit] + i for unit in span.units for i in range(per_group)]
            lens.append(span.size + span.stop - span.start)
            more = max(0, source.pages_for(lens[-1]) - len(table))
            table += range(self.num_pages, self.num_pages + more)
            self.num_pages += more
            tables.append(torch.tensor(table))
            place = torch.arange(span.size, lens[-1])
            targets.append(tables[-1][place // size] * size + place % size)
            sources.append(source.slots(span.row, span.start, span.stop))
        self._storage = source.scratch(self.num_pages)  # not within a pass, whose tensors nobody else may write to
        self.view = TableView(pad_sequence(tables, batch_first=True), torch.tensor(lens), size)
        self._units = torch.tensor(used, dtype=torch.int64, device=device)
        self._decoded = torch.arange(len(used) * store.group, device=device)
        self._sources, self._targets = torch.cat(sources).to(device), torch.cat(targets).to(device)

    def decode(self, i: int, kv: LayerKV) -> LayerKV:
        """See ``Decode``."""
        store, layout, storage = self.store, self.store.source.layout, self._storage
        parts = [part[i, self._units] for part in store.parts]
        write_groups(layout, storage, self._decoded, *store.format.decode(parts, kv.k.dtype))
        layout.write_k(storage.k, self._targets, layout.read_k(kv.k, self._sources))
        layout.write_v(storage.v, self._targets, layout.read_v(kv.v, self._sources))
        return storage
