"""Passes that are padded as for CUDA graphs draft what others draft, and disturb no cache."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from longdraft.integrations.vllm.args import engine_args
from longdraft.integrations.vllm.settings import Settings
from tests.in_vllm.engines import GAMMA, engine
from tests.in_vllm.test_engine import change, greedy, prompts, run


@pytest.fixture(scope="module")
def padded(folder):
    ours = engine_args(Settings(budget=64), GAMMA, "cpu")
    ours["speculative_config"] |= {"model": "tests.in_vllm.padded.PaddedProposer"}
    return engine(folder, **ours)


@pytest.mark.parametrize("reads", ["full", "streaming_llm"])
def test_greedy_text_is_plains(plain, padded, reads):
    change(padded, draft=reads)
    texts = prompts(31, 24)
    wishes = [{"longdraft_gamma": i % (GAMMA + 1)} for i in range(len(texts))]
    assert run(padded, texts, [greedy(20 + i, extra_args=w) for i, w in enumerate(wishes)]) == run(
        plain, texts, [greedy(20 + i) for i in range(len(texts))]
    )
    (counts,) = padded.collective_rpc("longdraft_set")
    assert counts["padded"] > 20 and counts["plain"] > 10 and counts["accepted"] > 100
    assert reads != "full" or counts["accepted"] == counts["verified"]


def test_sampled_text_of_one_seed_is_that_of_no_padding(padded):
    texts = prompts(32, 6, 20, 40)
    params = [SamplingParams(temperature=1, seed=i, max_tokens=30, ignore_eos=True, detokenize=False) for i in range(6)]
    change(padded, draft="streaming_llm", graphs=True)
    with_padding = run(padded, texts, params)
    change(padded, graphs=False)
    assert run(padded, texts, params) == with_padding
    (counts,) = padded.collective_rpc("longdraft_set", kwargs={"graphs": True})
    assert "padded" not in counts and counts["accepted"] > 0
