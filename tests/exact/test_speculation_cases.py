"""Real-world cases of speculative decoding, shrunk to the tiny model: O01–O05, O11, O12, O14, O23, O24."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from longdraft import SamplingParams
from longdraft.config import DraftConfig
from longdraft.drafts.base import Draft, DraftRow
from longdraft.drafts.registry import SELECTORS, make
from longdraft.errors import ContextLengthError
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.rope import apply_rotary
from longdraft.models.transformer import Transformer
from longdraft.view import NEVER, AttnPlan
from tests.conftest import greedy, make_engine, run, run_alone
from tests.exact.fake_drafts import Constant, Noisy, Wrong, finish, install, outputs, place, slot, tokens_of

PROMPT = list(range(5, 13))
FULL = DraftConfig(kv="full", gamma=4)

# --- O01


class TiedRows:
    """The tiny model's weights with row ``low`` of the output layer copied to row ``high``."""

    def __init__(self, low, high):
        self.inner = RandomWeights(tiny_config(), seed=6)
        self.path, self.low, self.high = self.inner.path, low, high

    def shapes(self):
        return self.inner.shapes()

    def load(self, name):
        x = self.inner.load(name)
        if name == "lm_head.weight":
            x[self.high] = x[self.low]
        return x


def tied_model(dtype):
    plain = run_alone(Transformer(tiny_config(), RandomWeights(tiny_config(), seed=6), dtype=dtype), PROMPT, greedy(64))
    low = max((t for t in set(plain) if t < 120), key=plain.count)
    high = next(t for t in range(low + 1, 128) if t not in plain)
    return Transformer(tiny_config(), TiedRows(low, high), dtype=dtype), low, high


TIE_PROMPTS = [PROMPT, list(range(30, 47)), list(range(90, 123))]


def tie_runs(model, batch):
    requests = [(p, greedy(64)) for p in TIE_PROMPTS[:batch]]
    plain = tokens_of(outputs(model, requests))
    for gamma, draft in product((1, 4, 7), (FULL, slot("wrong"))):
        yield plain, tokens_of(outputs(model, requests, [replace(draft, gamma=gamma)] * batch))


@pytest.mark.parametrize("batch", [1, 3])
def test_exact_ties_go_to_the_lower_id_with_and_without_speculation(batch):
    model, low, high = tied_model(torch.float64)
    for plain, spec in tie_runs(model, batch):
        assert spec == plain
        assert low in plain[0]  # the tie did win
        assert all(high not in tokens for tokens in spec)
        assert plain[0] == run_alone(model, PROMPT, greedy(64))


@pytest.mark.parametrize("batch", [3])
def test_in_bfloat16_outputs_part_only_at_a_near_tie(batch):
    """One step of bfloat16 is 2^-8 of a logit; a parting at a clear gap would be a bug."""
    model, _, _ = tied_model(torch.bfloat16)
    for plain, spec in tie_runs(model, batch):
        for prompt, a, b in zip(TIE_PROMPTS, plain, spec, strict=False):
            if a != b:
                at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                engine = make_engine(model)
                logits = engine.runner.forward
                rows = []
                engine.runner.forward = lambda batch, f=logits, rows=rows: rows.append(f(batch)) or rows[-1]
                engine.add(prompt + a[:at], greedy(1))
                finish(engine)
                top = rows[-1][-1].double()
                gap = top[a[at]] - top[b[at]]
                assert abs(gap) < 4 * 2**-8 * top.abs().max(), f"parted at token {at} over a gap of {gap:.4f}"


# --- O02


def test_a_perfect_draft_stays_perfect(tiny):
    """(a) 200 tokens in rounds of five, every drafted token accepted."""
    engine = make_engine(tiny)
    seq, sizes = engine.sequence(engine.add(PROMPT, greedy(200), FULL)), []
    for output in run(engine):
        sizes.append(len(output.tokens))
    assert sizes[0] == 1
    assert set(sizes[1:-1]) == {5}
    assert sum(sizes) == 200
    assert seq.stats.accepted == seq.stats.drafted
    assert seq.stats.verify_passes == 40
    assert seq.output_ids == run_alone(tiny, PROMPT, greedy(200))


