"""Drafts inside transformers' ``generate``: what it returns is what it returns without them."""

import functools
import importlib.metadata

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
)

import longdraft
from longdraft.checkpoint.load import load_checkpoint
from longdraft.integrations import transformers as inside
from longdraft.integrations.transformers import checks, loop, rules
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams
from longdraft.spec.noise import all_gumbels
from longdraft.spec.verify import Verdict
from tests.conftest import run_alone
from tests.parity.models import T0, tiny_checkpoint

pytest.importorskip("transformers", minversion="5.24")
SIZES = {**T0, "num_hidden_layers": 2, "eos_token_id": None, "pad_token_id": 0}
# Every ratio of query heads to KV heads that the kernels know, and what the families add to attention.
FAMILIES = [
    ("llama", {}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen3", {"num_key_value_heads": 4}),
    ("mistral", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "sliding_window": None}),
]
LENGTHS = (40, 23, 35)


@functools.cache
def model_of(family="llama", seed=0, **overrides):
    """A random model in float64, whose greedy text is varied and partly guessed by a draft that sees little."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **{**SIZES, **overrides})
        model = AutoModelForCausalLM.from_config(config).double().eval()
        for name, weight in model.named_parameters():
            norm = "norm" in name
            weight.data = 0.75 + 0.5 * torch.rand_like(weight) if norm else 0.12 * torch.randn_like(weight)
    return model


def prompts(rows=3, seed=1):
    """Left-padded prompts of different lengths."""
    ids = torch.randint(3, 128, (rows, max(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    mask = torch.stack([(torch.arange(ids.shape[1]) >= ids.shape[1] - n).long() for n in LENGTHS[:rows]])
    return {"input_ids": ids * mask, "attention_mask": mask}


def drafting(draft="streaming_llm", **settings):
    return longdraft.generate_with(draft, **{"budget": 24, "sinks": 4, "gamma": 3, **settings})


def both(model, inputs, draft=None, cached=False, **options):
    """What ``generate`` returns without drafts and with them; ``cached``: each with an empty cache of its own."""
    caches = [{"cache": DynamicCache(config=model.config)} if cached else {} for _ in range(2)]
    want = model.generate(**inputs, **caches[0], **options)
    return want, model.generate(**inputs, **caches[1], **options, custom_generate=draft or drafting())


def some_eos(model, inputs, count):
    """Tokens that end the rows of greedy decoding at different places."""
    new = model.generate(**inputs, max_new_tokens=count, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return sorted({int(row[at]) for row, at in zip(new, (4, count // 2, count - 2), strict=False)})


@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_greedy_text_is_that_of_generate(family, overrides):
    """One prompt, and a batch of padded ones whose rows end at different places."""
    model = model_of(family, **overrides)
    eos = some_eos(model, prompts(), 18)
    for rows, options in ((1, {}), (3, {"eos_token_id": eos})):
        options = {**prompts(rows), "max_new_tokens": 18, "do_sample": False, **options}
        want = model.generate(**options)
        assert rows == 1 or (want[:, -1] == 0).any()
        for draft in (drafting(), drafting("snapkv"))[:rows]:
            assert torch.equal(model.generate(**options, custom_generate=draft), want)
            accepted, drafted = (sum(sum(getattr(s, x)) for s in draft.stats) for x in ("accepted", "drafted"))
            assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "draft", [drafting("full"), drafting("streaming_llm", budget=128), drafting("topk", budget=128)]
)
def test_a_draft_that_reads_all_is_always_right(draft):
    want, got = both(model_of(), prompts(), draft, max_new_tokens=18, do_sample=False)
    assert torch.equal(want, got)
    assert all(s.drafted == s.accepted and sum(s.drafted) >= 12 for s in draft.stats)


def test_any_number_of_tokens_any_budget():
    for count in (1, 2, 5):
        for budget in (1, 9):
            draft = drafting("snapkv" if count == 5 else "streaming_llm", budget=budget, sinks=1)
            want, got = both(model_of(), prompts(), draft, max_new_tokens=count, do_sample=False)
            assert torch.equal(want, got)


class RowBias:
    """A user's processor: what it does hangs on the row's number, all ids so far, and the batch being whole."""

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores) == 3
        out = scores.clone()
        for b, ids in enumerate(input_ids):
            out[b, (int(ids[-1]) * 7 + int(ids.sum()) + b) % 128] += 3.0
        return out


GREEDY_OPTIONS = {
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "exponential_decay_length_penalty": (3, 1.2)},
    "lengths": {"min_new_tokens": 9, "forced_eos_token_id": 5},
    "words": {"bad_words_ids": [[7], [9, 30]], "suppress_tokens": [3], "sequence_bias": {(8,): 2.0}},
    "prefix": {"prefix_allowed_tokens_fn": lambda b, ids: [(int(ids[-1]) * 3 + b + i) % 128 for i in range(9)]},
    "own": {"logits_processor": LogitsProcessorList([RowBias()])},
}


@pytest.mark.parametrize("options", GREEDY_OPTIONS.values(), ids=GREEDY_OPTIONS)
def test_processors_see_what_they_see_in_generate(options):
    model = model_of()
    eos = some_eos(model, prompts(), 16)
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want, got = both(model, prompts(), max_new_tokens=16, do_sample=False, eos_token_id=eos, **kept, **options)
    assert torch.equal(want.sequences, got.sequences) and type(want) is type(got)
    for name in ("scores", "logits"):
        going = torch.ones(3, dtype=torch.bool)
        assert len(want[name]) == len(got[name])
        for i, (a, b) in enumerate(zip(want[name], got[name], strict=True)):
            torch.testing.assert_close(b[going], a[going], rtol=0, atol=1e-6)
            assert not b[~going].any()
            going &= ~torch.isin(want.sequences[:, 40 + i], torch.tensor(eos))


def pick(ids, row):
    """A number that hangs on the ids of a row."""
    return (int(ids[row, -1]) + 3 * int(ids[row, -2])) % 11


def ends_by_row(ids, scores, **kwargs):
    assert len(ids) == 3
    return torch.tensor([pick(ids, b) == b and ids.shape[1] > 44 for b in range(3)])


def ends_by_scores(ids, scores, **kwargs):
    assert len(scores) == ids.shape[1] - 40
    return scores[-1].max(dim=-1).values > sum(s.max() for s in scores) / len(scores) / 2 + 1


@pytest.mark.parametrize("eos", [None, 0])
def test_stopping_criteria_are_asked_about_every_token(eos):
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [eos + 5] if eos is not None else None}
    kept = {"return_dict_in_generate": True, "output_scores": True}
    for criterion, more in ((ends_by_row, {}), (ends_by_row, {"max_length": 58}), (ends_by_scores, {})):
        extra = {**options, **kept, **more, "stopping_criteria": StoppingCriteriaList([criterion])}
        if "max_length" in more:
            del extra["max_new_tokens"]
        if criterion is ends_by_scores:
            want, got = both(model_of(), prompts(1), **extra)
        else:
            want, got = both(model_of(), prompts(), **extra)
        assert torch.equal(want.sequences, got.sequences) and len(got.scores) == got.sequences.shape[1] - 40


def test_a_cache_goes_in_and_comes_out_as_without_drafts():
    """Rows that end early are padded in the cache, too; then a second turn starts from it in both of the ways."""
    model, inputs = model_of(), prompts()
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": some_eos(model, inputs, 20)}
    for draft in (drafting(), drafting("snapkv")):
        want, got = both(model, inputs, draft, True, **options, return_dict_in_generate=True, prefill_chunk_size=16)
        caches = [want.cache, got.cache]
        for turn in range(2):
            for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
                assert type(a) is type(b) and a.keys.shape == b.keys.shape
                for ours, theirs in ((b.keys, a.keys), (b.values, a.values)):
                    shown = torch.nn.functional.pad(inputs["attention_mask"], (0, ours.shape[2] - 40), value=1)[:, None]
                    assert ((ours - theirs).abs().amax(-1) * shown).max() < 1e-9
            added = torch.cat([want.sequences, prompts(seed=5 + turn)["input_ids"][:, -6:].clamp(min=3)], dim=1)
            past = added.shape[1] - inputs["attention_mask"].shape[1]
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, past), value=1)
            ids = added[:, caches[0].get_seq_length() :] if turn else added
            call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
            new = [
                model.generate(**call, cache=caches[0]),
                model.generate(**call, cache=caches[1], custom_generate=draft),
            ]
            assert torch.equal(*new)
            want.sequences = torch.cat([added[:, : added.shape[1] - ids.shape[1]], new[0]], dim=1)


class Listener:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token_once_and_the_end():
    model, heard = model_of(), [Listener(), Listener()]
    options = {**prompts(1), "max_new_tokens": 12, "do_sample": False}
    options["eos_token_id"] = some_eos(model, prompts(1), 9)[:1]
    model.generate(**options, streamer=heard[0])
    model.generate(**options, streamer=heard[1], custom_generate=drafting("full", gamma=7))  # ends inside a block
    assert heard[0].tokens == heard[1].tokens and heard[1].ended


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}


def drawn_plainly(model, ids, seed, count):
    """Coupled sampling written down as it is defined: one token after the other, nothing cached or batched."""
    from transformers.generation import logits_process as lp

    steps = [
        lp.RepetitionPenaltyLogitsProcessor(1.1),
        lp.TemperatureLogitsWarper(0.8),
        lp.TopKLogitsWarper(40),
        lp.TopPLogitsWarper(0.9),
        lp.MinPLogitsWarper(0.01),
    ]
    padding = int((ids == 0).sum())
    for _ in range(count):
        with torch.no_grad():
            scores = model(input_ids=ids[:, padding:], use_cache=False).logits[:, -1].float()
        for step in steps:
            scores = step(ids, scores)
        noise = all_gumbels(torch.tensor([seed]), torch.tensor([ids.shape[1] - padding]), 128)
        token = (scores.double().log_softmax(-1) + noise).argmax(-1)
        ids = torch.cat([ids, token[:, None]], dim=1)
    return ids


def test_sampled_text_hangs_on_seeds_alone():
    """Of a row's own seed and ids: not of the draft, its length, or the rows beside it."""
    model, inputs = model_of(), prompts()
    torch.manual_seed(7)
    seeds = torch.randint(2**63 - 1, (3,))
    rows = range(3)
    want = torch.cat([drawn_plainly(model, inputs["input_ids"][b : b + 1], int(seeds[b]), 9) for b in rows])
    for draft in (drafting(), drafting("snapkv", gamma=5), drafting("full", gamma=1)):
        torch.manual_seed(7)
        got = model.generate(**inputs, max_new_tokens=9, **SAMPLING, custom_generate=draft)
        assert torch.equal(want, got)
    for rule in ("coupled", "maximal"):
        random = torch.Generator()
        draft = drafting(sampling_rule=rule, generator=random)
        twice = []
        for _ in range(2):
            random.manual_seed(3)
            twice.append(model.generate(**inputs, max_new_tokens=9, **SAMPLING, custom_generate=draft))
        assert torch.equal(*twice)


