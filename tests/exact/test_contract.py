"""Every parameter of a request under every draft: what plain decoding returns, and what the parameter's words say."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from longdraft.checkpoint.tokenizer import Tokenizer
from longdraft.config import DraftConfig, EngineConfig
from longdraft.engine.admission import derived_seed
from longdraft.engine.engine import Engine
from longdraft.errors import ContextLengthError
from longdraft.exactness import forced_logits
from longdraft.models.feedback import FeedbackConfig
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams
from longdraft.spec.noise import all_gumbels
from tests.conftest import greedy, run
from tests.exact.fake_drafts import FAKES, install, slot
from tests.spire_drafts import spire_of

VOCAB, PAGE = 128, 16
GAMMAS = range(1, 9)
DRAFTS = {
    "streaming": DraftConfig(kv="streaming_llm", budget=16, sinks=4),
    "full": DraftConfig(kv="full"),
    "snapkv": DraftConfig(kv="snapkv", budget=24),
    "snapkv-first:2": DraftConfig(kv="snapkv", budget=40, layers="first:2", refresh=2),
    "topk": DraftConfig(kv="topk", budget=20),
    "pages": DraftConfig(kv="pages", budget=50, sinks=0),
    "verified": DraftConfig(kv="verified", budget=50, sinks=0),
    "every:2": DraftConfig(layers="every:2", budget=16, sinks=4),
    "first:2": DraftConfig(layers="first:2", kv="full"),
    "ngram": DraftConfig(weights="ngram"),
    "self": DraftConfig(weights="self", kv="full"),
    "self-streaming": DraftConfig(weights="self", budget=16, sinks=4),
    "small": DraftConfig(weights="small", kv="full"),
    "small-streaming": DraftConfig(weights="small", budget=16, sinks=4),
    "wide": DraftConfig(weights="wide", budget=16, sinks=4),
    "self-snapkv": DraftConfig(weights="self", kv="snapkv", budget=24),
    "spire": DraftConfig(weights="spire"),
    "spire-trained": DraftConfig(weights="spire-trained"),
    **{f"fake-{name}": slot(name) for name in FAKES},
}
NOISY, CONTROL, EOS = "fake-noisy", 34, 39  # CONTROL is a control token of the tokenizer, EOS ends a text


# --- engines, and requests run to their end


def letters() -> Tokenizer:
    """128 tokens of one to three letters and a capital, one of them a control token."""
    names = [chr(97 + i % 26) * (1 + i % 3) + chr(65 + i // 26) for i in range(VOCAB)]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([names[CONTROL]])
    return Tokenizer(backend)


class Kit:
    """A target with a tokenizer, an end-of-sequence token and small models, which makes engines on demand."""

    def __init__(self, model):
        self.model, self.tokenizer = model, letters()
        self.known = {}  # plain runs alone: the same ones are compared with again and again
        self.small = {"self": model, "small": self.one_layer(120), "wide": self.one_layer(136)}
        source = RandomWeights(model.config, seed=6)
        self.small["spire"] = spire_of(model, source, FeedbackConfig((0, 1, 2), 16, 2), trained=False)
        self.small["spire-trained"] = spire_of(model, source, FeedbackConfig((1, 2), 12), trained=True)

    @staticmethod
    def one_layer(vocab):
        config = tiny_config(num_layers=1, vocab_size=vocab, max_position_embeddings=64)
        return Transformer(config, RandomWeights(config, seed=2), dtype=torch.float64)

    def engine(self, **sizes):
        sizes = {"max_model_len": 256, "num_pages": 400, "max_num_batched_tokens": 64} | sizes
        return install(Engine(self.model, EngineConfig(**sizes), (EOS,), self.tokenizer, self.small))

    def alone(self, prompt, params, draft=None, **sizes):
        """The completions of one request in an engine of its own."""
        if draft:
            return self.batch([(prompt, params)], [draft], **sizes)[0]
        key = (tuple(prompt), params, *sizes.items())
        if key not in self.known:
            self.known[key] = self.batch([(prompt, params)], **sizes)[0]
        return self.known[key]

    def batch(self, requests, drafts=None, **sizes):
        """The completions of each request = (prompt, params), all run together; ``drafts``: one for each, or None."""
        engine = self.engine(**sizes)
        drafts = drafts or [None] * len(requests)
        ids = [engine.add_all(list(p), q, d) for (p, q), d in zip(requests, drafts, strict=True)]
        seqs = [[engine.sequence(i) for i in own] for own in ids]
        drain(engine)
        return seqs

    def text(self, ids, **kwargs):
        return self.tokenizer.decode(ids, **kwargs)


@pytest.fixture(scope="module")
def kit(tiny):
    return Kit(tiny)


def drain(engine):
    """Run to the end; afterwards nothing is left of anybody."""
    outputs = list(run(engine))
    check_nothing_left(engine)
    return outputs


def stores(engine):
    """The target's, small models' and SPIRe drafts'."""
    own = [*engine.runner.small.values(), *engine.runner._drafts.values()]
    return [engine.store, *(holder.store for holder in own if hasattr(holder, "store"))]


