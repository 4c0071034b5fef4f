"""Small models that draft, through the public API: tiny checkpoints on disk, paired by their tokenizers."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.checkpoint.load import load_checkpoint
from longdraft.checkpoint.spire import read_spire, save_spire
from longdraft.compare import compare
from longdraft.errors import (
    InvalidValueError,
    ModelFileError,
    ModelNotFoundError,
    OutOfMemoryError,
    TargetMismatchError,
    VocabularyMismatchError,
)
from longdraft.kernels import native
from longdraft.llm_draft import room_for
from longdraft.models.feedback import FeedbackConfig
from longdraft.train.prune_init import initial_tensors
from tests.parity.models import tiny_checkpoint
from tests.unit.test_pairing import TOKENS, swapped
from tests.unit.test_pairing import make as make_tokenizer

SIZES = {"dtype": "float64", "kv_cache_memory_bytes": 2**22}
PROMPTS = [[(7 * i + n) % 120 for i in range(n)] for n in (3, 40, 17)]
TEXTS = ["the tide is over", "an end"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, max_tokens=12, n=2, logprobs=2),
]
TARGET_TOKEN, DRAFT_TOKEN = 2 * 3 * 2 * 16, 2 * 1 * 2 * 16  # elements of K and V per token


def checkpoint(tmp_path_factory, name, tokenizer=None, seed=0, **overrides):
    folder = tiny_checkpoint(tmp_path_factory.mktemp(name), "llama", seed, std=0.3, **overrides)
    (tokenizer or make_tokenizer())._backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return checkpoint(tmp_path_factory, "target")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One layer, more embedding rows than the target and half of its range."""
    sizes = {"num_hidden_layers": 1, "vocab_size": 136, "max_position_embeddings": 32}
    return checkpoint(tmp_path_factory, "small", seed=1, **sizes)


@pytest.fixture(scope="module")
def spire(tmp_path_factory, target):
    """The target's last layer with a short window, before training."""
    checkpoint, config = load_checkpoint(target), FeedbackConfig((2,), window=10, sinks=2)
    tensors = initial_tensors(config, checkpoint.config, checkpoint.weights)
    return save_spire(tmp_path_factory.mktemp("spire"), config, tensors, checkpoint)


@pytest.fixture(scope="module")
def plain(target):
    return LLM(target, None, **SIZES)


DRAFTS = {
    "path": lambda small, target: small,
    "text of a path": lambda small, target: str(small),
    "mapping": lambda small, target: {"weights": small, "kv": "full", "gamma": 3},
    "config": lambda small, target: DraftConfig(weights=small, budget=12, sinks=2, gamma=5),
    "target": lambda small, target: {"weights": target, "kv": "full", "gamma": 3},
    "snapkv": lambda small, target: DraftConfig(weights=target, kv="snapkv", budget=24),
    "ngram": lambda small, target: "ngram",
    "layer_skip": lambda small, target: "layer_skip",
    "layers": lambda small, target: {"layers": "first:2", "kv": "full"},
    "streaming_llm": lambda small, target: "streaming_llm",
    "full": lambda small, target: "full",
}


@pytest.fixture(scope="module", params=DRAFTS)
def drafting(request, target, small):
    return request.param, LLM(target, draft=DRAFTS[request.param](small, target), **SIZES)


def same_outputs(plain, drafted):
    """Equal in everything; log-probabilities up to the order of sums."""
    assert [replace(x, logprobs=None) for x in plain] == [replace(x, logprobs=None) for x in drafted]
    for a, b in zip(plain, drafted, strict=True):
        for one, other in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert one.keys() == other.keys()
            assert [x.logprob for x in one.values()] == pytest.approx([x.logprob for x in other.values()], abs=1e-9)


@pytest.fixture(scope="module")
def without_a_draft(plain):
    """Results by the numbers of parameters and prompts, each computed once for all drafts."""
    return cache(lambda p, n: plain.generate(ASKED[n], PARAMS[p]))


