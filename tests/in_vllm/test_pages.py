"""Drafts that choose blocks by their keys change no text, and what they choose by is never out of date."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from longdraft.integrations.vllm.args import engine_args
from longdraft.integrations.vllm.settings import Settings
from tests.in_vllm.engines import GAMMA, KINDS, LENGTH, drafting, engine
from tests.in_vllm.test_engine import change, greedy, prompts, run, surprise


def still_drafts(llm):
    """Whether no check failed: after one that does decoding is plain."""
    llm.collective_rpc("longdraft_set")
    run(llm, prompts(30, 4, 100), greedy())
    (counts,) = llm.collective_rpc("longdraft_set")
    return counts.get("verified", 0) > 0


def choosing(folder, kind, proposer="CheckedProposer", draft="streaming_llm"):
    """With blocks for a few rows: some are thrown out and come back, and blocks pass from hand to hand."""
    settings = Settings(draft, budget=64, selection="pages", **KINDS[kind])
    ours = engine_args(settings, GAMMA, "cpu")
    ours["speculative_config"] |= {"model": f"tests.in_vllm.checked.{proposer}"}
    return engine(folder, **ours, num_gpu_blocks_override=72)


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "vllm"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def chooser(folder, kind):
    return choosing(folder, kind)


@pytest.fixture
def counted(chooser):
    """Counts since the last call or the start of the test; restores the settings."""

    def read():
        (counts,) = chooser.collective_rpc("longdraft_set")
        return [counts.get(name, 0) for name in ("chosen", "verified", "accepted")]

    read()
    yield read
    change(chooser, draft="streaming_llm", budget=64, gamma=None)


def test_greedy_text_is_plains(plain, chooser, counted):
    """In prompt chunks, with cached prefixes and budgets of their own, thrown out, up to the model's length."""
    texts = prompts(31, 20) + prompts(32, 2, LENGTH - 40, LENGTH - 30)
    params = [greedy(50, extra_args=wish) for wish in [{}, {"longdraft_budget": 150}] * (len(texts) // 2)]
    first = run(chooser, texts, params)
    assert first == run(plain, texts, greedy(50))
    longer = [text + words + [7] for text, words in zip(texts[:12], first, strict=False)]
    assert run(chooser, longer, greedy()) == run(plain, longer, greedy())
    chosen, drafted, accepted = counted()
    assert chosen > 100 and 0 < accepted < drafted
    preemptions = [m.value for m in chooser.get_metrics() if m.name == "vllm:num_preemptions"]
    assert sum(preemptions) > 0
    assert still_drafts(chooser)


@pytest.mark.parametrize("settings", [dict(budget=LENGTH), dict(draft="full")], ids=str)
def test_a_draft_over_all_blocks_is_accepted_whole(chooser, counted, kind, settings):
    change(chooser, **settings)
    run(chooser, prompts(0, 8, 50), greedy())
    _, drafted, accepted = counted()
    assert drafted > 150
    assert accepted > 0.8 * drafted if kind == "int8" else accepted == drafted


def test_sampled_text_follows_the_models_law(chooser, reference, counted):
    texts = prompts(34, 300, 130, 200)
    params = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, detokenize=False)
    words = run(chooser, texts, params)
    chosen, drafted, accepted = counted()
    assert chosen > 1000 and accepted > 0.2 * drafted
    assert abs(surprise(reference, texts, words, 0.9, {})) < 4
    assert still_drafts(chooser)


def test_with_gamma_chosen_at_random(folder, plain):
    """Ragged and empty lists at every step."""
    llm, texts = choosing(folder, "native", "CheckedDiceProposer", "auto"), prompts(35, 16, 100)
    assert run(llm, texts, greedy()) == run(plain, texts, greedy())
    (counts,) = llm.collective_rpc("longdraft_set")
    assert counts["chosen"] > 100
    assert still_drafts(llm)


def test_where_the_native_attention_does_not_serve_the_last_blocks_are_read(folder, capfd):
    """float16: said in a sentence, and the text is that of an engine without a draft."""
    texts = prompts(36, 6, 200)
    settings = Settings(budget=64, selection="pages", **KINDS["native"])
    llm = engine(folder, "float16", **engine_args(settings, GAMMA, "cpu"))
    theirs = run(drafting(folder, "vllm", "float16"), texts, greedy())
    assert run(llm, texts, greedy()) == theirs
    assert "choosing them goes with the native attention" in "".join(capfd.readouterr())
