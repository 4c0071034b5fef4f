"""Block tables of draft steps: the first blocks and the last ones of each sequence (StreamingLLM, arXiv:2309.17453).

Whole blocks are left out, so what remains is an ordinary paged sequence, shorter by a multiple of the block's size:
any attention kernel that reads pages reads it as it is. Only the positions of rotary embeddings are still those of the
text. The table is built once a round; its steps differ in lengths and slots, which follow from it on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAD_SLOT = -1  # vLLM's: keys and values of such a token are not written


@dataclass(frozen=True)
class Step:
    """What a pass reads and writes of R rows that feed N tokens, one each in a draft step.

    Lengths ``[R]`` int32, the fed tokens among them; positions and slots of these ``[N]`` int64.
    """

    lengths: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class DraftTables:
    """Shortened block tables ``[R, C]`` int32 of one round, on the device of vLLM's own."""

    table: torch.Tensor
    known: torch.Tensor  # [R] int64, tokens of each row whose values are settled; the newest of them is fed first
    dropped: torch.Tensor  # [R] int64, tokens left out, whole blocks
    wanted: torch.Tensor  # [R] int64, tokens each row drafts
    block_size: int
    longest: int  # no step's length is above it

    @classmethod
    def build(
        cls,
        table: torch.Tensor,
        known: list[int],
        wanted: list[int],
        budgets: list[int],
        sinks: int,
        block_size: int,
    ) -> DraftTables:
        """For rows of vLLM's ``table [R, M]`` with ``known`` tokens each, at least 1, that draft ``wanted``, at most.

        Kept are the blocks that hold the first ``sinks`` tokens and, at every step, at least the last ``budgets[r]``;
        all blocks where these meet. The rows' own slots must reach to ``known + wanted - 1`` tokens.
        """
        first = -(-sinks // block_size)
        gaps = [max(0, (n - budget) // block_size - first) for n, budget in zip(known, budgets, strict=True)]
        ends = [-(-(n + more - 1) // block_size) for n, more in zip(known, wanted, strict=True)]
        width = max(end - gap for end, gap in zip(ends, gaps, strict=True))
        length, gap, more = torch.tensor([known, gaps, wanted], dtype=torch.int64).to(table.device)
        columns = torch.arange(width, device=table.device)
        columns = columns + gap[:, None] * (columns >= first)
        short = table.gather(1, columns.clamp(max=table.shape[1] - 1))
        lengths = [n + max(0, more - 1) - gap * block_size for n, more, gap in zip(known, wanted, gaps, strict=True)]
        return cls(short, length, gap * block_size, more, block_size, max(lengths))

    def step(self, step: int) -> Step:
        """The ``step``-th draft step, from 0: rows that want no more tokens read what they have and write nothing."""
        positions = self.known - 1 + (self.wanted - 1).clamp(min=0, max=step)
        short = positions - self.dropped
        block = self.table.gather(1, (short // self.block_size)[:, None])[:, 0].long()
        slots = block * self.block_size + short % self.block_size
        slots = torch.where(step < self.wanted, slots, PAD_SLOT)
        return Step((short + 1).int(), positions, slots)


def fed(table: torch.Tensor, lengths: Sequence[int], sizes: Sequence[int], block_size: int) -> Step:
    """A pass over rows of ``table [R, M]`` with ``lengths[r]`` cached tokens that feeds each ``sizes[r]`` more."""
    rows = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(table.device)
    spans = [torch.arange(n, n + size) for n, size in zip(lengths, sizes, strict=True)]
    positions = torch.cat(spans).to(table.device)
    slots = table[rows, positions // block_size].long() * block_size + positions % block_size
    whole = torch.tensor([n + size for n, size in zip(lengths, sizes, strict=True)], dtype=torch.int32)
    return Step(whole.to(table.device), positions, slots)