ASKED = (PROMPTS, TEXTS, TEXTS[0])


@pytest.mark.parametrize("p", range(len(PARAMS)), ids=["greedy", "sampled", "two completions"])
def test_results_are_those_without_a_draft(without_a_draft, drafting, p):
    name, llm = drafting
    for n, prompts in enumerate(ASKED):
        for a, b in zip(without_a_draft(p, n), llm.generate(prompts, PARAMS[p]), strict=True):
            same_outputs(a.outputs, b.outputs)
            assert (a.prompt_token_ids, a.exactness, b.exactness) == (b.prompt_token_ids, "identical", "identical")
            assert a.stats.drafted == 0
            if name in ("target", "full"):
                assert b.stats.drafted == b.stats.accepted > 0
                assert b.stats.tokens_per_verify > 2
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages
    for model in llm.engine.runner.small.values():
        assert model.store.num_free_pages == model.store.num_pages


def test_drafts_did_propose(drafting):
    name, llm = drafting
    results = llm.generate(PROMPTS, PARAMS[0])
    proposed = [r.stats.drafted for r in results]
    assert all(n > 0 for n in proposed) or name in ("ngram", "mapping")
    assert name != "mapping" or (proposed[0] > 0) is (proposed[1] == 0)  # the second prompt is beyond its range


def test_streams_are_the_same(plain, drafting):
    _, llm = drafting
    for params in PARAMS[:2]:
        texts = ["".join(output.text for output in one.stream(TEXTS[0], params)) for one in (plain, llm)]
        assert texts[0] == texts[1]


def test_a_stream_that_is_closed_frees_the_draft(target, small):
    llm = LLM(target, draft=small, **SIZES)
    stream = llm.stream(PROMPTS[1], PARAMS[0])
    next(stream), next(stream)
    (store,) = (model.store for model in llm.engine.runner.small.values())
    assert store.num_free_pages < store.num_pages
    stream.close()
    assert store.num_free_pages == store.num_pages


def test_comparing_every_draft_with_plain_decoding(drafting):
    name, llm = drafting
    result = compare(llm, PROMPTS, PARAMS[0], llm.draft)
    report = result.report()
    assert (report["identical"], report["held"], report["first_difference"]) == (True, True, None)
    speculative = report["speculative"]
    assert speculative["tokens"] == report["plain"]["tokens"] == 72
    assert speculative["drafted"] > 0 or name == "ngram"
    assert 0 <= speculative["accepted"] <= speculative["drafted"]
    assert speculative["drafted"] == 0 or len(speculative["acceptance_by_position"]) <= llm.draft.gamma
    assert speculative["tokens_per_verify"] >= 1
    lengths = [len(p) + 24 for p in PROMPTS]
    whole = (256, TARGET_TOKEN)
    own = {"target": whole, "snapkv": whole}.get(name, (32, DRAFT_TOKEN) if llm.draft.own_model else (0, 0))
    copies = 64 * len(lengths) * TARGET_TOKEN if name == "snapkv" else 0  # whole pages, proposals included
    held = sum(min(n, own[0]) * own[1] for n in lengths) + copies
    assert name == "ngram" or speculative["draft_kv_bytes"] == 8 * held
    assert speculative["kv_bytes_read_per_plain_token"] == 8 * TARGET_TOKEN * sum(lengths) / 3
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages


def test_comparing_with_a_model_that_was_not_loaded(plain, small):
    with pytest.raises(InvalidValueError, match="weights is .*a draft model that was loaded .none was."):
        compare(plain, PROMPTS, PARAMS[0], DraftConfig(weights=small))
    assert plain.engine.num_unfinished == 0


# --- SPIRe drafts


