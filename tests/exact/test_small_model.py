"""Drafts with other weights or fewer layers: a small model's own cache, its range, its rows, and layer skipping."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import SamplingParams
from longdraft.config import DraftConfig, EngineConfig
from longdraft.core import Place, Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.layer_skip import choose_layers
from longdraft.drafts.registry import VIEW_SELECTORS, make
from longdraft.drafts.small_model import DraftModel, SmallModel
from longdraft.engine import sizing
from longdraft.engine.engine import Engine
from longdraft.errors import InvalidValueError
from longdraft.kv.select.full import Full
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.spec.next_tokens import distribution, next_tokens
from tests.conftest import greedy, make_engine, run, run_alone
from tests.exact.fake_drafts import finish, outputs, tokens_of
from tests.exact.laws import counts, g_test
from tests.exact.test_engine_identity import World, drawn, random_params
from tests.exact.test_speculation_identity import SAMPLING, SHAPES, exact_law, requests_of
from tests.exact.test_speculation_identity import sample as sample_law
from tests.unit.test_pairing import make as make_tokenizer

SELF = DraftConfig(weights="self", kv="full", gamma=4)
SMALL = DraftConfig(weights="small", kv="full", gamma=4)
STREAMING = replace(SMALL, kv="streaming_llm", budget=12, sinks=2)
PROMPT = list(range(5, 13))
SAMPLED = SamplingParams(seed=8, max_tokens=200)


# --- models, engines, and a reference that knows nothing of drafts


def model_of(seed=6, weights=None, dtype=torch.float64, **config):
    """A tiny model; with ``seed=6`` and no sizes of its own it is the target of these tests."""
    config = tiny_config(**config)
    return Transformer(config, weights or RandomWeights(config, seed=seed), dtype=dtype)


class Noise:
    """The target's weights with noise on them."""

    def __init__(self, scale):
        self.inner, self.other, self.scale = RandomWeights(tiny_config(), 6), RandomWeights(tiny_config(), 7), scale
        self.path = self.inner.path

    def shapes(self):
        return self.inner.shapes()

    def load(self, name):
        return self.inner.load(name) + (0 if name.endswith("norm.weight") else self.scale * self.other.load(name))


class Raised:
    """An output layer with something added to the logits of some ids."""

    def __init__(self, head, raised):
        self.head, self.raised = head, raised

    def __call__(self, x):
        logits = self.head(x).clone()
        for token, bias in self.raised.items():
            logits[:, token] += bias
        return logits


def raise_ids(model, raised):
    model.head = Raised(model.head, raised)
    return model


def with_models(engine, models, num_pages=None):
    """``engine`` with small models beside its target, by name."""
    engine.runner.small |= {name: DraftModel(m, num_pages or engine.config.num_pages) for name, m in models.items()}
    return engine


def engine_of(target, models, **sizes):
    """An engine whose draft models are given as a user of ``Engine`` gives them."""
    tokenizer = sizes.pop("tokenizer", None)
    defaults = {"max_model_len": target.config.max_position_embeddings, "num_pages": 64}
    return Engine(target, EngineConfig(**(defaults | sizes)), (), tokenizer, models)


def ended(engine):
    """Check that nobody holds a page of any store any more."""
    for store in (engine.store, *(small.store for small in engine.runner.small.values())):
        store.check_integrity()
        assert store.num_free_pages == store.num_pages
    for draft in engine.runner._drafts.values():
        assert not getattr(draft, "_states", {})


def run_requests(target, models, requests, drafts, **sizes):
    """The ended sequences of ``requests`` = (prompt, params), in order."""
    engine = engine_of(target, models, **({"num_pages": 16 * len(requests)} | sizes))
    seqs = [engine.sequence(engine.add(list(p), q, d)) for (p, q), d in zip(requests, drafts, strict=True)]
    finish(engine)
    ended(engine)
    return seqs


def drafted(seqs):
    return sum(sum(seq.stats.drafted) for seq in seqs)


def accepted(seqs):
    return sum(sum(seq.stats.accepted) for seq in seqs)


def watch(engine, config, before=None, after=None):
    """Call ``before(rows)`` and ``after(rows, proposal)`` around each proposal of a draft; the draft."""
    draft = engine.runner.draft(config)
    propose = draft.propose

    def watched(rows, *, sampled):
        if before:
            before(rows)
        proposal = propose(rows, sampled=sampled)
        if after:
            after(rows, proposal)
        return proposal

    draft.propose = watched
    return draft


@pytest.fixture(scope="module")
def plain(tiny):
    """Output ids of a request to the target without a draft, each computed once."""

    @cache
    def output_ids(prompt, params):
        return run_alone(tiny, list(prompt), params)

    return lambda prompt, params: output_ids(tuple(prompt), params)


class Reference:
    """A model over a cache of its own into which every token is fed alone."""

    def __init__(self, model, size=400):
        self.model, self.length = model, 0
        pages = -(-size // model.layout.page_size)
        self.store = PagedStore(model.config.num_layers, pages, model.layout, model.kv_dtype, "cpu")
        self.store.reserve(0, 0, size)

    def take(self, tokens, select=None):
        """Logits ``[1, V]`` after the last of ``tokens``."""
        for token in tokens:
            logits = feed(self.model, self.store, [Feed(0, self.length, [token], 1)], select)
            self.length += 1
        return logits

    def propose(self, seq, gamma, tokens, select=None):
        """``gamma`` tokens after ``seq``, ``tokens`` being the part of its text to take in first; all logits seen."""
        drafted, rows = [], []
        for _ in range(gamma):
            rows.append(self.take(drafted[-1:] or tokens, select))
            (token,), _ = next_tokens(rows[-1], [Place(seq, tuple(drafted))])
            drafted.append(token)
        return drafted, torch.cat(rows)

    def cached(self):
        return cached(self.store, 0, self.length)


def cached(store, row, length):
    """K and V of all layers."""
    return [x for layer in range(len(store.layers)) for x in store.read(layer, row, length)]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Recorded(SmallModel):
    """A small model that keeps the logits of its last proposals, by row of its store."""

    def propose(self, rows, *, sampled=False):
        self.logits = {}
        return super().propose(rows, sampled=sampled)

    def run(self, feeds):
        logits = super().run(feeds)
        for f, row in zip(feeds, logits, strict=True):
            self.logits.setdefault(f.row, []).append(row)
        return logits


# --- 1: the cache is that of the tokens alone, whatever was accepted

PAGE, VOCAB = 4, 32
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1}
NANO_CONFIG = tiny_config(**SIZES, head_dim=8, num_layers=2, max_position_embeddings=512)
NANO = Transformer(NANO_CONFIG, RandomWeights(NANO_CONFIG, seed=3), dtype=torch.float64, page_size=PAGE)

