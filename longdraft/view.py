"""What attention reads, as data: all that a kernel ever sees of the cache.

A ``KVView`` says which cached tokens a row can see; an ``AttnPlan`` adds the step's queries. Neither knows about
requests, drafts or phases: prefill, decoding and verifying differ only in the numbers held here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVView:
    """Rows' pages of a paged store (the *table* kind), built on the CPU.

    Row ``b``'s token ``t`` lies in page ``tables[b, t // page_size]`` at offset ``t % page_size``; it sees tokens
    ``[0, lens[b])``. Entries of ``tables`` past a row's last page are never followed.
    """

    tables: torch.Tensor  # [B, P] int64
    lens: torch.Tensor  # [B] int64, the step's own tokens included
    page_size: int


@dataclass(frozen=True)
class AttnPlan:
    """One step's attention: ragged queries over views. Made once per step, used by every layer.

    Row ``b`` owns the flat tokens ``[query_starts[b], query_starts[b + 1])``, which are the last ones of its view, and
    attends causally: its last query sees ``lens[b]`` tokens, the one before it one fewer.
    """

    view: KVView
    query_starts: torch.Tensor  # [B + 1] int64
    slots: torch.Tensor  # [N] int64: page * page_size + offset where each new token's K/V go

    @property
    def query_lens(self) -> torch.Tensor:
        """[B] queries per row."""
        return self.query_starts[1:] - self.query_starts[:-1]


@dataclass(frozen=True)
class LayerKV:
    """One layer's storage, in the layout its store was made with."""

    k: torch.Tensor
    v: torch.Tensor