class Watched(Noisy):
    """Noisy, comparing what the full-cache draft proposes with a fresh prefill of the same tokens, every round."""

    def __init__(self, engine, model):
        super().__init__(engine, seed=4, rate=0.3, ragged=False)
        self.model, self.offsets, self.compared = model, [], 0

    def change(self, row, own):
        seq = row.seq
        assert seq.num_committed == seq.num_prompt + len(seq.output_ids) - 1
        fresh = make_engine(self.model)
        twin = fresh.sequence(fresh.add(seq.ids[:-1], greedy(8)))
        fresh.step()  # the prefill; its own next token is replaced by the one that the sequence really has
        twin.ids[-1:] = seq.ids[-1:]
        fresh.store.reserve(twin.id, twin.num_committed, 1 + row.gamma)
        twin.params, twin.seed = seq.params, seq.seed
        (want,) = make(FULL, self.model, fresh.store).propose([DraftRow(twin, row.gamma)], sampled=False).tokens
        assert own == want
        self.compared += 1
        return super().change(row, own)


@pytest.mark.parametrize("params", [greedy(200), SamplingParams(seed=8, max_tokens=200)], ids=["greedy", "sampled"])
def test_a_draft_after_any_rejection_proposes_what_a_fresh_one_would(tiny, params):
    """(b) Rejections at every offset and full acceptance, 200 tokens."""
    engine = make_engine(tiny)
    fake = place(engine, FULL, Watched(engine, tiny))
    seq, sizes = engine.sequence(engine.add(PROMPT, params, FULL)), []
    for output in run(engine):
        sizes.append(len(output.tokens))
    assert set(sizes[1:]) == {1, 2, 3, 4, 5}
    assert fake.compared == seq.stats.verify_passes > 50
    assert seq.output_ids == run_alone(tiny, PROMPT, params)


# --- O03, O04, O05


@pytest.mark.parametrize("m", range(11))
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
@pytest.mark.parametrize("gamma", [4, 16])
def test_an_end_inside_a_block(tiny, m, how, gamma):
    """O03, and O04 for stop tokens (stop strings are tested elsewhere): every slot of a block."""
    plain = run_alone(tiny, PROMPT, greedy(40))
    end = plain[m]
    want = plain[: plain.index(end) + 1]
    sizes = {"eos_token_ids": (end,)} if how == "eos" else {}
    params = greedy(40) if how == "eos" else greedy(40, stop_token_ids=(127, end))
    engine, streamed = make_engine(tiny, **sizes), []
    seq = engine.sequence(engine.add(PROMPT, params, replace(FULL, gamma=gamma)))
    for output in run(engine):
        streamed += output.tokens
    assert streamed == seq.output_ids == want
    assert seq.finish_reason == "stop"
    assert seq.num_committed <= len(PROMPT) + len(want) - 1
    assert engine.stats.decode_tokens == len(want) - 1
    # Nothing behind the end counts, and all before it was accepted.
    assert seq.stats.accepted == seq.stats.drafted
    assert sum(seq.stats.drafted) <= len(want) - 1
    assert engine.store.num_free_pages == engine.store.num_pages


@pytest.mark.parametrize("m", range(1, 11))
def test_an_end_inside_a_block_of_any_draft(tiny, m):
    plain = run_alone(tiny, PROMPT, greedy(40))
    drafts = [replace(slot(n), gamma=6) for n in ("noisy", "wrong", "constant", "random")] + [
        DraftConfig(budget=6, gamma=6)
    ]
    requests = [(PROMPT, greedy(40))] * len(drafts)
    for seq in outputs(tiny, requests, drafts, eos_token_ids=(plain[m],)):
        assert seq.output_ids == plain[: plain.index(plain[m]) + 1]
        assert seq.finish_reason == "stop"
        assert sum(seq.stats.accepted) + seq.stats.verify_passes >= len(seq.output_ids) - 1


def test_a_rejected_end_ends_nothing(tiny):
    plain = run_alone(tiny, PROMPT, greedy(40))
    eos = next(t for t in range(128) if t not in plain)
    engine = make_engine(tiny, eos_token_ids=(eos,))
    place(engine, FULL, Constant(eos))
    seq = engine.sequence(engine.add(PROMPT, greedy(40), FULL))
    finish(engine)
    assert (seq.output_ids, seq.finish_reason) == (plain, "length")
    assert sum(seq.stats.accepted) == 0


@pytest.mark.parametrize(("index", "kept", "reason"), [(2, 3, "stop"), (5, 5, "length"), (4, 5, "stop")])
def test_a_stop_against_the_cap(tiny, index, kept, reason):
    """O05 (a), (b): one block of accepted tokens holds both."""
    plain = run_alone(tiny, PROMPT, greedy(12))
    assert plain.index(plain[index]) == index
    request = (PROMPT, greedy(5, stop_token_ids=(plain[index],)))
    for draft in (None, *(replace(FULL, gamma=g) for g in (3, 6, 8))):
        (seq,) = outputs(tiny, [request], [draft])
        assert (seq.output_ids, seq.finish_reason) == (plain[:kept], reason)