PATTERN = st.integers(1, 9).flatmap(lambda g: st.tuples(st.just("draft"), st.just(g), st.integers(0, g)))
EVENT = st.one_of(
    PATTERN,
    PATTERN,
    PATTERN,
    PATTERN.map(lambda p: ("draft", p[1], p[1])),  # all accepted
    st.tuples(st.just("rest"), st.integers(1, 12)),  # plain decoding for so many tokens
    st.tuples(st.just("preempt"), st.booleans()),  # and with or without a prefill after it
    st.tuples(st.just("fork")),
)
ROUNDS = st.lists(st.tuples(EVENT, EVENT), min_size=5, max_size=8)


class Drafting:
    """Rows of one draft whose texts go on as the test says: so many proposals accepted, then another token."""

    def __init__(self, draft, prompts, rng):
        self.draft, self.rng, self.patterns = draft, rng, 0
        self.references = {}  # sequence id → reference, and what it has been fed
        self.seqs = [self.sequence(i, ids) for i, ids in enumerate(prompts)]
        self.next_id = len(prompts)

    def sequence(self, i, ids):
        params = greedy(100) if i % 2 else SamplingParams(seed=i, max_tokens=100)
        return Sequence(i, list(ids), len(ids), params, 100 + i, 1000, num_committed=len(ids) - 1)

    def act(self, events):
        drafting = [(seq, e) for seq, e in zip(self.seqs, events, strict=True) if e[0] == "draft"]
        for seq, event in zip(self.seqs, events, strict=True):
            if event[0] != "draft":
                getattr(self, event[0])(seq, *event[1:])
        if drafting:
            rows = [DraftRow(seq, g) for seq, (_, g, _) in drafting]
            tokens = self.draft.propose(rows, sampled=False).tokens
            for own, (seq, (_, g, a)) in zip(tokens, drafting, strict=True):
                self.verify(seq, own, g, a)
        self.draft.draft.store.check_integrity()

    def verify(self, seq, own, g, a):
        """Take the first ``a`` of a round's ``g`` tokens, and one that was not proposed in that place."""
        state, length, store = self.draft._states[seq.id], len(seq.ids), self.draft.draft.store
        assert (len(own), state.length, state.guesses) == (g, length, own[:-1])
        assert len(store._tables[state.row]) == store.pages_for(length + g - 1)
        other = self.rng.choice([t for t in range(VOCAB) if own[a:] == [] or t != own[a]])
        self.go_on(seq, [*own[:a], other])
        settled = replace(state)  # a copy: the text may go on before the draft looks at it
        self.draft._settle(seq, settled)
        assert settled.length == length + min(a, g - 1)
        self.patterns += 1

    def go_on(self, seq, tokens):
        seq.ids += tokens
        seq.num_committed = len(seq.ids) - 1

    def rest(self, seq, n):
        self.go_on(seq, [self.rng.randrange(VOCAB) for _ in range(n)])

    def preempt(self, seq, follow):
        self.draft.release(seq.id)
        if follow:
            for stop in (len(seq.ids) // 2, len(seq.ids) - 1):  # two chunks
                seq.num_committed = stop
                self.draft.follow([seq])
                assert self.draft._states[seq.id].length == stop

    def fork(self, seq):
        """The child takes the source's place half of the time; the other one is let go or stays idle."""
        child = replace(seq, id=self.next_id, ids=list(seq.ids))
        self.next_id += 1
        self.draft.fork(seq, child)
        if self.rng.random() < 0.5:
            self.seqs[self.seqs.index(seq)] = child
            if self.rng.random() < 0.5:
                self.draft.release(seq.id)

    def check(self, gamma=3):
        """Caches, logits and proposals against a reference per row."""
        proposal = self.draft.propose([DraftRow(seq, gamma) for seq in self.seqs], sampled=False)
        for seq, own in zip(self.seqs, proposal.tokens, strict=True):
            row = self.draft._states[seq.id].row
            reference, fed = self.references.setdefault(seq.id, (Reference(NANO), []))
            reference.length = sum(
                1 for _ in takewhile(lambda ab: ab[0] == ab[1], zip(fed, seq.ids[:-1], strict=False))
            )
            want, logits = reference.propose(seq, gamma, seq.ids[reference.length :])
            assert own == want
            fed[:] = [*seq.ids, *own[:-1]]
            close(torch.stack(self.draft.logits[row]), logits)
            close(cached(self.draft.draft.store, row, len(seq.ids) + gamma - 1), reference.cached())
        for seq in self.seqs:
            self.go_on(seq, [self.rng.randrange(VOCAB)])


@pytest.mark.parametrize("selector", [Full(1), StreamingLLM(400, 4)], ids=["full", "within the budget"])
@settings(max_examples=22, deadline=None, derandomize=True)
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), ROUNDS, st.randoms(use_true_random=False))
def test_the_cache_is_that_of_the_tokens_alone(selector, prompts, rounds, rng):
    """At least 300 patterns of (proposed, accepted): ragged rows over pages of four, rests, preemption and forks."""
    draft = Recorded(DraftModel(NANO, 400), selector, VOCAB)
    drafting = Drafting(draft, [[rng.randrange(VOCAB) for _ in range(n)] for n in prompts], rng)
    for events in rounds:
        drafting.act(events)
    drafting.check()
    for i in list(draft._states):
        draft.release(i)
    assert draft.draft.store.num_free_pages == 400


@pytest.mark.parametrize("selector", [Full(1), StreamingLLM(400, 4)], ids=["full", "within the budget"])
@pytest.mark.parametrize("g", range(1, 10))
def test_every_number_of_accepted_tokens(selector, g):
    """One row through all ``a`` of 0 … γ in turn: every page offset is passed, and the cache checked each time."""
    draft, rng = Recorded(DraftModel(NANO, 400), selector, VOCAB), random.Random(g)
    drafting = Drafting(draft, [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 6)], rng)
    for a in (*range(g + 1), g, 0):
        drafting.act([("draft", g, a), ("draft", g, g - a)])
        drafting.check(2)
    assert drafting.patterns == 2 * (g + 3)


@pytest.mark.parametrize(("budget", "sinks"), [(12, 2), (6, 3), (5, 0), (2, 1), (1, 0)])
def test_a_selection_that_leaves_something_out(budget, sinks):
    """What is fed before the proposals: at full attention a prompt and long rests, over the selection a few tokens."""
    selector, rng = StreamingLLM(budget, sinks), random.Random(budget)
    draft, reference = Recorded(DraftModel(NANO, 100), selector, VOCAB), Reference(NANO)
    seq = Sequence(0, [rng.randrange(VOCAB) for _ in range(30)], 30, greedy(300), 0, 1000, num_committed=29)
    draft.follow([seq])
    reference.take(seq.ids[:29])
    for step in range(24):
        missing = seq.ids[reference.length :]
        if len(missing) > max(1, budget - selector.sinks):
            reference.take(missing[:-1])
            missing = missing[-1:]
        first = feed(NANO, reference.store, [Feed(0, reference.length, missing, 1)], selector.select)
        reference.length += len(missing)
        (own,) = draft.propose([DraftRow(seq, 4)], sampled=False).tokens
        logits = torch.cat([first, *(reference.take([token], selector.select) for token in own[:-1])])
        close(torch.stack(draft.logits[draft._states[0].row]), logits)
        assert own == logits.argmax(dim=1).tolist()
        close(cached(draft.draft.store, draft._states[0].row, len(seq.ids) + 3), reference.cached())
        accepted = step % 5
        reference.length = len(seq.ids) + min(accepted, 3)
        other = (own[accepted] + 1) % VOCAB if accepted < 4 else 0
        seq.ids += [*own[:accepted], other, *(rng.randrange(VOCAB) for _ in range(step % 7 * (step % 2)))]
        seq.num_committed = len(seq.ids) - 1


