"""Drives a model directly over a paged store, without an engine: chunk by chunk, wanting every token's logits."""

from __future__ import annotations

import torch

from longdraft.kv.store import PagedStore
from longdraft.models.transformer import Transformer
from longdraft.view import AttnPlan


def chunked_logits(model: Transformer, rows: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
    """Feed all rows together in chunks of the given sizes (the last one repeats) → logits ``[len(row), V]`` per row."""
    pages = sum(-(-len(row) // model.layout.page_size) for row in rows)
    store = PagedStore(model.config.num_layers, pages, model.layout, model.kv_dtype, model.device)
    done, out = [0] * len(rows), [[] for _ in rows]
    sizes = iter(chunks)
    size = next(sizes)
    while any(d < len(row) for d, row in zip(done, rows, strict=True)):
        active = [b for b, row in enumerate(rows) if done[b] < len(row)]
        ids, positions, slots, starts = [], [], [], [0]
        for b in active:
            stop = min(done[b] + size, len(rows[b]))
            assert store.reserve(b, done[b], stop - done[b])
            ids += rows[b][done[b] : stop]
            positions += range(done[b], stop)
            slots.append(store.slots(b, done[b], stop))
            starts.append(len(ids))
            done[b] = stop
        plan = AttnPlan(store.view(active, [done[b] for b in active]), torch.tensor(starts), torch.cat(slots))
        logits = model.forward(torch.tensor(ids), torch.tensor(positions), plan, store.layers, torch.arange(len(ids)))
        for i, b in enumerate(active):
            out[b].append(logits[starts[i] : starts[i + 1]])
        size = next(sizes, size)
    return [torch.cat(parts) for parts in out]