@pytest.mark.parametrize("name", ["self", "noisy", "streaming_llm", "full"])
def test_exactly_as_many_tokens_as_asked_for(tiny, name):
    """O05 (c): caps 1 to 12 under γ = 8, with an EOS that is ignored."""
    plain = run_alone(tiny, PROMPT, greedy(12))
    draft = DraftConfig(kv=name, budget=8, gamma=8) if name in SELECTORS else replace(slot(name), gamma=8)
    requests = [(PROMPT, greedy(n, ignore_eos=True)) for n in range(1, 13)]
    seqs = outputs(tiny, requests, [draft] * 12, eos_token_ids=(plain[3],))
    for n, seq in enumerate(seqs, start=1):
        assert (seq.output_ids, seq.finish_reason) == (plain[:n], "length")
        # The first token comes from the prompt; each verify pass gives one token besides the accepted ones.
        assert 1 + seq.stats.verify_passes + sum(seq.stats.accepted) == n


# --- O11


class Forced(Draft):
    """Another draft, cut to a length of its own for each request that changes every round."""

    def __init__(self, inner, lengths):
        self.inner, self.lengths, self.round = inner, lengths, 0

    def propose(self, rows, *, sampled):
        self.round += 1
        proposal = self.inner.propose(rows, sampled=sampled)
        cut = [(self.lengths[row.seq.id] + self.round * (1 + row.seq.id)) % 9 for row in rows]
        return replace(proposal, tokens=[t[:n] for t, n in zip(proposal.tokens, cut, strict=True)])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sampled", [False, True])
