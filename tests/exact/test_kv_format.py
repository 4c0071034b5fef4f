"""The target's own cache in a format: a model of its own, whose outputs depend on nothing but the text.

Types: computed in float64, stored in bfloat16, where a group has 32 tokens and is encoded from 97 final ones on.
"""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from longdraft import SamplingParams
from longdraft.capture import Capture
from longdraft.config import DraftConfig
from longdraft.drafts.registry import FORMATS, KVS, SELECTORS
from longdraft.errors import InvalidValueError
from longdraft.exactness import forced_logits, tier
from longdraft.kernels import native
from longdraft.kv.format.base import old_tokens
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import AttnPlan
from tests.conftest import make_engine
from tests.exact.fake_drafts import Scripted, finish, place
from tests.exact.test_formats import CONFIG, disturbing, request, round_trip

GROUP = 32
TYPES = {"dtype": torch.float64, "kv_dtype": torch.bfloat16}


def made(config=CONFIG, fmt="quant8", seed=3, **types):
    return Transformer(
        config, RandomWeights(config, seed=seed), **(types or TYPES), kv_format=FORMATS[fmt]() if fmt else None
    )


MODEL, FULL = made(), made(fmt=None)
NATIVE = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")


def text(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(n)]


# --- what is computed


def by_hand(model, ids):
    """Logits ``[N, V]`` of a model without a format, each query over K and V that are encoded as the rule says."""
    n = len(ids)
    store = PagedStore(model.config.num_layers, -(-n // 16), model.layout, model.kv_dtype, "cpu")
    store.reserve(0, 0, n)
    plan = AttnPlan(store.view([0], [n]), torch.tensor([0, n]), store.slots(0, 0, n))
    x = model._embed(torch.tensor(ids)).to(model.spec.compute_dtype)
    rotary = model.rotary(torch.arange(n), plan)
    for i, layer in enumerate(model.layers):

        def attention(q, kv, i=i):
            whole = store.read(i, 0, n)
            old = old_tokens(n - 1, GROUP)
            coded = round_trip(FORMATS["quant8"](), *(x[:old] for x in whole)) if old else [x[:0] for x in whole]
            out = torch.empty_like(q)
            for at in range(n):
                seen = old_tokens(at, GROUP)
                k, v = (torch.cat([x[:seen], y[seen : at + 1]]).to(q.dtype) for x, y in zip(coded, whole, strict=True))
                heads = q[at].to(model.kv_dtype).to(q.dtype).view(k.shape[1], -1, k.shape[2])
                scores = torch.einsum("ghd,sgd->ghs", heads, k) * k.shape[2] ** -0.5
                out[at] = torch.einsum("ghs,sgd->ghd", scores.softmax(dim=-1), v).reshape(out[at].shape)
            return out

        x = layer(x, rotary, plan, store.layers[i], attention, model.layout)
    return model.head(model.norm(x))


@pytest.mark.parametrize("n", [98, 200])
def test_attention_is_that_over_the_decoded_groups(n):
    """In float64, by the equation, at every position: which groups are encoded, and what they decode to."""
    ids = text(n)
    want = by_hand(FULL, ids)
    for chunk in (512, 1) if n < 100 else (512, 37):
        got = forced_logits(MODEL, [ids, ids[: n - 7]], n - 7, chunk).view(2, n - 7, -1)
        for row, part in zip(got, (want[7:], want[: n - 7]), strict=True):
            torch.testing.assert_close(row, part, rtol=1e-9, atol=1e-9)
    full = forced_logits(FULL, [ids], n)
    same = (full - want).abs().amax(dim=1) < 1e-9
    assert same[:97].all()
    assert not same[97:].any()


def test_it_stays_close_to_the_model():
    ids = text(240)
    ours, full = (forced_logits(m, [ids], 140).log_softmax(dim=-1) for m in (MODEL, FULL))
    kl = (full.exp() * (full - ours)).sum(dim=-1)
    assert 0 < kl.mean() < 1e-4


# --- what nothing may change


def outputs(model, asked, drafts, disturb=None, **sizes):
    """Output ids, and the engine's sequences. Nothing may be held in the end."""
    engine = make_engine(model, **({"num_pages": 14 * len(asked)} | sizes))
    seqs = [engine.sequence(engine.add(p, q, d)) for (p, q), d in zip(asked, drafts, strict=True)]
    while engine.has_work:
        if disturb:
            disturb(engine)
        engine.step()
    engine.store.check_integrity()
    assert engine.store.num_free_pages == engine.store.num_pages
    return [seq.output_ids for seq in seqs], seqs


def check_mixed(model, weights, seed):
    """Every (selection, γ) in one batch; budgets, layers, weights and sampling in turns; preemption, forks, chunks."""
    rng, forks = random.Random(seed), []
    drafts = [
        DraftConfig(weights=weights[n % len(weights)], kv=kv, budget=(24, 48, 100)[n % 3], gamma=gamma)
        for n, (kv, gamma) in enumerate(product(SELECTORS, (1, 3, 8)))
    ]
    drafts = [replace(d, layers="every:2") if n % 5 == 4 else d for n, d in enumerate(drafts)]
    drafts += [DraftConfig(weights="ngram"), None]
    asked = [request(rng, rng.choice((1, 40, 90, 96, 97, 110, 161, 200))) for _ in drafts]

    want, _ = outputs(model, asked, [None] * len(asked))
    got, seqs = outputs(
        model, asked, drafts, disturbing(rng, forks, drafts[0]), max_num_batched_tokens=100, num_pages=100
    )
    assert got == want
    assert all(sum(seq.stats.drafted) for seq in seqs[: len(drafts) - 2])
    assert sum(seq.stats.preemptions for seq in seqs)
    for source, child in forks:
        if source < len(want):
            assert child.output_ids == want[source]
    assert len(forks) == 6
    for chunk, few in ((1, [next(i for i, (ids, _) in enumerate(asked) if len(ids) == 110)]), (17, [3, 9, 15])):
        got, _ = outputs(model, [asked[i] for i in few], [None] * len(few), max_num_batched_tokens=chunk)
        assert got == [want[i] for i in few]


def test_neither_drafts_nor_chunks_nor_company_change_an_output():
    assert tier(MODEL) == "identical"
    check_mixed(MODEL, ["target"], 0)


@NATIVE
def test_on_native_kernels_either():
    """Six query heads to two KV heads; all bits of the logits."""
    model = made(tiny_config(num_heads=6, num_kv_heads=2, num_layers=2), dtype=torch.bfloat16)
    assert tier(model) == "bit-identical"
    check_mixed(model, ["target", "target@int8"], 1)
    ids = text(200)
    alone = forced_logits(model, [ids], 150)
    assert torch.equal(alone, forced_logits(model, [ids, ids[3:]], 150)[:150])
    assert torch.equal(alone[-40:], forced_logits(model, [ids], 40, chunk=1))


@NATIVE
def test_a_native_pass_is_one_call_that_asks_where_each_layer_reads():
    """Equal to the pass by parts but for rounding; what a decoder raises comes through."""
    model = made(tiny_config(num_layers=2), dtype=torch.float32)
    ids, store = text(140), model.new_store(20)
    for start in range(0, 130, 65):
        assert store.reserve(0, start, 65)
        feed(model, store, [Feed(0, start, ids[start : start + 65], 0)])
    assert store.reserve(0, 130, 10)
    got = feed(model, store, [Feed(0, 130, ids[130:], 10)])
    fused, model._fused = model._fused, None
    torch.testing.assert_close(got, feed(model, store, [Feed(0, 130, ids[130:], 10)]), rtol=1e-4, atol=1e-4)
    model._fused = fused

    def refuse(i, kv):
        raise RuntimeError(f"layer {i}")

    with pytest.raises(RuntimeError, match="layer 0"):
        feed(model, store, [Feed(0, 139, ids[139:], 1)], decode=refuse)


def test_completions_share_the_groups_of_their_prompt():
    engine, params = make_engine(MODEL, num_pages=60), SamplingParams(n=4, seed=1, max_tokens=30)
    seqs = [engine.sequence(i) for i in engine.add_all(text(150), params)]
    while min(len(seq.output_ids) for seq in seqs) < 2:
        engine.step()
    groups = engine.store._groups
    assert [groups[seq.id].pages[:2] for seq in seqs] == [groups[0].pages[:2]] * 4
    finish(engine)
    alone = [replace(params, n=1, seed=seq.seed) for seq in seqs]
    assert [seq.output_ids for seq in seqs] == outputs(MODEL, [(text(150), p) for p in alone], [None] * 4)[0]


def test_a_completion_that_comes_too_late_to_share_starts_anew():
    """Of two sequences one runs at a time: by then the first one's last tokens are encoded."""
    params = SamplingParams(n=2, seed=1, max_tokens=40)
    engine = make_engine(MODEL, num_pages=60, max_num_seqs=2)
    other = engine.sequence(engine.add(text(20), SamplingParams(seed=2, max_tokens=36)))
    first, late = (engine.sequence(i) for i in engine.add_all(text(150), params))
    finish(engine)
    asked = [(other.ids[:20], other.params), *((text(150), replace(params, n=1, seed=s.seed)) for s in (first, late))]
    assert [s.output_ids for s in (other, first, late)] == outputs(MODEL, asked, [None] * 3)[0]


# --- what is kept


class Kept:
    """The bytes of every group of every row when it is encoded, which must be once and in order."""

    def __init__(self, store):
        self.store, self.bytes, encode = store, {}, store._encode

        def noting(row, groups, count):
            before = groups.coded
            encode(row, groups, count)
            for n in range(before, count):
                assert (row, n) not in self.bytes
                self.bytes[row, n] = self.now(groups.pages[n])

        store._encode = noting

    def now(self, pages):
        return torch.cat([x[:, pages].flatten() for x in self.store._bytes])

    def check(self):
        """Nothing that is encoded has changed since."""
        for row, groups in self.store._groups.items():
            for n, pages in enumerate(groups.pages[: groups.coded]):
                assert torch.equal(self.now(pages), self.bytes[row, n])


def test_a_thousand_accept_patterns_leave_no_stale_or_requantised_key():
    """Any number of proposals of which any number stand, in ragged rows, NaN in every slot before it is verified: each
    group is encoded once, to the bits that plain decoding encodes, and stays as it is."""
    rng = random.Random(5)
    asked = [(text(n, n), SamplingParams(seed=n, max_tokens=56)) for n in range(60, 160, 2)]
    config, engines = DraftConfig(kv="streaming_llm", budget=60, gamma=6), []
    for speculative in (False, True):
        engine = make_engine(MODEL, num_pages=500)
        kept = Kept(engine.store)
        if speculative:
            fake = place(engine, config, Scripted(engine, {}, lambda: (g := rng.randint(0, 6), rng.randint(0, g))))
        seqs = [engine.sequence(engine.add(*ask, config if speculative else None)) for ask in asked]
        if speculative:
            fake.truth.update({seq.id: old.output_ids for seq, old in zip(seqs, engines[0][1], strict=True)})
        while engine.has_work:
            for _ in range(10):
                engine.step()
            kept.check()
        engines.append((kept, seqs))
    (plain, want), (spec, got) = engines
    assert [seq.output_ids for seq in got] == [seq.output_ids for seq in want]
    assert len(fake.rounds) >= 1000
    assert len(plain.bytes) > len(asked)
    for key in plain.bytes:
        assert torch.equal(plain.bytes[key], spec.bytes[key])


def test_page_masses_are_of_what_was_read():
    """A pass that is cut at the end of a group tells masses by page of the sequence, which add up to one."""
    ids, store = text(160), MODEL.new_store(20)
    for start in (0, 65, 130):
        n = min(65, 160 - start)
        assert store.reserve(0, start, n)
        form = Capture(torch.arange(n), page_mass=torch.empty(2, n, 2, -(-(start + n) // 16), dtype=torch.float64))
        feed(MODEL, store, [Feed(0, start, ids[start : start + n], 0)], capture=form)
        torch.testing.assert_close(form.page_mass.sum(dim=-1), torch.full((2, n, 2), 2.0, dtype=torch.float64))
        for i, p in enumerate(range(start, start + n)):
            assert (form.page_mass[:, i, :, p // 16 + 1 :] == 0).all()


@pytest.mark.parametrize("kv", [kv for kv in KVS if "+" in kv])
def test_a_draft_in_a_format_over_a_cache_in_one_is_refused(kv):
    engine = make_engine(MODEL)
    with pytest.raises(
        InvalidValueError, match=f"kv is '{kv.replace('+', '.')}'.*own cache.*Pass '{kv.split('+')[0]}'"
    ):
        engine.add([1, 2, 3], SamplingParams(), DraftConfig(kv=kv))
