"""What one pass captures for the drafts of its rows, and which part of it belongs to whom."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod

import torch

from longdraft.capture import Capture, Needs, Seen
from longdraft.core import Row, Sequence
from longdraft.models.transformer import Transformer

# Bytes of page masses in a pass. All tokens have room for the pages of the longest row: one of 128k tokens among many
# short ones could ask for gigabytes. Beyond this nothing is told, and drafts choose by what they knew.
MOST_MASS = 1 << 29


class Observation:
    """Made before a pass, which fills in ``capture`` (``None`` if nobody needs anything); read after the commit."""

    def __init__(self, model: Transformer, rows: Seq[Row], needs: Seq[Needs]) -> None:
        """``needs``: those of each row's draft."""
        self._parts: dict[int, _Part] = {}  # by sequence id
        tokens: list[int] = []
        stop = 0
        for row, need in zip(rows, needs, strict=True):
            start, n = row.seq.num_committed, len(row.tokens)
            stop += n
            # In the middle of a prompt nothing but what its last tokens will be; of proposals any may turn out final.
            ranges = need.ranges(len(row.seq.ids), start, start + n) if need.tokens else []
            if ranges:
                self._parts[row.seq.id] = _Part(len(tokens), ranges, need.taps)
            for a, b in ranges:
                tokens.extend(range(stop - (start + n - a), stop - (start + n - b)))
        self.capture: Capture | None = None
        if tokens:
            self.capture = _form(model, tokens, rows, needs)

    def of(self, seq: Sequence) -> list[Seen]:
        """What was captured of the sequence's tokens that are final by now, a record for each stretch of them."""
        part = self._parts.get(seq.id)
        if self.capture is None or part is None:
            return []
        seen, number = [], part.number
        for start, stop in part.ranges:
            final = min(stop, seq.num_committed)
            if start < final:
                seen.append(self.capture.part(number, number + final - start, start, part.taps))
            number += stop - start
        return seen


@dataclass(frozen=True)
class _Part:
    """The form's tokens from ``number`` on: those at ``ranges`` of a sequence, one range after the other."""

    number: int
    ranges: list[tuple[int, int]]
    taps: tuple[int, ...]


def _form(model: Transformer, tokens: Seq[int], rows: Seq[Row], needs: Seq[Needs]) -> Capture | None:
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
    taps = tuple(sorted({tap for need in needs for tap in need.taps}))
    hidden = model.hidden_form(len(taps), n) if taps else None
    if queries is None and page_mass is None and hidden is None:
        return None
    return Capture(torch.tensor(tokens, device=device), queries, page_mass, hidden, taps)
