"""What SPIRe's parts are worth (arXiv:2504.06419): the draft, and drafts that lack one part each, by name.

All are trained on the same texts, for as many steps, by the same optimizer. Windows are sparse in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.errors import InvalidValueError
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


def student(
    arm: str, target: Checkpoint, config: FeedbackConfig, learning: DistillConfig, seed: int = 0
) -> tuple[Student, DistillConfig]:
    """An arm's draft before training, in float32, and how it learns; ``seed``: of random layers.

    A small model with a width, embedding and head of its own is none of these: see ``distill.narrowed``.
    Raises ``InvalidValueError`` for an unknown name.
    """
    if arm not in ARMS:
        raise InvalidValueError("arm", arm, f"must be one of {', '.join(ARMS)}")
    how = ARMS[arm]
    config, random = replace(config, **how.draft), seed if how.random else None
    tensors = initial_tensors(config, target.config, target.weights, torch.float32, random)
    draft = FeedbackDraft(config, target.config, tensors, Ends.of(target.config, target.weights))
    return Student.of_spire(draft, target), replace(learning, **how.learning)