def test_ragged_verification(tiny, seed, sampled):
    rng = random.Random(seed)
    caps, lengths = (3, 50, 10, 1, 40, 7, 25, 33), (0, 1, 2, 5, 0, 8, 3, 4)
    order = rng.sample(range(8), 8)
    prompts = [[rng.randrange(128) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    params = [SamplingParams(seed=i, max_tokens=c) if sampled else greedy(c) for i, c in enumerate(caps)]
    want = [run_alone(tiny, p, q) for p, q in zip(prompts, params, strict=True)]
    engine = make_engine(tiny, num_pages=100)
    slots = [replace(slot("self"), gamma=8), replace(slot("wrong"), gamma=8)]
    ids = {}
    drawn = {}
    place(engine, slots[0], Forced(install(engine).runner.draft(slots[0]), drawn))
    place(engine, slots[1], Forced(Wrong(engine), drawn))
    seqs, total = {}, 0
    while engine.has_work or order:
        if order:
            i = order.pop()
            ids[i] = engine.add(prompts[i], params[i], slots[i % 2])
            drawn[ids[i]] = lengths[i]
            seqs[i] = engine.sequence(ids[i])
        elif seqs[4].finish_reason is None and len(seqs[4].output_ids) > 12:
            engine.abort(ids[4])
        for output in engine.step():
            total += len(output.tokens)
    for i, seq in seqs.items():
        assert seq.output_ids == (want[i][: len(seq.output_ids)] if seq.finish_reason == "abort" else want[i])
        assert sum(seq.stats.accepted) + seq.stats.verify_passes == len(seq.output_ids) - 1
        assert (sum(seq.stats.accepted) == 0) if i % 2 else (seq.stats.accepted == seq.stats.drafted)
    assert seqs[4].finish_reason == "abort"
    assert sum(len(s.output_ids) for s in seqs.values()) == total
    assert engine.stats.decode_tokens == sum(sum(s.stats.accepted) + s.stats.verify_passes for s in seqs.values())
    assert engine.store.num_free_pages == 100


# --- O12


@pytest.mark.parametrize("gamma", [5, 20])
@pytest.mark.parametrize("name", ["noisy", "self", "wrong", "nan"])
def test_a_pool_without_a_spare_page_full_of_nan(tiny, gamma, name):
    for a, b in ((14, 15), (17, 16), (31, 32)):
        requests = [([n + i for i in range(n)], greedy(20)) for n in (a, b)]
        want = tokens_of(outputs(tiny, requests))
        pages = sum(-(-(n + 19) // 16) for n in (a, b))  # the last token is never cached
        engine = install(make_engine(tiny, num_pages=pages))
        engine.store.k.fill_(torch.nan)
        engine.store.v.fill_(torch.nan)
        seqs = [engine.sequence(engine.add(p, q, replace(slot(name), gamma=gamma))) for p, q in requests]
        while engine.has_work:
            engine.step()
            engine.store.check_integrity()
            for seq in engine.scheduler.running:
                if seq.decoding:
                    assert len(engine.store._tables[seq.id]) == engine.store.pages_for(seq.num_committed)
        assert tokens_of(seqs) == want
        assert engine.store.num_free_pages == pages


def test_three_hundred_short_requests_leave_nothing_behind(tiny):
    rng = random.Random(0)
    engine = install(make_engine(tiny, num_pages=16))
    drafts = [replace(slot("noisy"), gamma=5), replace(slot("wrong"), gamma=20), DraftConfig(budget=8, gamma=7)]
    for i in range(300):
        request = engine.add([i % 128] * rng.randint(1, 33), greedy(rng.randint(1, 8)), drafts[i // 3 % 3])
        seq = engine.sequence(request)
        for _ in range(rng.randint(1, 3)):
            engine.step()
        if i % 3 == 0 and seq.finish_reason is None:
            engine.abort(request)
        finish(engine)
        assert engine.store.num_free_pages == 16
        engine.store.check_integrity()
    assert (engine.store._tables, engine._sequences) == ({}, {})
    assert len(engine.runner._drafts) < 10


# --- O14


@pytest.mark.parametrize("prompt", [58, 63])
@pytest.mark.parametrize("name", ["self", "noisy", "streaming_llm", "nan"])
def test_the_context_limit_in_the_middle_of_a_draft(prompt, name):
    """(a) A model of 64 positions; a prompt of 64 or more is refused with and without a draft."""
    config = tiny_config(max_position_embeddings=64)
    model = Transformer(config, RandomWeights(config, seed=6), dtype=torch.float64)
    draft = DraftConfig(budget=16, gamma=8) if name == "streaming_llm" else replace(slot(name), gamma=8)
    request = ([i % 128 for i in range(prompt)], greedy(100))
    plain, spec = (outputs(model, [request], [d])[0] for d in (None, draft))
    assert spec.output_ids == plain.output_ids
    assert (len(spec.output_ids), spec.finish_reason) == (64 - prompt, "length")
    for length, d in product((64, 65), (None, draft)):
        with pytest.raises(ContextLengthError, match=str(length)):
            make_engine(model).add([1] * length, greedy(100), d)


@pytest.mark.parametrize("kv", SELECTORS)
def test_no_cap_and_a_prompt_just_below_the_limit(tiny, kv):
    """(c) Two tokens of room: the second is not worth a proposal, and none is booked."""
    request = ([i % 128 for i in range(254)], greedy(None))
    (seq,) = outputs(tiny, [request], [DraftConfig(kv=kv, budget=32, gamma=8)], num_pages=40)
    assert (len(seq.output_ids), seq.finish_reason) == (2, "length")
    assert seq.output_ids == run_alone(tiny, *request)
    assert (seq.stats.drafted, seq.stats.accepted, seq.stats.verify_passes) == ([], [], 1)


# --- O23


@pytest.mark.parametrize(("sinks", "budget"), [(4, 32), (16, 32), (16, 64)])
def test_prompts_shorter_than_the_window(tiny, sinks, budget):
    """Prompts around every border, 80 new tokens: the target itself as long as all fits in the budget."""
    lengths = (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65)
    requests = [([(7 * i + n) % 128 for i in range(n)], greedy(80)) for n in lengths]
    plain = tokens_of(outputs(tiny, requests))
    engine = make_engine(tiny, num_pages=200)
    draft = DraftConfig(kv="streaming_llm", sinks=sinks, budget=budget, gamma=4)
    seqs = [engine.sequence(engine.add(p, q, draft)) for p, q in requests]
    rejected_beyond = 0
    while engine.has_work:
        before = {s: (len(s.ids), sum(s.stats.drafted), sum(s.stats.accepted)) for s in seqs}
        engine.step()
        for s, (length, drafted, accepted) in before.items():
            drafted, accepted = sum(s.stats.drafted) - drafted, sum(s.stats.accepted) - accepted
            if length + 3 <= budget:  # the last of four draft steps sees so many tokens
                assert accepted == drafted
            elif length > budget:
                rejected_beyond += drafted - accepted
    assert tokens_of(seqs) == plain
    assert rejected_beyond > 50  # beyond it the selection does leave something out


# --- O24


def kept_tokens(length, budget=32, sinks=16):
    return list(range(length)) if length <= budget else [*range(sinks), *range(length - (budget - sinks), length)]


@pytest.fixture(scope="module")
def long_model():
    config = tiny_config(max_position_embeddings=2048)
    return Transformer(config, RandomWeights(config, seed=6), dtype=torch.float64)


def dense_logits(model, store, row, token, position, kept):
    """Logits of one token by softmax over exactly the kept tokens' K and V, without views and kernels."""
    group = model.config.num_heads // model.config.num_kv_heads

    def attention(q, kv):
        slots = store.slots(row, 0, position + 1)[kept]
        k, v = (store.layout.read(x, slots) for x in (kv.k, kv.v))
        heads = [
            (q[0, h] @ k[:, h // group].T * q.shape[2] ** -0.5).softmax(dim=-1) @ v[:, h // group]
            for h in range(q.shape[1])
        ]
        return torch.stack(heads)[None]

    with torch.inference_mode():
        here = torch.tensor([position])
        rotary = model._rotary.lookup(here, position + 1)
        plan = AttnPlan(None, None, store.slots(row, position, position + 1))
        x = model.embedding[torch.tensor([token])].to(torch.float64)
        for layer, kv in zip(model.layers, store.layers, strict=True):
            x = layer(x, rotary, plan, kv, attention, store.layout)
        return model.head(model.norm(x))


@pytest.mark.parametrize("context", [20, 32, 33, 40, 100, 1000])
def test_streaming_drafts_see_original_positions(long_model, context):
    """Keys stay at their original positions; the running draft equals dense attention over the kept tokens."""
    rng = random.Random(context)
    ids = [rng.randrange(128) for _ in range(context)]
    engine = make_engine(long_model, num_pages=70, max_num_batched_tokens=300)
    store, selector = engine.store, StreamingLLM(32)
    assert store.reserve(0, 0, context + 4)
    feed(long_model, store, [Feed(0, 0, ids[:-1], 0)])
    token, at = ids[-1], context - 1
    for _ in range(4):  # four draft steps, each of which leaves its key behind for the next
        view = selector.select(store.view([0], [at + 1]))
        positions = view.expand()[1].flatten()
        seen = positions[positions != NEVER].tolist()
        assert seen == kept_tokens(at + 1)
        assert seen[-2:] == [at - 1, at]  # the newest key before the query is at distance 1
        got = feed(long_model, store, [Feed(0, at, [token], 1)], selector.select)
        key = store.read(0, 0, at + 1)[0][-1].clone()
        want = dense_logits(long_model, store, 0, token, at, seen)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        # In layer 0 a key is a function of token and position: turn the same token's key at position 0 to here.
        assert store.reserve(1, 0, 1)
        feed(long_model, store, [Feed(1, 0, [token], 0)])
        first = store.read(0, 1, 1)[0]
        turned = apply_rotary(first, *long_model._rotary.lookup(torch.tensor([at]), at + 1))[0]
        torch.testing.assert_close(key, turned, rtol=1e-10, atol=1e-10)
        token, at = int(got.argmax()), at + 1


@pytest.mark.parametrize("context", [20, 40, 100, 1000])
def test_a_streaming_draft_proposes_what_dense_attention_gives(long_model, context):
    """The same through the draft object of an engine, whose output also stays plain."""
    ids = [(17 * i + context) % 128 for i in range(context)]
    engine = make_engine(long_model, num_pages=70, max_num_batched_tokens=1024)
    config = DraftConfig(kv="streaming_llm", budget=32, gamma=4)
    seq = engine.sequence(engine.add(ids, greedy(12), config))
    engine.step()
    draft, rounds = engine.runner.draft(config), 0
    propose = draft.propose

    def checked(rows, *, sampled):
        nonlocal rounds
        proposal = propose(rows, sampled=sampled)
        tokens, at = [seq.ids[-1]], seq.num_committed
        for own in proposal.tokens[0]:
            logits = dense_logits(long_model, engine.store, seq.id, tokens[-1], at, kept_tokens(at + 1))
            tokens.append(int(logits.argmax()))
            assert own == tokens[-1]
            at += 1
        rounds += 1
        return proposal

    draft.propose = checked
    finish(engine)
    assert rounds > 1
    assert seq.output_ids == run_alone(long_model, ids, greedy(12), num_pages=70)
