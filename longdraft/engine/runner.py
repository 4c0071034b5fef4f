"""A batch → tensors → the model's logits. The only owner of what goes to the device each step."""

from __future__ import annotations

import torch

from longdraft.core import Batch
from longdraft.kv.store import PagedStore
from longdraft.models.transformer import Transformer
from longdraft.view import AttnPlan


class Runner:
    """Runs batches of one model over one store."""

    def __init__(self, model: Transformer, store: PagedStore) -> None:
        self.model, self.store = model, store

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[R, V]`` of the batch's wanted tokens, in row order; the fed tokens' K and V are in the store."""
        ids: list[int] = []
        positions: list[int] = []
        starts, logits_at = [0], []
        slots = []
        for row in batch.rows:
            start, stop = row.seq.num_committed, row.seq.num_committed + row.num_tokens
            ids.extend(row.seq.ids[start:stop])
            positions.extend(range(start, stop))
            slots.append(self.store.slots(row.seq.id, start, stop))
            starts.append(len(ids))
            logits_at.extend(range(len(ids) - row.num_logits, len(ids)))
        lens = [row.seq.num_committed + row.num_tokens for row in batch.rows]
        view = self.store.view([row.seq.id for row in batch.rows], lens)
        device = self.model.device
        plan = AttnPlan(view, torch.tensor(starts), torch.cat(slots).to(device))
        to_device = {"dtype": torch.int64, "device": device}
        return self.model.forward(
            torch.tensor(ids, **to_device),
            torch.tensor(positions, **to_device),
            plan,
            self.store.layers,
            torch.tensor(logits_at, **to_device),
        )