def check_nothing_left(engine):
    assert engine.num_unfinished == 0
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert not engine._texts
    for store in stores(engine):
        store.check_integrity()
        assert store.num_free_pages == store.num_pages
    for draft in engine.runner._drafts.values():
        assert not getattr(draft, "_states", None)
        if copies := getattr(draft, "copies", None):
            copies.store.check_integrity()
            assert copies.store.num_free_pages == copies.store.num_pages
        if memory := getattr(draft, "memory", None):
            assert not any(value for value in vars(memory).values() if isinstance(value, dict))


def summary(seq):
    return seq.output_ids, seq.finish_reason, seq.stop_text, seq.error


def check_same(got, want):
    """Two sequences returned the same: ids, reason, text before a stop, error, log-probabilities and ranks."""
    assert summary(got) == summary(want)
    check_same_logprobs(got.logprobs, want.logprobs)
    check_same_logprobs(got.prompt_logprobs, want.prompt_logprobs)


def check_same_logprobs(got, want):
    assert [list(entry) for entry in got] == [list(entry) for entry in want]
    for ours, theirs in zip(got, want, strict=True):
        assert [x.rank for x in ours.values()] == [x.rank for x in theirs.values()]
        assert [x.logprob for x in ours.values()] == pytest.approx([x.logprob for x in theirs.values()], abs=1e-10)


def check_all_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            check_same(*pair)


def with_gamma(name, gamma):
    return replace(DRAFTS[name], gamma=gamma)


def random_ids(rng, n):
    return [rng.randrange(VOCAB) for _ in range(n)]


def prompt_of(n, seed=0):
    return random_ids(random.Random(1000 * seed + n), n)


def speculated(seqs):
    """How many tokens were proposed and accepted for all these completions."""
    each = [seq.stats for completions in seqs for seq in completions]
    return tuple(sum(sum(getattr(x, what)) for x in each) for what in ("drafted", "accepted"))


# --- (a) every parameter × every draft × every γ


def push_away(ids, logits):
    """Steers away from the last three tokens, and a little towards the next multiple of their sum."""
    logits = logits.clone()
    logits[ids[-3:]] -= 4
    logits[sum(ids[-3:]) % VOCAB] += 2
    return logits


def by_prompt(prompt, ids, logits):
    """Depends on the prompt and on how many tokens there are."""
    return logits.roll(1) * 0.5 + logits if (len(ids) + len(prompt)) % 3 else logits


KINDS = {  # what a request asks for, given the plain output for its prompt
    "nothing": lambda out, text: {},
    "no seed": lambda out, text: {"seed": None},
    "top_p": lambda out, text: {"top_p": 0.7},
    "top_k": lambda out, text: {"top_k": 6},
    "min_p": lambda out, text: {"min_p": 0.1},
    "repetition": lambda out, text: {"repetition_penalty": 1.3},
    "presence": lambda out, text: {"presence_penalty": 1.9},
    "frequency": lambda out, text: {"frequency_penalty": 1.7},
    "penalties": lambda out, text: {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.9,
        "frequency_penalty": 0.4,
    },
    "logit_bias": lambda out, text: {"logit_bias": {out[2]: -100, out[5]: 3, 77: 6}},
    "bad_words": lambda out, text: {"bad_words": [out[1:3], out[4:7], (out[7],), text[8]]},
    "allowed": lambda out, text: {"allowed_token_ids": range(0, VOCAB, 3)},
    "stop": lambda out, text: {"stop": ["".join(text[5:8])[1:-1], "#"]},
    "stop_token_ids": lambda out, text: {"stop_token_ids": [out[6]]},
    "min_tokens": lambda out, text: {"min_tokens": 5, "stop_token_ids": [out[1], out[6]], "ignore_eos": False},
    "logprobs": lambda out, text: {"logprobs": 4},
    "prompt_logprobs": lambda out, text: {"prompt_logprobs": 2},
    "n": lambda out, text: {"n": 3},
    "processors": lambda out, text: {"logits_processors": [push_away, by_prompt]},
    "everything": lambda out, text: {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {out[3]: -100, out[4]: 2},
        "bad_words": [out[1:3]],
        "allowed_token_ids": [t for t in range(VOCAB) if t % 7],
        "min_tokens": 7,
        "stop_token_ids": out[:3],
        "logits_processors": by_prompt,
        "stop": text[5],
        "logprobs": 2,
        "prompt_logprobs": 0,
        "n": 2,
        "top_p": 0.95,
    },
}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 40)
RULES = {"greedy": {"temperature": 0}, "sampled": {"temperature": 1.0}}
CASES = [  # kind, rule, draft, γ: each kind with each draft and each γ, each draft with each γ, greedy and sampled
    (kind, rule, draft, 1 + (k + d + 4 * r) % 8)
    for (r, rule), (k, kind), (d, draft) in product(enumerate(RULES), enumerate(KINDS), enumerate(DRAFTS))
]


def request_of(kit, kind, rule):
    """(prompt, params) of a case."""
    k = list(KINDS).index(kind)
    prompt = prompt_of(LENGTHS[k % 8], seed=k + 100 * (rule == "sampled"))
    base = {"max_tokens": 18 - k % 4, "ignore_eos": True, "seed": 7**k, **RULES[rule]}
    out = kit.alone(prompt, SamplingParams(**base))[0].output_ids
    text = [kit.tokenizer.token_text(token) for token in out]
    return prompt, SamplingParams(**base | KINDS[kind](tuple(out), text))


