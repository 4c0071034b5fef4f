"""What a step of one batch costs under every choice: prices times pace, and the states of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2

from longdraft.config import DraftConfig, draft_key
from longdraft.core import Sequence as EngineSequence
from longdraft.planner.pace import Kind, Pace, paced
from longdraft.planner.prices import Prices

OTHER = ("other",)  # what is not observed on its own has the machine's pace
SPREAD = 128  # tokens over which waking a draft is spread, where the row has so many left


def situation(lengths: Sequence[int]) -> tuple[int, int]:
    """How large a batch and how long its rows are, in powers of two."""
    return round(log2(len(lengths))), round(log2(1 + sum(lengths) / len(lengths)))


def target_kind(lengths: Sequence[int]) -> Kind:
    """The kind of a target's pass over rows of some lengths, for its pace."""
    return ("target",), ("target", *situation(lengths))


def draft_kind(number: int, lengths: Sequence[int]) -> Kind:
    """The kind of a draft's passes over rows of some lengths."""
    kind = "draft", number
    return kind, (*kind, *situation(lengths))


@dataclass
class BatchCosts:
    """See ``Costs``. ``choosing`` are the numbers of the rows that choose among all ``seqs`` of a step.

    ``awake`` says of a draft's number which of the choosing rows it has a state of. ``asked`` is the number of the one
    that is asked at every step, chosen or not: its proposals cost nothing more.
    """

    prices: Prices
    pace: Pace
    drafts: Sequence[DraftConfig]
    seqs: Sequence[EngineSequence]
    choosing: Sequence[int]
    awake: Mapping[int, frozenset[int]]
    asked: int | None = None
    lengths: list[int] = field(init=False)
    fed: list[int] = field(init=False)  # by all rows, where those that choose have no proposal
    constant: float = field(init=False)  # seconds, whatever is chosen
    _known: dict[int, list[float]] = field(default_factory=dict)
    _passes: dict[tuple[int, ...], float] = field(default_factory=dict)
    _factors: dict[Kind, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lengths = [seq.num_committed for seq in self.seqs]
        self.fed = [1 + (seq.own_choice.draft.gamma if seq.own_choice.draft else 0) for seq in self.seqs]
        self._kind, self._plain = target_kind(self.lengths), self.prices.target(self.lengths, [1] * len(self.seqs))
        self.constant = sum(self.upkeep(number, rows) for number, rows in self.awake.items()) + self._own_drafts()

    def target(self, tokens: Sequence[int]) -> float:
        """See ``Costs``; the same is asked for every draft."""
        key = tuple(tokens)
        if key not in self._passes:
            fed = list(self.fed)
            for i, count in zip(self.choosing, tokens, strict=True):
                fed[i] = count
            seconds = paced(self._factor(self._kind), self._plain, self.prices.target(self.lengths, fed))
            self._passes[key] = self.constant + seconds
        return self._passes[key]

    def draft(self, number: int, rows: Sequence[int], gammas: Sequence[int]) -> float:
        """See ``Costs``."""
        if number == self.asked:
            return 0.0
        lengths = [self.lengths[self.choosing[i]] for i in rows]
        seconds = self._factor(draft_kind(number, lengths))[0] * self.prices.draft(self.drafts[number], lengths, gammas)
        beside = self._beside(number)
        return seconds + sum(beside[i] for i in rows)

    def upkeep(self, number: int, rows: Sequence[int] | frozenset[int]) -> float:
        """Of a draft that proposes nothing for some of the choosing rows."""
        if not rows:
            return 0.0
        price = self.prices.upkeep(self.drafts[number], [self.lengths[self.choosing[i]] for i in rows])
        return self._factor(OTHER)[0] * price

    def wake(self, number: int, row: int) -> float:
        """Seconds to give a draft its state of one of the choosing rows."""
        return self._factor(OTHER)[0] * self.prices.wake(self.drafts[number], self.lengths[self.choosing[row]])

    def waking(self, number: int, row: int) -> float:
        """See ``Costs``."""
        return 0.0 if row in self.awake.get(number, frozenset()) else self.wake(number, row)

    def _beside(self, number: int) -> list[float]:
        """By row what its proposals cost beside the passes: its share of waking, or (negative) the upkeep saved."""
        if number not in self._known:
            awake = self.awake.get(number, frozenset())
            rows = range(len(self.choosing))
            self._known[number] = [
                -self.upkeep(number, [i]) if i in awake else self.wake(number, i) / self._left(i) for i in rows
            ]
        return self._known[number]

    def _factor(self, kind: Kind) -> tuple[float, float]:
        if kind not in self._factors:
            self._factors[kind] = self.pace.factors(kind)
        return self._factors[kind]

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
                lengths = [self.lengths[i] for i in rows]
                factor, _ = self._factor(draft_kind(self.drafts.index(config), lengths))
                seconds += factor * self.prices.draft(config, lengths, gammas)
        return seconds

    def _left(self, row: int) -> int:
        seq = self.seqs[self.choosing[row]]
        return max(1, min(SPREAD, seq.max_total - len(seq.ids)))
