"""A proposer for tests: how much a row drafts is thrown at every step. Found by vLLM's workers by its name."""

from __future__ import annotations

from longdraft.integrations.vllm.proposer import SparseProposer
from tests.unit.test_vllm_auto import Dice


class DiceProposer(SparseProposer):
    """``SparseProposer`` without curves."""

    def prepare(self):
        """Nothing is measured."""
        self.drafter.control = Dice(0)