@pytest.fixture(scope="module")
def everybody(kit):
    """All requests of the matrix, and the completions that plain decoding gives them."""
    requests = [request_of(kit, kind, rule) for rule, kind in product(RULES, KINDS)]
    return requests, kit.batch(requests)


def test_the_cases_cover_every_pair():
    values = [set(column) for column in zip(*CASES, strict=True)]
    assert values == [set(KINDS), set(RULES), set(DRAFTS), set(GAMMAS)]
    for a, b in combinations(range(4), 2):
        assert {(case[a], case[b]) for case in CASES} == set(product(values[a], values[b]))


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_parameter_under_every_draft(kit, everybody, draft):
    """One ragged batch of all requests, γ from 1 to 8 side by side: identical to plain decoding."""
    requests, plain = everybody
    gammas = {(kind, rule): gamma for kind, rule, name, gamma in CASES if name == draft}
    drafts = [with_gamma(draft, gammas[kind, rule]) for rule, kind in product(RULES, KINDS)]
    assert len(drafts) == len(requests)
    got = kit.batch(requests, drafts)
    check_all_same(got, plain)
    drafted, accepted = speculated(got)
    assert drafted > 0
    if draft in ("full", "self", "fake-self"):
        assert accepted == drafted
    elif draft not in ("fake-wrong", "fake-nan", "fake-constant", "fake-random", "ngram", "small", "wide"):
        assert 0 < accepted < drafted


@pytest.mark.parametrize("seed", range(1))
def test_every_parameter_under_mixed_drafts(kit, everybody, seed):
    """Another draft for each row, plain ones between, in an engine short of seats that prefills in small chunks."""
    requests, plain = everybody
    rng = random.Random(seed)
    drafts = [rng.choice([None, with_gamma(rng.choice(list(DRAFTS)), rng.choice(GAMMAS))]) for _ in requests]
    check_all_same(kit.batch(requests, drafts, max_num_batched_tokens=13, max_num_seqs=24), plain)


def test_the_plain_batch_is_what_each_request_gives_alone(kit, everybody):
    for (prompt, params), want in zip(*everybody, strict=True):
        if params.seed is not None or params.greedy:
            check_all_same([kit.alone(prompt, params)], [want])


def test_every_kind_does_something(kit, everybody):
    """Each parameter changes the ids, or where they end, of its own requests, or adds log-probabilities."""
    changed = Counter()
    for (rule, kind), (prompt, params), seqs in zip(product(RULES, KINDS), *everybody, strict=True):
        same = {name: getattr(params, name) for name in ("temperature", "seed", "max_tokens", "ignore_eos")}
        bare = kit.alone(prompt, SamplingParams(**{**same, "seed": seqs[0].seed}))[0]
        changed[kind] += seqs[0].output_ids != bare.output_ids
        assert len(seqs) == params.n
        assert all(len(s.logprobs) == (0 if params.logprobs is None else len(s.output_ids)) for s in seqs)
        assert len(seqs[0].prompt_logprobs) == (0 if params.prompt_logprobs is None else len(prompt) - 1)
        if kind in ("stop", "stop_token_ids", "min_tokens"):
            assert seqs[0].finish_reason == "stop", (kind, rule)
            assert (seqs[0].stop_text is not None) is (kind == "stop")
        assert all(s.error is None for s in seqs)
    unchanged = {kind for kind in KINDS if not changed[kind]}
    assert unchanged == {"nothing", "no seed", "logprobs", "prompt_logprobs", "n"}


# --- (b) log-probabilities are those of a teacher-forced pass


def check_scores(entries, tokens, logits, top):
    """Each token's entry against the row of ``logits`` it was drawn from: own value and rank, and the best ones."""
    for entry, token, row in zip(entries, tokens, logits.log_softmax(dim=-1), strict=True):
        assert next(iter(entry)) == token
        assert set(entry) == {token, *row.topk(top).indices.tolist()}
        for other, value in entry.items():
            assert value.logprob == pytest.approx(float(row[other]), abs=1e-9)
            assert value.rank == 1 + int((row > row[other]).sum())


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=RULES)
def test_logprobs_of_accepted_corrected_and_bonus_tokens(kit, sampling):
    """Case O09: three rows, γ = 4, a draft that is often wrong."""
    params = SamplingParams(max_tokens=40, logprobs=5, ignore_eos=True, **sampling)
    requests = [(prompt_of(n), params) for n in (5, 16, 29)]
    seqs = [own[0] for own in kit.batch(requests, [with_gamma(NOISY, 4)] * 3)]
    for (prompt, _), seq in zip(requests, seqs, strict=True):
        logits = forced_logits(kit.model, [seq.ids], len(seq.output_ids) + 1)[:-1]
        check_scores(seq.logprobs, seq.output_ids, logits, 5)
        assert seq.ids[: len(prompt)] == prompt
        assert sum(seq.stats.accepted) > 0  # accepted tokens
        assert 0 < seq.stats.rejections < seq.stats.verify_passes  # corrected and bonus tokens