def test_a_source_and_its_fork_part_within_a_shared_page():
    draft, rng = Recorded(DraftModel(NANO, 400), Full(1), VOCAB), random.Random(0)
    for n in range(1, 10):
        drafting = Drafting(draft, [[rng.randrange(VOCAB) for _ in range(n)]], rng)
        drafting.act([("draft", 4, 2)])
        source = drafting.seqs[0]
        child = replace(source, id=50, ids=list(source.ids))
        draft.fork(source, child)
        assert draft._states[50].length == draft._states[source.id].length == n + 2
        assert draft._states[50] is not draft._states[source.id]
        drafting.seqs = [source, child]
        for a, b in ((0, 3), (4, 4), (2, 0)):
            drafting.act([("draft", 4, a), ("draft", 4, b)])
            drafting.check()
        assert source.ids != child.ids
        draft.release(source.id)
        drafting.seqs = [child]
        drafting.check()
        draft.release(50)
        assert draft.draft.store.num_free_pages == 400


def test_a_fork_of_a_prompt_takes_no_more_than_the_prompt():
    """The source may know more than the child's text, whose last token is always fed again."""
    draft = Recorded(DraftModel(NANO, 100), Full(1), VOCAB)
    drafting = Drafting(draft, [[3, 1, 4, 1, 5, 9, 2, 6]], random.Random(0))
    drafting.act([("draft", 4, 4)])
    source = drafting.seqs[0]
    child = replace(source, id=7, ids=source.ids[:8])
    draft.fork(source, child)
    assert draft._states[7].length == 7
    drafting.seqs = [source, child]
    drafting.check()


def test_a_step_that_was_interrupted_can_be_taken_again(tiny, plain):
    """Proposed, but never verified: as by Ctrl-C in the target's pass."""
    engine = engine_of(tiny, {"self": tiny})
    seqs = [engine.sequence(engine.add(PROMPT[:n], greedy(20), SELF)) for n in (3, 8)]
    for _ in range(2):
        engine.step()
    forward = engine.runner.forward

    def interrupted(batch):
        raise KeyboardInterrupt

    engine.runner.forward = interrupted
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.runner.forward = forward
    finish(engine)
    assert tokens_of(seqs) == [plain(PROMPT[:n], greedy(20)) for n in (3, 8)]
    assert accepted(seqs) == drafted(seqs)


# --- 2: the target itself as a small model


def rounds_of(engine):
    """Sizes of the outputs of every sequence, in order, until the engine is idle."""
    sizes = {}
    for output in run(engine):
        sizes.setdefault(output.seq, []).append(len(output.tokens))
    return sizes


def check_perfect(sizes, gamma):
    """One token from the prompt, γ+1 from each verify but the last, and nothing refused."""
    for seq, (first, *rounds) in sizes.items():
        assert first == 1
        assert all(n == gamma + 1 for n in rounds[:-1])
        assert all(1 <= n <= gamma + 1 for n in rounds)
        assert seq.stats.accepted == seq.stats.drafted
        assert seq.stats.drafted or len(seq.output_ids) <= 2
        assert seq.stats.verify_passes == len(rounds)


@pytest.mark.parametrize(
    ("gamma", "shape"), [(g, list(SHAPES)[(2 * g + i) % 5]) for g in range(1, 9) for i in range(2)]
)
def test_the_target_as_its_own_small_model_accepts_everything(tiny, gamma, shape):
    sampling = SAMPLING[(gamma + len(shape)) % 5]
    requests = requests_of(shape, sampling, gamma)
    engine = engine_of(tiny, {"self": tiny}, num_pages=100, max_num_batched_tokens=(512, 7, 33)[gamma % 3])
    for prompt, params in requests:
        engine.add(prompt, params, replace(SELF, gamma=gamma))
    sizes = rounds_of(engine)
    check_perfect(sizes, gamma)
    assert tokens_of(sorted(sizes, key=lambda s: s.id)) == tokens_of(outputs(tiny, requests))
    ended(engine)


@pytest.mark.parametrize("params", [greedy(200), SAMPLED], ids=["greedy", "sampled"])
def test_two_hundred_tokens_without_drift(tiny, params):
    """Case O02 (a)."""
    engine = engine_of(tiny, {"self": tiny})
    seq = engine.sequence(engine.add(PROMPT, params, SELF))
    sizes = rounds_of(engine)
    check_perfect(sizes, 4)
    assert seq.stats.verify_passes == 40
    assert seq.output_ids == run_alone(tiny, PROMPT, params)


@pytest.mark.parametrize("params", [greedy(60), SamplingParams(seed=2, max_tokens=60)], ids=["greedy", "sampled"])
def test_acceptance_survives_preemption_and_forks(tiny, params):
    engine = engine_of(tiny, {"self": tiny}, max_num_batched_tokens=24)
    seqs = [engine.sequence(engine.add([n + i for i in range(n)], params, SELF)) for n in (5, 16, 50)]
    prompts = [list(seq.ids) for seq in seqs]
    for _ in range(8):
        engine.step()
    engine.scheduler.preempt(seqs[1])
    engine.step()
    forks = [
        engine.sequence(engine.fork(seq.id, draft=SELF, seed=seed))
        for seq, seed in zip(seqs, (None, 5, 6), strict=True)
    ]
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(seqs[0])
    engine.scheduler.preempt(forks[2])
    finish(engine)
    for seq in seqs + forks:
        assert seq.stats.accepted == seq.stats.drafted
        assert sum(seq.stats.drafted) > 0
    for prompt, seq in zip(prompts, seqs, strict=True):
        assert seq.output_ids == run_alone(tiny, prompt, params)
    assert forks[0].ids == seqs[0].ids
    ended(engine)


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("sampling", SAMPLING[:2], ids=repr)
def test_several_completions_of_one_prompt(tiny, sampling, chunk):
    params = SamplingParams(seed=4, max_tokens=21, n=3, **sampling)
    for n in (1, 16, 60):
        prompt = [(3 * i + n) % 128 for i in range(n)]
        got = {}
        for draft in (None, SELF):
            engine = engine_of(tiny, {"self": tiny}, max_num_batched_tokens=chunk)
            seqs = [engine.sequence(i) for i in engine.add_all(prompt, params, draft)]
            sizes = rounds_of(engine)
            got[draft] = tokens_of(seqs)
            ended(engine)
        check_perfect(sizes, 4)
        assert got[SELF] == got[None]