def test_a_seed_gives_the_text_of_longdraft(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    checkpoint = load_checkpoint(folder)
    ours = Transformer(checkpoint.config, checkpoint.weights, dtype=torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = prompts(1)["input_ids"]
    want = run_alone(ours, ids[0].tolist(), SamplingParams(temperature=0.7, seed=11, max_tokens=12, ignore_eos=True))
    options = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 12, "num_return_sequences": 2}
    theirs.generation_config.eos_token_id = None
    got = theirs.generate(ids, **options, pad_token_id=0, custom_generate=drafting(seed=11))[:, 40:].tolist()
    assert got[0] == want != got[1]


class AcceptsAll(rules.Maximal):
    def verify(self, scores, proposals, rows, positions):
        verdict = super().verify(scores, proposals, rows, positions)
        tokens = [[*p, v[-1]] for p, v in zip(proposals, verdict.tokens, strict=True)]
        return Verdict([len(p) for p in proposals], tokens)


class NoResidual(rules.Maximal):
    """Draws from the target where a token is refused."""

    def verify(self, scores, proposals, rows, positions):
        verdict = super().verify(scores, proposals, rows, positions)
        places, start = [], 0
        for p, accepted in zip(proposals, verdict.accepted, strict=True):
            places.append(start + accepted)
            start += len(p) + 1
        again = scores[places].softmax(-1).multinomial(1)[:, 0].tolist()
        tokens = [[*t[:-1], x] for t, x in zip(verdict.tokens, again, strict=True)]
        return Verdict(verdict.accepted, tokens)


def law_of_three(model, ids):
    """The probability of all texts of three tokens behind ``ids [1, n]``, ``[V ** 3]``."""
    v = model.config.vocab_size
    texts = torch.cartesian_prod(*[torch.arange(v)] * 3)
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(len(texts), -1), texts], dim=1), use_cache=False).logits[:, -4:-1]
    return logits.float().double().log_softmax(-1).gather(2, texts[..., None])[..., 0].sum(1).exp()