SCORED = SamplingParams(temperature=0, max_tokens=14, prompt_logprobs=3, ignore_eos=True)


def check_prompt_scores(kit, seq):
    prompt = seq.ids[: seq.num_prompt]
    check_scores(seq.prompt_logprobs, prompt[1:], forced_logits(kit.model, [prompt], len(prompt))[:-1], 3)


@pytest.mark.parametrize("draft", [None, with_gamma(NOISY, 4), with_gamma("small", 3)], ids=["plain", "noisy", "small"])
def test_prompt_logprobs_with_every_chunk_size(kit, draft):
    requests = [(prompt_of(n), SCORED) for n in (37, 1, 2, 20)]
    want = [own[0] for own in kit.batch(requests)]
    for seq in want:
        check_prompt_scores(kit, seq)
    for chunk in (1, 2, 5, 16, 36, 60) if draft else range(1, 38):
        got = [own[0] for own in kit.batch(requests, [draft] * 4, max_num_batched_tokens=chunk)]
        check_all_same([[s] for s in got], [[s] for s in want])


@pytest.mark.parametrize("steps", range(1, 7))
def test_prompt_logprobs_after_preemption(kit, steps):
    """Thrown out in the middle of the prompt, at its end, or while decoding: every entry comes once."""
    prompt = prompt_of(37)
    want = kit.alone(prompt, SCORED)
    for draft in (None, with_gamma(NOISY, 3)):
        engine = kit.engine(max_num_batched_tokens=10)
        seq = engine.sequence(engine.add(prompt, SCORED, draft))
        for _ in range(steps):
            engine.step()
        middle = seq.num_committed < len(prompt)
        assert middle is (steps < 4)
        engine.scheduler.preempt(seq)
        drain(engine)
        check_same(seq, want[0])


@pytest.mark.parametrize("seats", [1, 2])
@pytest.mark.parametrize("steps", range(0, 7))
def test_prompt_logprobs_of_a_fork(kit, steps, seats):
    """Forked while queued, within the prompt or later, whether or not there is a seat to share the cache."""
    prompt = prompt_of(37)
    want = kit.alone(prompt, SCORED)
    engine = kit.engine(max_num_batched_tokens=10, max_num_seqs=seats)
    first = engine.sequence(engine.add(prompt, SCORED))
    for _ in range(steps):
        engine.step()
    second = engine.sequence(engine.fork(first.id, draft=with_gamma(NOISY, 3)))
    drain(engine)
    check_all_same([[first], [second]], [want, want])


# --- (c) penalties, bias, bad words, allowed tokens, min_tokens against a slow loop of their own


def oracle(kit, prompt, params, eos=()):
    """The output by one teacher-forced pass per token and vLLM's formulas, written down one token id at a time."""
    output, stop_ids = [], {*params.stop_token_ids, *eos}
    while len(output) < params.max_tokens:
        logits = forced_logits(kit.model, [[*prompt, *output]], 1)[0].tolist()
        scores = [oracle_score(logits, t, prompt, output, params, stop_ids) for t in range(VOCAB)]
        if params.temperature:
            position = torch.tensor([len(prompt) + len(output)])
            noise = all_gumbels(torch.tensor([params.seed]), position, VOCAB)[0].tolist()
            scores = [s / params.temperature + g for s, g in zip(scores, noise, strict=True)]
        output.append(max(range(VOCAB), key=scores.__getitem__))  # the first of equals
        if output[-1] in stop_ids and len(output) > params.min_tokens:
            break
    return output


def oracle_score(logits, token, prompt, output, params, stop_ids):
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return -torch.inf
    for *start, last in params.bad_words:
        if token == last and [*prompt, *output][len(prompt) + len(output) - len(start) :] == start:
            return -torch.inf
    if token in stop_ids and len(output) < params.min_tokens:
        return -torch.inf
    score = logits[token] + dict(params.logit_bias).get(token, 0)
    if token in prompt or token in output:
        score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
    score -= params.frequency_penalty * output.count(token)
    return score - params.presence_penalty * (token in output)


O08 = {
    "presence": lambda out: {"presence_penalty": 0.8},
    "frequency": lambda out: {"frequency_penalty": 0.5},
    "repetition": lambda out: {"repetition_penalty": 1.3},
    "banned": lambda out: {"logit_bias": {out[3]: -100}},
    "forced": lambda out: {"logit_bias": {out[10]: 100}},
    "bad words": lambda out: {"bad_words": [out[5:7]]},
    "together": lambda out: {
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {out[3]: -100, out[10]: 3},
        "bad_words": [out[5:7]],
    },
    "together, forced": lambda out: O08["together"](out) | {"logit_bias": {out[3]: -100, out[10]: 100}},
}


