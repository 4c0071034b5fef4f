"""Tiny random models for tests, demos of sizes, and anything that needs a model without a file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from longdraft.models.config import ModelConfig, RopeConfig
from longdraft.models.weights import expected_shapes

TINY = ModelConfig(
    family="llama",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    norm_eps=1e-5,
    rope=RopeConfig(),
)


def tiny_config(**overrides: object) -> ModelConfig:
    """The tiny Llama with some fields replaced."""
    return replace(TINY, **overrides)


@dataclass(frozen=True)
class RandomWeights:
    """Seeded random tensors for any config, made on demand; weights N(0, std²), norms around one."""

    config: ModelConfig
    seed: int = 0
    std: float = 0.3

    @property
    def path(self) -> str:
        """For messages."""
        return f"random weights (seed {self.seed})"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Exactly the tensors that the config calls for."""
        return expected_shapes(self.config)

    def load(self, name: str) -> torch.Tensor:
        """The tensor ``name`` in float32; the same for the same seed, in whatever order they are asked for."""
        shapes = self.shapes()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + list(shapes).index(name))
        x = torch.randn(shapes[name], generator=generator)
        return 1 + 0.2 * x if name.endswith("norm.weight") else self.std * x