def test_a_spire_draft_by_its_path(target, spire, plain):
    """It says itself what it reads; the output is that without it, and reports tell its own numbers."""
    llm = LLM(target, draft={"weights": spire, "gamma": 3}, **SIZES)
    assert (llm.draft.budget, llm.draft.sinks, llm.draft.gamma) == (12, 2, 3)
    assert llm.draft.label == f"{spire.name} over streaming_llm, budget 12"
    for a, b in zip(plain.generate(PROMPTS, PARAMS[2]), llm.generate(PROMPTS, PARAMS[2]), strict=True):
        same_outputs(a.outputs, b.outputs)
        assert b.stats.drafted > 0
    report = compare(llm, PROMPTS, PARAMS[0], llm.draft).report()
    assert (report["identical"], report["held"]) == (True, True)
    draft = llm.engine.runner.draft(llm.draft)
    assert draft.store.num_free_pages == draft.store.num_pages
    assert draft.spire.model.head is llm.model.head
    known = list(llm.engine.runner._drafts)
    llm.generate(PROMPTS[:1], PARAMS[0], draft=spire)  # named for one call, it is the same one
    assert list(llm.engine.runner._drafts) == known
    layer = sum(p.numel() for p in _parameters(spire)) - 2  # the memory
    room = room_for([llm.draft], read_spire(spire, ""), llm.model.config, torch.float64, torch.float64, 16)
    needed = {name: size for name, size in room.items() if size}
    assert needed == {"draft_weights": 8 * layer, "kept": (12 + 3) * 8 * 2 * 2 * 16}  # sinks, window and a block
    assert llm.engine.config.num_pages < plain.engine.config.num_pages


@pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
def test_a_spire_draft_in_8_bits(target, spire):
    types = {"dtype": "float32", "kv_cache_memory_bytes": 2**22}
    llm = LLM(target, draft=f"{spire}@int8", **types)
    assert llm.draft.label.startswith(f"{spire.name}@int8")
    for a, b in zip(LLM(target, **types).generate(PROMPTS), llm.generate(PROMPTS), strict=True):
        assert a.outputs == b.outputs
    draft = llm.engine.runner.draft(llm.draft)
    assert draft.runs is not draft.spire.model
    other = llm.engine.runner.draft(llm.resolve(spire))  # the same weights as they are, for another call
    assert other is not draft and other.spire is draft.spire and other.runs is draft.spire.model


def test_spire_drafts_that_cannot_be(tmp_path_factory, target, small, spire):
    with pytest.raises(InvalidValueError, match="native kernels"):
        LLM(target, draft=f"{spire}@int8", **SIZES)
    with pytest.raises(InvalidValueError, match="@int8 only for a SPIRe draft"):
        LLM(target, draft=f"{small}@int8", **SIZES)
    with pytest.raises(InvalidValueError, match="@int8 only for a SPIRe draft"):
        LLM(target, draft=small, **SIZES).generate(PROMPTS[0], draft=f"{small}@int8")
    with pytest.raises(InvalidValueError, match="must be a SPIRe draft's"):
        LLM(target, draft=f"auto+{small}", **SIZES)
    with pytest.raises(TargetMismatchError, match="made for"):
        LLM(checkpoint(tmp_path_factory, "other", seed=9), draft=spire, **SIZES)


# --- memory


def test_capacity_falls_with_a_draft(target, small, plain):
    """A page holds K and V of both."""
    with_draft = LLM(target, draft=small, **SIZES)
    pages = 2**22 // (8 * 16 * TARGET_TOKEN), 2**22 // (8 * 16 * (TARGET_TOKEN + DRAFT_TOKEN))
    assert (plain.engine.config.num_pages, with_draft.engine.config.num_pages) == pages
    (model,) = with_draft.engine.runner.small.values()
    assert model.store.num_pages == pages[1]
    both = sum(x.nbytes for store in (with_draft.engine.store, model.store) for x in (store.k, store.v))
    assert both <= 2**22
    for name in ("ngram", "layer_skip", "full"):
        assert LLM(target, draft=name, **SIZES).engine.config.num_pages == pages[0]