# --- 3: a draft that is sometimes wrong


@pytest.fixture(scope="module")
def noisy():
    return model_of(weights=Noise(0.009))


class Watch:
    """Before each round: the cache is as long as it should be. After it: the proposals are a fresh draft's."""

    def __init__(self, engine, config, model):
        self.config, self.model = config, model
        self.draft = watch(engine, config, self.before, self.after)
        self.last = {}  # sequence id → what was proposed after which length
        self.rounds = []  # (length, proposed, accepted)

    def before(self, rows):
        """All but the newest token is known, and all but the last two where every proposal stood: that was not fed."""
        for seq in (row.seq for row in rows):
            state = self.draft._states[seq.id]
            self.draft._settle(seq, state)
            unfed = 0
            if seq.id in self.last:
                length, tokens = self.last[seq.id]
                accepted = len(seq.ids) - length - 1
                assert seq.ids[length:-1] == tokens[:accepted]
                self.rounds.append((length, len(tokens), accepted))
                unfed = int(accepted == len(tokens))
            assert state.length == seq.num_prompt + len(seq.output_ids) - 1 - unfed

    def after(self, rows, proposal):
        fresh = make(self.config, self.model, None, {"small": DraftModel(self.model, 20)})
        for row, own in zip(rows, proposal.tokens, strict=True):
            twin = replace(row.seq, ids=list(row.seq.ids), num_committed=len(row.seq.ids) - 1)
            fresh.follow([twin])
            assert fresh._states[twin.id].length == len(twin.ids) - 1
            assert [own] == fresh.propose([DraftRow(twin, row.gamma)], sampled=False).tokens
            self.last[row.seq.id] = (len(row.seq.ids), own)


@pytest.mark.parametrize("params", [greedy(200), SAMPLED], ids=["greedy", "sampled"])
def test_after_any_refusal_the_draft_is_as_good_as_new(tiny, noisy, params):
    """Case O02 (b): refusals at every offset and none at all, 200 tokens, no loss of acceptance on the way."""
    engine = engine_of(tiny, {"small": noisy})
    watched = Watch(engine, SMALL, noisy)
    seq = engine.sequence(engine.add(PROMPT, params, SMALL))
    finish(engine)
    assert seq.output_ids == run_alone(tiny, PROMPT, params)
    assert {a for _, n, a in watched.rounds if n == 4} == {0, 1, 2, 3, 4}
    halves = [[(n, a) for length, n, a in watched.rounds if (length > 108) is late] for late in (False, True)]
    first, second = (sum(a for _, a in half) / sum(n for n, _ in half) for half in halves)
    assert 0.4 < accepted([seq]) / drafted([seq]) < 0.8
    assert second > first - 0.15


@pytest.mark.parametrize("kv", VIEW_SELECTORS)
def test_random_traffic_with_small_models(tiny, noisy, kv):
    """Join, leave, abort, preempt and fork with three drafts over two models, short of pages: output stays plain."""
    configs = [
        replace(SMALL, kv=kv, budget=24),
        replace(SELF, kv=kv, gamma=6),
        replace(STREAMING, weights="self"),
        None,
    ]
    world = DraftWorld(tiny, configs, {"small": noisy, "self": model_of(max_position_embeddings=48)}, seed=1)
    for _ in range(80):
        world.act()
        for small in world.engine.runner.small.values():
            small.store.check_integrity()
    while world.live:
        world.step()
    ended(world.engine)
    assert world.engine.stats.preemptions > 0
    for prompt, params, output, complete in world.done:
        assert output == drawn(tiny, prompt, params, output)
        assert len(output) == params.max_tokens or not complete


class DraftWorld(World):
    """The random traffic of the plain engine with drafts that have models."""

    def __init__(self, target, configs, models, seed):
        super().__init__(target, seed, num_pages=16, max_num_seqs=9, max_num_batched_tokens=32)
        self.engine, self.configs = engine_of(target, models, **vars_of(self.engine.config)), configs

    def join(self):
        prompt = [self.rng.randrange(128) for _ in range(self.rng.randint(1, 90))]
        params = random_params(self.rng)
        self.live[self.engine.add(prompt, params, self.rng.choice(self.configs))] = (prompt, params, [])

    def fork(self):
        source = self.rng.choice(list(self.live))
        prompt, params, output = self.live[source]
        draft = self.rng.choice([self.engine.sequence(source).draft, self.rng.choice(self.configs)])
        self.live[self.engine.fork(source, draft=draft)] = (prompt, params, list(output))


