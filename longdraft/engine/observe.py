"""What one pass captures for the drafts of its rows, and which part of it belongs to whom."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import prod

import torch

from longdraft.capture import MASS_EVERY, Capture, Needs, Seen
from longdraft.core import Row, Sequence
from longdraft.models.transformer import Transformer

# Bytes of page masses in a pass. All tokens have room for the pages of the longest row: one of 128k tokens among many
# short ones could ask for gigabytes. Beyond this nothing is told, and drafts choose by what they knew.
MOST_MASS = 1 << 29


class Observation:
    """Made before a pass, which fills in ``capture`` (``None`` if nobody needs anything); read after the commit."""

    def __init__(self, model: Transformer, rows: Seq[Row], needs: Seq[Needs]) -> None:
        """``needs``: those of each row's draft."""
        self._parts: dict[int, tuple[int, int]] = {}  # by sequence id: number of its first captured token, its position
        tokens: list[int] = []
        positions: list[int] = []
        stop = 0
        for row, need in zip(rows, needs, strict=True):
            start, n = row.seq.num_committed, len(row.tokens)
            stop += n
            # In the middle of a prompt nothing but what its last tokens will be; of proposals any may turn out final.
            first = max(start, len(row.seq.ids) - need.tokens)
            if need.tokens and first < start + n:
                self._parts[row.seq.id] = len(tokens), first
                tokens.extend(range(stop - (start + n - first), stop))
                positions.extend(range(first, start + n))
        self.capture: Capture | None = None
        if tokens:
            self.capture = _form(model, tokens, positions, rows, needs)

    def of(self, seq: Sequence) -> Seen | None:
        """What was captured of the sequence's tokens that are final by now; ``None`` if nothing was."""
        if self.capture is None or seq.id not in self._parts:
            return None
        number, position = self._parts[seq.id]
        return self.capture.part(number, number + seq.num_committed - position, position)


def _form(
    model: Transformer, tokens: Seq[int], positions: Seq[int], rows: Seq[Row], needs: Seq[Needs]
) -> Capture | None:
    """An empty form for those flat tokens, with room for what anybody needs; ``None`` if that is nothing."""
    config, device, n = model.config, model.device, len(tokens)
    queries = page_mass = None
    if any(need.queries for need in needs):
        queries = torch.empty(config.num_layers, n, config.num_heads, config.head_dim, device=device)
    if any(need.page_mass for need in needs):
        longest = max(row.seq.num_committed + len(row.tokens) for row in rows)
        num_pages = -(-longest // model.layout.page_size)
        size = (config.num_layers, n, config.num_kv_heads, num_pages)
        if prod(size) * torch.float32.itemsize <= MOST_MASS:
            page_mass = torch.empty(size, device=device)
    if queries is None and page_mass is None:
        return None
    massed = [-1 if at % MASS_EVERY else token for token, at in zip(tokens, positions, strict=True)]
    return Capture(torch.tensor(tokens, device=device), queries, page_mass, torch.tensor(massed, device=device))