@pytest.mark.parametrize(
    ("rule", "right"), [(rules.Coupled, True), (rules.Maximal, True), (AcceptsAll, False), (NoResidual, False)]
)
def test_the_law_of_sampled_text(rule, right, monkeypatch):
    """Three tokens of 800 texts against their exact law; the first of them is plain, two are drafted and judged."""
    model = model_of(vocab_size=5, num_hidden_layers=1, bos_token_id=None, seed=3)
    monkeypatch.setattr(inside, "Maximal", rule)
    ids = torch.tensor([[3, 1, 4, 1, 2, 3, 0, 2, 4, 3, 1, 2]])
    torch.manual_seed(1)
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, "num_return_sequences": 800}
    draft = drafting(budget=3, sinks=1, gamma=2, sampling_rule="maximal")
    new = model.generate(ids, attention_mask=torch.ones_like(ids), **options, custom_generate=draft)[:, 12:15]
    counts = torch.bincount(new @ torch.tensor([25, 5, 1]), minlength=125).double()
    expected = 800 * law_of_three(model, ids)
    big = expected >= 10
    pooled = [torch.cat([x[big], x[~big].sum()[None]]) for x in (counts, expected)]
    p = chisquare(*pooled).pvalue
    assert p > 0.01 if right else p < 1e-5


