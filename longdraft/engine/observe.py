"""What one pass captures for the drafts of its rows, and which part of it belongs to whom."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
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
        self._parts: dict[int, _Part] = {}  # by sequence id
        tokens: list[int] = []
        positions: list[int] = []
        stop = 0
        for row, need in zip(rows, needs, strict=True):
            start, n = row.seq.num_committed, len(row.tokens)
            stop += n
            # In the middle of a prompt nothing but what its last tokens will be; of proposals any may turn out final.
            ranges = need.ranges(len(row.seq.ids), start, start + n) if need.tokens else []
            if ranges:
                self._parts[row.seq.id] = _Part(len(row.seq.ids), start, start + n, len(tokens), ranges)
            for a, b in ranges:
                tokens.extend(range(stop - (start + n - a), stop - (start + n - b)))
                positions.extend(range(a, b))
        self.capture: Capture | None = None
        if tokens:
            self.capture = _form(model, tokens, positions, rows, needs)

    def of(self, seq: Sequence, needs: Needs) -> list[Seen]:
        """What was captured, as one draft's ``needs`` ask, of the sequence's tokens that are final by now.

        A record for each stretch of them; ``needs`` are among those of the row.
        """
        part = self._parts.get(seq.id)
        if self.capture is None or part is None:
            return []
        seen = []
        for start, stop in needs.ranges(part.known, part.start, min(part.stop, seq.num_committed)):
            number = part.number(start)
            seen.append(self.capture.part(number, number + stop - start, start, needs.taps).only(needs))
        return [x for x in seen if x]


@dataclass(frozen=True)
class _Part:
    """A row's tokens in the form: those at ``ranges``, one range after the other, from number ``first`` on."""

    known: int  # ids before the pass
    start: int  # what was fed: tokens [start, stop)
    stop: int
    first: int
    ranges: list[tuple[int, int]]

    def number(self, position: int) -> int:
        """The number in the form of the token at ``position``, one of those at ``ranges``."""
        return self.first + sum(min(b, position) - a for a, b in self.ranges if a < position)


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
    taps = tuple(sorted({tap for need in needs for tap in need.taps}))
    hidden = model.hidden_form(len(taps), n) if taps else None
    if queries is None and page_mass is None and hidden is None:
        return None
    massed = [-1 if at % MASS_EVERY else token for token, at in zip(tokens, positions, strict=True)]
    numbers, massed = torch.tensor(tokens, device=device), torch.tensor(massed, device=device)
    return Capture(numbers, queries, page_mass, massed, hidden, taps)
