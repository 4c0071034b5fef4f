"""The rows of a batch choose together: they share the target's pass, and each draft's passes.

Most tokens per second of the whole batch are wanted. A drafted token of a row is worth taking where the chance that it
stands exceeds (tokens per second) × (the seconds that it adds); weights are read once per pass for all rows, so whether
a further draft pass is worth it depends on all of them. For one draft:

- the rate is taken as known, from the best plan so far; each row then wants as many tokens as pay for themselves at the
  margin, draft and verification, the shared parts left out;
- these numbers are cut at 1, 2, …: every cut is a plan, priced as a whole, shared parts included.

The best plan raises the rate, so this is done again (Dinkelbach's iteration for a ratio). At last every other draft may
take over the rows that it serves better. Plain decoding is always among the plans, and wins ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

ITERATIONS = 2
PATIENCE = 2  # rounds of so many lengths that are worse than a shorter one end the search for longer ones


class Costs(Protocol):
    """Seconds, for one batch."""

    def target(self, tokens: Sequence[int]) -> float:
        """The target's pass if the choosing rows feed so many tokens, and everything that does not depend on that."""

    def draft(self, number: int, rows: Sequence[int], gammas: Sequence[int]) -> float:
        """The passes of a draft that proposes ``gammas`` tokens for ``rows``; beside them upkeep and part of waking."""

    def waking(self, number: int, row: int) -> float:
        """Waking a draft for a row; 0 where it has its state."""


@dataclass(frozen=True)
class Offer:
    """A draft for every row of the batch: the chance that the first 1, 2, … proposed tokens stand."""

    number: int
    survival: Sequence[Sequence[float]]  # [rows][γ]


@dataclass(frozen=True)
class Plan:
    """For each row the draft's number (``None``: plain decoding), γ and expected tokens; a step's seconds.

    ``others``: tokens of the rows that do not choose.
    """

    drafts: tuple[int | None, ...]
    gammas: tuple[int, ...]
    each: tuple[float, ...]
    seconds: float
    others: float = 0.0

    @property
    def tokens(self) -> float:
        """Expected of all rows together."""
        return self.others + sum(self.each)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def off(self) -> bool:
        """Whether nothing is proposed."""
        return not any(self.gammas)