REFUSED = {
    "num_beams": ({"num_beams": 2}, "beam_search"),
    "use_cache": ({"use_cache": False}, "use_cache is False"),
    "static": ({"cache_implementation": "static"}, "StaticLayer"),
    "static cache": ({"cache": StaticCache(AutoConfig.for_model("llama", **SIZES), 64)}, "StaticLayer"),
    "assistant": ({"assistant_model": object()}, "assisted_generation"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "streamer": ({"streamer": Listener()}, "streamer"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
}


@pytest.mark.parametrize(("options", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drafted_for_is_refused_by_name(options, named):
    model = model_of()
    with pytest.raises(longdraft.errors.LongDraftError, match=named):
        model.generate(**prompts(), max_new_tokens=4, do_sample=False, **options, custom_generate=drafting())
    assert model.config._attn_implementation == "sdpa"


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MODELS = {
    "window": ("mistral", {"sliding_window": 32}, "DynamicSlidingWindowLayer"),
    "dynamic": (
        "llama",
        {"max_position_embeddings": 40, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope",
    ),
    "own": ("bloom", {}, "attention of its own"),
    "encoder": ("bart", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}, "encoder-decoder"),
}


@pytest.mark.parametrize(("family", "overrides", "named"), MODELS.values(), ids=MODELS)
def test_models_that_cannot_draft_are_refused_by_name(family, overrides, named):
    kind = AutoModelForSeq2SeqLM if family == "bart" else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(family, **{**SIZES, **overrides}))
    with pytest.raises(longdraft.errors.UnsupportedModelError, match=named):
        checks.check_model(model, torch.arange(40)[None], 8)


def test_attention_that_does_more_is_refused_by_name():
    """It is known when the first pass comes to it."""
    config = AutoConfig.for_model("gemma2", **{**SIZES, "layer_types": ["full_attention"] * 2})
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(longdraft.errors.UnsupportedModelError, match="attention with softcap"):
        model.generate(**prompts(1), max_new_tokens=4, do_sample=False, custom_generate=drafting())
    assert model.config._attn_implementation != "longdraft"


@pytest.mark.parametrize("draft", ["verified", "pages", "int8", "ngram", "full+quant8", "gpt2", None])
def test_drafts_that_cannot_be_had_are_refused_by_name(draft):
    with pytest.raises(longdraft.errors.InvalidValueError, match="streaming_llm, full, snapkv, topk"):
        longdraft.generate_with(draft)
    with pytest.raises(longdraft.errors.InvalidValueError, match="weights"):
        longdraft.generate_with(weights="target@int8")


def test_transformers_that_is_absent_or_old_is_named_with_the_fix(monkeypatch):
    monkeypatch.setattr(inside, "version", lambda name: "5.9.1")
    with pytest.raises(
        longdraft.errors.MissingDependencyError, match=r"5.9.1 is installed.*pip install 'transformers>=5.24'"
    ):
        longdraft.generate_with()
    monkeypatch.setattr(inside, "version", lambda name: importlib.metadata.version("no-such-package"))
    with pytest.raises(longdraft.errors.MissingDependencyError, match="not installed"):
        longdraft.generate_with()


def test_rope_that_hangs_on_the_length_is_found_wherever_it_stands(monkeypatch):
    model = model_of()
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    monkeypatch.setattr(model.config, "rope_parameters", {"full_attention": rope})
    checks.check_model(model, torch.arange(40)[None], 24)
    for positions, new in ((torch.arange(40), 25), (torch.tensor([0, 50]), 24)):
        with pytest.raises(longdraft.errors.UnsupportedModelError, match="up to 64 tokens it is, and .* reach (65|75)"):
            checks.check_model(model, positions[None], new)


def test_a_model_whose_inputs_are_prepared_by_another_is_refused(monkeypatch):
    model = model_of()
    monkeypatch.setattr(model, "prepare_inputs_for_generation", model.prepare_inputs_for_generation)  # as PEFT does
    with pytest.raises(longdraft.errors.UnsupportedModelError, match="Prompts learned by PEFT"):
        model.generate(**prompts(1), max_new_tokens=4, custom_generate=drafting())


def cached(model, ids, count):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :count], cache=cache)
    return cache


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("draft", [drafting(), drafting("snapkv")])
def test_new_tokens_alone_behind_a_cache(draft):
    """With their positions alone, too; what does not join on is refused, where ``generate`` would feed it anyhow."""
    model, ids = model_of(), prompts(1)["input_ids"]
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False}
    new = {"input_ids": ids[:, 20:], "position_ids": torch.arange(20, 40)[None]}
    want = model.generate(**new, **call, cache=cached(model, ids, 20))
    for name in ("cache", "past_key_values"):  # the latter is its old name
        assert torch.equal(model.generate(**new, **call, **{name: cached(model, ids, 20)}, custom_generate=draft), want)
    for given, count in ((ids, 40), (ids[:, 30:], 20), (ids[:, 20:], 24)):
        with pytest.raises(longdraft.errors.InvalidValueError, match="the length of input_ids"):
            model.generate(given, **call, cache=cached(model, ids, count), custom_generate=draft)
    new["position_ids"] = new["position_ids"][:, 1:]
    with pytest.raises(longdraft.errors.InvalidValueError, match="the length of position_ids"):
        model.generate(**new, **call, cache=cached(model, ids, 20), custom_generate=draft)