@pytest.mark.parametrize(("name", "sampling"), [*product(O08, ["greedy"]), ("together", "sampled")])
def test_penalties_bias_and_bad_words(kit, name, sampling):
    """Case O08: 64 tokens, a draft that is often wrong, γ = 2, 8 and 48."""
    prompt, settings = prompt_of(24), {"max_tokens": 64, "ignore_eos": True, "seed": 11, **RULES[sampling]}
    free = kit.alone(prompt, SamplingParams(**settings))[0].output_ids
    params = SamplingParams(**settings, **O08[name](free))
    plain = kit.alone(prompt, params)
    ids = plain[0].output_ids
    assert ids == oracle(kit, prompt, params)
    assert ids != free
    for got in kit.batch([(prompt, params)] * 3, [with_gamma(NOISY, gamma) for gamma in (2, 8, 48)]):
        check_all_same([got], [plain])
        assert sum(got[0].stats.accepted) > 0 or name.endswith("forced")
    for token, bias in params.logit_bias:
        assert (token not in ids) if bias == -100 else True
    for a, b in params.bad_words:
        assert (a, b) in pairwise(free)
        assert (a, b) not in pairwise(ids)
        assert a in ids or name != "bad words"


def random_contract(rng, likely):
    """A few parameters at random that act on the tokens in ``likely``, so that they matter."""
    some = lambda n: rng.sample(likely, min(n, len(likely)))  # noqa: E731
    choices = {
        "repetition_penalty": lambda: rng.choice([0.5, 0.9, 1.2, 2.0]),
        "presence_penalty": lambda: rng.choice([-1.5, -0.5, 0.7, 2.0]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.3, 0.9, 2.0]),
        "logit_bias": lambda: {t: rng.choice([-100, -3, 2, 4]) for t in some(4)},
        "bad_words": lambda: [
            [rng.choice(likely)],
            *([likely[i], likely[i + 1]] for i in range(0, len(likely) - 1, 3)),
        ],
        "allowed_token_ids": lambda: {*some(12), *rng.sample(range(VOCAB), 50)},
        "min_tokens": lambda: rng.randint(1, 12),
        "stop_token_ids": lambda: some(2),
    }
    return {name: choices[name]() for name in rng.sample(list(choices), rng.randint(1, 5))}


@pytest.mark.parametrize("seed", range(8))
def test_random_parameters_against_the_oracle(kit, seed):
    rng = random.Random(seed)
    prompt = random_ids(rng, rng.randint(1, 30))
    settings = {"max_tokens": 16, **RULES[rng.choice(list(RULES))], "seed": rng.randrange(2**63)}
    likely = kit.alone(prompt, SamplingParams(**settings, ignore_eos=True))[0].output_ids
    requests = [(prompt, SamplingParams(**settings | random_contract(rng, likely))) for _ in range(3)]
    for (_, params), own in zip(requests, kit.batch(requests, [with_gamma(NOISY, rng.randint(1, 8))] * 3), strict=True):
        assert own[0].output_ids == oracle(kit, prompt, params, eos=(EOS,))
        check_same(own[0], kit.alone(prompt, params)[0])


# --- (d) n completions


COMPLETIONS = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True, logprobs=1)
SOME = (None, with_gamma(NOISY, 4), with_gamma("small-streaming", 3), with_gamma("ngram", 8), with_gamma("full", 2))
SOME_IDS = ("plain", "noisy", "small", "ngram", "full")


def separately(kit, prompt, params):
    """The completions as requests of their own, without speculation."""
    seeds = [params.seed, *(derived_seed(params.seed, i) for i in range(1, params.n))]
    return [kit.alone(prompt, replace(params, n=1, seed=seed))[0] for seed in seeds]


