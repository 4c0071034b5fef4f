"""SPIRe drafts of tiny targets: tensors from a dictionary, untrained or as training might leave them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.drafts.spire import SpireModel
from longdraft.models.feedback import MEMORY, Ends, FeedbackConfig, FeedbackDraft
from longdraft.models.transformer import Transformer
from longdraft.train.prune_init import initial_tensors


@dataclass(frozen=True)
class Tensors:
    """A ``WeightSource`` of what is in memory."""

    tensors: dict[str, torch.Tensor]
    path: str = "memory"

    def shapes(self):
        return {name: tuple(x.shape) for name, x in self.tensors.items()}

    def load(self, name):
        return self.tensors[name]


def tensors_of(target: Transformer, source, config: FeedbackConfig, trained=True, dtype=torch.float64, **more):
    """Of an untrained draft, or of one whose every weight has moved, each memory its own way."""
    tensors = initial_tensors(config, target.config, source, dtype, **more)
    if trained:
        random = torch.Generator().manual_seed(1)
        for name, x in tensors.items():
            size = 1.0 if name == MEMORY else 0.02
            x += size * torch.randn(x.shape, generator=random).to(dtype)
    return tensors


def spire_of(target: Transformer, source, config: FeedbackConfig, trained=True) -> SpireModel:
    """A draft on the target's kernels."""
    return SpireModel(config, Tensors(tensors_of(target, source, config, trained)), target)


def for_training(target: Transformer, source, config: FeedbackConfig, tensors) -> FeedbackDraft:
    """The same in plain torch."""
    dtype = next(iter(tensors.values())).dtype
    return FeedbackDraft(config, target.config, tensors, Ends.of(target.config, source, dtype))