def test_types_and_page_sizes_are_the_targets(target, small):
    llm = LLM(target, draft=small, dtype="float32", kv_dtype="bfloat16", block_size=8, kv_cache_memory_bytes=2**20)
    (model,) = llm.engine.runner.small.values()
    assert (model.model.dtype, model.store.k.dtype) == (torch.float32, torch.bfloat16)
    assert model.store.layout.page_size == 8
    assert len(llm.generate(PROMPTS, PARAMS[0])[1].outputs[0].token_ids) == 24


def test_weights_of_both_must_fit(target, small, monkeypatch):
    from longdraft.engine import sizing

    count = sum(p.numel() for p in _parameters(target))
    monkeypatch.setattr(sizing, "free_memory", lambda device: 8 * count + 1)
    with pytest.raises(OutOfMemoryError, match="weights"):
        LLM(target, draft=small, dtype="float64", kv_cache_memory_bytes=2**20)


def _parameters(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors").values()


# --- refusals

MISSING = "./missing"
TOO_LONG = pytest.param("x" * 5000, id="too long")
NO_HOME = "~nobody_here/model"


def test_a_draft_with_another_tokenizer(tmp_path_factory, target):
    wrong = checkpoint(tmp_path_factory, "wrong", make_tokenizer(swapped(103, 110)), num_hidden_layers=1)
    words = f"token 103 is {TOKENS[103]!r} for the target but {TOKENS[110]!r} for the draft"
    for draft in (wrong, {"weights": wrong, "kv": "full"}, DraftConfig(weights=wrong)):
        with pytest.raises(VocabularyMismatchError, match=words) as caught:
            LLM(target, draft=draft, **SIZES)
        assert str(wrong) in str(caught.value) or wrong.name in str(caught.value)


def test_a_draft_without_a_tokenizer(tmp_path_factory, target):
    bare = tiny_checkpoint(tmp_path_factory.mktemp("bare"), "llama", num_hidden_layers=1)
    with pytest.raises(VocabularyMismatchError, match="the target has a tokenizer but the draft has none"):
        LLM(target, draft=bare, **SIZES)


def test_the_tokenizer_that_the_user_names_counts(tmp_path_factory, small):
    """It replaces the target's own, and the draft is compared with it."""
    bare = tiny_checkpoint(tmp_path_factory.mktemp("bare"), "llama")
    llm = LLM(bare, draft=small, tokenizer=small, **SIZES)
    assert llm.generate("the end", PARAMS[0])[0].stats.drafted > 0


@pytest.mark.parametrize("draft", ["/no/such/model", "no such draft", "a\0b", MISSING, TOO_LONG, NO_HOME])
def test_a_draft_that_is_not_there(target, draft):
    with pytest.raises(InvalidValueError, match="must be one of .*, or a model's path or name") as caught:
        LLM(target, draft=draft, **SIZES)
    assert repr(draft)[:20] in str(caught.value)


@pytest.mark.parametrize("weights", ["/no/such/model", "no such draft", "a\0b", MISSING, NO_HOME])
def test_weights_that_are_not_there(target, weights):
    with pytest.raises(ModelNotFoundError) as caught:
        LLM(target, draft={"weights": weights}, **SIZES)
    assert repr(weights) in str(caught.value)
    assert "hf download" not in str(caught.value)


def test_a_hub_name_that_is_not_cached(target):
    with pytest.raises(ModelNotFoundError, match="nobody/nothing"):
        LLM(target, draft="nobody/nothing", **SIZES)


def test_a_folder_that_is_no_model(target, tmp_path):
    with pytest.raises((ModelFileError, ModelNotFoundError), match=str(tmp_path)):
        LLM(target, draft=tmp_path, **SIZES)


@pytest.mark.parametrize(
    "draft", ["", {"kv": "nonsense"}, {"weights": "ngram", "layers": "every:2"}, {"layers": "first:4"}]
)
def test_drafts_that_make_no_sense(target, draft):
    with pytest.raises(InvalidValueError):
        LLM(target, draft=draft, **SIZES)