@pytest.mark.parametrize("draft", [drafting(), drafting("snapkv")])
def test_padding_on_the_right_is_what_it_is_in_generate(draft):
    """Unusual, but defined: the first token comes after padding, and a row's last 32 columns may hold nothing else."""
    model, inputs = model_of(), prompts()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 5:] = inputs["attention_mask"][2, 30:] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want, got = both(model, inputs, draft, **options)
    assert torch.equal(want.sequences, got.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-6)


@pytest.mark.parametrize("eos", [None, [5]])
@pytest.mark.parametrize("rule", ["coupled", "maximal"])
def test_nobody_is_asked_about_more_tokens_than_there_may_be(eos, rule):
    asked, judged = [], []

    def bias(ids, scores):
        asked.append(ids.shape[1])
        return scores

    def ends(ids, scores, **kwargs):
        judged.append(ids.shape[1])
        return torch.zeros(3, dtype=torch.bool)

    more = {"logits_processor": [bias], "stopping_criteria": StoppingCriteriaList([ends]), "eos_token_id": eos}
    draft = drafting(sampling_rule=rule, gamma=5, seed=2)
    model_of().generate(**prompts(), max_new_tokens=13, do_sample=True, top_k=0, **more, custom_generate=draft)
    assert max(asked) + 1 == max(judged) == 53
    assert len({tuple(s.drafted) for s in draft.stats}) > 1


