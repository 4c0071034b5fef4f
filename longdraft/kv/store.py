"""The paged KV store: pages, who holds them, and nothing else.

Owns page allocation and the storage. It does not know how long a sequence is: callers pass lengths (the one owner of a
length is ``Sequence.num_committed``). After PagedAttention (arXiv:2309.06180).

    tokens of a row     0 ........ 15 | 16 ....... 31 | 32 ... len ... 47
    its table           page 7        | page 2        | page 9
                        maybe shared    maybe shared    written next: must be its own (copied on reserve if shared)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.errors import KVCapacityError
from longdraft.kernels.layout import Layout
from longdraft.kernels.native import use_huge_pages
from longdraft.kv.pool import Pool
from longdraft.view import LayerKV, TableView


class PagedStore:
    """KV of many rows in pages of ``layout.page_size`` tokens, one row of pages per sequence for all layers."""

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
        self._tables: dict[int, list[int]] = {}
        self._pool = Pool(num_pages)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pool.num_free

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return (self.k[:, 0].nbytes + self.v[:, 0].nbytes) // self.layout.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.layout.page_size)

    def reserve(self, row: int, length: int, extra: int) -> bool:
        """Make ``[length, length + extra)`` of ``row`` writable; ``False``, with nothing changed, if pages are lacking.

        New pages are zeroed. Pages in that range which are shared with a fork are replaced by copies.
        """
        table = self._tables.get(row, [])
        first, total = length // self.layout.page_size, max(self.pages_for(length + extra), len(table))
        written = range(first, min(len(table), self.pages_for(length + extra)))
        shared = [i for i in written if self._pool.shared(table[i])]
        if total - len(table) + len(shared) > self._pool.num_free:
            return False
        table = self._tables.setdefault(row, table)
        for i in shared:
            (page,) = self._pool.take(1)
            self.k[:, page], self.v[:, page] = self.k[:, table[i]], self.v[:, table[i]]
            self._pool.release([table[i]])
            table[i] = page
        fresh = self._pool.take(total - len(table))
        if fresh:
            self.k[:, fresh] = 0
            self.v[:, fresh] = 0
        table.extend(fresh)
        return True

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """``[stop - start]`` slots of the tokens ``[start, stop)`` of ``row``, which must be reserved."""
        size = self.layout.page_size
        first = start // size
        pages = torch.tensor(self._tables[row][first : self.pages_for(stop)], dtype=torch.int64)
        token = torch.arange(start, stop)
        return pages[token // size - first] * size + token % size

    def pages(self, row: int, first: int, stop: int) -> torch.Tensor:
        """``[stop - first]``: where the pages ``[first, stop)`` of ``row`` lie, which must be reserved."""
        return torch.tensor(self._tables[row][first:stop], dtype=torch.int64)

    def view(self, rows: Sequence[int], lens: Sequence[int]) -> TableView:
        """The first ``lens[b]`` tokens of each row, all of them visible."""
        tables = [self._tables[row] for row in rows]
        width = max(len(table) for table in tables)
        padded = [table + [0] * (width - len(table)) for table in tables]
        return TableView(torch.tensor(padded), torch.tensor(list(lens)), self.layout.page_size)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store ``k, v [N, G, D]`` of one layer at ``slots [N]``."""
        self.layout.write_k(self.k[layer], slots, k)
        self.layout.write_v(self.v[layer], slots, v)

    def read(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first ``length`` tokens of ``row`` as ``[length, G, D]``."""
        slots = self.slots(row, 0, length)
        return self.layout.read_k(self.k[layer], slots), self.layout.read_v(self.v[layer], slots)

    def truncate(self, row: int, length: int) -> None:
        """Give back the pages of ``row`` that hold no token below ``length``."""
        table = self._tables[row]
        keep = self.pages_for(length)
        self._pool.release(table[keep:])
        del table[keep:]

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
