"""What SPIRe's parts are worth (arXiv:2504.06419): the draft, and drafts that lack one part each, by name.

All are trained on the same texts, for as many steps, by the same optimizer. Windows are sparse in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.models.config import ModelConfig
from longdraft.models.feedback import Ends, FeedbackConfig, FeedbackDraft
from longdraft.train.distill import DistillConfig, Student
from longdraft.train.prune_init import initial_tensors


@dataclass(frozen=True)
class TrainedAs:
    """How an arm differs from the full draft."""

    draft: Mapping[str, str] = field(default_factory=dict)  # of ``FeedbackConfig``
    learning: Mapping[str, object] = field(default_factory=dict)  # of ``DistillConfig``
    random: bool = False  # it begins with random layers


OWN = {"context": "own", "memory": "off"}
ARMS: dict[str, TrainedAs] = {
    "spire": TrainedAs(),
    "no-memory": TrainedAs({"memory": "off"}),
    "no-activations": TrainedAs(OWN),
    "random-init": TrainedAs(random=True),
    "hard-labels": TrainedAs(learning={"loss": "hard"}),
    "kl-only": TrainedAs(learning={"omega": 1.0}),
    "log-acceptance": TrainedAs(learning={"loss": "log_acceptance"}),
    # Not in the paper: what remains of its gain over a small model if that, too, is distilled and has a sparse cache.
    "small-distilled": TrainedAs(OWN, random=True),
}
VANILLA = "vanilla"  # a plain small model that learns the text itself: what speculation had before
NAMES = (*ARMS, VANILLA)


def student(
    how: TrainedAs, target: Checkpoint, config: FeedbackConfig, learning: DistillConfig, seed: int = 0
) -> tuple[Student, DistillConfig]:
    """A draft before training, in float32, and how it learns; ``seed``: of random layers.

    A small model with a width, embedding and head of its own is none of these: see ``distill.narrowed``.
    """
    config, random = replace(config, **how.draft), seed if how.random else None
    tensors = initial_tensors(config, target.config, target.weights, torch.float32, random)
    draft = FeedbackDraft(config, target.config, tensors, Ends.of(target.config, target.weights))
    return Student.of_spire(draft, target), replace(learning, **how.learning)


def an_eighth(target: ModelConfig) -> dict[str, object]:
    """A ``config.json`` of about an eighth of the target's layers' weights, as the paper's small model has.

    Half the layers, half the width, half the inner width; as many heads, of half the size.
    """
    return {
        "model_type": target.family,
        "hidden_size": target.hidden_size // 2,
        "intermediate_size": target.intermediate_size // 2,
        "num_hidden_layers": max(1, target.num_layers // 2),
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": max(2, target.head_dim // 4 * 2),  # even, as rotary embeddings need it
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.norm_eps,
        "tie_word_embeddings": target.tie_embeddings,
    }