@pytest.mark.parametrize("rule", ["coupled", "maximal"])
def test_scores_that_are_no_distribution_are_refused(rule):
    def broken(ids, scores):
        return scores if ids.shape[1] < 43 else torch.full_like(scores, -torch.inf)

    with pytest.raises(longdraft.errors.InvalidValueError, match="the scores of a token"):
        options = {"max_new_tokens": 9, "do_sample": True, "logits_processor": [broken]}
        model_of().generate(**prompts(1), **options, custom_generate=drafting(sampling_rule=rule))


@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_fails_leaves_model_and_cache_as_they_were(late, monkeypatch):
    """In the middle of a text, or when it is complete and its cache is not."""
    model, inputs = model_of(), prompts(1)
    cache = cached(model, inputs["input_ids"], 20)
    before = [x.clone() for layer in cache.layers for x in (layer.keys, layer.values)]

    def fails(ids, scores=None):
        if late or ids.shape[1] > 44:
            raise RuntimeError("of the user")
        return scores

    processors = [] if late else [fails]
    if late:
        monkeypatch.setattr(loop.Call, "_give_back", fails)
    options = {"cache": cache, "logits_processor": processors, "max_new_tokens": 9}
    with pytest.raises(RuntimeError, match="of the user"):
        model.generate(**inputs, **options, custom_generate=drafting())
    assert model.config._attn_implementation == "sdpa"
    after = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert all(map(torch.equal, before, after)) and cache.get_seq_length() == 20


@pytest.mark.parametrize("count", [0, 20])
def test_a_prompt_that_fails_half_way_leaves_no_trace(count):
    """Some layers have taken it and others have not; an empty cache then serves other rows."""
    model, inputs = model_of(), prompts()
    cache = cached(model, inputs["input_ids"], count) if count else DynamicCache(config=model.config)

    def fails(module, args):
        raise RuntimeError("of the machine")

    for draft in (drafting(), drafting("snapkv")):
        hook = model.model.layers[1].register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="of the machine"):
            model.generate(**inputs, cache=cache, max_new_tokens=3, custom_generate=draft)
        hook.remove()
        assert [layer.get_seq_length() for layer in cache.layers] == [count, count]
    if not count:
        options = {**prompts(1), "max_new_tokens": 3, "do_sample": False}
        assert torch.equal(
            model.generate(**options, cache=cache, custom_generate=drafting()), model.generate(**options)
        )
