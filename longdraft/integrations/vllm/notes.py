"""What the native attention notes of the target's passes, for drafts that choose by it. Imports no vLLM.

Of the last pass the queries of each row's last tokens, in all layers; and of all passes which blocks they wrote to. So
whoever remembers something of a block, by its number, learns when it no longer holds, whoever has the block by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Notes:
    """Of passes over a cache of so many ``blocks``. Draft steps are not noted: the target writes there again."""

    def __init__(self, layers: Sequence[str], blocks: int, block_size: int, keep: int) -> None:
        """``layers``: names, in order; ``keep``: of so many last tokens of a row queries are kept."""
        self.block_size, self._keep, self._layers = block_size, keep, tuple(layers)
        # Of each block, whether it was written to since somebody last set this back; the last: tokens without a slot.
        self.written = torch.ones(blocks + 1, dtype=torch.bool)
        self._queries: dict[str, torch.Tensor] = {}
        self._tokens = self._ends = self._counts = self._lens = torch.zeros(0, dtype=torch.int64)

    def begin(self, starts: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor) -> None:
        """A pass of R rows: their first tokens ``starts [R + 1]``, lengths with the pass's tokens, slots of all."""
        self.written[slots.long() // self.block_size] = True  # slot -1: block -1, the last entry
        self._queries.clear()
        starts, self._lens = starts.long(), lens.long()
        self._counts = starts.diff().clamp(max=self._keep)
        self._ends = self._counts.cumsum(0)
        shift = (starts[1:] - self._ends).repeat_interleave(self._counts)
        self._tokens = torch.arange(len(shift)) + shift

    def note(self, layer: str, queries: torch.Tensor) -> None:
        """A layer's ``queries [N, H, D]``, as attention reads them."""
        self._queries[layer] = queries[self._tokens]

    def queries(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[torch.Tensor, list[bool]]:
        """``[L, n, H, D]`` float32 of tokens of the last pass, and which of them it had: the others' mean nothing.

        None is known unless all layers ran.
        """
        if any(name not in self._queries for name in self._layers):
            return torch.empty(0), [False] * len(rows)
        row = torch.tensor(rows, dtype=torch.int64)
        behind = self._lens[row] - torch.tensor(positions, dtype=torch.int64)  # 1: the row's last token
        known = (behind > 0) & (behind <= self._counts[row])
        at = torch.where(known, self._ends[row] - behind, 0)
        return torch.stack([self._queries[name][at] for name in self._layers]).float(), known.tolist()
