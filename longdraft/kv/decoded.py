"""Pages of a cache in a format, made readable for one layer at a time: groups are decoded, other pages copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from longdraft.kv.groups import write_groups
from longdraft.view import LayerKV

if TYPE_CHECKING:
    from longdraft.kv.formatted import FormattedStore


class Decoded:
    """Pages by their numbers ``[n]``, ascending, each once; whole groups of them; and where they are decoded to.

    places    first group | second group | ... | pages at full precision
    """

    def __init__(self, store: FormattedStore, numbers: torch.Tensor) -> None:
        self.store, self.per_group = store, store.packing.span
        self.full = numbers[numbers < store.num_pages]
        self.groups = ((numbers[numbers >= store.num_pages] - store.num_pages) // self.per_group).unique()
        self.before = len(self.groups) * self.per_group  # pages
        self.storage = store.scratch(self.before + len(self.full))  # not within a pass: nobody else may write to those
        device = store.k.device
        self._pages = self.full.to(device)
        self._slots = torch.arange(len(self.groups) * store.packing.group, device=device)

    def place(self, numbers: torch.Tensor) -> torch.Tensor:
        """Where pages lie in the storage; somewhere, if they are not among those that are decoded."""
        inner = numbers.contiguous() - self.store.num_pages
        group = torch.searchsorted(self.groups, inner // self.per_group).clamp(max=max(0, len(self.groups) - 1))
        page = self.before + torch.searchsorted(self.full, numbers.contiguous())
        place = torch.where(inner >= 0, group * self.per_group + inner % self.per_group, page)
        return place.clamp(max=self.before + len(self.full) - 1)

    def __call__(self, i: int, kv: LayerKV) -> LayerKV:
        """See ``Decode``."""
        out = self.storage
        if len(self.groups):
            write_groups(self.store.layout, out, self._slots, *self.store.decoded(i, self.groups))
        stop = self.before + len(self.full)
        out.k[self.before : stop], out.v[self.before : stop] = kv.k[self._pages], kv.v[self._pages]
        return out
