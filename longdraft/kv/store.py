"""The paged KV store: pages, who holds them, and nothing else.

Owns page allocation and the storage. It does not know how long a sequence is: callers pass lengths (the one owner of a
length is ``Sequence.num_committed``). After PagedAttention (arXiv:2309.06180).

    tokens of a row     0 ........ 15 | 16 ....... 31 | 32 ... len ... 47
    its table           page 7        | page 2        | page 9
                        maybe shared    maybe shared    written next: must be its own (copied on reserve if shared)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import product

import torch

from longdraft.errors import KVCapacityError
from longdraft.kernels.layout import Layout
from longdraft.kernels.native import use_huge_pages
from longdraft.kv.format.base import Format
from longdraft.kv.pool import Pool
from longdraft.view import Decode, KVView, LayerKV, TableView


class PagedStore:
    """KV of many rows in pages of ``layout.page_size`` tokens, one row of pages per sequence for all layers."""

    format: Format | None = None  # that old tokens are kept in
    longest_feed: int = 2**31 - 1  # tokens of a row that may be fed at once

    def __init__(
        self, num_layers: int, num_pages: int, layout: Layout, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.layout, self.num_pages = layout, num_pages
        shape = (num_layers, *layout.shape(num_pages))
        try:
            # Left uninitialised: untouched pages cost no memory, and a page is zeroed when it is handed out.
            self.k = torch.empty(shape, dtype=dtype, device=device)
            self.v = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            need = (
                2 * num_layers * num_pages * layout.page_size * layout.num_kv_heads * layout.head_dim * dtype.itemsize
            )
            raise KVCapacityError(
                f"The KV cache of {need / 2**30:.1f} GiB could not be allocated. Pass a smaller kv_cache_memory_bytes."
            ) from error
        for storage in (self.k, self.v):
            use_huge_pages(storage)
        self.layers = [LayerKV(k, v) for k, v in zip(self.k, self.v, strict=True)]
        # By one thread: those that torch would take go on looking for work while the next pass runs.
        on_cpu = self.k.device.type == "cpu"
        self._by_page = [x.view(torch.uint8).numpy() if on_cpu else x for x in (self.k, self.v)]
        self._tables: dict[int, list[int]] = {}
        self._pool = Pool(num_pages)
        self._scratch: LayerKV | None = None

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pool.num_free

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return (self.k[:, 0].nbytes + self.v[:, 0].nbytes) // self.layout.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes over all layers."""
        return self.bytes_per_token * self.layout.page_size

    def bytes_of(self, length: int) -> int:
        """Bytes of K and V of a row of ``length`` tokens."""
        return length * self.bytes_per_token

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold together at most."""
        return self.num_pages * self.layout.page_size

    @property
    def longest(self) -> int:
        """Tokens of the longest row for which there are pages."""
        return self.capacity

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.layout.page_size)

    def takes(self, length: int) -> int:
        """Pages that a row takes at most while it grows to ``length`` tokens."""
        return self.pages_for(length)

    def reserve(self, row: int, length: int, extra: int) -> bool:
        """Make ``[length, length + extra)`` of ``row`` writable; ``False``, with nothing changed, if pages are lacking.

        New pages are zeroed. Pages in that range which are shared with a fork are replaced by copies.
        """
        if self._lacking(row, length, extra) > self._pool.num_free:
            return False
        table, total = self._tables.setdefault(row, []), self.pages_for(length + extra)
        for i in self._shared(row, length, extra):
            (page,) = self._pool.take(1)
            for storage in self._by_page:
                storage[:, page] = storage[:, table[i]]
            self._pool.release([table[i]])
            table[i] = page
        fresh = self._pool.take(max(0, total - len(table)))
        for page, storage in product(fresh, self._by_page):
            storage[:, page] = 0
        table.extend(fresh)
        return True

    def _shared(self, row: int, length: int, extra: int) -> list[int]:
        """Which pages of a row hold tokens ``[length, length + extra)`` and are shared."""
        table = self._tables.get(row, [])
        written = range(length // self.layout.page_size, min(len(table), self.pages_for(length + extra)))
        return [i for i in written if self._pool.shared(table[i])]

    def _lacking(self, row: int, length: int, extra: int) -> int:
        """Pages to be taken before tokens ``[length, length + extra)`` of a row can be written."""
        missing = self.pages_for(length + extra) - len(self._tables.get(row, []))
        return max(0, missing) + len(self._shared(row, length, extra))

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """``[stop - start]`` slots of the tokens ``[start, stop)`` of ``row``, which must be reserved."""
        size = self.layout.page_size
        if stop - start <= size:  # a few: counting is quicker than what follows
            return torch.tensor(self.slots_at(row, range(start, stop)), dtype=torch.int64)
        first = start // size
        pages = torch.tensor(self._tables[row][first : self.pages_for(stop)], dtype=torch.int64)
        token = torch.arange(start, stop)
        return pages[token // size - first] * size + token % size

    def slots_at(self, row: int, tokens: Iterable[int]) -> list[int]:
        """Slots of these tokens of ``row``, which must be reserved."""
        table, size = self._tables[row], self.layout.page_size
        return [table[token // size] * size + token % size for token in tokens]

    def settled_pages(self, row: int) -> int:
        """How many of a row's first pages will keep their numbers while it holds them."""
        return len(self._tables.get(row, []))

    @property
    def num_numbers(self) -> int:
        """Numbers of pages are below this."""
        return self.num_pages

    def pages(self, row: int, first: int, stop: int) -> torch.Tensor:
        """``[stop - first]``: numbers of the pages ``[first, stop)`` of ``row``, which must be reserved."""
        return torch.tensor(self._tables[row][first:stop], dtype=torch.int64)

    def cut(self, start: int, stop: int) -> list[int]:
        """Where to cut a row's queries ``[start, stop)``: the ends of pieces within which all see the same pages."""
        return [stop]

    def view(self, rows: Sequence[int], lens: Sequence[int]) -> TableView:
        """The first ``lens[b]`` tokens of each row, all of them visible, as the last of them sees them."""
        tables = self.tables(rows, lens)
        width = max(len(table) for table in tables)
        padded = array("q")  # a tensor made of lists takes ten times as long, which shows at every step
        for table in tables:
            padded.fromlist(table + [0] * (width - len(table)))
        numbers = torch.frombuffer(padded, dtype=torch.int64).view(len(tables), width)
        return TableView(numbers, torch.tensor(list(lens)), self.layout.page_size)

    def tables(self, rows: Sequence[int], lens: Sequence[int]) -> list[list[int]]:
        """The numbers of all pages of each row."""
        return [self._tables[row] for row in rows]

    def lay_out(self, view: KVView) -> tuple[KVView, Decode | None]:
        """A view by numbers of pages → one by where these lie in a layer's cache, or where they are decoded to."""
        return view, None

    def at(self, layer: int, pages: torch.Tensor) -> tuple[LayerKV, torch.Tensor]:
        """A storage of one layer, and where in it the pages with numbers ``pages [...]`` lie; until the next call."""
        return self.layers[layer], pages

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at slots ``[L, n]``, or ``[L, n, G]`` by head, of each layer: ``[L * n, G, D]``."""
        step = torch.arange(len(self.layers)) * self.layout.page_size * self.num_pages  # all layers, seen as one
        flat = (slots + step.view(-1, *[1] * (slots.dim() - 1))).flatten(0, 1).to(self.k.device)
        return self.layout.read_k(self.k.flatten(0, 1), flat), self.layout.read_v(self.v.flatten(0, 1), flat)

    def bounds(self, pages: torch.Tensor) -> torch.Tensor:
        """The smallest and the largest key of each page, by channel, in all layers: ``[L, P, G, 2, D]``."""
        return self.layout.bounds_k(self.k, pages)

    def scratch(self, num_pages: int) -> LayerKV:
        """One layer's storage of at least so many pages, the same for all that decode; what lies in it is stale."""
        if self._scratch is None or len(self._scratch.k) < num_pages:
            shape = self.layout.shape(num_pages)
            self._scratch = LayerKV(self.k.new_zeros(shape), self.k.new_zeros(shape))
        return self._scratch

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store ``k, v [N, G, D]`` of one layer at ``slots [N]``."""
        self.layout.write_k(self.k[layer], slots, k)
        self.layout.write_v(self.v[layer], slots, v)

    def read(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first ``length`` tokens of ``row`` as ``[length, G, D]``."""
        slots, size = self.slots(row, 0, length), self.layout.page_size
        kv, pages = self.at(layer, slots // size)
        at = pages * size + slots % size
        return self.layout.read_k(kv.k, at), self.layout.read_v(kv.v, at)

    def truncate(self, row: int, length: int) -> None:
        """Give back the pages of ``row`` that hold no token below ``length``."""
        table = self._tables[row]
        keep = self.pages_for(length)
        self._pool.release(table[keep:])
        del table[keep:]

    def can_fork(self, row: int, length: int) -> bool:
        """Whether another row may go on from the first ``length`` tokens of ``row``."""
        return True

    def fork(self, source: int, target: int, length: int) -> None:
        """Let the new row ``target`` share the first ``length`` tokens of ``source``; nothing is copied yet."""
        shared = self._tables[source][: self.pages_for(length)]
        self._pool.share(shared)
        self._tables[target] = list(shared)

    def free(self, row: int) -> None:
        """Give back all pages of ``row``; a row that holds none is fine."""
        self._pool.release(self._tables.pop(row, []))

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every page is either free or held as often as it is counted."""
        self._pool.check_integrity(self._tables.values())
