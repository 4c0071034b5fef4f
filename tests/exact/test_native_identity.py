"""Native kernels: outputs are bit-identical in float32 and bfloat16, ids and log-probabilities, whatever happens."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from longdraft.config import DraftConfig, EngineConfig
from longdraft.drafts.registry import NAMED
from longdraft.engine import runner
from longdraft.engine.engine import Engine
from longdraft.exactness import tier
from longdraft.kernels import native
from longdraft.models.feedback import FeedbackConfig
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams
from longdraft.spec import sample
from longdraft.spec.probs import to_log_probs
from tests.conftest import run
from tests.spire_drafts import spire_of

pytestmark = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLING = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.05},
)
GAMMAS = (1, 2, 3, 5)
DRAFTS = {name: replace(draft, budget=24, sinks=4) for name, draft in NAMED.items()}
DRAFTS |= {
    "first layers": DraftConfig(layers="first:2", kv="full"),
    "small": DraftConfig(weights="small", budget=24, sinks=4),
    "spire": DraftConfig(weights="spire"),
    "spire in 8 bits": DraftConfig(weights="spire of 2@int8"),
    **{kv: DraftConfig(kv=kv, budget=64, sinks=4) for kv in ("pages", "verified")},  # pages to choose from
}


def models_in(dtype):
    """Target, small model and SPIRe drafts in one type. The logits are flat enough for ties to be near in bfloat16."""
    configs = tiny_config(), tiny_config(num_layers=1)
    sources = [RandomWeights(c, seed=6 + i) for i, c in enumerate(configs)]
    pair = [Transformer(c, s, dtype=dtype) for c, s in zip(configs, sources, strict=True)]
    kinds = {"spire": FeedbackConfig((0, 1, 2), 20, 4), "spire of 2": FeedbackConfig((1, 2), 20, 4)}
    spires = {n: spire_of(pair[0], sources[0], c, trained=False) for n, c in kinds.items()}
    return [*pair, spires]


@pytest.fixture(scope="module", params=DTYPES)
def models(request):
    return models_in(DTYPES[request.param])


def engine_of(models, control=None, **sizes):
    config = EngineConfig(**({"max_model_len": 256, "num_pages": 200} | sizes))
    return Engine(models[0], config, draft_models={"small": models[1], **models[2]}, control=control)


def requests(sampling, seed=0):
    rng = random.Random(seed)
    params = SamplingParams(**sampling, max_tokens=24, logprobs=2, ignore_eos=True)
    lengths = (1, 15, 16, 17, 33, 70, 130)
    return [([rng.randrange(128) for _ in range(n)], replace(params, seed=rng.randrange(2**40))) for n in lengths]


def outcomes(models, asked, drafts=None, act=None, **sizes):
    """(ids, logprobs) of each request; ``act`` may disturb the engine before each step."""
    engine = engine_of(models, **sizes)
    drafts = drafts or [None] * len(asked)
    seqs = [engine.sequence(engine.add(p, q, d)) for (p, q), d in zip(asked, drafts, strict=True)]
    while engine.has_work:
        if act:
            act(engine)
        engine.step()
    engine.store.check_integrity()
    assert engine.store.num_free_pages == engine.store.num_pages
    return [(seq.output_ids, seq.logprobs) for seq in seqs]


def alone(models, asked):
    return [outcomes(models, [request])[0] for request in asked]


@pytest.mark.parametrize("sampling", SAMPLING, ids=repr)
def test_every_draft_and_gamma(models, sampling):
    """Each request alone and plainly, against ragged batches under every draft; log-probability bits, too.

    The rows of a batch differ in γ. Each draft meets each γ in each of the four ways to sample, at one or two lengths.
    """
    asked, start = requests(sampling), SAMPLING.index(sampling)
    want = alone(models, asked)
    for d, draft in enumerate(DRAFTS.values()):
        drafts = [replace(draft, gamma=GAMMAS[(i + d + start) % len(GAMMAS)]) for i in range(len(asked))]
        assert outcomes(models, asked, drafts) == want


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING, ids=repr)
def test_every_draft_and_gamma_at_every_length(models, sampling):
    asked = requests(sampling)
    want = alone(models, asked)
    for draft, gamma in product(DRAFTS.values(), GAMMAS):
        assert outcomes(models, asked, [replace(draft, gamma=gamma)] * len(asked)) == want


@pytest.mark.parametrize("sampling", SAMPLING, ids=repr)
@pytest.mark.parametrize("chunk", [1, 17, 256])
def test_chunks_of_any_size(models, sampling, chunk):
    asked = requests(sampling, 1)
    assert outcomes(models, asked, max_num_batched_tokens=chunk) == alone(models, asked)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_drafts_preemptions_and_forks(models, seed):
    rng = random.Random(seed)
    asked = [request for sampling in SAMPLING for request in requests(sampling, seed)]
    drafts = [replace(rng.choice(list(DRAFTS.values())), gamma=rng.randint(1, 6)) for _ in asked]
    drafts = [None if rng.random() < 0.2 else draft for draft in drafts]
    forks = {}

    def disturb(engine):
        running = engine.scheduler.running
        if running and rng.random() < 0.15:
            engine.scheduler.preempt(rng.choice(running))
        if running and rng.random() < 0.1:
            source = rng.choice(running)
            draft = rng.choice([None, *DRAFTS.values()])
            forks.setdefault(source.id, []).append(engine.sequence(engine.fork(source.id, draft=draft)))

    want = alone(models, asked)
    sizes = {"num_pages": 40, "max_num_seqs": 12, "max_num_batched_tokens": 48}
    assert outcomes(models, asked, drafts, disturb, **sizes) == want
    assert len(forks) > 2
    for source, children in forks.items():
        for child in children:
            if source < len(want):
                assert (child.output_ids, child.logprobs) == want[source]


def test_completions_and_prompt_logprobs(models):
    """n > 1 shares a prompt; its scores do not depend on how it was cut."""
    prompt = [(5 * i) % 128 for i in range(50)]
    params = SamplingParams(n=3, seed=5, max_tokens=20, prompt_logprobs=1, logprobs=0)
    results = []
    for draft, chunk in ((None, 512), (None, 7), (DRAFTS["small"], 16), (DRAFTS["streaming_llm"], 512)):
        engine = engine_of(models, max_num_batched_tokens=chunk)
        seqs = [engine.sequence(i) for i in engine.add_all(prompt, params, draft)]
        list(run(engine))
        results.append([(seq.output_ids, seq.logprobs, seq.prompt_logprobs) for seq in seqs])
    assert all(result == results[0] for result in results)


def test_the_tier_says_so(models, monkeypatch):
    assert tier(models[0]) == "bit-identical"
    assert tier(models[0], DraftConfig(sampling_rule="maximal")) == "distribution"


@pytest.mark.parametrize("vocab", [5, 17, 128, 131, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0, 3.0])
def test_the_native_draw_is_the_reference_draw(vocab, temperature):
    """argmax(x / T + G) over 400 rows each: same noise, same winner; masked tokens never win."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(400, vocab, generator=generator)
    logits[:, ::3] = -torch.inf
    seeds = torch.randint(0, 2**62, (400,), generator=generator).tolist()
    positions = torch.randint(0, 2**20, (400,), generator=generator).tolist()
    log_probs = to_log_probs(logits, [SamplingParams(temperature=temperature)] * 400)
    for role in (0, 1):
        want = sample.draw(log_probs, torch.tensor(seeds), torch.tensor(positions), role).tolist()
        assert native.draw(logits, [temperature] * 400, seeds, positions, role) == want
        assert all(token % 3 for token in want)