@dataclass
class Problem:
    """``caps`` bounds each row's γ, ``others`` are tokens per step of other rows, ``ids`` name the rows."""

    costs: Costs
    offers: Sequence[Offer]
    caps: Sequence[int]
    others: float = 0.0
    ids: Sequence[int] = ()
    _margins: dict[int, float] = field(default_factory=dict)
    _draft_margins: dict[int, float] = field(default_factory=dict)
    _plans: dict[tuple[tuple[int | None, ...], tuple[int, ...]], Plan] = field(default_factory=dict)

    def plan(self, drafts: Sequence[int | None], gammas: Sequence[int]) -> Plan:
        """The plan of these choices, priced."""
        key = tuple(draft if gamma else None for draft, gamma in zip(drafts, gammas, strict=True)), tuple(gammas)
        if key not in self._plans:
            self._plans[key] = self._priced(*key)
        return self._plans[key]

    def plain(self) -> Plan:
        """Nothing is proposed."""
        return self.plan([None] * len(self.caps), [0] * len(self.caps))

    def best(self) -> Plan:
        """See the module."""
        found = self.plain()
        for _ in range(ITERATIONS):
            rate = found.rate
            for offer in self.offers:
                found = _better(found, self.alone(offer, rate))
            if found.rate <= rate:
                break
        for offer in self.offers:
            if not found.off:
                found = _better(found, self.take_over(found, offer, found.rate))
        return found

    def joined(self, offer: Offer, plan: Plan, rate: float) -> Plan:
        """The best of ``plan`` and plain decoding, with this draft for the rows that it serves better or without it.

        For a draft whose offers change from step to step: best is what gives most tokens beyond those that its seconds
        are worth at the usual ``rate``. A step with little to propose is to be short.
        """
        bases = (plan,) if plan.off else (plan, self.plain())
        found = [p for base in bases for p in (base, self.take_over(base, offer, rate))]
        return max(found, key=lambda p: p.tokens - rate * p.seconds)

    def alone(self, offer: Offer, rate: float) -> Plan:
        """The best plan with this draft only, of those that pay at the margin at ``rate`` tokens per second."""
        drafts, best, worse, least = [offer.number] * len(self.caps), None, 0, self._least(offer, rate)
        wanted = [_worth(*row, least) for row in self._rows(offer)]
        for cut in range(1, max(wanted, default=0) + 1):
            plan = self.plan(drafts, [min(gamma, cut) for gamma in wanted])
            if best is None or plan.rate > best.rate:
                best, worse = plan, 0
            else:
                worse += 1
            if worse == PATIENCE:  # longer ones are worse still
                break
        return best or self.plain()

    def take_over(self, plan: Plan, offer: Offer, rate: float) -> Plan:
        """``plan`` with those rows moved to this draft that are worth more with it, at ``rate`` tokens per second."""
        drafts, gammas = list(plan.drafts), list(plan.gammas)
        mine = {other.number: other for other in self.offers}
        least = self._least(offer, rate)
        for i, (chances, cap) in enumerate(self._rows(offer)):
            if drafts[i] == offer.number:
                continue
            gamma = _worth(chances, cap, least)
            now = (
                _gain(mine[drafts[i]].survival[i], gammas[i], self._least(mine[drafts[i]], rate)) if gammas[i] else 0.0
            )
            if _gain(chances, gamma, least) > now:
                drafts[i], gammas[i] = offer.number, gamma
        return self.plan(drafts, gammas)

    def _least(self, offer: Offer, rate: float) -> list[float]:
        """By position the chance at which a token of a row is worth its seconds at ``rate`` tokens per second."""
        shared = self._draft_margin(offer)
        return [rate * (shared + self._verify_margin(gamma)) for gamma in range(1, max(self.caps, default=0) + 1)]

    def _priced(self, drafts: tuple[int | None, ...], gammas: tuple[int, ...]) -> Plan:
        by_number = {offer.number: offer.survival for offer in self.offers}
        each, seconds = [1.0] * len(gammas), self.costs.target([1 + gamma for gamma in gammas])
        for number in {draft for draft in drafts if draft is not None}:
            rows = [i for i, draft in enumerate(drafts) if draft == number]
            seconds += self.costs.draft(number, rows, [gammas[i] for i in rows])
            for i in rows:
                each[i] += sum(by_number[number][i][: gammas[i]])
        return Plan(drafts, gammas, tuple(each), seconds, self.others)

    def _rows(self, offer: Offer) -> zip[tuple[Sequence[float], int]]:
        return zip(offer.survival, self.caps, strict=True)

    def _verify_margin(self, gamma: int) -> float:
        """Seconds that a token to verify adds which is the ``gamma``-th of its row, where all rows have as many."""
        if gamma not in self._margins:
            rows = len(self.caps)
            more, fewer = self.costs.target([1 + gamma] * rows), self.costs.target([gamma] * rows)
            self._margins[gamma] = max(0.0, (more - fewer) / rows)
        return self._margins[gamma]

    def _draft_margin(self, offer: Offer) -> float:
        """Seconds that one more row adds to a draft's pass."""
        rows, number = range(len(self.caps)), offer.number
        if len(rows) < 2:
            return 0.0
        if number not in self._draft_margins:
            many, one = self.costs.draft(number, rows, [1] * len(rows)), self.costs.draft(number, [0], [1])
            self._draft_margins[number] = max(0.0, (many - one) / (len(rows) - 1))
        return self._draft_margins[number]


def _better(plan: Plan, other: Plan) -> Plan:
    return other if other.rate > plan.rate else plan


def _worth(chances: Sequence[float], cap: int, least: Sequence[float]) -> int:
    """How many leading tokens, up to ``cap``, stand with a chance of at least ``least``; chances fall."""
    pairs = zip(chances[:cap], least, strict=False)
    return next((k for k, (chance, enough) in enumerate(pairs) if chance < enough), min(len(chances), cap))


def _gain(chances: Sequence[float], gamma: int, least: Sequence[float]) -> float:
    """What ``gamma`` tokens are worth beyond their seconds."""
    return sum(chances[:gamma]) - sum(least[:gamma])
