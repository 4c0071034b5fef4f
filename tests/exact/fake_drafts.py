"""Drafts that misbehave on purpose, how to put them into an engine, and batches run with and without speculation."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from longdraft.config import DraftConfig
from longdraft.core import Proposal
from longdraft.drafts.base import Draft
from longdraft.drafts.self_spec import SelfSpec
from longdraft.kv.select.full import Full
from tests.conftest import make_engine, run


class Constant(Draft):
    """One token again and again."""

    def __init__(self, token):
        self.token = token

    def propose(self, rows, *, sampled):
        return Proposal([[self.token] * row.gamma for row in rows])


class RandomTokens(Draft):
    """Anything, and any number of it from none to γ."""

    def __init__(self, vocab, seed=0):
        self.vocab, self.rng = vocab, random.Random(seed)

    def propose(self, rows, *, sampled):
        return Proposal([[self.rng.randrange(self.vocab) for _ in range(self.rng.randint(0, r.gamma))] for r in rows])


class OverSelf(Draft):
    """Starts from what the target itself would draw, which it finds out over the full view."""

    def __init__(self, engine):
        self.engine = engine
        self.vocab = engine.model.config.vocab_size
        self.target = SelfSpec(engine.model, engine.store, Full(1))

    def propose(self, rows, *, sampled):
        tokens = self.target.propose(rows, sampled=False).tokens
        return Proposal([self.change(row, own) for row, own in zip(rows, tokens, strict=True)])

    def change(self, row, own):
        return own


class Wrong(OverSelf):
    """Always one more than the token that the target draws: nothing is ever accepted."""

    def change(self, row, own):
        return [(token + 1) % self.vocab for token in own]


class Noisy(OverSelf):
    """The target's tokens with some of them replaced at random; the block's length is random too, 0 included."""

    def __init__(self, engine, seed=0, rate=0.25, ragged=True):
        super().__init__(engine)
        self.rng, self.rate, self.ragged = random.Random(seed), rate, ragged

    def change(self, row, own):
        if self.ragged:
            own = own[: self.rng.randint(0, len(own))]
        return [self.rng.randrange(self.vocab) if self.rng.random() < self.rate else token for token in own]


class Scripted(Draft):
    """Knows each request's output beforehand: proposes ``g`` tokens of which exactly the first ``a`` are right.

    ``truth``: ids → output; ``script()`` gives the next (g, a). The reserved slots are filled with ``junk`` first, as a
    draft that runs over the target's cache does with its tentative keys and values.
    """

    def __init__(self, engine, truth, script, junk=float("nan")):
        self.engine, self.truth, self.script, self.junk = engine, truth, script, junk
        self.rounds = []  # (sequence id, g, a)
        self.vocab = engine.model.config.vocab_size

    def propose(self, rows, *, sampled):
        tokens = []
        for row in rows:
            seq, store = row.seq, self.engine.store
            slots = store.slots(seq.id, seq.num_committed, seq.num_committed + 1 + row.gamma)
            fill = torch.full((len(slots), store.layout.num_kv_heads, store.layout.head_dim), self.junk)
            for layer in range(len(store.layers)):
                store.write(layer, fill, fill, slots)
            g, a = self.script()
            g = min(g, row.gamma)
            a = min(a, g)
            done = len(seq.output_ids)
            right = self.truth[seq.id][done : done + g]
            tokens.append([t if i < a else (t + 1) % self.vocab for i, t in enumerate(right)])
            self.rounds.append((seq.id, g, a))
        return Proposal(tokens)


class NaNModel:
    """The target, but every logit is NaN."""

    def __init__(self, model):
        self.model = model
        self.device = model.device

    def forward(self, *args):
        return torch.full_like(self.model.forward(*args), torch.nan)


class NaNSelf(Draft):
    """A self-draft whose logits are NaN, and which leaves NaN in all its reserved slots."""

    def __init__(self, engine, selector=None):
        self.engine = engine
        self.inner = SelfSpec(NaNModel(engine.model), engine.store, selector or Full(1))

    def propose(self, rows, *, sampled):
        proposal = self.inner.propose(rows, sampled=sampled)
        store = self.engine.store
        for row in rows:
            start = row.seq.num_committed
            slots = store.slots(row.seq.id, start, start + 1 + row.gamma)
            nan = torch.full((len(slots), store.layout.num_kv_heads, store.layout.head_dim), torch.nan)
            for layer in range(len(store.layers)):
                store.write(layer, nan, nan, slots)
        return proposal


FAKES = {
    "constant": lambda engine: Constant(7),
    "random": lambda engine: RandomTokens(engine.model.config.vocab_size),
    "wrong": Wrong,
    "noisy": Noisy,
    "nan": NaNSelf,
    "self": OverSelf,
}


def slot(name):
    """A config under which ``install`` puts the fake draft ``name``; γ and the rule may be replaced at will."""
    return DraftConfig(kv="full", budget=1_000_000 + list(FAKES).index(name))


def place(engine, config, fake):
    """Let ``fake`` serve all rows of ``engine`` with this config, whatever their γ and rule."""
    key = replace(config, gamma=1, sampling_rule="coupled")
    engine.runner._drafts[key] = fake
    engine.runner._users[key].add(-1)  # never idle: it could not be made again
    return fake


def install(engine):
    """All the fakes of this file, each under ``slot(name)``."""
    for name, make in FAKES.items():
        place(engine, slot(name), make(engine))
    return engine


def finish(engine):
    """Run ``engine`` to its end: ended sequences by id."""
    return {o.seq.id: o.seq for o in run(engine) if o.finish_reason}


def outputs(model, requests, drafts=None, *, prepare=install, **sizes):
    """The sequences of ``requests`` = (prompt, params) in one engine, in order; ``drafts``: one for each, or None."""
    drafts = drafts or [None] * len(requests)
    engine = prepare(make_engine(model, **({"num_pages": 16 * len(requests)} | sizes)))
    ids = [engine.add(list(p), q, d) for (p, q), d in zip(requests, drafts, strict=True)]
    done = finish(engine)
    engine.store.check_integrity()
    assert engine.store.num_free_pages == engine.store.num_pages
    return [done[i] for i in ids]


def tokens_of(seqs):
    return [seq.output_ids for seq in seqs]
