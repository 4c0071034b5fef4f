"""What a step of one batch costs under every choice: prices times pace, and the states of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from longdraft.config import DraftConfig, draft_key
from longdraft.core import Sequence as EngineSequence
from longdraft.planner.pace import Pace
from longdraft.planner.prices import Prices

OTHER = "other"  # what is not observed on its own has the machine's pace
SPREAD = 128  # tokens over which waking a draft is spread, where the row has so many left


def verify_kind(tokens: Sequence[float]) -> tuple[str, int]:
    """The kind of a target's pass, for its pace: tokens per row."""
    return "target", round(sum(tokens) / len(tokens))


def draft_kind(number: int) -> tuple[str, int]:
    """The kind of a draft's passes."""
    return "draft", number


@dataclass
class BatchCosts:
    """See ``Costs``. ``choosing`` are the numbers of the rows that choose among all ``seqs`` of a step.

    ``awake`` says of a draft's number which of the choosing rows it has a state of.
    """

    prices: Prices
    pace: Pace
    drafts: Sequence[DraftConfig]
    seqs: Sequence[EngineSequence]
    choosing: Sequence[int]
    awake: Mapping[int, frozenset[int]]
    lengths: list[int] = field(init=False)
    fed: list[int] = field(init=False)  # by all rows, where those that choose have no proposal
    constant: float = field(init=False)  # seconds, whatever is chosen

    def __post_init__(self) -> None:
        self.lengths = [seq.num_committed for seq in self.seqs]
        self.fed = [1 + (seq.own_choice.draft.gamma if seq.own_choice.draft else 0) for seq in self.seqs]
        self.constant = sum(self.upkeep(number, rows) for number, rows in self.awake.items()) + self._own_drafts()

    def target(self, tokens: Sequence[int]) -> float:
        """See ``Costs``."""
        fed = list(self.fed)
        for i, count in zip(self.choosing, tokens, strict=True):
            fed[i] = count
        return self.constant + self.pace.factor(verify_kind(fed)) * self.prices.target(self.lengths, fed)

    def draft(self, number: int, rows: Sequence[int], gammas: Sequence[int]) -> float:
        """See ``Costs``."""
        config, known = self.drafts[number], self.awake.get(number, frozenset())
        lengths = [self.lengths[self.choosing[i]] for i in rows]
        seconds = self.pace.factor(draft_kind(number)) * self.prices.draft(config, lengths, gammas)
        seconds -= self.upkeep(number, [i for i in rows if i in known])
        return seconds + sum(self.wake(number, i) / self._left(i) for i in rows if i not in known)

    def upkeep(self, number: int, rows: Sequence[int] | frozenset[int]) -> float:
        """Of a draft that proposes nothing for some of the choosing rows."""
        if not rows:
            return 0.0
        price = self.prices.upkeep(self.drafts[number], [self.lengths[self.choosing[i]] for i in rows])
        return self.pace.factor(OTHER) * price

    def wake(self, number: int, row: int) -> float:
        """Seconds to give a draft its state of one of the choosing rows."""
        return self.pace.factor(OTHER) * self.prices.wake(self.drafts[number], self.lengths[self.choosing[row]])

    def _own_drafts(self) -> float:
        """What the drafts take that other rows have named, as far as they have a price."""
        groups: dict[DraftConfig, list[int]] = defaultdict(list)
        for i, seq in enumerate(self.seqs):
            if seq.own_choice.draft:
                groups[draft_key(seq.own_choice.draft)].append(i)
        seconds = 0.0
        for config, rows in groups.items():
            if config in self.drafts:
                gammas = [self.fed[i] - 1 for i in rows]
                price = self.prices.draft(config, [self.lengths[i] for i in rows], gammas)
                seconds += self.pace.factor(draft_kind(self.drafts.index(config))) * price
        return seconds

    def _left(self, row: int) -> int:
        seq = self.seqs[self.choosing[row]]
        return max(1, min(SPREAD, seq.max_total - len(seq.ids)))
