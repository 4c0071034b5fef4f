"""Which draft, which budget, which γ, or none at all: the choice by predicted tokens per second.

After MagicDec (arXiv:2408.11049, Eq. 4): all candidates are tried, γ = 0 (plain decoding) is always one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from longdraft.config import as_int
from longdraft.planner.candidates import Candidate, Target
from longdraft.planner.cost import Rows, Times, lengths_of, min_acceptance, pass_work, round_seconds, speedup, times
from longdraft.planner.memory import rows_that_fit
from longdraft.spec.acceptance import expected_tokens

MAX_GAMMA = 8
STEPS_PER_DOUBLING = 4  # of the search for a break-even context


@dataclass(frozen=True)
class Round:
    """A way of decoding and what it was predicted, or measured, to take: seconds, and tokens per row and round.

    γ = 0 is plain decoding: a round is one plain step and gives one token.
    """

    gamma: int
    draft_s: float
    verify_s: float
    tokens: float
    rows: int = 1
    extra_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a round."""
        return round_seconds(self.gamma, self.draft_s, self.verify_s, self.extra_s)

    @property
    def tokens_per_s(self) -> float:
        """Of all rows that run together."""
        return self.rows * self.tokens / self.seconds

    def speedup(self, plain: Round) -> float:
        """Over ``plain``, which may have more rows where a draft takes memory."""
        return speedup(self.rows * self.tokens, plain.seconds / plain.rows, self.seconds)

    def min_acceptance(self, plain: Round, target: float = 1.0) -> float | None:
        """The constant acceptance that would make it ``target`` times as fast as ``plain``; ``None``: none would."""
        return min_acceptance(self.gamma, plain.seconds * self.rows / plain.rows, self.seconds, target)


def fastest(rounds: Sequence[Round], plain: Round) -> Round:
    """The one with most tokens per second; ``plain`` where none has more than it."""
    return max((plain, *rounds), key=lambda r: r.tokens_per_s)


@dataclass(frozen=True)
class Choice:
    """A candidate (``None``: plain decoding) at its best γ; ``rounds`` are those of every γ that was tried."""

    draft: Candidate | None
    round: Round
    plain: Round
    rounds: tuple[Round, ...] = ()

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.round.speedup(self.plain)

    def min_acceptance(self, target: float = 1.0) -> float | None:
        """The least constant acceptance that makes it ``target`` times as fast as plain decoding, at the γ for that."""
        needed = [found.min_acceptance(self.plain, target) for found in self.rounds]
        return min((rate for rate in needed if rate is not None), default=None)


def mean_tokens(draft: Candidate, rows: Rows, gamma: int) -> float:
    """Tokens per row and round, over rows whose acceptance differs with their length."""
    total = sum(n * expected_tokens(draft.acceptance.rate(length), gamma) for length, n in rows.items())
    return total / sum(rows.values())


def plain_round(target: Target, rows: Rows) -> Round:
    """Plain decoding of ``rows``."""
    return Round(0, 0.0, target.pass_seconds(rows), 1.0, sum(rows.values()))


def draft_times(target: Target, draft: Candidate, rows: Rows) -> Times | None:
    """One draft step by the roofline model; ``None`` for a draft that runs no pass."""
    if draft.network is None:
        return None
    return times(pass_work(draft.network, rows, reads=draft.reads), target.hardware)


def draft_seconds(target: Target, draft: Candidate, rows: Rows, gamma: int) -> float:
    """A proposed token's share of a round of γ: a draft step and, as calibrated, what goes with it."""
    if target.curves and target.curves.knows(draft.config):
        lengths = lengths_of(rows)
        return target.curves.draft(draft.config, lengths, [gamma] * len(lengths)) / gamma
    step = draft_times(target, draft, rows)
    return step.total if step else 0.0


def predict(target: Target, draft: Candidate, rows: Rows, gammas: Sequence[int]) -> list[Round]:
    """A round of ``draft`` for each of ``gammas``."""
    rounds = []
    for gamma in gammas:
        draft_s, verify = draft_seconds(target, draft, rows, gamma), target.pass_seconds(rows, gamma + 1)
        tokens = mean_tokens(draft, rows, gamma)
        rounds.append(Round(gamma, draft_s, verify, tokens, sum(rows.values()), target.hardware.round_s))
    return rounds


@dataclass(frozen=True)
class Planner:
    """Plans for a target with some candidates; ``max_gamma`` bounds γ (per-position acceptance bounds it, too)."""

    target: Target
    candidates: tuple[Candidate, ...]
    max_gamma: int = MAX_GAMMA

    def __post_init__(self) -> None:
        as_int("max_gamma", self.max_gamma, 1, 64)

    def plain(self, batch: int, context: int) -> Round | None:
        """Plain decoding of as many of ``batch`` rows as fit; ``None`` where none fits."""
        rows = rows_that_fit(self.target, None, batch, context)
        return plain_round(self.target, {context: rows}) if rows else None

    def ranking(self, batch: int, context: int) -> list[Choice]:
        """Plain decoding and every candidate that fits, each at its best γ, fastest first; empty where nothing fits.

        Rows that do not fit wait: each way of decoding runs with as many as it has memory for.
        """
        plain = self.plain(batch, context)
        if plain is None:
            return []
        choices = [Choice(None, plain, plain)]
        for draft in self.candidates:
            rows = rows_that_fit(self.target, draft, batch, context)
            if rows:
                rounds = tuple(predict(self.target, draft, {context: rows}, range(1, self.max_gamma + 1)))
                choices.append(Choice(draft, max(rounds, key=lambda r: r.tokens_per_s), plain, rounds))
        return sorted(choices, key=lambda choice: -choice.speedup)  # stable: plain first among equals

    def best_speedup(self, batch: int, context: int) -> float | None:
        """That of the first in the ranking: 1 for plain decoding, ``None`` where nothing fits."""
        ranking = self.ranking(batch, context)
        return ranking[0].speedup if ranking else None

    def break_even_context(self, batch: int, target: float = 1.0) -> int | None:
        """The shortest context at which some draft is more than ``target`` times as fast as plain decoding.

        ``None`` where that is so at no length up to the model's limit. Memory is left out of account, as the
        question is about speed. At a fixed batch the speed-up rises with the context where acceptance does not fall
        faster; lengths are tried in steps of 2^(1/4), then halved.
        """
        hardware = replace(self.target.hardware, memory_gib=None)
        free = replace(self, target=replace(self.target, hardware=hardware))

        def pays(context: int) -> bool:
            return free.best_speedup(batch, context) > target

        lost = 0
        for context in lengths(self.target.config.full_attention_length):
            if pays(context):
                while context - lost > 1:
                    middle = (context + lost) // 2
                    lost, context = (lost, middle) if pays(middle) else (middle, context)
                return context
            lost = context
        return None


def lengths(limit: int) -> Iterator[int]:
    """Context lengths from 16 up to ``limit``, each 2^(1/4) times the one before."""
    step = 4 * STEPS_PER_DOUBLING
    while (length := round(2 ** (step / STEPS_PER_DOUBLING))) < limit:
        yield length
        step += 1
    yield limit
