"""Who proposes for which row: what the engine asks at every step, and the answer where requests name their drafts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from longdraft.config import DraftConfig
from longdraft.core import Choice, Round, Sequence


class Control(Protocol):
    """Chooses drafts. Nothing that it answers changes what a request returns."""

    drafts: tuple[DraftConfig, ...]  # those that may be chosen where a request leaves it open
    asked: DraftConfig | None  # one that runs no pass: before every choice it says what it would propose

    def choose(self, seqs: Seq[Sequence], guesses: Mapping[int, Seq[int]]) -> list[Choice]:
        """For the decoding rows of a step, all of them; ``guesses`` of the draft ``asked``, by sequence id."""

    def told(self, seq: Sequence) -> tuple[DraftConfig, ...]:
        """The drafts that follow a sequence: their needs are captured, and they take in its prompt."""

    def observe(
        self, rounds: Seq[Round], seconds: float, draft_s: dict[DraftConfig, float], own_s: float = 0.0
    ) -> None:
        """After a decode step: what came of it, how long it took, and how much of that each draft took.

        ``own_s``: what control itself took besides, asking and taking note included.
        """

    def fork(self, source: Sequence, child: Sequence) -> None:
        """``child`` goes on from ``source``'s tokens."""

    def release(self, seq_id: int) -> None:
        """A sequence ended or lost its pages; one that is not known is fine."""


class OwnDrafts:
    """Every request has the draft that it named, at every step."""

    drafts: tuple[DraftConfig, ...] = ()
    asked: DraftConfig | None = None

    def choose(self, seqs: Seq[Sequence], guesses: Mapping[int, Seq[int]]) -> list[Choice]:
        """See ``Control``."""
        return [seq.own_choice for seq in seqs]

    def told(self, seq: Sequence) -> tuple[DraftConfig, ...]:
        """See ``Control``."""
        return seq.own_choice.told

    def observe(
        self, rounds: Seq[Round], seconds: float, draft_s: dict[DraftConfig, float], own_s: float = 0.0
    ) -> None:
        """See ``Control``."""

    def fork(self, source: Sequence, child: Sequence) -> None:
        """See ``Control``."""

    def release(self, seq_id: int) -> None:
        """See ``Control``."""