@pytest.mark.parametrize("draft", SOME, ids=SOME_IDS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_n_completions_are_requests_of_their_own(kit, length, draft):
    """The first is that of n = 1; they differ, repeat in order, and more of them begin with the same ones."""
    prompt = prompt_of(length)
    want = separately(kit, prompt, COMPLETIONS)
    assert len({tuple(seq.output_ids) for seq in want}) == 3
    for n, chunk in ((3, 64), (5, 7), (1, 64)):
        got = kit.alone(prompt, replace(COMPLETIONS, n=n), draft, max_num_batched_tokens=chunk)
        assert len(got) == n
        check_all_same([got[:3]], [want[:n]])


@pytest.mark.parametrize("draft", SOME, ids=SOME_IDS)
def test_n_greedy_completions_are_equal(kit, draft):
    got = kit.alone(prompt_of(20), greedy(12, n=4, ignore_eos=True), draft)
    assert len({tuple(seq.output_ids) for seq in got}) == 1


@pytest.mark.parametrize("draft", SOME, ids=SOME_IDS)
def test_n_completions_share_the_pages_of_the_prompt(kit, draft):
    engine = kit.engine()
    engine.add_all(prompt_of(100), replace(COMPLETIONS, n=6, max_tokens=8), draft)
    drain(engine)
    shared, own = 100 // PAGE, 2  # of the rest: the last prompt token's page, and one more for outputs and proposals
    assert shared + 6 <= engine.stats.peak_kv_pages <= shared + 6 * own
    assert engine.stats.peak_kv_pages < 6 * -(-100 // PAGE)
    assert engine.stats.prompt_tokens == 100


@pytest.mark.parametrize("draft", SOME[:4], ids=SOME_IDS[:4])
@pytest.mark.parametrize(
    "sizes", [{"max_num_seqs": 1}, {"max_num_seqs": 2}, {"num_pages": 5}, {"num_pages": 7, "max_num_seqs": 2}], ids=str
)
def test_n_completions_in_a_crowded_engine(kit, sizes, draft):
    """With too few seats or pages, beside other requests that come first and last."""
    params = replace(COMPLETIONS, max_tokens=12)
    requests = [(prompt_of(n), replace(params, seed=n, n=count)) for n, count in ((9, 1), (17, 4), (32, 3))]
    want = [separately(kit, *request) for request in requests]
    check_all_same(kit.batch(requests, [draft] * 3, max_num_batched_tokens=14, **sizes), want)


@pytest.mark.parametrize("draft", SOME[:3], ids=SOME_IDS[:3])
@pytest.mark.parametrize("what", ["abort", "preempt", "hold", "fork"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_n_completions_when_something_happens_to_the_first(kit, what, steps, draft):
    """While it is queued, within its prompt, at its end, and later: the others go on as ever."""
    prompt = prompt_of(20)
    want = separately(kit, prompt, COMPLETIONS)
    engine = kit.engine(max_num_batched_tokens=9, max_num_seqs=4)
    seqs = [engine.sequence(i) for i in engine.add_all(prompt, COMPLETIONS, draft)]
    for _ in range(steps):
        engine.step()
    first = seqs[0]
    if what == "abort":
        engine.abort(first.id)
    elif what == "preempt" and first in engine.scheduler.running:
        engine.scheduler.preempt(first)
    elif what == "hold":
        engine.hold(first.id)
        list(run(engine))
        assert all(seq.status.value == "finished" for seq in seqs[1:]) or steps < 3
        engine.hold(first.id, False)
    elif what == "fork":
        seqs.append(engine.sequence(engine.fork(first.id, draft=with_gamma(NOISY, 2))))
        want = [*want, want[0]]
    drain(engine)
    check_all_same([seqs[1:]], [want[1:]])
    if what == "abort":
        assert first.output_ids == want[0].output_ids[: len(first.output_ids)]
        assert first.finish_reason == "abort"
    else:
        check_same(first, want[0])


def level(ids, logits):
    """All tokens that are left are equally probable."""
    return torch.where(logits.isfinite(), 0.0, logits)


THREE = {"allowed_token_ids": (3, 50, 99), "logits_processors": level}


def test_neighbouring_seeds_draw_evenly_and_independently(kit):
    """Case O07: first tokens of seeds 1 to 300 with three equally probable tokens, and pairs of neighbours."""
    params = SamplingParams(max_tokens=1, **THREE)
    seqs = kit.batch([([1, 2, 3], replace(params, seed=seed)) for seed in range(1, 301)], max_num_seqs=300)
    drawn = [THREE["allowed_token_ids"].index(own[0].output_ids[0]) for own in seqs]
    check_even_and_independent(drawn)


def test_the_completions_of_one_request_draw_evenly_and_independently(kit):
    params = SamplingParams(max_tokens=4, n=100, seed=1, **THREE)
    seqs = kit.alone([1, 2, 3], params, max_num_seqs=100)
    for position in range(4):
        check_even_and_independent([THREE["allowed_token_ids"].index(s.output_ids[position]) for s in seqs])


def check_even_and_independent(drawn):
    assert stats.chisquare([drawn.count(i) for i in range(3)]).pvalue > 1e-3
    pairs = Counter(pairwise(drawn))
    table = [[pairs[a, b] for b in range(3)] for a in range(3)]
    assert stats.chi2_contingency(table).pvalue > 1e-3


# --- (e) where an output ends, and where its prompt begins


GREEDY_PROMPT = list(range(8))  # its greedy output holds the control token


@pytest.fixture(scope="module")
def free(kit):
    """The greedy output for ``GREEDY_PROMPT`` with nothing to end it, and its tokens' texts."""
    ids = kit.alone(GREEDY_PROMPT, greedy(24, ignore_eos=True))[0].output_ids
    assert CONTROL in ids[1:6]
    return ids, [kit.tokenizer.token_text(token) for token in ids]


def everywhere(kit, prompt, params):
    """The first completion of a request, after checking that drafts of every sort give the same."""
    want = kit.alone(prompt, params)
    names = ("streaming", "every:2", "ngram", "self", "small-streaming", "fake-noisy", "fake-wrong")
    got = kit.batch([(prompt, params)] * len(names), [with_gamma(name, 3 + i) for i, name in enumerate(names)])
    check_all_same(got, [want] * len(names))
    return want[0]


@pytest.mark.parametrize("minimum", [0, 1, 5, 12])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_with_end_tokens(kit, free, minimum, ignore_eos):
    """Neither the end of sequence nor a stop token comes before ``min_tokens``; both may be the very next token."""
    ids, _ = free
    bias = {ids[4] if ignore_eos else EOS: 30}  # the best token everywhere
    params = greedy(12, min_tokens=minimum, stop_token_ids=(ids[4],), ignore_eos=ignore_eos, logit_bias=bias)
    seq = everywhere(kit, GREEDY_PROMPT, params)
    assert seq.output_ids == oracle(kit, GREEDY_PROMPT, params, eos=() if ignore_eos else (EOS,))
    ends = {ids[4]} if ignore_eos else {EOS, ids[4]}
    assert not ends & set(seq.output_ids[:minimum])
    assert not ends & set(seq.output_ids[minimum:-1])
    assert (len(seq.output_ids), seq.finish_reason) == ((minimum + 1, "stop") if minimum < 12 else (12, "length"))


@pytest.mark.parametrize("minimum", [1, 2, 3, 4, 7, 8, 9, 11])
def test_min_tokens_with_stop_strings(kit, free, minimum):
    """A stop string that is complete within the first ``min_tokens`` tokens does not count; a later one does."""
    ids, text = free
    stops = [text[3], text[8][:1] + "#", text[8]]
    seq = everywhere(kit, GREEDY_PROMPT, greedy(20, min_tokens=minimum, stop=stops, ignore_eos=True))
    end = next((n for n in range(minimum + 1, 21) if any("".join(visible(text[:n])).endswith(s) for s in stops)), None)
    assert (len(seq.output_ids), seq.finish_reason) == ((end, "stop") if end else (20, "length"))


def visible(texts):
    """Without the control token, which the text of an output leaves out."""
    return [t for t in texts if t != chr(97 + CONTROL % 26) * (1 + CONTROL % 3) + chr(65 + CONTROL // 26)]


def test_stop_tokens_in_any_order(kit, free):
    """Whichever comes first ends the output, wherever it stands in the list, and however often."""
    ids, _ = free
    for at in ([7, 4, 10], [10, 7, 4], [4, 4, 10], [10, 4, 23]):
        seq = everywhere(kit, GREEDY_PROMPT, greedy(20, stop_token_ids=[ids[i] for i in at], ignore_eos=True))
        assert (seq.output_ids, seq.finish_reason) == (ids[: ids.index(ids[4]) + 1], "stop")


def test_one_token(kit, free):
    ids, text = free
    for extra, reason in (({}, "length"), ({"stop_token_ids": ids[:1]}, "stop"), ({"stop": text[0]}, "stop")):
        seq = everywhere(kit, GREEDY_PROMPT, greedy(1, ignore_eos=True, logprobs=0, prompt_logprobs=0, n=2, **extra))
        assert (seq.output_ids, seq.finish_reason) == (ids[:1], reason)
        assert [list(entry) for entry in seq.logprobs] == [ids[:1]]
        assert [list(entry) for entry in seq.prompt_logprobs] == [[t] for t in GREEDY_PROMPT[1:]]


def test_the_stop_string_may_stay(kit, free):
    """Of two that the same token completes, the one that begins first counts, whatever their order in the list."""
    ids, text = free
    whole = "".join(visible(text))
    stop = "".join(text[6:9])[1:-1]  # begins and ends within tokens
    assert whole.count(stop) == whole.count(stop[2:]) == 1
    for include in (False, True):
        params = greedy(24, stop=["#", stop[2:], stop], include_stop_str_in_output=include, ignore_eos=True)
        seq = everywhere(kit, GREEDY_PROMPT, params)
        assert seq.stop_text == whole[: whole.index(stop) + include * len(stop)]
        assert (seq.output_ids, seq.finish_reason) == (ids[:9], "stop")


def test_control_tokens_in_the_text(kit, free):
    """With ``skip_special_tokens=False`` they are text, in which a stop string may lie."""
    ids, text = free
    at = ids.index(CONTROL)
    for skip in (True, False):
        params = greedy(24, stop=text[at], skip_special_tokens=skip, ignore_eos=True)
        seq = everywhere(kit, GREEDY_PROMPT, params)
        assert seq.finish_reason == ("length" if skip else "stop")
        assert seq.output_ids == (ids if skip else ids[: at + 1])
        assert seq.stop_text == (None if skip else "".join(text[:at]))


@pytest.mark.parametrize("keep", [1, 5, 16, 30, 31, 500, -1])
def test_truncated_prompts(kit, keep):
    """The last ``keep`` tokens, all if there are fewer, and as many as leave room for the output at −1."""
    prompt = prompt_of(30)
    params = greedy(8, truncate_prompt_tokens=keep, prompt_logprobs=1, ignore_eos=True, repetition_penalty=1.5)
    kept = prompt if keep == -1 else prompt[-keep:]
    seq = everywhere(kit, prompt, params)
    check_same(seq, kit.alone(kept, replace(params, truncate_prompt_tokens=None))[0])
    assert seq.ids[: seq.num_prompt] == kept


@pytest.mark.parametrize(("limit", "max_tokens", "kept"), [(24, 8, 16), (24, 23, 1), (24, 24, 23), (24, None, 23)])
def test_prompts_truncated_to_fit(kit, limit, max_tokens, kept):
    prompt = prompt_of(30)
    params = greedy(max_tokens, truncate_prompt_tokens=-1, ignore_eos=True)
    for draft in SOME:
        seq = kit.alone(prompt, params, draft, max_model_len=limit)[0]
        assert seq.ids[: seq.num_prompt] == prompt[-kept:]
        assert len(seq.output_ids) == min(max_tokens or limit, limit - kept)
        assert seq.finish_reason == "length"
        check_same(seq, kit.alone(prompt[-kept:], replace(params, truncate_prompt_tokens=None), max_model_len=limit)[0])
        with pytest.raises(ContextLengthError):
            kit.alone(prompt, replace(params, truncate_prompt_tokens=None), draft, max_model_len=limit)


# --- (f) a request's own functions, and their faults


def at_token(k, answer):
    """A processor that is harmless but for the k-th token."""
    return lambda ids, logits: answer(logits) if len(ids) == k else logits


def raising(logits):
    raise RuntimeError("out of order")


def in_place(logits):
    return logits.fill_(torch.nan)


FAULTS = {  # what the processor does, and what the error says
    "raises": (raising, "RuntimeError: out of order"),
    "nan": (lambda logits: logits * torch.nan, "not finite"),
    "one nan": (lambda logits: logits.index_fill(0, torch.tensor([3]), torch.nan), "not finite"),
    "nan in place": (in_place, "not finite"),
    "inf": (lambda logits: logits + torch.inf, "not finite"),
    "shape": (lambda logits: logits[1:], "shape"),
    "matrix": (lambda logits: logits[None], "shape"),
    "list": (lambda logits: logits.tolist(), "shape"),
    "none": (lambda logits: None, "shape"),
    "empty": (lambda logits: torch.full_like(logits, -torch.inf), "no token is left"),
}


def faulty_batch():
    """Requests and, for the faulty ones, how many tokens come before what error; neighbours between them."""
    rows = []
    for i, (answer, message) in enumerate(FAULTS.values()):
        k = (0, 1, 3, 6)[i % 4]
        base = SamplingParams(max_tokens=9, ignore_eos=True, seed=i, logprobs=1, temperature=i % 2)
        rows.append((prompt_of(2 + 3 * i), base, None, None))
        rows.append((prompt_of(3 + 3 * i), replace(base, logits_processors=at_token(k, answer)), k, message))
    nothing_left = replace(base, allowed_token_ids=(4, 9), bad_words=[[4], [9]])
    return [*rows, (prompt_of(20), base, None, None), (prompt_of(21), nothing_left, 0, "no token is left")]


@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_a_fault_stays_in_its_request(kit, draft):
    """Its tokens up to there are those of a request without the fault; everybody else's are what they ever were."""
    rows = faulty_batch()
    drafts = [draft and with_gamma(draft, 1 + i % 8) for i in range(len(rows))]
    seqs = [own[0] for own in kit.batch([row[:2] for row in rows], drafts)]
    for seq, (prompt, params, k, message) in zip(seqs, rows, strict=True):
        harmless = replace(params, logits_processors=(), allowed_token_ids=None, bad_words=())
        want = kit.alone(prompt, harmless)[0]
        if message is None:
            check_same(seq, want)
            continue
        assert seq.output_ids == want.output_ids[:k]
        assert seq.finish_reason == "error"
        assert message in seq.error
        check_same_logprobs(seq.logprobs, want.logprobs[:k])


@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_a_fault_behind_the_end_is_never_met(kit, free, draft):
    """Plain decoding would not have asked for that token: the output has ended before, by length, token or text."""
    ids, text = free
    ends = ({"max_tokens": 5}, {"stop_token_ids": (ids[4],)}, {"stop": text[4]})
    base = {"max_tokens": 12, "logits_processors": at_token(5, raising), "ignore_eos": True}
    requests = [(GREEDY_PROMPT, greedy(**base | end)) for end in ends]
    for own in kit.batch(requests, [draft and with_gamma(draft, 8)] * 3):
        assert own[0].output_ids == ids[:5]
        assert own[0].error is None


def test_faults_of_completions_concern_one_another_not(kit):
    """A processor that fails for some outputs only ends the completions with these outputs."""
    params = SamplingParams(n=6, seed=3, max_tokens=10, ignore_eos=True)
    prompt = prompt_of(18)
    plain = kit.alone(prompt, params)
    bad = plain[2].output_ids[:4]

    def fails(ids, logits):
        return raising(logits) if ids == bad else logits

    for draft in SOME:
        got = kit.alone(prompt, replace(params, logits_processors=fails), draft)
        assert [seq.finish_reason for seq in got] == ["length"] * 2 + ["error"] + ["length"] * 3
        check_all_same([got[:2], got[3:]], [plain[:2], plain[3:]])
        assert got[2].output_ids == bad


@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_processors_see_the_tokens_before_each_place(kit, draft):
    """Each call's history is output that stands and then at most γ drafted ones; no place of the output is missed."""
    gamma, prompt, calls = 4, prompt_of(19), []

    def note(prompt_ids, ids, logits):
        calls.append((list(prompt_ids), list(ids)))
        ids.append(0)  # it is the function's own list
        prompt_ids.clear()
        return push_away(calls[-1][1], logits)

    params = SamplingParams(max_tokens=24, seed=4, ignore_eos=True)
    config = draft and with_gamma(draft, gamma)
    seq = kit.alone(prompt, replace(params, logits_processors=note), config)[0]
    output = seq.output_ids
    assert output == kit.alone(prompt, replace(params, logits_processors=push_away))[0].output_ids
    assert all(given == prompt for given, _ in calls)
    histories = [ids for _, ids in calls]
    for n in range(len(output)):
        assert output[:n] in histories
    for ids in histories:
        agreed = next((n for n, (x, y) in enumerate(zip(ids, output, strict=False)) if x != y), len(ids))
        assert len(ids) - agreed <= gamma
    if draft is None:
        assert histories == [output[:n] for n in range(len(output))]
