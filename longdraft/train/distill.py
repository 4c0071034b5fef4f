"""Distillation as an ``Objective``: a draft of few layers learns what a target says of given texts (arXiv:2504.06419).

Texts are cut into blocks of k tokens, as the draft will propose them. Where the first one begins is computed from the
text itself, so that over all texts every token comes at every place of a block; nothing depends on the order of texts
or on which come together.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from longdraft.checkpoint.base import Checkpoint
from longdraft.checkpoint.spire import save_spire
from longdraft.config import MAX_GAMMA, MAX_SEED, as_float, as_int
from longdraft.errors import InvalidValueError
from longdraft.models.feedback import FeedbackConfig, FeedbackDraft
from longdraft.train.losses import CHUNK, Logits, Targets, Text, Whole, make_loss, mean_loss
from longdraft.train.teacher import Teacher


@dataclass(frozen=True)
class Said:
    """What a target says of texts ``[B, L]``."""

    residuals: torch.Tensor  # [n, B, L, hidden] what a draft's layers read
    targets: Targets  # [B, L, ...] the distributions of what follows each token


class Source(Protocol):
    """Who knows what a target says: the target itself, or ``shards.py``, where it was written down."""

    def of(self, ids: torch.Tensor) -> Said:
        """Of the texts ``ids [B, L]``."""


@dataclass(frozen=True)
class Live:
    """The target itself, asked for every batch.

    Its type may be another than the draft's: a bfloat16 target on native kernels teaches a float32 draft.
    """

    teacher: Teacher
    taps: tuple[int, ...]

    @property
    def logits(self) -> Logits:
        """By its own norm and head."""
        return self.teacher.logits

    def of(self, ids: torch.Tensor) -> Said:
        """See ``Source``."""
        last = self.teacher.model.config.num_layers
        with torch.autocast(ids.device.type, enabled=False):  # the target's type is its own
            streams = self.teacher.residuals(ids.tolist(), (*self.taps, last)).to(ids.device)
        return Said(streams[:-1], Whole(streams[-1], self.logits))


@dataclass(frozen=True)
class DistillConfig:
    """How a draft learns.

    ``k``: tokens of a block, as many as will be proposed at once. ``loss``, ``omega``: see ``losses.py``, at
    ``temperature``. ``weights``: how much each place in a block counts, k numbers; none: all alike. ``seed``: of the
    blocks' beginnings.
    """

    k: int = 4
    loss: str = "mixed"
    omega: float = 0.5
    temperature: float = 1.0
    weights: tuple[float, ...] = ()
    seed: int = 0
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        as_int("k", self.k, 1, MAX_GAMMA)
        as_int("seed", self.seed, 0, MAX_SEED)
        as_int("chunk", self.chunk, 1, 2**20)
        as_float("temperature", self.temperature, 1e-3, 1e3)
        object.__setattr__(self, "weights", tuple(as_float("weights", w, 0.0, 1e6) for w in self.weights))
        if self.weights and (len(self.weights) != self.k or not sum(self.weights)):
            raise InvalidValueError("weights", self.weights, f"must be {self.k} numbers that are not all 0, or none")
        make_loss(self.loss, self.omega)


@dataclass(frozen=True)
class Student:
    """What learns: a model, its parameters by the names of its file, and how it is written to a folder."""

    model: FeedbackDraft
    parameters: Mapping[str, torch.Tensor]
    export: Callable[[Path], object]

    @classmethod
    def of_spire(cls, model: FeedbackDraft, target: Checkpoint) -> Student:
        """A draft that shares its target's embedding, norm and head."""
        named = dict(model.named_parameters())
        return cls(model, named, lambda folder: save_spire(folder, model.config, named, target))

    @property
    def learned_ends(self) -> tuple[torch.Tensor, ...]:
        """Norm and head, where they are its own and learn, too."""
        return tuple(x for x in (self.model.norm, self.model.head) if x.requires_grad)


class Distillation:
    """See ``Objective``; figures are ``acceptance``, ``kl`` and ``cross_entropy``, means over tokens."""

    def __init__(self, student: Student, source: Source, config: DistillConfig | None = None) -> None:
        self.student, self.source, self.config = student, source, config or DistillConfig()
        self.parameters = student.parameters
        self._loss = make_loss(self.config.loss, self.config.omega)

    def loss(self, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """See ``Objective``: the mean over texts of the mean over their tokens, all but those before the first block.

        Raises ``InvalidValueError`` for texts too short to have a block.
        """
        as_int("length", ids.shape[1], self.config.k + 1, 2**31 - 1, "Train on longer texts.")
        total, figures = ids.new_zeros((), dtype=self.student.model.embedding.dtype), defaultdict(float)
        said, logits = self.source.of(ids), self._logits()
        for first, rows in self._by_beginning(ids):
            value, shown = self._of_alike(ids, said, logits, rows, first)
            share = len(rows) / len(ids)
            total = total + share * value
            for name, x in shown.items():
                figures[name] += share * x
        return total, dict(figures)

    def export(self, folder: Path) -> None:
        """See ``Objective``."""
        self.student.export(folder)

    def _logits(self) -> Logits:
        """The draft's, for one batch."""
        model = self.student.model
        return partial(model.ends.as_multiplied().logits, eps=model.target.norm_eps)

    def _by_beginning(self, ids: torch.Tensor) -> Iterator[tuple[int, list[int]]]:
        """Where blocks begin, and the texts for which that is so."""
        if self.student.model.config.context == "own":  # it has to begin with the text
            yield 0, list(range(len(ids)))
            return
        found = defaultdict(list)
        for row, text in enumerate(ids):
            found[first_block(text, self.config.k, self.config.seed)].append(row)
        yield from found.items()

    def _of_alike(
        self, ids: torch.Tensor, said: Said, logits: Logits, rows: list[int], first: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Of texts whose blocks begin at the same place. What follows the last token is not known, so it is no use."""
        model, config, stop = self.student.model, self.config, ids.shape[1] - 1
        streams = None if model.config.context == "own" else said.residuals[:, rows].to(model.embedding.dtype)
        x = model(ids[rows], streams, config.k, first)[:, :-1]
        weights = None
        if config.weights:
            place = torch.arange(stop - first, device=ids.device) % config.k
            weights = x.new_tensor(config.weights)[place].repeat(len(rows))
        text = Text(ids[rows, first + 1 :].flatten(), said.targets.part(rows, first, stop), weights)
        how = {"temperature": config.temperature, "learned": self.student.learned_ends, "chunk": config.chunk}
        return mean_loss(x.flatten(0, 1), logits, text, self._loss, **how)


def first_block(text: torch.Tensor, k: int, seed: int) -> int:
    """Where the blocks of ``text [L]`` begin, from 0 to k − 1: a pure function of seed and text, as good as random."""
    digest = hashlib.blake2b(text.cpu().to(torch.int32).numpy().tobytes(), digest_size=8, key=seed.to_bytes(8, "big"))
    return int.from_bytes(digest.digest(), "big") % k


def narrowed(model: FeedbackDraft, window: int, sinks: int) -> FeedbackDraft:
    """``model``, which reads its own residual streams, over the first ``sinks`` and last ``window`` tokens of a text.

    The parameters are the same tensors. So a plain small model learns to draft over a sparse cache.
    """
    config = FeedbackConfig(model.config.layers, window, sinks, "off", "own")
    return FeedbackDraft(config, model.target, dict(model.named_parameters()), model.ends)
