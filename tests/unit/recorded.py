"""A batch without a model and without a clock: recorded costs, given acceptances, and what the best choice would be."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import product

from longdraft.config import AutoDraft, DraftConfig
from longdraft.core import Round, Row, Sequence
from longdraft.sampling_params import SamplingParams

INT8 = DraftConfig(weights="target@int8", budget=256, gamma=1)
WINDOW = DraftConfig(budget=256, gamma=1)
NGRAM = DraftConfig(weights="ngram", gamma=1)


def interpolate(points, at):
    """Linear between recorded points, and beyond them."""
    xs = sorted(points)
    right = min(max(bisect_left(xs, at), 1), len(xs) - 1)
    x0, x1 = xs[right - 1], xs[right]
    return points[x0] + (points[x1] - points[x0]) * (at - x0) / (x1 - x0)


@dataclass
class Recorded:
    """Prices from a machine's records, in milliseconds: weights by tokens fed, cache by tokens read and by queries."""

    linear: dict[int, float]  # tokens of a pass → ms
    read: float  # ms per 1,000 cached tokens
    query: float  # ms per 1,000 (token fed × cached token), beyond the first token of a row
    drafts: dict[DraftConfig, tuple[dict[int, float], float]]  # → ms of a pass by rows, ms per round besides
    upkeeps: dict[DraftConfig, float] = field(default_factory=dict)  # ms per row
    wakes: dict[DraftConfig, float] = field(default_factory=dict)  # ms per 1,000 tokens

    def target(self, lengths, tokens):
        more = sum((n - 1) * length for n, length in zip(tokens, lengths, strict=True))
        return (interpolate(self.linear, sum(tokens)) + self.read * sum(lengths) / 1e3 + self.query * more / 1e3) / 1e3

    def draft(self, config, lengths, gammas):
        by_rows, once = self.drafts[config]
        steps = sum(interpolate(by_rows, sum(g > k for g in gammas)) for k in range(max(gammas))) if by_rows else 0.0
        return (once + steps) / 1e3

    def upkeep(self, config, lengths):
        return self.upkeeps.get(config, 0.0) * len(lengths) / 1e3

    def wake(self, config, length):
        return self.wakes.get(config, 0.0) * length / 1e6


# Two cores of an EPYC, SmolLM2-135M in bfloat16, before the attention kernel of docs/performance.md: 8 x 7,000 take
# 46 ms, to verify four 58 ms; a draft pass takes 13 ms, with 8-bit weights 10 ms.
EPYC = Recorded(
    linear={1: 7.0, 8: 8.0, 16: 10.5, 32: 16.0, 64: 28.0, 144: 60.0},
    read=0.66,
    query=0.03,
    drafts={
        WINDOW: ({1: 8.0, 4: 10.5, 8: 13.0, 16: 17.3}, 0.3),
        INT8: ({1: 4.5, 4: 7.0, 8: 9.6, 16: 14.0}, 0.3),
        NGRAM: ({}, 0.1),
    },
    wakes={NGRAM: 1.3},
    upkeeps={NGRAM: 0.002},
)


def sequence(number, length, new=10**6):
    ids = list(range(length + 1))
    return Sequence(number, ids, length, SamplingParams(), 0, length + new, AutoDraft(), num_committed=length)


class World:
    """Rows of given lengths whose drafts' tokens stand as ``truth(draft, row, position of the text)`` says."""

    def __init__(self, control, costs, lengths, truth, seed=0):
        self.control, self.costs, self.truth, self.rng = control, costs, truth, random.Random(seed)
        self.seqs = [sequence(number, length) for number, length in enumerate(lengths)]
        self.seconds, self.tokens, self.plain_s, self.steps = 0.0, 0, 0.0, []
        self.deserved = 0.0  # the mean of tokens, luck apart

    def step(self):
        lengths = [seq.num_committed for seq in self.seqs]
        choices = self.control.choose(self.seqs, {seq.id: self.guess(i) for i, seq in enumerate(self.seqs)})
        rows = [
            Row(seq, 1, 1, room=choice.draft.gamma if choice.draft else 0, choice=choice)
            for seq, choice in zip(self.seqs, choices, strict=True)
        ]
        draft_s = {}
        groups = {}
        for i, row in enumerate(rows):
            if row.choice.draft:
                key = DraftConfig(**{**vars(row.choice.draft), "gamma": 1})
                groups.setdefault(key, []).append(i)
        for draft, members in groups.items():
            draft_s[draft] = self.costs.draft(draft, [lengths[i] for i in members], [rows[i].room for i in members])
        fed = [1 + row.room for row in rows]
        seconds = self.costs.target(lengths, fed) + sum(draft_s.values())
        rounds = [self.round(i, row) for i, row in enumerate(rows)]
        self.plain_s += self.costs.target(lengths, [1] * len(rows)) * sum(r.tokens for r in rounds) / len(rows)
        self.control.observe(rounds, seconds, draft_s)
        self.seconds += seconds
        self.tokens += sum(r.tokens for r in rounds)
        self.steps.append(tuple((row.choice.draft and row.choice.draft.label, row.room) for row in rows))

    def round(self, i, row):
        seq, accepted = row.seq, 0
        self.deserved += 1
        if row.room:
            rate = self.truth(row.choice.draft, i, len(seq.output_ids))
            self.deserved += sum(rate**k for k in range(1, row.room + 1))
            while accepted < row.room and self.rng.random() < rate:
                accepted += 1
        seq.stats.count(row.room, accepted, accepted + 1)
        seq.num_committed += accepted + 1
        seq.ids.extend([0] * (accepted + 1))
        return Round(replace(row, proposal=(0,) * row.room), row.room, accepted, accepted + 1)

    def guess(self, i):
        """What the draft that is asked says; the text is all zeros."""
        if self.control.asked is None:
            return ()
        rate = self.truth(self.control.asked, i, len(self.seqs[i].output_ids))
        length = 8 if rate > 0.6 else 2
        return tuple(int(self.rng.random() >= rate) for _ in range(length))


def oracle(costs, lengths, rates, most=6):
    """Most tokens per second of any choice of one draft; ``rates[draft][row]``: how often a token stands.

    Rows that are all alike are tried with every γ for every number of them; others with every γ for each.
    """
    rows = len(lengths)
    best = rows / costs.target(lengths, [1] * rows)
    for draft, own in rates.items():
        if len(set(lengths)) == len(set(own)) == 1:
            tried = [[g] * n + [0] * (rows - n) for g in range(1, most + 1) for n in range(1, rows + 1)]
        else:
            tried = [gammas for gammas in product(range(most + 1), repeat=rows) if any(gammas)]
        for gammas in tried:
            some = [i for i, g in enumerate(gammas) if g]
            seconds = costs.target(lengths, [1 + g for g in gammas])
            seconds += costs.draft(draft, [lengths[i] for i in some], [gammas[i] for i in some])
            best = max(best, sum(sum(own[i] ** k for k in range(g + 1)) for i, g in enumerate(gammas)) / seconds)
    return best


class Flat:
    """A pass takes a second; a drafted token takes ``draft_s``."""

    def __init__(self, draft_s):
        self.draft_s = draft_s

    def knows(self, config):
        return True

    def target(self, lengths, tokens):
        return 1.0

    def draft(self, config, lengths, gammas):
        return self.draft_s * max(gammas)

    def upkeep(self, config, lengths):
        return 0.0

    wake = upkeep
