"""What a checkpoint is once it has been read: everything the engine needs, with no file format left in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longdraft.models.config import ModelConfig
from longdraft.models.weights import WeightSource

if TYPE_CHECKING:
    from longdraft.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its config, its tensors (read lazily) and its text tools."""

    name: str
    path: str
    config: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer | None
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
