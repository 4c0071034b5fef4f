"""Rejected tokens leave no trace: whatever is proposed, the cache is that of the committed tokens alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import SamplingParams
from longdraft.config import DraftConfig
from longdraft.drafts.registry import SELECTORS, make
from longdraft.kernels.layout import PlainLayout
from longdraft.kv.select.base import TokenSelector
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import AttnPlan
from tests.conftest import make_engine
from tests.exact.fake_drafts import Scripted, finish, outputs, place, tokens_of

PAGE, VOCAB, DUSTBIN = 4, 32, 99
CONFIG = tiny_config(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
)
MODEL = Transformer(CONFIG, RandomWeights(CONFIG, seed=3), dtype=torch.float64, page_size=PAGE)

PATTERN = st.integers(0, 9).flatmap(lambda g: st.tuples(st.just(g), st.integers(0, g)))  # (proposed, accepted)
ROUNDS = st.lists(st.lists(PATTERN, min_size=2, max_size=2), min_size=4, max_size=6)  # of two rows


def new_store():
    return PagedStore(CONFIG.num_layers, 120, PlainLayout(PAGE, 1, 8), torch.float64, "cpu")


def spoil(store, row, start, stop, value):
    """``value`` into all slots of ``[start, stop)``."""
    if stop > start:
        slots = store.slots(row, start, stop)
        junk = torch.full((len(slots), 1, 8), value, dtype=torch.float64)
        for layer in range(CONFIG.num_layers):
            store.write(layer, junk, junk, slots)


def cached(store, row, length):
    """K and V of all layers as bytes, so that −0 and NaN count too."""
    return [x.contiguous().view(torch.int64) for i in range(CONFIG.num_layers) for x in store.read(i, row, length)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def verify_elsewhere(store, feeds, accepted):
    """The pass over ``feeds`` with its very shapes, but rejected tokens' K and V never reach their rows' pages."""
    slots, trash = [], 0
    for f, a in zip(feeds, accepted, strict=True):
        slots.append(store.slots(f.row, f.start, f.start + 1 + a))
        rejected = len(f.tokens) - 1 - a
        slots.append(store.slots(DUSTBIN, trash, trash + rejected))
        trash += rejected
    starts = torch.tensor([0, *(len(f.tokens) for f in feeds)]).cumsum(0)
    view = store.view([f.row for f in feeds], [f.start + len(f.tokens) for f in feeds])
    ids = torch.tensor([t for f in feeds for t in f.tokens])
    positions = torch.cat([torch.arange(f.start, f.start + len(f.tokens)) for f in feeds])
    return MODEL.forward(ids, positions, AttnPlan(view, starts, torch.cat(slots)), store.layers, torch.arange(len(ids)))


@settings(max_examples=130, deadline=None, derandomize=True)
@given(st.tuples(st.integers(1, 13), st.integers(1, 13)), ROUNDS, st.randoms(use_true_random=False))
def test_the_cache_is_that_of_never_having_written_the_rejected_tokens(prompts, rounds, rng):
    """At least 1,000 (proposed, accepted) patterns, pages of four tokens, two rows at a time, drafts' junk before each
    verify pass and NaN over the rejected slots after it."""
    real, clean = new_store(), new_store()
    clean.reserve(DUSTBIN, 0, 20)
    ids = [[rng.randrange(VOCAB) for _ in range(n)] for n in prompts]
    for store in (real, clean):
        for row, tokens in enumerate(ids):
            assert store.reserve(row, 0, len(tokens))
        feed(MODEL, store, [Feed(row, 0, tokens, 0) for row, tokens in enumerate(ids)])
    for patterns in rounds:
        feeds = []
        for row, (g, _) in enumerate(patterns):
            c = len(ids[row])
            for store in (real, clean):
                assert store.reserve(row, c, 1 + g)
            spoil(real, row, c, c + g, rng.choice([math.nan, math.inf, 1e300]))  # the draft's tentative K and V
            feeds.append(Feed(row, c, [rng.randrange(VOCAB) for _ in range(1 + g)], 1 + g))
        accepted = [a for _, a in patterns]
        before = [cached(real, row, len(ids[row])) for row in range(2)]
        logits = feed(MODEL, real, feeds)
        other = verify_elsewhere(clean, feeds, accepted)
        start = 0
        for row, f in enumerate(feeds):
            c, a = f.start, accepted[row]
            assert torch.equal(logits[start : start + a + 1], other[start : start + a + 1])
            start += len(f.tokens)
            assert same(before[row], cached(real, row, c))
            ids[row] += f.tokens[: 1 + a]
            spoil(real, row, c + 1 + a, c + len(f.tokens), math.nan)
            for store in (real, clean):
                store.truncate(row, len(ids[row]))
                store.check_integrity()
            assert len(real._tables[row]) == real.pages_for(len(ids[row]))
        for row in range(2):
            assert same(cached(real, row, len(ids[row])), cached(clean, row, len(ids[row])))
    # And a prefill from scratch gives what comes next, up to the order of sums.
    fresh = new_store()
    for row in range(2):
        assert real.reserve(row, len(ids[row]), 1)
        assert fresh.reserve(row, 0, len(ids[row]) + 1)
    got = feed(MODEL, real, [Feed(row, len(ids[row]), [5], 1) for row in range(2)])
    want = feed(MODEL, fresh, [Feed(row, 0, [*ids[row], 5], 1) for row in range(2)])
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


REQUESTS = [
    ([3], SamplingParams(temperature=0, max_tokens=60)),
    (list(range(15)), SamplingParams(seed=5, max_tokens=60)),
    (list(range(7, 30)), SamplingParams(seed=6, max_tokens=60, top_p=0.9)),
]


@pytest.fixture(scope="module")
def truth():
    return tokens_of(outputs(MODEL, REQUESTS, prepare=lambda e: e, block_size=PAGE, num_pages=200))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(PATTERN, min_size=1, max_size=40), st.sampled_from([math.nan, math.inf, 0.0]))
def test_an_engine_with_a_scripted_draft_accepts_what_is_right_and_keeps_nothing_else(truth, patterns, junk):
    """The same through the scheduler: counts, pages in mid-step and after it, bytes that never change."""
    engine = make_engine(MODEL, block_size=PAGE, num_pages=100)
    config = DraftConfig(kv="full", budget=3, gamma=9)
    turns = iter(range(10**9))
    fake = Scripted(engine, {}, lambda: patterns[next(turns) % len(patterns)], junk)
    place(engine, config, fake)
    seqs = [engine.sequence(engine.add(p, q, config)) for p, q in REQUESTS]
    fake.truth.update({seq.id: tokens for seq, tokens in zip(seqs, truth, strict=True)})
    store, forward, kept = engine.store, engine.runner.forward, {}

    def watched(batch):
        for row in batch.rows:
            if not batch.prefill:
                assert len(store._tables[row.seq.id]) <= store.pages_for(row.seq.num_committed + 9 + 1)
        return forward(batch)

    engine.runner.forward = watched
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            if seq.decoding:
                c = seq.num_committed
                assert len(store._tables[seq.id]) == store.pages_for(c)
                now = cached(store, seq.id, c)
                old = kept.get(seq.id)
                assert old is None or same(old, [x[: len(old[0])] for x in now])
                kept[seq.id] = now
                spoil(store, seq.id, c, store.pages_for(c) * PAGE, math.nan)
    assert tokens_of(seqs) == truth
    assert store.num_free_pages == store.num_pages
    accepted = {seq.id: 0 for seq in seqs}
    for seq_id, _, a in fake.rounds:
        accepted[seq_id] += a
    assert all(sum(seq.stats.accepted) == accepted[seq.id] for seq in seqs)


@pytest.mark.parametrize("kv", SELECTORS)
@pytest.mark.parametrize("budget", [1, 8, 33, 512])
def test_a_draft_over_the_targets_cache_costs_its_copies_and_reads_its_budget(tiny, kv, budget):
    engine = make_engine(tiny)
    draft = make(DraftConfig(kv=kv, budget=budget), tiny, engine.store)
    per_token = 2 * 3 * 2 * 16 * 8  # K and V, layers, KV heads, head_dim, float64
    # Copies of a budget, or of one round's proposals, in pages of 16 tokens.
    copies = per_token * (-(-max(budget, 64) // 16) * 16)
    for length in (1, 7, 8, 9, 33, 34, 200, 511, 512, 513, 100_000):
        assert draft.bytes(length) <= (copies if issubclass(SELECTORS[kv], TokenSelector) else 0)
        assert draft.bytes_read(length) == per_token * (length if kv == "full" else min(length, budget))


@pytest.mark.parametrize("kv", SELECTORS)
@pytest.mark.parametrize("gamma", [1, 5, 17])
def test_pages_never_exceed_the_tokens_of_a_round(tiny, kv, gamma):
    """In mid-step ceil((committed + γ + 1) / page), after it ceil(committed / page); no other tensor grows."""
    engine = make_engine(tiny)
    config = DraftConfig(kv=kv, budget=12, gamma=gamma)
    for n in (1, 14, 15, 16, 17, 31):
        engine.add(list(range(n)), SamplingParams(seed=n, max_tokens=40), config)
    store, forward, most = engine.store, engine.runner.forward, []

    def watched(batch):
        for row in batch.rows:
            held = len(store._tables[row.seq.id])
            most.append(held - store.pages_for(row.seq.num_committed + row.num_tokens))
            assert batch.prefill or held <= store.pages_for(row.seq.num_committed + gamma + 1)
        return forward(batch)

    engine.runner.forward = watched
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            assert not seq.decoding or len(store._tables[seq.id]) == store.pages_for(seq.num_committed)
    assert max(most) > 0
    assert store.num_free_pages == store.num_pages


def test_a_selected_view_shares_the_targets_tensors(tiny, monkeypatch):
    """The draft's forward passes get the store's own layers, and nothing else is kept between rounds."""
    engine = make_engine(tiny)
    config = DraftConfig(budget=8, gamma=3)
    engine.add(list(range(50)), SamplingParams(seed=1, max_tokens=12), config)
    forward, seen = Transformer.forward, set()
    monkeypatch.setattr(Transformer, "forward", lambda self, *a: seen.add(id(a[3])) or forward(self, *a))
    finish(engine)
    assert seen == {id(engine.store.layers)}
    assert set(vars(engine.runner.draft(config))) == {"model", "store", "selector", "layers"}