def test_ties_and_bad_logits():
    """The lowest of equal tokens; −1 for NaN, +inf, or nothing but −inf."""
    x = torch.zeros(6, 50)
    x[1, 20] = x[1, 40] = 7
    x[2, 49] = torch.nan
    x[3, 3] = torch.inf
    x[4] = -torch.inf
    x[5, :49] = -torch.inf
    greedy = native.draw(x, [0.0] * 6, [1] * 6, [1] * 6, 0)
    assert greedy == [0, 20, -1, -1, -1, 49]
    sampled = native.draw(x, [1.0] * 6, [1] * 6, [1] * 6, 0)
    assert sampled[2:] == [-1, -1, -1, 49]


def test_steps_of_all_sizes_share_the_memory_of_their_logits(models, monkeypatch):
    """Once it is large enough it stays; what is too much to be kept is found anew."""
    engine, places = engine_of(models, max_num_batched_tokens=8), []  # first chunks of prompts want none
    forward = engine.runner.forward

    def watched(batch):
        logits = forward(batch)
        places.append((logits.data_ptr(), len(logits)))
        return logits

    monkeypatch.setattr(engine.runner, "forward", watched)
    for prompt, params in requests(SAMPLING[1])[3:7]:
        engine.add(prompt, params, DRAFTS["full"])
    list(run(engine))
    sizes = [size for _, size in places]
    assert sizes[0] == 0
    largest = sizes.index(max(sizes))
    assert len(set(sizes[largest:])) > 1
    assert {place for place, size in places[largest:] if size} == {engine.runner._logits.data_ptr()}
    monkeypatch.setattr(runner, "MOST_LOGITS", 0)
    assert engine.runner._room(1) is None


def test_bad_logits_end_their_own_request_only(models, monkeypatch):
    engine = engine_of(models)
    asked = requests(SAMPLING[1])[:3]
    want = alone(models, asked)
    seqs = [engine.sequence(engine.add(p, q, DRAFTS["full"])) for p, q in asked]
    forward = engine.runner.forward

    def spoil(batch):
        logits, start = forward(batch).clone(), 0
        for row in batch.rows:
            if row.seq is seqs[1] and len(row.seq.output_ids) > 4:
                logits[start : start + row.num_logits] = torch.nan
            start += row.num_logits
        return logits

    monkeypatch.setattr(engine.runner, "forward", spoil)
    list(run(engine))
    assert [(s.output_ids, s.logprobs) for s in (seqs[0], seqs[2])] == [want[0], want[2]]
    assert (seqs[1].finish_reason, seqs[1].error) == ("error", "the model's logits are not finite")
    assert seqs[1].output_ids == want[1][0][: len(seqs[1].output_ids)]
