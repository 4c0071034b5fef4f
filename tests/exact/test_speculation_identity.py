"""Speculation changes no output: every draft, every γ, every company, against plain decoding in float64."""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
import torch

from longdraft import SamplingParams
from longdraft.config import DraftConfig
from longdraft.drafts.registry import SELECTORS
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.spec import verify
from tests.conftest import greedy, make_engine, run
from tests.exact.fake_drafts import FAKES, Constant, Noisy, finish, install, outputs, place, slot, tokens_of
from tests.exact.laws import counts, g_test
from tests.exact.test_engine_identity import World, random_params

GAMMAS = range(1, 9)
BUDGETS = (2, 8, 16, 33, 64)
SAMPLING = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
)
SHAPES = {  # prompt lengths of a batch, and how many tokens each row is given
    "one": ((70,), (24,)),
    "equal": ((33, 33, 33), (16, 16, 16)),
    "ragged": ((1, 15, 17, 90), (20, 17, 3, 14)),
    "short": ((2, 16, 31, 64, 65), (1, 2, 18, 9, 12)),
    "long": ((130, 5, 48), (17, 8, 20)),
}
CASES = [  # selector, γ, budget, shape, sampling: five of each (selector, γ), pairwise covering
    (kv, gamma, BUDGETS[k], list(SHAPES)[(k + gamma + s) % 5], SAMPLING[(2 * k + gamma + s) % 5])
    for (s, kv), gamma, k in product(enumerate(SELECTORS), GAMMAS, range(5))
]


