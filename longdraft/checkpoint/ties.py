"""What to do when the config ties the output layer to the embedding, yet the file holds an output layer too."""

from __future__ import annotations

from dataclasses import replace

import torch

from longdraft.models.config import ModelConfig
from longdraft.models.weights import WeightSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def resolve_tie(config: ModelConfig, source: WeightSource) -> tuple[ModelConfig, str | None]:
    """The config to load with, and a warning when it is not the one given.

    One rule, that of ``transformers`` 5: an output layer equal to the embedding is tied to it, and one that differs is
    what the checkpoint was saved with, so it is used and the tie dropped.
    """
    shapes = source.shapes()
    if not config.tie_embeddings or HEAD not in shapes or EMBEDDING not in shapes:
        return config, None
    if shapes[HEAD] == shapes[EMBEDDING] and torch.equal(source.load(HEAD), source.load(EMBEDDING)):
        return config, None
    warning = (
        f"{source.path}: the config says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; "
        f"{HEAD} is used. Set tie_word_embeddings to false to silence this."
    )
    return replace(config, tie_embeddings=False), warning
