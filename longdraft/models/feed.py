"""Rows of tokens → one forward pass over a store: flat tensors, slots, a plan. The one way to run a model.

Phases are data: prefill chunks, decoding, drafting and verifying differ in how many tokens a row feeds and in the view
that ``select`` makes of the rows' caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from longdraft.capture import Capture
from longdraft.kv.store import PagedStore
from longdraft.models.transformer import Transformer
from longdraft.view import AttnPlan, Decode, KVView, TableView

Select = Callable[[TableView], KVView]


@dataclass(frozen=True)
class Feed:
    """Tokens of one row, to be written at positions ``start``, ``start + 1``, … of its cache (pages reserved)."""

    row: int  # the row's id in the store
    start: int
    tokens: Sequence[int]
    num_logits: int  # logits are wanted for so many of the last tokens
    num_first: int = 0  # and for so many of the first ones
    shift: int = 0  # how far the tokens' positions in the text lie beyond those in the cache


def feed(
    model: Transformer,
    store: PagedStore,
    feeds: Sequence[Feed],
    select: Select | None = None,
    layers: Sequence[int] | None = None,
    capture: Capture | None = None,
    decode: Decode | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits ``[R, V]`` of the wanted tokens in row order. Attention reads what ``select`` leaves of the full view.

    Only ``layers`` run, where they are given; the caches of the others stay as they are. ``capture`` is filled in.
    ``decode`` says where the pages of the selected view lie, if that is not in ``store``. ``out``: see
    ``Transformer.forward``.
    """
    ids: list[int] = []
    positions: list[int] = []
    rows, lens, starts, logits_at, slots = [], [], [0], [], []
    for f in feeds:
        stop, first = f.start + len(f.tokens), len(ids)
        ids.extend(f.tokens)
        positions.extend(range(f.start + f.shift, stop + f.shift))
        slots.extend(store.slots_at(f.row, range(f.start, stop)))
        for end in store.cut(f.start, stop):
            rows.append(f.row)
            lens.append(end)
            starts.append(first + end - f.start)
        logits_at.extend([*range(first, first + f.num_first), *range(len(ids) - f.num_logits, len(ids))])
    view: KVView = store.view(rows, lens)
    view, own = store.lay_out(select(view) if select else view)
    parts = (ids, positions, slots, logits_at)
    one = torch.tensor([x for part in parts for x in part]).to(model.device)  # every tensor made apart takes its time
    ids_t, positions_t, slots_t, at_t = one.split([len(part) for part in parts])
    plan = AttnPlan(view, torch.tensor(starts), slots_t, max(positions) + 1, decode or own)
    return model.forward(ids_t, positions_t, plan, store.layers, at_t, layers, capture, out)
