"""Drafts over encoded keys and values change no output, and what they read is never stale."""

import copy
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from longdraft import SamplingParams
from longdraft.config import DraftConfig
from longdraft.core import Proposal
from longdraft.drafts.base import Draft
from longdraft.drafts.registry import FORMATS, KVS, make, selector
from longdraft.kernels import native
from longdraft.kv.select.base import ViewSelector
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import NEVER, TableView
from tests.conftest import make_engine
from tests.exact.fake_drafts import finish, place

CODED = [kv for kv in KVS if "+" in kv]
BUDGETS = (1, 24, 48, 100)
GAMMAS = (1, 3, 8)
SAMPLING = ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9})
LENGTHS = (1, 40, 96, 97, 110, 129, 140)  # groups of 32 come into being from 97 final tokens on


def test_every_format_is_here():
    assert {kv.partition("+")[2] for kv in CODED} == {*FORMATS}


def request(rng, n):
    params = SamplingParams(seed=rng.randrange(2**40), max_tokens=16, **rng.choice(SAMPLING))
    return [rng.randrange(128) for _ in range(n)], params


def disturbing(rng, forks, draft):
    """Now and then a row is preempted, or forked: six times, into ``forks``; rows without a draft with ``draft``."""

    def disturb(engine):
        running = engine.scheduler.running
        if running and rng.random() < 0.1:
            engine.scheduler.preempt(rng.choice(running))
        if running and rng.random() < 0.2 and len(forks) < 6:
            source = rng.choice(running)
            forks.append((source.id, engine.sequence(engine.fork(source.id, draft=source.draft or draft))))

    return disturb


def outputs(model, asked, drafts, disturb=None, **sizes):
    """Output ids; ``disturb`` may preempt and fork before each step. Nothing may be held in the end, by anyone."""
    engine = make_engine(model, **({"num_pages": 16 * len(asked)} | sizes))
    seqs = [engine.sequence(engine.add(p, q, d)) for (p, q), d in zip(asked, drafts, strict=True)]
    while engine.has_work:
        if disturb:
            disturb(engine)
        engine.step()
    assert engine.store.num_free_pages == engine.store.num_pages
    for draft in engine.runner._drafts.values():
        store = getattr(draft, "coded", getattr(draft, "copies", None))
        store.check_integrity()
        assert store.pool.num_free == store.pool.size
    return [seq.output_ids for seq in seqs], seqs


def check_mixed(model, weights, seed):
    """Every (kv, γ) in one batch, budgets, layers, weights and sampling in turns; preemption, forks and chunks."""
    rng, forks = random.Random(seed), []
    drafts = [
        DraftConfig(weights=weights[n % len(weights)], kv=kv, budget=BUDGETS[n % 4], gamma=gamma)
        for n, (kv, gamma) in enumerate(product(CODED, GAMMAS))
    ]
    drafts = [replace(d, layers="every:2") if n % 5 == 4 else d for n, d in enumerate(drafts)]
    asked = [request(rng, rng.choice(LENGTHS)) for _ in drafts]

    want, _ = outputs(model, asked, [None] * len(asked))
    got, seqs = outputs(model, asked, drafts, disturbing(rng, forks, drafts[0]), max_num_batched_tokens=100)
    assert got == want
    assert all(sum(seq.stats.drafted) for seq in seqs)
    for source, child in forks:
        if source < len(want):
            assert child.output_ids == want[source]
    assert len(forks) == 6


def test_no_selection_weights_or_gamma_changes_an_output(tiny):
    check_mixed(tiny, ["target"], 0)


@pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nor_do_eight_bit_weights_on_native_kernels(dtype):
    """Six query heads to two KV heads."""
    config = tiny_config(num_heads=6, num_kv_heads=2, num_layers=2)
    check_mixed(Transformer(config, RandomWeights(config, seed=6), dtype=dtype), ["target", "target@int8"], 1)


