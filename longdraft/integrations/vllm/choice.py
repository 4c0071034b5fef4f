"""Which blocks a draft reads: those whose keys could match a row's last query best (Quest, arXiv:2406.10774).

What is read is as much as without a choice: chosen blocks take the places of the oldest recent ones, in their order,
so lengths and slots stay.

    blocks of a row     0 .. | sinks | ................. | recent .. the newest token's .. the proposals'
    without a choice    all  |        the last ``count`` | all
    with one            all  |          the best ``count`` | all

A row has one block table for all layers and heads, so what these think of a block is added up. A choice is made at
every round: it reads a number for each channel where verification reads a block's keys and values, and nothing is
remembered of a row that could be out of date. Ranks of a tensor-parallel group choose for their own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.integrations.vllm.notes import Notes
from longdraft.integrations.vllm.pages import Pages
from longdraft.integrations.vllm.rows import Row
from longdraft.integrations.vllm.tables import DraftTables
from longdraft.kernels import native
from longdraft.kv.select.base import top
from longdraft.kv.select.pages import parts_of


@dataclass(frozen=True)
class Split:
    """Of a row's blocks ``[0, sinks)`` are read, ``count`` of ``[sinks, recent)``, and all from ``recent`` on."""

    sinks: int
    recent: int
    count: int


def split(row: Row, dropped: int, sinks: int, block_size: int) -> Split:
    """Of a ``row`` that ``DraftTables.build`` leaves ``dropped`` tokens out of, in whole blocks.

    Half of the budget stays with the last tokens. What may be chosen is full, of tokens whose keys are final.
    """
    first, gap = -(-sinks // block_size), dropped // block_size
    if not gap:
        return Split(first, first, 0)
    recent = max(first + gap, min(row.known - 1, row.known - row.budget // 2) // block_size)
    return Split(first, recent, recent - first - gap)


def rating(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """``[P]``: what blocks are worth to a row by the bounds ``scores [L, G, P]`` of its queries.

    Of each layer and KV head the share of attention, if each block had one key that reaches its bound times ``scale``.
    """
    return (scores * scale).softmax(dim=-1).sum(dim=(0, 1))


class BlockBounds:
    """The smallest and the largest key of blocks, by channel, in all layers.

    They lie by block, not by row: rows that share blocks share them. Where a block was written to they are made anew.
    """

    def __init__(self, pages: Pages, caches: Sequence[torch.Tensor], notes: Notes) -> None:
        """``caches``: vLLM's, of each layer in order."""
        self._pages, self._caches, self._notes = pages, caches, notes
        shape = (len(caches), len(caches[0]), pages.num_kv_heads, 2, pages.spec.head_dim)
        self._bounds = torch.empty(shape, dtype=caches[0].dtype)  # untouched, it costs no memory

    def scores(self, queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """``[L, G, P]``: the bounds of ``queries [L, H, D]`` against full ``blocks [P]``, summed over each group."""
        new = blocks[self._notes.written[blocks]]
        if len(new):
            for bounds, cache in zip(self._bounds, self._caches, strict=True):
                bounds[new] = self._pages.key_bounds(cache, new)
            self._notes.written[new] = False
        return native.page_scores(parts_of(queries[:, None], self._pages.num_kv_heads), self._bounds, blocks)


class Chooser:
    """Chooses by the queries that the target's last pass gave each row's last final token."""

    def __init__(self, pages: Pages, caches: Sequence[torch.Tensor], layers: Sequence[str], most: int) -> None:
        """``layers``: names of these, in order; ``most``: drafted tokens that a pass verifies."""
        self.notes = Notes(layers, len(caches[0]), pages.block_size, 1 + most)
        self._bounds = BlockBounds(pages, caches, self.notes)
        self._scale = 1 / (pages.spec.group_size * pages.spec.head_dim**0.5)  # of a group's mean

    def choose(self, tables: DraftTables, table: torch.Tensor, rows: Sequence[Row], sinks: int) -> DraftTables:
        """``tables`` of ``rows``, whose own blocks ``table [R, M]`` names, with chosen ones.

        Rows that all is read of, or that no query is known of, keep what they have.
        """
        dropped = tables.dropped.tolist()
        splits = [split(row, n, sinks, tables.block_size) for row, n in zip(rows, dropped, strict=True)]
        asked = [at for at, cut in enumerate(splits) if cut.count]
        if not asked:
            return tables
        # The newest token has not been fed; the last that was, and is final, is the one before it.
        queries, known = self.notes.queries([rows[r].index for r in asked], [rows[r].known - 2 for r in asked])
        short = tables.table.clone()
        for at, row in enumerate(asked):
            if known[at]:
                cut = splits[row]
                blocks = table[row, cut.sinks : cut.recent]
                worth = rating(self._bounds.scores(queries[:, at], blocks.long()), self._scale)
                short[row, cut.sinks : cut.sinks + cut.count] = blocks[top(worth, cut.count)]
        return replace(tables, table=short)
