"""What the training loop asks of whatever it trains; it knows nothing else of models, targets or losses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch


class Batches(Protocol):
    """Texts in an order that is computed, so that a run can go on wherever it was killed."""

    def step(self, step: int) -> torch.Tensor:
        """Token ids ``[B, L]``, int64, that step 0, 1, … trains on: a function of ``step`` alone."""


class Objective(Protocol):
    """Something with parameters and a loss."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """What is trained, by name: leaves with ``requires_grad``, float32 (or float64 in proofs).

        The same tensors at every call: the loop writes into them.
        """

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, float]]:
        """Of token ids ``[B, L]`` a scalar to minimise, and figures to show (as ``acceptance``, ``kl``).

        A mean over what is predicted, and a function of ids and parameters alone, so that a run can be repeated.
        """

    def export(self, folder: Path) -> None:
        """Write what was trained as a folder that ``LLM`` opens, as a model or as a draft."""
