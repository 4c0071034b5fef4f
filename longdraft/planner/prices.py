"""What passes and proposals cost on the machine at hand: the question that online control asks every step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from longdraft.config import DraftConfig


class Prices(Protocol):
    """Seconds, from calibrated curves or from the roofline model. Rows may differ in everything.

    Drafts are named by their ``draft_key``: γ is 1, and ``gammas`` are what count. Ratios matter; the scale is
    observed (``pace.py``). Asked some dozens of times per plan, so an answer should take microseconds.
    """

    def knows(self, config: DraftConfig) -> bool:
        """Whether such a draft has a price, at any γ."""

    def target(self, lengths: Seq[int], tokens: Seq[int]) -> float:
        """One pass of the target in which row ``i`` feeds ``tokens[i]`` tokens after ``lengths[i]`` cached ones."""

    def draft(self, config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> float:
        """Proposing ``gammas[i]`` tokens for row ``i``, choosing what to read included."""

    def upkeep(self, config: DraftConfig, lengths: Seq[int]) -> float:
        """What such a draft adds to a pass in which it proposes nothing, to be able to propose in the next one."""

    def wake(self, config: DraftConfig, length: int) -> float:
        """Bringing the draft's state of one row up to date after it was dropped."""


@dataclass(frozen=True)
class Partly:
    """``Prices`` by ``known``, but for drafts that only ``guessed`` has a price of: both are seconds of one machine."""

    known: Prices
    guessed: Prices

    def knows(self, config: DraftConfig) -> bool:
        """See ``Prices``."""
        return self.known.knows(config) or self.guessed.knows(config)

    def target(self, lengths: Seq[int], tokens: Seq[int]) -> float:
        """See ``Prices``."""
        return self.known.target(lengths, tokens)

    def draft(self, config: DraftConfig, lengths: Seq[int], gammas: Seq[int]) -> float:
        """See ``Prices``."""
        return self._of(config).draft(config, lengths, gammas)

    def upkeep(self, config: DraftConfig, lengths: Seq[int]) -> float:
        """See ``Prices``."""
        return self._of(config).upkeep(config, lengths)

    def wake(self, config: DraftConfig, length: int) -> float:
        """See ``Prices``."""
        return self._of(config).wake(config, length)

    def _of(self, config: DraftConfig) -> Prices:
        return self.known if self.known.knows(config) else self.guessed