def vars_of(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


# --- 4: beyond the draft's range


@pytest.fixture(scope="module", params=["context", "window"])
def short(request):
    """The target's weights in a model whose range is 32: its context, or its sliding window."""
    return model_of(**{"context": {"max_position_embeddings": 32}, "window": {"sliding_window": 32}}[request.param])


def spy(model, monkeypatch):
    """Positions and lengths that ``model`` runs over."""
    forward, seen = model.forward, []

    def watched(ids, positions, plan, *rest):
        seen.append((int(positions.max()), int(plan.view.lens.max())))
        return forward(ids, positions, plan, *rest)

    monkeypatch.setattr(model, "forward", watched)
    return seen


def run_short(tiny, plain, short, monkeypatch, draft, prompt, cap):
    """One request, with proposals' sizes by the length of the text before them; output equal to plain."""
    seen, sizes = spy(short, monkeypatch), {}
    engine = engine_of(tiny, {"small": short})
    watch(engine, draft, after=lambda rows, proposal: sizes.update({len(rows[0].seq.ids): proposal.tokens[0]}))
    prompt = [(5 * i + 3) % 128 for i in range(prompt)]
    params = greedy(cap)
    seq = engine.sequence(engine.add(prompt, params, draft))
    finish(engine)
    ended(engine)
    assert seq.output_ids == plain(prompt, params)
    assert all(max(pair) <= 32 and pair[0] < 32 for pair in seen)
    return seq, {length: len(tokens) for length, tokens in sizes.items()}


BUDGETS = [(512, 16), (12, 2), (12, 0), (32, 16), (16, 8), (3, 16), (2, 1), (1, 0)]


@pytest.mark.parametrize(("budget", "sinks"), BUDGETS)
def test_drafting_goes_on_beyond_the_range(tiny, plain, short, monkeypatch, budget, sinks):
    """Case O14 (b): 200 tokens after a prompt of 20 with a draft of 32 positions, none of which is ever passed."""
    draft, cap = replace(STREAMING, budget=budget, sinks=sinks), 200 if (budget, sinks) == (12, 2) else 40
    seq, sizes = run_short(tiny, plain, short, monkeypatch, draft, 20, cap)
    assert all(n == min(4, 19 + cap - length) for length, n in sizes.items())
    assert max(sizes) > 13 + cap
    assert sum(seq.stats.accepted) > 0 or budget < 3


@pytest.mark.parametrize("gamma", [1, 4, 16, 40])
def test_a_whole_cache_ends_at_the_range(tiny, plain, short, monkeypatch, gamma):
    """Up to there the target's own weights are right about everything; from there on nothing is proposed."""
    draft = replace(SMALL, gamma=gamma)
    seq, sizes = run_short(tiny, plain, short, monkeypatch, draft, 8, 200 if gamma == 4 else 40)
    fits = min(gamma, 16)
    assert {length: n for length, n in sizes.items() if n} == {
        length: fits for length in sizes if length + fits - 1 <= 32
    }
    assert seq.stats.accepted == seq.stats.drafted
    assert sum(seq.stats.drafted) == sum(sizes.values()) >= 12


@pytest.mark.parametrize("prompt", [29, 31, 32, 33, 40, 100, 230])
@pytest.mark.parametrize("kv", VIEW_SELECTORS)
def test_prompts_around_and_beyond_the_range(tiny, plain, short, monkeypatch, kv, prompt):
    draft = replace(STREAMING, kv=kv)
    seq, sizes = run_short(tiny, plain, short, monkeypatch, draft, prompt, 24)
    if kv == "streaming_llm":
        assert all(n == min(4, prompt + 23 - length) for length, n in sizes.items())
    else:
        assert sum(sizes.values()) == 0
        assert seq.stats.verify_passes == 23


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("kv", VIEW_SELECTORS)
def test_ranges_of_a_few_tokens(tiny, plain, kv, size):
    for prompt in (PROMPT, [5]):
        models = {"small": model_of(max_position_embeddings=size)}
        (seq,) = run_requests(tiny, models, [(prompt, greedy(12))], [replace(STREAMING, kv=kv)])
        assert seq.output_ids == plain(prompt, greedy(12))
        assert (drafted([seq]) > 0) is (kv != "full" or len(prompt) == 1)
        assert len(seq.stats.drafted) <= size // 2


@pytest.mark.parametrize(("budget", "sinks"), BUDGETS)
def test_what_the_cache_holds_after_it_was_cut(short, budget, sinks):
    """The first tokens and the last ones at positions 0, 1, …: what a fresh model says of exactly these tokens."""
    selector = StreamingLLM(budget, sinks)
    keep = min(budget, 16)
    sinks = min(selector.sinks, keep // 2)
    for prompt in (3, 40):
        draft = Recorded(DraftModel(short, 4), selector, 128)
        rng = random.Random(prompt)
        seq = Sequence(0, [rng.randrange(128) for _ in range(prompt)], prompt, greedy(300), 0, 1000)
        cuts = 0
        draft.follow([replace(seq, num_committed=prompt - 1)])
        while len(seq.ids) < prompt + 70:
            old = draft._state(seq).skip
            (own,) = draft.propose([DraftRow(seq, 4)], sampled=False).tokens
            state = draft._states[0]
            if state.skip != old:
                cuts += 1
                kept = seq.ids[:sinks] + seq.ids[len(seq.ids) - keep + sinks :]
                reference = Reference(short, 32)
                logits = feed(short, reference.store, [Feed(0, 0, kept, 1)])
                assert (len(kept), state.length) == (keep, keep)
                close(draft.logits[state.row][0], logits[0])
                check_steps(draft, reference, state, seq, own, logits, keep)
            seq.ids += [*own[: rng.randint(0, 4)], rng.randrange(128)]
        assert cuts >= 2


def check_steps(draft, reference, state, seq, own, logits, keep):
    """The other steps of a round, over what the selection leaves of a cache that goes on behind ``keep``."""
    for i, token in enumerate(own):
        place = Place(seq, tuple(own[:i]))
        assert next_tokens(logits, [place])[0] == [token]
        if i < len(own) - 1:
            f = Feed(0, keep + i, [token], 1)
            logits = feed(reference.model, reference.store, [f], draft.selector.select)
            close(draft.logits[state.row][i + 1], logits[0])
    length = keep + len(own) - 1
    close(cached(draft.draft.store, state.row, length), cached(reference.store, 0, length))


@pytest.mark.parametrize("sinks", [0, 2, 16])
def test_forks_and_preemption_beyond_the_range(tiny, short, sinks):
    params, engine = greedy(36), engine_of(tiny, {"small": short})
    draft = replace(STREAMING, sinks=sinks, budget=16)
    prompt = [(5 * i + 3) % 128 for i in range(60)]
    seq = engine.sequence(engine.add(prompt, params, draft))
    for _ in range(6):
        engine.step()
    children = [engine.sequence(engine.fork(seq.id, draft=draft)) for _ in range(2)]
    states = engine.runner.draft(draft)._states
    source = states[seq.id]
    for child in children:
        own = states.get(child.id)
        assert own and own is not source and own.row != source.row
        assert (own.skip, own.known) == (source.skip, source.known)
    for _ in range(2):
        engine.step()
    engine.scheduler.preempt(children[0])
    finish(engine)
    ended(engine)
    assert tokens_of([seq, *children]) == [run_alone(tiny, prompt, params)] * 3
    assert seq.stats.drafted == children[1].stats.drafted or sum(children[1].stats.drafted) > 0


def test_a_fork_proposes_what_its_source_does_beyond_the_range(short):
    for sinks in (0, 2, 8):
        draft = Recorded(DraftModel(short, 8), StreamingLLM(16, sinks), 128)
        seq = Sequence(0, [(7 * i) % 128 for i in range(50)], 50, greedy(300), 0, 1000)
        for i in range(12):
            draft.propose([DraftRow(seq, 4)], sampled=False)
            seq.ids.append(i)
            child = replace(seq, id=1, ids=list(seq.ids))
            draft.fork(seq, child)
            tokens = draft.propose([DraftRow(seq, 4), DraftRow(child, 4)], sampled=False).tokens
            assert tokens[0] == tokens[1]
            close(*(torch.stack(rows) for rows in draft.logits.values()))
            seq.ids.append(tokens[0][0])
            draft.release(1)


# --- 5: embedding rows that the tokenizer does not know

ROWS = (120, 128, 136)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize("params", [greedy(30), SamplingParams(seed=3, max_tokens=30)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", ["coupled", "maximal"])
@pytest.mark.parametrize("kv", VIEW_SELECTORS)
def test_an_id_that_the_target_lacks_is_never_proposed(tiny, tokenizer, kv, rule, params):
    """Case O18: a draft of 136 rows that is sure of row 130."""
    draft_model = raise_ids(model_of(2, num_layers=1, vocab_size=136), {130: 1e4})
    engine = engine_of(tiny, {"small": draft_model}, tokenizer=tokenizer)
    draft = replace(STREAMING, kv=kv, sampling_rule=rule)
    proposed = []
    watch(engine, draft, after=lambda rows, proposal: proposed.extend(t for own in proposal.tokens for t in own))
    seq = engine.sequence(engine.add(PROMPT, params, draft))
    finish(engine)
    assert len(proposed) > 60 and max(proposed) < 128
    assert max(seq.output_ids) < 128
    if rule == "coupled" or params.greedy:
        assert seq.output_ids == run_alone(tiny, PROMPT, params)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rule", ["coupled", "maximal"])
def test_drafts_with_any_number_of_rows(tiny, tokenizer, rows, rule):
    draft_model = model_of(2, num_layers=1, vocab_size=rows)
    requests = requests_of("ragged", {"temperature": 0 if rule == "maximal" else 1}, rows)
    for kv in VIEW_SELECTORS:
        drafts = [replace(STREAMING, kv=kv, sampling_rule=rule)] * len(requests)
        seqs = run_requests(tiny, {"small": draft_model}, requests, drafts, tokenizer=tokenizer)
        assert tokens_of(seqs) == tokens_of(outputs(tiny, requests))
        assert drafted(seqs) > 30


@pytest.mark.parametrize("params", [greedy(30), SamplingParams(seed=3, max_tokens=30)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv", VIEW_SELECTORS)
def test_a_token_that_the_draft_lacks(tokenizer, kv, params):
    """Case O18: the target likes its row 125, of which neither the draft nor the tokenizer knows."""
    target = raise_ids(model_of(), {125: 6.0})
    draft_model = model_of(2, num_layers=1, vocab_size=120)
    draft = replace(STREAMING, kv=kv)
    prompts = [[*PROMPT, 125, 127, 120], PROMPT]
    seqs = run_requests(
        target, {"small": draft_model}, [(p, params) for p in prompts], [draft] * 2, tokenizer=tokenizer
    )
    assert tokens_of(seqs) == [run_alone(target, p, params) for p in prompts]
    assert all(3 < seq.output_ids.count(125) < 30 for seq in seqs)
    for seq in seqs:
        known = [t for t in seq.output_ids if t < 120]
        assert tokenizer.decode(seq.output_ids) == tokenizer.decode(known)
    assert tokenizer.decode([125]) == ""


@pytest.mark.parametrize("rule", ["coupled", "maximal"])
def test_only_tokens_that_the_draft_lacks_are_allowed(tiny, rule):
    """Nothing is left of the draft's distribution, and the request goes on as without it."""
    draft_model = model_of(2, num_layers=1, vocab_size=120)
    for temperature in (0, 1):
        params = SamplingParams(
            temperature=temperature, seed=3, max_tokens=20, allowed_token_ids=tuple(range(121, 127))
        )
        draft = replace(SMALL, sampling_rule=rule)
        (seq,) = run_requests(tiny, {"small": draft_model}, [(PROMPT, params)], [draft])
        assert seq.finish_reason == "length"
        assert set(seq.output_ids) <= set(range(121, 127))
        if rule == "coupled" or not temperature:
            assert seq.output_ids == run_alone(tiny, PROMPT, params)


# --- 6: memory


def refusals(engine):
    """How often a draft model's store had no page to give, as a list that grows."""
    seen = []
    for small in engine.runner.small.values():

        def watched(row, length, extra, reserve=small.store.reserve):
            ok = reserve(row, length, extra)
            seen.extend([] if ok else [(row, length, extra)])
            return ok

        small.store.reserve = watched
    return seen


def random_requests(seed, count):
    rng = random.Random(seed)
    lengths = [rng.choice([1, 15, 16, 17, 31, 33, rng.randint(1, 60)]) for _ in range(count)]
    return [
        ([rng.randrange(128) for _ in range(n)], SamplingParams(seed=i, max_tokens=rng.randint(5, 40)))
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def other():
    """A model of one layer that knows nothing of the target."""
    return model_of(2, num_layers=1)


def test_the_drafts_pages_last_as_long_as_the_targets(tiny, other):
    """All rows drafting in a pool that is short of pages: where the target has room for a row, the draft has."""
    rng, engine = random.Random(4), engine_of(tiny, {"small": other}, num_pages=12)
    refused = refusals(engine)
    requests = [
        (
            [rng.randrange(128) for _ in range(rng.choice([1, 2, 15, 16, 17, 31]))],
            SamplingParams(seed=i, max_tokens=100 - i),
        )
        for i in range(10)
    ]
    seqs = [engine.sequence(engine.add(p, q, SMALL)) for p, q in requests]
    finish(engine)
    ended(engine)
    assert engine.stats.preemptions > 3
    for seq, (prompt, params) in zip(seqs, requests, strict=True):
        assert len(seq.output_ids) == params.max_tokens
        assert seq.output_ids == drawn(tiny, prompt, params, seq.output_ids)
    assert refused == []


def test_completions_share_the_drafts_pages_of_their_prompt(tiny, other):
    """Six completions of 200 tokens in a pool that holds the prompt once."""
    engine = engine_of(tiny, {"small": other}, num_pages=24)
    refused = refusals(engine)
    seqs = [
        engine.sequence(i) for i in engine.add_all([i % 128 for i in range(200)], SamplingParams(seed=1, n=6), SMALL)
    ]
    store, most = engine.runner.small["small"].store, 0
    while engine.has_work:
        engine.step()
        most = max(most, 24 - store.num_free_pages)
    ended(engine)
    assert all(sum(seq.stats.drafted) > 0 for seq in seqs)
    assert most <= engine.stats.peak_kv_pages
    assert refused == []


def test_the_drafts_pages_come_back(tiny, other):
    """On preemption, abort and the end; the rows that stay keep theirs."""
    engine = engine_of(tiny, {"small": other})
    store = engine.runner.small["small"].store
    ids = [engine.add([n] * n, greedy(60), SMALL) for n in (5, 40, 70, 20)]
    seqs = [engine.sequence(i) for i in ids]
    for _ in range(6):
        engine.step()
    states = engine.runner.draft(SMALL)._states
    held = {i: len(store._tables[states[i].row]) for i in ids}
    free = store.num_free_pages
    assert free == 64 - sum(held.values())
    engine.scheduler.preempt(seqs[2])
    assert store.num_free_pages == free + held[ids[2]]
    engine.abort(ids[1])
    assert store.num_free_pages == free + held[ids[2]] + held[ids[1]]
    assert set(states) == {ids[0], ids[3]}
    finish(engine)
    ended(engine)


def test_two_drafts_of_one_model_share_its_pages(tiny):
    """Rows never mix: the target's own weights stay right about everything in both."""
    engine = engine_of(tiny, {"self": tiny})
    configs = [SELF, replace(SELF, budget=7), replace(SELF, kv="streaming_llm", budget=250), replace(SELF, gamma=2)]
    requests = random_requests(3, 12)
    seqs = [engine.sequence(engine.add(p, q, configs[i % 4])) for i, (p, q) in enumerate(requests)]
    finish(engine)
    assert len(engine.runner._drafts) == 3  # γ makes no other draft
    assert {id(d.draft) for d in engine.runner._drafts.values()} == {id(engine.runner.small["self"])}
    assert accepted(seqs) == drafted(seqs) > 100
    assert tokens_of(seqs) == tokens_of(outputs(tiny, requests))
    ended(engine)


@pytest.mark.parametrize("pages", [1, 2, 5])
@pytest.mark.parametrize("config", [SELF, replace(STREAMING, weights="self")], ids=["full", "streaming"])
def test_rows_without_a_page_are_not_drafted(tiny, config, pages):
    """The others are, and what comes out is the same."""
    requests = random_requests(5, 8)
    engine = with_models(make_engine(tiny, num_pages=128), {"self": tiny}, num_pages=pages)
    seqs = [engine.sequence(engine.add(p, q, config)) for p, q in requests]
    refused = refusals(engine)
    finish(engine)
    ended(engine)
    assert refused
    assert tokens_of(seqs) == tokens_of(outputs(tiny, requests))
    assert 0 < drafted(seqs)
    if config == SELF:
        assert accepted(seqs) == drafted(seqs)


def sized(memory, draft=None, config=None):
    kwargs = {"max_num_seqs": 10**4, "max_num_batched_tokens": 512, "block_size": 16, "seed": 0, "max_model_len": None}
    types = (torch.float32, torch.float32, torch.device("cpu"))
    return sizing.size_engine(config or tiny_config(), *types, draft=draft, kv_cache_memory_bytes=memory, **kwargs)


def test_the_drafts_share_of_the_memory(monkeypatch):
    """Its KV per token beside the target's, and its weights."""
    per_token = 2 * 2 * 16 * 4  # of one layer
    memory = 1000 * 16 * 3 * per_token
    assert sized(memory).num_pages == 1000
    for layers in (1, 2, 3, 9):
        assert sized(memory, tiny_config(num_layers=layers)).num_pages == 3000 // (3 + layers)
    monkeypatch.setattr(sizing, "free_memory", lambda device: 2**30)
    both = [sum(RandomWeights(c).load(n).numel() for n in RandomWeights(c).shapes()) for c in (tiny_config(), WIDE)]
    for draft, weights, layers in ((None, both[0], 3), (WIDE, sum(both), 4)):
        share = int((2**30 - 4 * weights) * sizing.FREE_MEMORY_SHARE)
        assert sized(None, draft).num_pages == share // (16 * layers * per_token)
    monkeypatch.setattr(sizing, "free_memory", lambda device: 4 * sum(both) - 1)
    assert sized(2**20).num_pages > 0
    with pytest.raises(sizing.OutOfMemoryError):
        sized(2**20, WIDE)


WIDE = tiny_config(num_layers=1, intermediate_size=4096)


def test_what_a_draft_reports_of_its_memory(tiny):
    engine = engine_of(tiny, {"small": model_of(2, num_layers=1, max_position_embeddings=64)})
    per_token = 2 * 2 * 16 * 8
    for config, budget in ((SMALL, 10**9), (STREAMING, 12)):
        draft = engine.runner.draft(config)
        for length in (1, 11, 12, 13, 63, 64, 65, 1000):
            assert draft.bytes(length) == min(length, 64) * per_token
            assert draft.bytes_read(length) == min(length, 64, budget) * per_token


# --- 7: layer skipping


def test_the_layers_that_are_chosen():
    assert choose_layers("all", 5) is None
    assert choose_layers("every:1", 5) == (0, 1, 2, 3, 4)
    assert choose_layers("every:2", 5) == (0, 2, 4)
    assert choose_layers("every:2", 6) == (0, 2, 4, 5)
    assert choose_layers("every:3", 5) == (0, 3, 4)
    assert choose_layers("every:5", 5) == (0, 4)
    assert choose_layers("every:1", 1) == choose_layers("first:1", 1) == (0,)
    assert choose_layers("first:1", 5) == (0,)
    assert choose_layers("first:5", 5) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("spec", ["every:6", "first:6", "first:9999"])
def test_more_layers_than_there_are(tiny, spec):
    with pytest.raises(InvalidValueError, match=f"layers is '{spec}'.*the target's 5 layers"):
        choose_layers(spec, 5)
    with pytest.raises(InvalidValueError, match="3 layers"):
        make_engine(tiny).add(PROMPT, greedy(), DraftConfig(layers=spec))


@pytest.mark.parametrize(
    "spec", ["", "every", "every:0", "first:0", "first:-1", "last:2", "every:1.5", "ALL", "every:2 "]
)
def test_layers_that_cannot_be_meant(spec):
    with pytest.raises(InvalidValueError, match="layers"):
        DraftConfig(layers=spec)


def test_layers_are_the_targets_business():
    for weights in ("ngram", "small"):
        with pytest.raises(InvalidValueError, match="layers is 'every:2'.*target"):
            DraftConfig(weights=weights, layers="every:2")


SKIPS = ("every:1", "every:2", "every:3", "first:1", "first:2", "first:3")


@pytest.mark.parametrize("kv", VIEW_SELECTORS)
@pytest.mark.parametrize("layers", SKIPS)
def test_output_is_plain_whatever_layers_run(tiny, layers, kv):
    for shape, sampling in (("ragged", SAMPLING[0]), ("short", SAMPLING[1]), ("equal", SAMPLING[3])):
        requests = requests_of(shape, sampling, layers)
        draft = DraftConfig(layers=layers, kv=kv, budget=16, gamma=3)
        seqs = outputs(tiny, requests, [draft] * len(requests))
        assert tokens_of(seqs) == tokens_of(outputs(tiny, requests))
        assert drafted(seqs) > 0
        if kv == "full" and layers in ("every:1", "first:3"):
            assert accepted(seqs) == drafted(seqs)


@pytest.mark.parametrize("kv", VIEW_SELECTORS)
@pytest.mark.parametrize("layers", ("all", *SKIPS))
def test_only_the_chosen_layers_are_written(tiny, layers, kv):
    """And of them only the slots reserved for the step: the newest token's and those of all proposals but the last."""
    engine = make_engine(tiny)
    config = DraftConfig(layers=layers, kv=kv, budget=16, gamma=4)
    seqs = [engine.sequence(engine.add([n] * n, greedy(20), config)) for n in (5, 30)]
    engine.step()
    store, rows = engine.store, []
    for seq in seqs:
        assert store.reserve(seq.id, seq.num_committed, 5)
        slots = store.slots(seq.id, seq.num_committed, seq.num_committed + 5)
        fill = torch.full((5, 2, 16), 777.0, dtype=torch.float64)
        for layer in range(3):
            store.write(layer, fill, fill, slots)
        rows.append((seq.num_committed, DraftRow(seq, 4)))
    before = store.k.clone(), store.v.clone()
    engine.runner.draft(config).propose([row for _, row in rows], sampled=False)
    chosen = choose_layers(layers, 3) or (0, 1, 2)
    written = torch.cat([store.slots(row.seq.id, at, at + 4) for at, row in rows])
    for old, new in zip(before, (store.k, store.v), strict=True):
        for layer in range(3):
            differ = old[layer].view(torch.int64) != new[layer].view(torch.int64)  # bits: untouched pages may hold NaN
            changed = store.layout.read(differ, torch.arange(64 * 16)).flatten(1).any(dim=1)
            assert changed.nonzero().flatten().tolist() == (sorted(written.tolist()) if layer in chosen else [])


@pytest.mark.parametrize("layers", ("all", *SKIPS))
def test_skipped_layers_are_not_read(tiny, layers):
    engine = make_engine(tiny)
    draft = engine.runner.draft(DraftConfig(kv="full", layers=layers))
    share = len(choose_layers(layers, 3) or range(3))
    assert draft.bytes(100) == 0
    assert draft.bytes_read(100) == 100 * 2 * 2 * 16 * 8 * share


def test_every_layer_is_the_whole_model(tiny):
    """The same proposals, to the bit."""
    proposals = {}
    for layers in ("all", "every:1", "first:3"):
        engine = make_engine(tiny)
        config, seen = DraftConfig(layers=layers, budget=8, gamma=5), proposals.setdefault(layers, [])
        watch(engine, config, after=lambda rows, proposal, seen=seen: seen.append(proposal.tokens))
        engine.add(PROMPT, SamplingParams(seed=1, max_tokens=40), config)
        finish(engine)
    assert proposals["all"] == proposals["every:1"] == proposals["first:3"] != []


def test_skipping_layers_leaves_a_worse_model(tiny):
    """Proposals are those of a model made of the chosen layers alone."""

    class Chosen:
        path = "some layers"

        def __init__(self):
            self.inner, self.config = RandomWeights(tiny_config(), 6), tiny_config(num_layers=2)

        def shapes(self):
            return RandomWeights(self.config).shapes()

        def load(self, name):
            return self.inner.load(name.replace("layers.1.", "layers.2."))

    fewer = Transformer(tiny_config(num_layers=2), Chosen(), dtype=torch.float64)
    engine = make_engine(tiny)
    config = DraftConfig(layers="every:2", kv="full", gamma=4)
    seq = engine.sequence(engine.add(PROMPT, greedy(2), config))
    engine.step()
    # The skipped layer fed the cache of the layer behind it, so compare where the draft has fed everything itself.
    store = engine.store
    assert store.reserve(99, 0, 30)
    alone = replace(seq, id=99, ids=[7], num_committed=0)
    (own,) = engine.runner.draft(config).propose([DraftRow(alone, 4)], sampled=False).tokens
    assert own == Reference(fewer).propose(alone, 4, [7])[0]
    assert own != Reference(tiny).propose(alone, 4, [7])[0]


# --- 8: the maximal rule


EIGHT = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1}


def eight_model(seed, layers, rows=8):
    config = tiny_config(**(EIGHT | {"vocab_size": rows, "num_layers": layers}))
    return Transformer(config, RandomWeights(config, seed=seed, std=0.25), dtype=torch.float64)


@pytest.fixture(scope="module")
def eight():
    """A target of eight tokens and three layers with spread-out distributions."""
    return eight_model(1, 3)


@pytest.fixture(scope="module")
def law(eight):
    return exact_law(eight, 3)


LAWS = {
    "full": ({}, DraftConfig(weights="small", kv="full", gamma=2)),
    "streaming": ({}, DraftConfig(weights="small", budget=2, gamma=3)),
    "fewer rows": ({"rows": 6}, DraftConfig(weights="small", kv="full", gamma=2)),
    "more rows": ({"rows": 10}, DraftConfig(weights="small", budget=4, gamma=3)),
    "every:2": ({}, DraftConfig(layers="every:2", kv="full", gamma=2)),
    "first:1": ({}, DraftConfig(layers="first:1", budget=4, gamma=3)),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_law_under_the_maximal_rule(eight, law, name):
    """600 seeds against the exact joint law of three tokens; ids that the draft lacks have q = 0."""
    sizes, config = LAWS[name]
    small = eight_model(3, 1, **sizes)
    if sizes.get("rows") == 10:
        raise_ids(small, {9: 1e4})
    config = replace(config, sampling_rule="maximal")
    tokens, seqs = sample_law(eight, config, 3, 600, prepare=lambda e: with_models(e, {"small": small}))
    assert g_test(counts(tokens, 8), law) > 1e-4
    assert 0.02 * drafted(seqs) < accepted(seqs) < 0.98 * drafted(seqs)


@pytest.mark.parametrize("name", LAWS)
def test_proposals_are_drawn_from_the_distributions_given_with_them(eight, name):
    """``log_q`` is normalised, −inf where the draft has no row, and the law of what was proposed."""
    sizes, config = LAWS[name]
    engine = with_models(make_engine(eight, num_pages=2000), {"small": eight_model(3, 1, **sizes)})
    ids = [3, 1, 4, 1, 5, 2, 6, 5]
    draft, rows = engine.runner.draft(config), []
    for i in range(600):
        seq = Sequence(i, list(ids), 8, SamplingParams(max_tokens=9), 10_000 + i, 100, num_committed=7)
        engine.store.reserve(i, 0, 10)
        rows.append(DraftRow(seq, 2))
    for part in range(0, 600, 300):  # one prompt for all
        feed(eight, engine.store, [Feed(i, 0, ids[:-1], 0) for i in range(part, part + 300)])
    proposal = draft.propose(rows, sampled=True)
    q = proposal.log_q.exp()
    assert q.shape == (1200, 8)
    torch.testing.assert_close(q.sum(dim=1), torch.ones(1200, dtype=torch.float64))
    torch.testing.assert_close(q[::2], q[:1].expand(600, 8))
    assert (q[0] == 0).sum() == (2 if sizes.get("rows") == 6 else 0)
    first = Counter(tokens[0] for tokens in proposal.tokens)
    assert g_test(torch.tensor([first[t] for t in range(8)]).double(), q[0]) > 1e-4
    for token in (t for t, n in first.items() if n > 100):  # the second token's law belongs to the first token
        second = Counter(b for a, b in proposal.tokens if a == token)
        row = next(q[2 * i + 1] for i, (a, _) in enumerate(proposal.tokens) if a == token)
        assert g_test(torch.tensor([second[t] for t in range(8)]).double(), row) > 1e-5
    if config.weights == "small" and config.kv == "full":
        own = Reference(engine.runner.small["small"].model, 50)
        last = engine.runner.small["small"].model.config.vocab_size - 1
        logits = own.take([min(t, last) for t in ids])[:, :8]
        want, _ = distribution(logits, [Place(rows[0].seq)])
        close(q[0, : want.shape[1]], want[0].exp())
