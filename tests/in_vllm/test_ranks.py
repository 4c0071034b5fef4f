"""Two ranks of a tensor-parallel group draft alike: greedy text is that of plain with as many ranks."""

from __future__ import annotations

from vllm import SamplingParams

from tests.in_vllm.engines import drafting, engine
from tests.in_vllm.test_engine import change, greedy, prompts, run


def test_two_ranks_say_what_two_plain_ranks_say(folder, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core each: else vLLM wants a memory node each
    texts, ranks = prompts(41, 8, 20, 300), {"tensor_parallel_size": 2}
    seeds = [{"seed": i} if i % 2 else {} for i in range(8)]
    sampled = [SamplingParams(temperature=1, max_tokens=20, ignore_eos=True, detokenize=False, **s) for s in seeds]
    plain = engine(folder, **ranks)
    expected = run(plain, texts, greedy(20))
    plain.llm_engine.engine_core.shutdown()
    draft = drafting(folder, "vllm", **ranks)
    assert run(draft, texts, greedy(20)) == expected
    change(draft, draft="full")
    first = run(draft, [text[:40] for text in texts], sampled)
    assert run(draft, [text[:40] for text in texts], sampled)[1::2] == first[1::2]
    counts = draft.collective_rpc("longdraft_set")
    keys = ("rounds", "verified", "accepted")
    assert [counts[0][key] for key in keys] == [counts[1][key] for key in keys]  # tokens, too, or they would part
    assert counts[0]["accepted"] > 0.9 * counts[0]["verified"] > 100
    draft.llm_engine.engine_core.shutdown()