def acceptance(model, weights="target"):
    """Over the whole cache most proposals stand; completions share their prompt's groups."""
    engine = make_engine(model, num_pages=100)
    config = DraftConfig(weights=weights, kv="full+quant8", gamma=4)
    params = SamplingParams(n=4, seed=1, max_tokens=24)
    ids = engine.add_all([(5 * i + i // 3) % 128 for i in range(150)], params, config)
    seqs = [engine.sequence(i) for i in ids]
    while min(len(seq.output_ids) for seq in seqs) < 3:
        engine.step()
    store = engine.runner.draft(config).coded
    assert store.pool.size - store.pool.num_free == 2  # (150 - 65) // 32, for all four
    finish(engine)
    return sum(sum(s.stats.accepted) for s in seqs) / sum(sum(s.stats.drafted) for s in seqs)


def test_a_draft_over_the_whole_cache_is_nearly_the_target(tiny):
    assert acceptance(tiny) > 0.9


@pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
def test_so_it_is_on_native_kernels():
    config = tiny_config()
    model = Transformer(config, RandomWeights(config, seed=6), dtype=torch.float32)
    assert acceptance(model) > 0.9
    assert acceptance(model, "target@int8") > 0.7


# --- what is read


CONFIG = tiny_config(
    vocab_size=128, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
MODEL = Transformer(CONFIG, RandomWeights(CONFIG, seed=3), dtype=torch.float64)


class Scripted(Draft):
    """Lets ``inner`` draft, then proposes ``g`` tokens of which the first ``a`` are right, whatever it said."""

    def __init__(self, inner, truth, rng):
        self.inner, self.truth, self.rng, self.rounds, self.needs = inner, truth, rng, 0, inner.needs
        for name in ("observe", "follow", "settle", "fork", "release"):
            setattr(self, name, getattr(inner, name))

    def propose(self, rows, *, sampled):
        self.inner.propose(rows, sampled=sampled)
        tokens = []
        for row in rows:
            g = self.rng.randint(0, row.gamma)
            a = self.rng.randint(0, g)
            done = len(row.seq.output_ids)
            right = self.truth[row.seq.id][done : done + g]
            tokens.append([t if i < a else (t + 1) % 128 for i, t in enumerate(right)])
            self.rounds += 1
        return Proposal(tokens)


def round_trip(fmt, k, v):
    """``k, v [n, G, D]`` of whole groups of 32, as the format gives them back."""
    parts = fmt.encode(*(x.unflatten(0, (-1, 32)).transpose(1, 2) for x in (k, v)))
    return [x.transpose(1, 2).flatten(0, 1) for x in fmt.decode(parts, k.dtype)]


class Watch:
    """Looks at every pass of a draft, at the layers in turns: all that each row and head sees, bit for bit."""

    def __init__(self, draft, config, store, seqs):
        self.store, self.seqs, self.reader = store, seqs, selector(config)
        self.kept = getattr(draft, "coded", getattr(draft, "copies", None))
        self.chosen, self.fmt, self.passes = {}, FORMATS[config.format](), 0
        if not isinstance(self.reader, ViewSelector):
            fill = self.kept.fill
            self.kept.fill = lambda row, chosen: self.chosen.update({row: chosen}) or fill(row, chosen)

    def __call__(self, lens, plan):
        """After a pass over rows that are ``lens[row]`` tokens long by then."""
        pages, places = plan.view.expand()
        layer = self.passes % len(self.store.layers)
        storage = plan.decode(layer, self.store.layers[layer])
        for b, (row, stop) in enumerate(lens.items()):
            at = (places[b, 0] != NEVER).nonzero().flatten()
            slots = pages[b, 0, at // 16] * 16 + at % 16
            got = [self.store.layout.read(x, slots) for x in (storage.k, storage.v)]
            own = self.store.read(layer, row, stop)
            see = self.view if isinstance(self.reader, ViewSelector) else self.choice
            for x, y in zip(got, see(row, layer, own, stop), strict=True):
                assert torch.equal(x, y)
        self.passes += 1

    def view(self, row, layer, own, stop):
        """What the selection shows of the target's ``own [stop, G, D]``, encoded as far as it is old."""
        view = self.reader.select(TableView(torch.zeros(1, 99, dtype=torch.int64), torch.tensor([stop]), 16))
        positions = view.expand()[1].flatten()
        old = max(0, self.seqs[row].num_committed - 65) // 32 * 32
        rounded = round_trip(self.fmt, *(x[:old] for x in own)) if old else [x[:0] for x in own]
        return [torch.cat([x, y[old:]])[positions[positions != NEVER]] for x, y in zip(rounded, own, strict=True)]

    def choice(self, row, layer, own, stop):
        """What was chosen for each head, encoded, and all that came after."""
        chosen, size, start = self.chosen[row][layer].T, self.kept.get(row).size, self.kept.get(row).start
        if not size:
            return [x[start:] for x in own]
        padded = torch.cat([chosen, chosen[-1:].expand(-size % 32, -1)])
        rounded = round_trip(self.fmt, *(x[padded, torch.arange(2)] for x in own))
        return [torch.cat([x[:size], y[start:]]) for x, y in zip(rounded, own, strict=True)]


@pytest.mark.parametrize("kv", CODED)
def test_a_thousand_accept_patterns_leave_no_stale_key(kv):
    """Ragged rows, any number of proposals of which any number stand: what a draft reads is the target's own, encoded
    where it is old, in every pass and layer; nothing of what was refused."""
    rng = random.Random(kv)
    asked = [([rng.randrange(128) for _ in range(n)], SamplingParams(seed=n, max_tokens=70)) for n in range(60, 124, 8)]
    truth, _ = outputs(MODEL, asked, [None] * len(asked))
    config, engine = DraftConfig(kv=kv, budget=60, gamma=4), make_engine(MODEL, num_pages=200)
    inner = make(config, MODEL, engine.store)
    seqs = {}
    watch = Watch(inner, config, engine.store, seqs)
    run, plans, noting = inner.run, [], copy.copy(MODEL)
    noting.forward = lambda *step: plans.append(step[2]) or MODEL.forward(*step)
    inner.model = noting

    def watched(feeds):
        logits = run(feeds)
        watch({f.row: f.start + len(f.tokens) for f in feeds}, plans.pop())
        return logits

    inner.run = watched
    fake = place(engine, config, Scripted(inner, {}, rng))
    for prompt, params in asked:
        seq = engine.sequence(engine.add(prompt, params, config))
        seqs[seq.id] = seq
    fake.truth.update(dict(zip(seqs, truth, strict=True)))
    finish(engine)
    assert [seq.output_ids for seq in seqs.values()] == truth
    assert fake.rounds >= 250  # for each of the four selections
    assert watch.passes > 100
