"""Stock vLLM with LongDraft's draft returns what it returns without: greedy the same tokens, sampled the same law.

Runs where vLLM is installed (``make test-vllm``); nowhere else.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from vllm import SamplingParams

from longdraft.integrations.vllm.args import engine_args
from longdraft.integrations.vllm.settings import Settings
from tests.in_vllm.engines import GAMMA, LENGTH, VOCAB, drafting, engine


def prompts(seed, count, shortest=1, longest=700):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def run(llm, texts, params):
    """Token ids that follow each prompt; ``params``: one for all, or one each."""
    outs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


def greedy(tokens=40, **more):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def change(llm, **settings):
    """New settings of the drafting engine."""
    llm.collective_rpc("longdraft_set", kwargs=settings)


@pytest.fixture
def counted(draft):
    """Verified and accepted tokens since the last call or the start of the test; restores the settings."""

    def read():
        (counts,) = draft.collective_rpc("longdraft_set")
        return [counts.get("verified", 0), counts.get("accepted", 0)]

    read()
    yield read
    change(draft, draft="streaming_llm", budget=64, gamma=None)


def test_a_draft_over_all_keys_is_accepted_whole(draft, counted, kind):
    change(draft, draft="full")
    run(draft, prompts(0, 8, 50), greedy())
    drafted, accepted = counted()
    assert drafted > 150
    assert accepted > 0.8 * drafted if kind == "int8" else accepted == drafted  # rounded weights err now and then


@pytest.mark.parametrize("budget", [1, 64, 300])
def test_greedy_text_is_plains(plain, draft, counted, budget):
    change(draft, budget=budget)
    texts = prompts(1, 32)
    assert run(draft, texts, greedy()) == run(plain, texts, greedy())
    drafted, accepted = counted()
    assert drafted > 32 * 20 and 0 < accepted < drafted  # else nothing was tried


def test_with_its_own_words_as_a_cached_prefix(plain, draft, counted):
    texts = prompts(2, 8, 200)
    first = run(draft, texts, greedy())
    assert first == run(plain, texts, greedy())
    longer = [text + words + [7, 9] for text, words in zip(texts, first, strict=True)]
    assert run(draft, longer, greedy()) == run(plain, longer, greedy())
    assert counted()[0] > 0


def test_penalties_lists_and_lengths_of_each_request(plain, draft, counted):
    kinds = [
        dict(repetition_penalty=1.3),
        dict(presence_penalty=1.0, frequency_penalty=0.5),
        dict(allowed_token_ids=list(range(0, VOCAB, 3))),
        dict(min_tokens=9, stop_token_ids=list(range(0, VOCAB, 5))),
        dict(logprobs=2),
        dict(),
    ]
    texts = prompts(3, 24)
    params = [greedy(5 + 3 * i, **kinds[i % len(kinds)]) for i in range(len(texts))]
    assert run(draft, texts, params) == run(plain, texts, params)
    assert counted()[1] > 0


def test_each_request_may_draft_less_or_not_at_all(plain, draft, counted):
    wishes = [{"longdraft_gamma": n} for n in range(GAMMA + 3)] + [{"longdraft_off": 1}, {"longdraft_budget": 200}]
    wishes += [{"longdraft_gamma": -1}, {"longdraft_budget": "much"}, {"longdraft_what": 1}]  # passed over
    texts = prompts(4, len(wishes), 100)
    params = [greedy(extra_args=wish) for wish in wishes]
    assert run(draft, texts, params) == run(plain, texts, greedy())
    assert counted()[0] > 0
    run(draft, texts, [greedy(extra_args={"longdraft_off": 1})] * len(texts))
    assert counted() == [0, 0]


def test_to_the_models_last_token(plain, draft, counted):
    texts = prompts(5, 6, LENGTH - 30, LENGTH - 5) + prompts(6, 4)
    long = greedy(60)
    assert run(draft, texts, long) == run(plain, texts, long)
    assert counted()[0] > 0


def test_where_the_native_attention_does_not_serve_vllms_own_runs(folder, capfd):
    """float16: what is asked for is named as missing, and the text is that of an engine that nobody asked."""
    ours = engine_args(Settings(attention="native"), 0, "cpu")
    texts = prompts(12, 8)
    assert run(engine(folder, "float16", **ours), texts, greedy()) == run(engine(folder, "float16"), texts, greedy())
    assert "vLLM's own attention runs: it computes in float32 and bfloat16" in "".join(capfd.readouterr())


def test_preempted_requests(folder, plain, kind):
    """Blocks for half of the rows: some are thrown out and come back."""
    few = drafting(folder, kind, num_gpu_blocks_override=56, enable_prefix_caching=False)
    texts = prompts(7, 8, 150, 260)
    assert run(few, texts, greedy(120)) == run(plain, texts, greedy(120))
    preemptions = [m.value for m in few.get_metrics() if m.name == "vllm:num_preemptions"]
    assert sum(preemptions) > 0


@pytest.mark.parametrize("filters", [dict(), dict(top_k=20), dict(top_p=0.8)], ids=str)
@pytest.mark.parametrize("reads", ["streaming_llm", "full"])
def test_sampled_text_follows_the_models_law(draft, reference, counted, reads, filters):
    """Log-probabilities under the model in float64: their sum, and the ranks they come from, are as the law says.

    Under the law each token's ``log p`` has mean ``-H`` and a known variance at its own place, whatever came before:
    the sum's distance from its expectation is a normal number. Taking too much of the draft's likes shows there.
    """
    change(draft, draft=reads)
    temperature = 0.9
    texts = prompts(8, 400, 5, 160)
    words = run(
        draft,
        texts,
        SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, detokenize=False, **filters),
    )
    drafted, accepted = counted()
    assert drafted > 5000 and accepted > 0.2 * drafted
    assert abs(surprise(reference, texts, words, temperature, filters)) < 4


def surprise(model, texts, words, temperature, filters):
    """Standard deviations between the tokens' log-probabilities and what they should be."""
    gap = variance = 0.0
    for text, said in zip(texts, words, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text + said])).logits[0, len(text) - 1 : -1]
        log_p = filtered(logits / temperature, **filters)
        p = log_p.exp()
        finite = log_p.clamp(min=-1e3)
        mean = (p * finite).sum(-1)
        gap += float((finite.gather(1, torch.tensor(said)[:, None])[:, 0] - mean).sum())
        variance += float(((p * finite**2).sum(-1) - mean**2).sum())
    return gap / math.sqrt(variance)