def requests_of(shape, sampling, seed):
    """A batch of fresh random prompts."""
    rng = random.Random(repr((shape, sorted(sampling.items()), seed)))
    lengths, caps = SHAPES[shape]
    return [
        ([rng.randrange(128) for _ in range(n)], SamplingParams(seed=rng.randrange(2**63), max_tokens=cap, **sampling))
        for n, cap in zip(lengths, caps, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(tiny):
    """(shape, sampling's number, seed) → plain decoding of these requests, run once for all the drafts they meet."""
    return cache(lambda shape, number, seed: outputs(tiny, requests_of(shape, SAMPLING[number], seed)))


def check_case(model, known, kv, gamma, budget, shape, sampling):
    requests, plain = requests_of(shape, sampling, gamma % 3), known(shape, SAMPLING.index(sampling), gamma % 3)
    draft = DraftConfig(kv=kv, budget=budget, gamma=gamma)
    spec = outputs(model, requests, [draft] * len(requests))
    assert tokens_of(spec) == tokens_of(plain)
    assert [s.finish_reason for s in spec] == [s.finish_reason for s in plain]
    for seq in spec:
        assert sum(seq.stats.accepted) + seq.stats.verify_passes == len(seq.output_ids) - 1
        assert seq.stats.drafted or len(seq.output_ids) <= 2
    return len(requests)


def test_the_cases_cover_every_pair():
    """Of any two of selector, γ, budget, shape and sampling, every combination of values occurs."""
    rows = [(kv, gamma, budget, shape, repr(sampling)) for kv, gamma, budget, shape, sampling in CASES]
    values = [set(column) for column in zip(*rows, strict=True)]
    assert values == [set(SELECTORS), set(GAMMAS), set(BUDGETS), set(SHAPES), {repr(s) for s in SAMPLING}]
    for a, b in combinations(range(5), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(values[a], values[b]))
    assert all(sum(row[:2] == pair for row in rows) >= 5 for pair in product(SELECTORS, GAMMAS))
    assert sum(len(SHAPES[row[3]][0]) for row in rows) >= 200


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kv", SELECTORS)
def test_speculative_output_is_plain_output(tiny, plain, kv, gamma):
    for case in CASES:
        if case[:2] == (kv, gamma):
            check_case(tiny, plain, *case)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kv", SELECTORS)
def test_the_full_product(tiny, plain, kv, gamma):
    for budget, shape, sampling in product(BUDGETS, SHAPES, SAMPLING):
        check_case(tiny, plain, kv, gamma, budget, shape, sampling)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches(tiny, seed):
    """Rows with other drafts, other γ and other sampling, and plain ones, in the same step."""
    rng = random.Random(seed)
    requests = [r for shape in SHAPES for r in requests_of(shape, rng.choice(SAMPLING), seed)]
    drafts = [random_draft(rng) for _ in requests]
    assert None in drafts
    rng.shuffle(requests)
    assert tokens_of(outputs(tiny, requests, drafts)) == tokens_of(outputs(tiny, requests))


def random_draft(rng, plain=0.2):
    """None, a selector of the registry, or one of the fakes, under the coupled rule."""
    if rng.random() < plain:
        return None
    gamma = rng.choice(GAMMAS)
    if rng.random() < 0.5:
        return DraftConfig(kv=rng.choice(list(SELECTORS)), budget=rng.choice(BUDGETS), gamma=gamma)
    return replace(slot(rng.choice(list(FAKES))), gamma=gamma)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_target_accepts_all_of_its_own_tokens(tiny, gamma, shape):
    """Full view: acceptance exactly 1, γ+1 tokens in every verify but the last, which the length cuts."""
    sampling = SAMPLING[(gamma + len(shape)) % 5]
    engine, steps = make_engine(tiny, num_pages=100), {}
    for prompt, params in requests_of(shape, sampling, gamma):
        engine.add(prompt, params, DraftConfig(kv="full", gamma=gamma))
    for output in run(engine):
        steps.setdefault(output.seq, []).append(len(output.tokens))
    for seq, (first, *rounds) in steps.items():
        assert first == 1
        assert all(n == gamma + 1 for n in rounds[:-1])
        assert all(1 <= n <= gamma + 1 for n in rounds)
        assert seq.stats.accepted == seq.stats.drafted
        assert seq.stats.verify_passes == len(rounds)


@pytest.mark.parametrize("sampling", (SAMPLING[0], SAMPLING[1], SAMPLING[3]), ids=repr)
@pytest.mark.parametrize("name", FAKES)
def test_adversarial_drafts(tiny, name, sampling):
    """A constant, random, always wrong, noisy, NaN draft, and the target itself, at several γ in one batch."""
    requests = requests_of("ragged", sampling, name) + requests_of("short", sampling, name)
    drafts = [replace(slot(name), gamma=1 + i % 8) for i in range(len(requests))]
    plain, spec = outputs(tiny, requests), outputs(tiny, requests, drafts)
    assert tokens_of(spec) == tokens_of(plain)
    drafted, accepted = (sum(sum(getattr(s.stats, x)) for s in spec) for x in ("drafted", "accepted"))
    assert drafted > 0
    assert {"wrong": accepted == 0, "self": accepted == drafted}.get(name, True)
    if name == "noisy":
        assert 0 < accepted < drafted


def test_bad_logits_behind_a_rejected_token_hurt_nobody(tiny):
    """Plain decoding would never have met them."""
    requests = requests_of("ragged", SAMPLING[1], 2)
    engine = install(make_engine(tiny))
    seqs = [engine.sequence(engine.add(p, q, replace(slot("wrong"), gamma=4))) for p, q in requests]
    forward = engine.runner.forward

    def spoiled(batch):
        logits, start = forward(batch).clone(), 0
        for row in batch.rows:
            logits[start + 1 : start + row.num_logits] = torch.nan
            start += row.num_logits
        return logits

    engine.runner.forward = spoiled
    finish(engine)
    assert [s.finish_reason for s in seqs] == ["length"] * len(seqs)
    assert tokens_of(seqs) == tokens_of(outputs(tiny, requests))


@pytest.mark.parametrize("rule", ["coupled", "maximal"])
@pytest.mark.parametrize("name", FAKES)
def test_adversarial_drafts_under_both_rules_when_greedy(tiny, name, rule):
    """At temperature 0 both rules give plain greedy decoding, whatever the draft."""
    requests = requests_of("ragged", {"temperature": 0}, 1)
    drafts = [replace(slot(name), gamma=1 + 2 * i, sampling_rule=rule) for i in range(len(requests))]
    assert tokens_of(outputs(tiny, requests, drafts)) == tokens_of(outputs(tiny, requests))


@pytest.mark.parametrize("sampling", SAMPLING[:2], ids=repr)
def test_a_draft_that_always_proposes_the_end_of_sequence(tiny, sampling):
    """A proposed EOS ends nothing unless the target draws it too."""
    requests = requests_of("ragged", sampling, 3)
    plain = outputs(tiny, requests)
    unused = next(t for t in range(128) if all(t not in s.output_ids for s in plain))
    used = plain[0].output_ids[5]
    for eos in (unused, used):
        drafts = [replace(slot("constant"), gamma=g) for g in (1, 3, 5, 8)]

        def prepare(engine, eos=eos):
            place(engine, slot("constant"), Constant(eos))
            return engine

        want = outputs(tiny, requests, eos_token_ids=(eos,))
        got = outputs(tiny, requests, drafts, prepare=prepare, eos_token_ids=(eos,))
        assert tokens_of(got) == tokens_of(want)
        assert [s.finish_reason for s in got] == [s.finish_reason for s in want]
        assert (got[0].finish_reason == "stop") is (eos == used)


@pytest.mark.parametrize("kv", SELECTORS)
def test_the_maximal_rule_is_plain_when_greedy(tiny, kv):
    requests = [r for shape in SHAPES for r in requests_of(shape, {"temperature": 0}, kv)]
    plain = tokens_of(outputs(tiny, requests))
    for gamma, budget in ((1, 2), (4, 16), (8, 64)):
        draft = DraftConfig(kv=kv, budget=budget, gamma=gamma, sampling_rule="maximal")
        assert tokens_of(outputs(tiny, requests, [draft] * len(requests))) == plain


# --- the law under the maximal rule


@pytest.fixture(scope="module")
def eight():
    """A model with eight tokens and spread-out distributions."""
    config = tiny_config(vocab_size=8, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
    return Transformer(config, RandomWeights(config, seed=1, std=0.25), dtype=torch.float64)


PROMPT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7]


def exact_law(model, n):
    """Probabilities of the next ``n`` tokens after the prompt at temperature 1, ``[8 ** n]``."""
    law, contexts = torch.ones(1, dtype=torch.float64), [[]]
    for _ in range(n):
        engine = make_engine(model, num_pages=2 * len(contexts), max_num_seqs=len(contexts))
        rows = []
        forward = engine.runner.forward
        engine.runner.forward = lambda batch, forward=forward, rows=rows: rows.append(forward(batch)) or rows[-1]
        for context in contexts:
            engine.add(PROMPT + context, greedy(1))
        list(run(engine))
        law = (law[:, None] * torch.cat(rows).softmax(dim=-1)).flatten()
        contexts = [[*context, t] for context in contexts for t in range(8)]
    return law


def sample(model, draft, n, runs, prepare=install):
    """``runs`` samples of the first ``n`` tokens, and the ended sequences."""
    requests = [(PROMPT, SamplingParams(seed=1000 + i, max_tokens=n + 1)) for i in range(runs)]
    seqs = outputs(model, requests, [draft] * runs, prepare=prepare, num_pages=2 * runs, max_num_batched_tokens=8192)
    return torch.tensor([s.output_ids[:n] for s in seqs]), seqs


MAXIMAL = {
    "streaming": DraftConfig(budget=2, gamma=2, sampling_rule="maximal"),
    "full": DraftConfig(kv="full", gamma=3, sampling_rule="maximal"),
    "one-hot": replace(slot("constant"), gamma=2, sampling_rule="maximal"),
    "random": replace(slot("random"), gamma=3, sampling_rule="maximal"),
    "NaN": replace(slot("nan"), gamma=2, sampling_rule="maximal"),
    "coupled": DraftConfig(budget=2, gamma=2),
    "plain": None,
}


@pytest.mark.parametrize("draft", MAXIMAL.values(), ids=MAXIMAL)
def test_the_law_of_three_tokens(eight, draft):
    """The first comes from the prompt, the others from rounds of proposals; 1,500 seeds against the exact joint."""
    tokens, seqs = sample(eight, draft, 3, 1500)
    assert g_test(counts(tokens, 8), exact_law(eight, 3)) > 1e-4
    drafted, accepted = (sum(sum(getattr(s.stats, x)) for s in seqs) for x in ("drafted", "accepted"))
    if draft == MAXIMAL["full"]:
        assert accepted == drafted
    elif draft and draft != MAXIMAL["NaN"]:
        assert 0.02 * drafted < accepted < 0.98 * drafted


def test_the_test_of_the_law_has_teeth(eight, monkeypatch):
    """Accepting every proposal gives another law, and the test sees it."""
    monkeypatch.setattr(verify, "accept_uniforms", lambda seed, position: torch.zeros(len(position)).double() + 1e-12)
    tokens, _ = sample(eight, MAXIMAL["streaming"], 3, 2000)
    assert g_test(counts(tokens, 8), exact_law(eight, 3)) < 1e-6


def test_the_maximal_rule_with_both_kinds_of_draft_in_one_batch(eight):
    """Rows whose drafts give distributions beside rows whose drafts are deterministic."""
    engine = install(make_engine(eight, num_pages=4000, max_num_seqs=2000, max_num_batched_tokens=8192))
    drafts = [MAXIMAL["streaming"], MAXIMAL["one-hot"]]
    for i in range(2000):
        engine.add(PROMPT, SamplingParams(seed=i, max_tokens=4), drafts[i % 2])
    done = finish(engine)
    for kind in range(2):
        tokens = torch.tensor([seq.output_ids[:3] for i, seq in done.items() if i % 2 == kind])
        assert g_test(counts(tokens, 8), exact_law(eight, 3)) > 1e-4


# --- what happens around a request


class DraftWorld(World):
    """The random traffic of the plain engine, with drafts of all kinds; forks get another draft than their source."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        install(self.engine)

    def join(self):
        length = self.rng.choice([1, 2, 15, 16, 17, 31, 33, self.rng.randint(1, 90)])
        prompt = [self.rng.randrange(128) for _ in range(length)]
        params = random_params(self.rng)
        self.live[self.engine.add(prompt, params, random_draft(self.rng))] = (prompt, params, [])

    def fork(self):
        source = self.rng.choice(list(self.live))
        prompt, params, output = self.live[source]
        child = self.engine.fork(source, draft=random_draft(self.rng))
        self.live[child] = (prompt, params, list(output))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_thousand_random_steps_with_drafts(tiny, seed):
    world = DraftWorld(tiny, seed, num_pages=16, max_num_seqs=9, max_num_batched_tokens=32)
    world.run(1000)
    world.check()


@pytest.mark.parametrize("kv", SELECTORS)
def test_preemption_between_rounds(tiny, kv):
    """Any running row loses its pages at any time; what it returns stays the same."""
    requests = requests_of("ragged", SAMPLING[1], kv) + requests_of("short", SAMPLING[0], kv)
    want, rng = tokens_of(outputs(tiny, requests)), random.Random(0)
    engine = make_engine(tiny, num_pages=100)
    ids = [engine.add(p, q, DraftConfig(kv=kv, budget=8, gamma=1 + i % 8)) for i, (p, q) in enumerate(requests)]
    seqs = [engine.sequence(i) for i in ids]
    while engine.has_work:
        if engine.scheduler.running and rng.random() < 0.6:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        engine.step()
        engine.store.check_integrity()
    assert tokens_of(seqs) == want
    assert sum(s.stats.preemptions for s in seqs) > 2
    assert engine.store.num_free_pages == 100


def test_a_step_that_fails_after_drafting_can_be_repeated(tiny, monkeypatch):
    """Tentative keys and reserved pages of the failed round do no harm."""
    requests = requests_of("ragged", SAMPLING[1], 5)
    want = tokens_of(outputs(tiny, requests))
    engine = install(make_engine(tiny))
    seqs = [engine.sequence(engine.add(p, q, replace(slot("noisy"), gamma=6))) for p, q in requests]
    forward, rng = engine.runner.forward, random.Random(1)

    def failing(batch):
        if rng.random() < 0.4:
            raise RuntimeError("out of memory")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", failing)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
        engine.store.check_integrity()
    assert failures > 3
    assert tokens_of(seqs) == want
    assert engine.store.num_free_pages == engine.store.num_pages


@pytest.mark.parametrize("sampling", SAMPLING[:2], ids=repr)
def test_forks_with_other_drafts(tiny, sampling):
    """A prefilled request forked to every draft: all of them, and the source, give the plain output."""
    (prompt, params), drafts = requests_of("one", sampling, 7)[0], [replace(slot(name), gamma=5) for name in FAKES]
    drafts += [DraftConfig(kv=kv, budget=b, gamma=g) for kv, b, g in product(SELECTORS, (2, 33), (1, 8))]
    (want,) = tokens_of(outputs(tiny, [(prompt, params)]))
    engine = install(make_engine(tiny, num_pages=200))
    source = engine.add(prompt, params, DraftConfig(budget=8, gamma=3))
    for _ in range(3):
        engine.step()
    seqs = [engine.sequence(source)]
    assert 1 < len(seqs[0].output_ids) < len(want)
    for i, draft in enumerate(drafts):
        seqs.append(engine.sequence(engine.fork(source, draft=draft)))
        if i % 4 == 0:
            engine.step()
    engine.abort(seqs.pop(3).id)
    finish(engine)
    assert tokens_of(seqs) == [want] * len(seqs)
    assert engine.store.num_free_pages == 200


# --- pages and limits


def test_short_pages_shrink_proposals_before_anyone_is_preempted(tiny):
    """Three rows of one page each, two spare pages, γ = 20: all would like two more pages, and nobody loses any."""
    prompts = [[(i * 31 + j * 7) % 128 for j in range(14)] for i in range(3)]
    plain = [outputs(tiny, [(p, greedy(3))])[0].output_ids for p in prompts]
    # The third token ends each request: then no row ever needs a second page for a token it really has.
    requests = [(p, greedy(100, stop_token_ids=(t[2],))) for p, t in zip(prompts, plain, strict=True)]
    engine = install(make_engine(tiny, num_pages=5))
    seqs = [engine.sequence(engine.add(p, q, replace(slot("wrong"), gamma=20))) for p, q in requests]
    proposed = []
    propose = engine.runner.propose

    def spy(batch):
        proposed.append([row.room for row in batch.rows if not batch.prefill])
        return propose(batch)

    engine.runner.propose = spy
    finish(engine)
    assert proposed[1] == [20, 1, 1]  # the first takes what there is, the others fill their own page
    assert engine.scheduler.num_preemptions == 0
    assert all(s.output_ids == t[: t.index(t[2]) + 1] for s, t in zip(seqs, plain, strict=True))


@pytest.mark.parametrize("seed", range(1))
def test_nobody_is_preempted_for_a_proposal(tiny, seed):
    """Whenever a decoding step takes pages from a row, the rows' own next tokens did not fit."""
    requests = [r for shape in ("ragged", "long", "short") for r in requests_of(shape, SAMPLING[1], seed)]
    requests = [(p, replace(q, max_tokens=50)) for p, q in requests]
    want = tokens_of(outputs(tiny, requests))
    engine, rng = install(make_engine(tiny, num_pages=16)), random.Random(seed)
    preempt, store = engine.scheduler.preempt, engine.store

    def watched(victim):
        assert sum(store.pages_for(s.num_committed + max(1, s.num_pending)) for s in engine.scheduler.running) > 16
        preempt(victim)

    engine.scheduler.preempt = watched
    seqs = [engine.sequence(engine.add(p, q, random_draft(rng, plain=0))) for p, q in requests]
    finish(engine)
    assert engine.scheduler.num_preemptions > 0
    assert tokens_of(seqs) == want


@pytest.mark.parametrize("kv", SELECTORS)
@pytest.mark.parametrize("prompt", [55, 58, 61, 62, 63])
def test_gamma_at_the_context_limit(tiny, kv, prompt):
    """From nine tokens of room down to a prompt that leaves room for one."""
    request = ([(9 * i) % 128 for i in range(prompt)], SamplingParams(seed=1, max_tokens=None))
    (plain,) = outputs(tiny, [request], max_model_len=64)
    assert (len(plain.output_ids), plain.finish_reason) == (64 - prompt, "length")
    for gamma in (1, 5, 8, 64):
        (seq,) = outputs(tiny, [request], [DraftConfig(kv=kv, budget=16, gamma=gamma)], max_model_len=64)
        assert (seq.output_ids, seq.finish_reason) == (plain.output_ids, "length")
        assert len(seq.stats.drafted) <= max(0, 64 - prompt - 2)


def test_a_context_shorter_than_the_budget_is_drafted_by_the_target_itself(tiny):
    requests = requests_of("ragged", SAMPLING[1], 9)
    for seq in outputs(tiny, requests, [DraftConfig(kv="streaming_llm", budget=110, gamma=4)] * 4):
        assert seq.stats.accepted == seq.stats.drafted


@pytest.mark.parametrize("start", range(12, 20))
def test_rollback_over_a_page_border(tiny, start):
    """γ = 8 from every offset around a border, accepted in part: pages come back and nothing is lost."""
    requests = [
        ([(3 * i + start) % 128 for i in range(start)], params) for params in (greedy(30), random_params(random))
    ]
    (want, _), engine = tokens_of(outputs(tiny, requests)), make_engine(tiny)
    config = DraftConfig(kv="full", budget=9, gamma=8)
    place(engine, config, Noisy(engine, seed=start, rate=0.4, ragged=False))
    seq = engine.sequence(engine.add(*requests[0], config))
    while engine.has_work:
        engine.step()
        held = engine.store.num_pages - engine.store.num_free_pages
        assert held == (0 if seq.finish_reason else engine.store.pages_for(seq.num_committed))
    assert seq.output_ids == want
    assert 0 < sum(seq.stats.accepted) < sum(seq.stats.drafted)


def test_one_row_takes_all_and_its_mate_nothing(tiny):
    requests = requests_of("equal", {"temperature": 0}, 0)
    seqs = outputs(tiny, requests, [replace(slot(n), gamma=5) for n in ("wrong", "self", "constant")])
    assert tokens_of(seqs) == tokens_of(outputs(tiny, requests))
    assert sum(seqs[0].stats.accepted) == 0
    assert seqs[1].stats.accepted == seqs[1].stats.drafted != []


@pytest.mark.parametrize("budget", [2, 5, 16, 40])
def test_the_selection_holds_exactly_its_budget_at_every_length(budget):
    """No key twice, sinks and window, the newest token always, and all of them while they fit."""
    from longdraft.view import NEVER, TableView

    selector = StreamingLLM(budget)
    for length in range(1, 100):
        view = TableView(torch.arange(7)[None], torch.tensor([length]), 16)
        positions = selector.select(view).expand()[1].flatten()
        seen = positions[positions != NEVER].tolist()
        assert len(seen) == len(set(seen)) == min(length, budget) == selector.tokens_read(length)
        assert max(seen) == length - 1
        if length > budget:
            assert seen == [*range(selector.sinks), *range(length - budget + selector.sinks, length)]
