"""A proposer for tests: what blocks are chosen by is compared with vLLM's own memory and modules at every choice."""

from __future__ import annotations

import torch

from longdraft.integrations.vllm.proposer import SparseProposer
from tests.unit.test_vllm_auto import Dice


class CheckedProposer(SparseProposer):
    """``SparseProposer`` that fails, and so drafts no more, where it would choose by something out of date."""

    def choose(self, tables, table, rows):
        """Counts rows that read other blocks than they would without a choice, as ``chosen``."""
        chosen = super().choose(tables, table, rows)
        self._check_bounds(table, rows)
        self._check_queries(rows)
        self.drafter.counts["chosen"] += int((chosen.table != tables.table).any(1).sum())
        return chosen

    def _check_bounds(self, table, rows):
        made = ~self.chooser.notes.written
        for row, blocks in zip(rows, table.long(), strict=True):
            full = blocks[: (row.known - 1) // self.pages.block_size]
            full = full[made[full]]
            for bounds, cache in zip(self.chooser._bounds._bounds, self.caches(), strict=True):
                assert torch.equal(bounds[full], self.pages.key_bounds(cache, full)), "bounds out of date"

    def _check_queries(self, rows):
        """The first layer's are a function of a token and its position."""
        at, batch = [row.known - 2 for row in rows], self.drafter.runner.input_batch
        found, known = self.chooser.notes.queries([row.index for row in rows], at)
        assert all(known), "a query that is not known"
        ids = torch.tensor([batch.token_ids_cpu[row.index, row.known - 2] for row in rows])
        first = self.drafter.runner.model.model.layers[0]
        attention = first.self_attn
        qkv, _ = attention.qkv_proj(first.input_layernorm(self.drafter.runner.model.model.embed_tokens(ids)))
        q, k, _ = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        q, _ = attention.rotary_emb(torch.tensor(at), q, k)
        torch.testing.assert_close(found[0], q.view(found[0].shape).float())


class CheckedDiceProposer(CheckedProposer):
    """And how much a row drafts is thrown at every step."""

    def prepare(self):
        """Nothing is measured."""
        self._note_keys()
        self.drafter.control = Dice(0)