def filtered(logits, top_k=None, top_p=None):
    """Log-probabilities by the definitions, over sorted tokens."""
    values, order = logits.sort(descending=True, dim=-1)
    keep = torch.ones_like(values, dtype=torch.bool)
    if top_k:
        keep[:, top_k:] = False
    if top_p:
        mass = values.softmax(-1)
        keep &= mass.cumsum(-1) - mass < top_p
    return torch.full_like(logits, -torch.inf).scatter(1, order, values.masked_fill(~keep, -torch.inf)).log_softmax(-1)


def test_the_law_is_a_test_that_can_fail(plain, reference):
    """Text of a slightly colder model is found out."""
    texts = prompts(9, 400, 5, 160)
    words = run(plain, texts, SamplingParams(temperature=0.85, max_tokens=24, ignore_eos=True, detokenize=False))
    assert abs(surprise(reference, texts, words, 0.9, {})) > 8


def test_requests_with_a_seed_repeat(draft, counted):
    texts = prompts(10, 6, 20, 40)  # no chunks: vLLM's CPU build cannot set a seeded request's noise back after one
    params = [SamplingParams(temperature=1, seed=i, max_tokens=30, ignore_eos=True, detokenize=False) for i in range(6)]
    assert run(draft, texts, params) == run(draft, texts, params)
    assert counted()[0] > 0


def test_in_bfloat16_differences_are_near_ties(folder, kind):
    """A row that differs does so where the best two words of plain with the same attention were as good as equal."""
    plain, draft = drafting(folder, kind, "bfloat16", 0), drafting(folder, kind, "bfloat16")
    texts = prompts(11, 32)
    outs = plain.generate([{"prompt_token_ids": text} for text in texts], greedy(logprobs=2), use_tqdm=False)
    theirs, differ = run(draft, texts, greedy()), 0
    for out, words in zip(outs, theirs, strict=True):
        said = list(out.outputs[0].token_ids)
        at = next((i for i, pair in enumerate(zip(said, words, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            differ += 1
            best = sorted((p.logprob for p in out.outputs[0].logprobs[at].values()), reverse=True)
            assert best[0] - best[1] <= 0.1, (at, best)
    # As often as plain does when its batch is another one.
    halves = [run(plain, texts[i : i + 3], greedy()) for i in range(0, 32, 3)]
    again = [words for part in halves for words in part]
    own = sum(list(out.outputs[0].token_ids) != words for out, words in zip(outs, again, strict=True))
    assert differ <= 2 * own + 6, (differ, own)
