"""Plain against speculative decoding through the API and the command line, and the certificates of near-ties."""

import json
from dataclasses import replace

import pytest
import torch

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.compare import compare
from longdraft.config import AutoDraft
from longdraft.core import Place, Sequence
from longdraft.errors import InvalidValueError
from longdraft.exactness import certify, forced_logits, margin, rounding, tier
from tests.e2e.command import longdraft
from tests.e2e.test_cli import TIER

KEYS = {
    *("tokens_per_s", "tokens", "seconds", "prefill_s", "draft_s", "verify_s"),
    *("tokens_per_verify", "acceptance_by_position"),
}


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, None, dtype="float64", kv_cache_memory_bytes=2**22)


PROMPTS = [[(7 * i + n) % 128 for i in range(n)] for n in (3, 40, 17)]
PARAMS = [SamplingParams(temperature=t, seed=5, max_tokens=30, ignore_eos=True) for t in (0, 1)]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv", ["streaming_llm", "full"])
def test_both_ways_give_the_same(llm, params, kv):
    result = compare(llm, PROMPTS, params, DraftConfig(kv=kv, budget=16, gamma=3))
    report = result.report()
    assert (report["identical"], report["first_difference"], report["exactness"]) == (True, None, "identical")
    assert KEYS <= report["plain"].keys() & report["speculative"].keys()
    assert report["plain"]["tokens"] == report["speculative"]["tokens"] == 90
    assert report["plain"]["tokens_per_verify"] == 1
    assert report["plain"]["draft_s"] < 0.1 * report["speculative"]["draft_s"]
    per_token = 2 * 3 * 2 * 16 * 8
    lengths = [len(p) + 30 for p in PROMPTS]
    assert report["speculative"]["draft_kv_bytes"] == 0
    assert report["speculative"]["kv_bytes_read_per_plain_token"] == sum(lengths) * per_token / 3
    read = lengths if kv == "full" else [min(n, 16) for n in lengths]
    assert report["speculative"]["kv_bytes_read_per_draft_token"] == sum(read) * per_token / 3
    if kv == "full":
        assert report["speculative"]["acceptance_by_position"] == [1, 1, 1]
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages
    assert json.dumps(report)


def test_a_draft_of_the_llm_shows_in_the_statistics(folder, llm):
    plain = llm.generate(PROMPTS, PARAMS[0])
    fast = LLM(folder, draft={"kv": "full", "gamma": 3}, dtype="float64", kv_cache_memory_bytes=2**22)
    for a, b in zip(plain, fast.generate(PROMPTS, PARAMS[0]), strict=True):
        assert a.outputs == b.outputs
        assert b.stats.drafted == b.stats.accepted > 0
        assert b.stats.acceptance_by_position == [1, 1, 1]
        assert b.stats.tokens_per_verify > 3
        assert (a.stats.drafted, a.stats.tokens_per_verify, a.stats.draft_s) == (0, 1, 0)
        assert b.stats.draft_s > 0


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("nonsense", "draft is 'nonsense'.*streaming_llm"),
        ({"kv": "full", "size": 3}, "fields weights, layers, kv"),
        ({"gamma": 0}, "gamma is 0"),
        ({"budget": -1}, "budget is -1"),
        ({"sampling_rule": "loose"}, "coupled, maximal"),
        ({"weights": ""}, "weights is ''"),
        ({"layers": "some"}, "layers is 'some'"),
        ({"layers": "first:9"}, "layers is 'first:9'.*3 layers"),
        ({"weights": "ngram", "layers": "first:1"}, "layers is 'first:1'"),
        (5, "draft is 5"),
    ],
)
def test_wrong_drafts_are_refused(folder, draft, words):
    with pytest.raises(InvalidValueError, match=words):
        LLM(folder, draft=draft)


def test_a_draft_that_is_chosen_shows_what_was_chosen(folder, llm):
    """As the LLM's own, for one call, and compared; a call may also name another draft, or none."""
    params = replace(PARAMS[1], max_tokens=12)
    plain = [r.outputs[0].token_ids for r in llm.generate(PROMPTS, params)]
    auto = LLM(folder, "auto", dtype="float64", kv_cache_memory_bytes=2**22)
    for results in (auto.generate(PROMPTS, params), llm.generate(PROMPTS, params, draft="auto")):
        assert [r.outputs[0].token_ids for r in results] == plain
        for stats in (r.stats for r in results):
            assert stats.control.rounds.total() + stats.control.off.total() == stats.verify_passes > 0
            assert stats.control.report()["chosen"]
    for draft in (None, "ngram", DraftConfig(budget=16)):
        results = auto.generate(PROMPTS, params, draft=draft)
        assert [r.outputs[0].token_ids for r in results] == plain
        assert all(r.stats.control is None for r in results)
        assert any(r.stats.drafted for r in results) == isinstance(draft, DraftConfig)
    with auto.stream(PROMPTS[0], params, draft=None) as stream:
        assert [t for piece in stream for t in piece.token_ids] == plain[0]
    result = compare(llm, PROMPTS, params, AutoDraft())
    assert result.identical
    assert result.held
    assert result.speculative["control"]["chosen"]
    assert "control" not in result.plain


def test_tiers(folder, llm):
    assert tier(llm.model) == "identical"
    assert tier(llm.model, DraftConfig(sampling_rule="maximal")) == "distribution"
    small = LLM(folder, draft=DraftConfig(sampling_rule="maximal"), kv_cache_memory_bytes=2**22)
    assert small.exactness == "distribution"
    assert tier(small.model) == TIER


def place(ids, params):
    return Place(Sequence(0, ids, len(ids), params, params.seed or 0, len(ids) + 1))


def test_margins(llm):
    """What may be certified: only tokens that are themselves next to the best one."""
    ids = PROMPTS[1]
    logits = forced_logits(llm.model, [ids], 1)[0]
    (best, second), (i, j) = (x.tolist() for x in logits.topk(2))
    worst = int(logits.argmin())
    assert margin(llm.model, place(ids, PARAMS[0]), [i], 0.0) == 0
    assert margin(llm.model, place(ids, PARAMS[0]), [i, j], 0.0) == pytest.approx(best - second)
    assert margin(llm.model, place(ids, PARAMS[0]), [i, worst], 0.0) == pytest.approx(best - float(logits.min()))
    for temperature in (0.01, 1.0):
        params = SamplingParams(temperature=temperature, seed=3)
        drawn = llm.generate([ids], SamplingParams(temperature=temperature, seed=3, max_tokens=1))[0]
        token = drawn.outputs[0].token_ids[0]
        assert margin(llm.model, place(ids, params), [token], 0.0) == 0
        assert margin(llm.model, place(ids, params), [worst], 0.0) > 0


def test_margins_at_the_border_of_a_filter(llm):
    """A token next to the border may come or not; one behind it cannot."""
    ids, params = PROMPTS[1], SamplingParams(temperature=1, top_k=2, seed=1)
    logits = forced_logits(llm.model, [ids], 1)[0]
    values, order = logits.topk(4)
    gap = float(values[1] - values[2])
    assert margin(llm.model, place(ids, params), [int(order[2])], 0.5 * gap) == float("inf")
    assert margin(llm.model, place(ids, params), [int(order[2])], 1.01 * gap) < float("inf")


def test_certificates(llm):
    ids = PROMPTS[1]
    logits = forced_logits(llm.model, [ids], 1)[0]
    (best, second), (i, j) = (x.tolist() for x in logits.topk(2))
    same = certify(llm.model, ids, ([i, 5], [i, 5]), PARAMS[0], 0, 1.0)
    assert same is None
    near = certify(llm.model, ids, ([i, 5], [j, 7]), PARAMS[0], 0, 2 * (best - second))
    assert (near["position"], near["first"], near["second"], near["near_tie"]) == (0, [i], [j], True)
    assert not certify(llm.model, ids, ([i], [j]), PARAMS[0], 0, 0.5 * (best - second))["near_tie"]
    assert not certify(llm.model, ids, ([i], [int(logits.argmin())]), PARAMS[0], 0, 2 * (best - second))["near_tie"]
    assert not certify(llm.model, ids, ([i, 5], [i]), PARAMS[0], 0, 1e9)["near_tie"]  # a length is no tie


def test_rounding(folder, llm):
    single = LLM(folder, kv_cache_memory_bytes=2**22).model
    rows = [[(i * n) % 128 for i in range(60)] for n in (3, 5, 7)]
    assert rounding(llm.model, rows) < 1e-12
    assert 0 <= rounding(single, rows) < 1e-3
    assert rounding(single, [[1], [2, 3]]) < 1e-3
    many = forced_logits(llm.model, rows, 5)
    one = torch.cat([forced_logits(llm.model, [row], 5, chunk=1) for row in rows])
    torch.testing.assert_close(many, one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [{"max_num_seqs": 1}, {"kv_cache_memory_bytes": 12 * 16 * 1536}])
def test_groups_that_do_not_fit_together_take_turns_all_the_same(folder, sizes):
    llm = LLM(folder, dtype="float64", max_num_batched_tokens=16, **sizes)
    result = compare(llm, [PROMPTS[1] * 3], PARAMS[0], DraftConfig(kv="full", gamma=3))
    assert (result.identical, result.held) == (True, True)
    assert result.plain["tokens"] == result.speculative["tokens"] == 30
    assert result.speculative["verify_passes"] < result.plain["verify_passes"]
    assert llm.engine.num_unfinished == 0


def test_failed_requests_and_other_requests(llm, monkeypatch):
    forward = llm.engine.runner.forward
    monkeypatch.setattr(llm.engine.runner, "forward", lambda batch: forward(batch) * torch.nan)
    result = compare(llm, PROMPTS, PARAMS[0], DraftConfig(kv="full", gamma=3))
    assert not result.held
    assert "not finite" in result.errors[0]
    monkeypatch.undo()
    other = llm.engine.add([1, 2], PARAMS[0])
    with pytest.raises(InvalidValueError, match="unfinished requests"):
        compare(llm, PROMPTS, PARAMS[0], DraftConfig())
    llm.engine.abort(other)


def test_the_maximal_rule_is_exact_where_it_is_greedy(llm):
    draft = DraftConfig(kv="streaming_llm", budget=16, gamma=3, sampling_rule="maximal")
    assert compare(llm, PROMPTS, PARAMS[0], draft).exactness == "identical"
    assert compare(llm, PROMPTS, PARAMS[0], draft).identical
    sampled = compare(llm, PROMPTS, PARAMS[1], draft)
    assert (sampled.exactness, sampled.held) == ("distribution", True)


def test_a_difference_at_a_clear_gap_breaks_the_promise(llm, wrong_verify):
    """A wrong verifier must be seen: identical is false, the first difference named, and the promise not held."""
    result = compare(llm, PROMPTS, PARAMS[0], DraftConfig(kv="full", gamma=3))
    assert not result.identical
    assert not result.held
    assert result.first_difference["position"] == 2
    assert llm.engine.store.num_free_pages == llm.engine.store.num_pages


def test_generate_compares_on_the_command_line():
    args = ("generate", "The capital of France is", "--max-tokens", "12", "--draft", "streaming_llm", "--gamma", "2")
    done = longdraft(*args, "--compare", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["identical"] is True
    assert "Paris" in report["results"][0]["text"]
    assert KEYS <= report["plain"].keys() & report["speculative"].keys()
    assert "identical" in done.stderr
    plain = longdraft(*args)
    assert "tokens per verify" in plain.stderr
    assert plain.stdout.strip() == report["results"][0]["text"].strip()


def test_verify_prints_the_tier_and_its_checks(monkeypatch):
    monkeypatch.setattr("longdraft.cli.verify.PROMPTS", 2)
    monkeypatch.setattr("longdraft.cli.verify.NEW_TOKENS", 8)
    done = longdraft("verify", "--prompt-tokens", "60", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tier"] == TIER
    assert len(report["checks"]) >= 8
    assert all(check["passed"] and check["name"] and "figure" in check for check in report["checks"])


def test_comparing_without_a_draft_is_refused():
    done = longdraft("generate", "x", "--compare", "--draft", "off")
    assert (done.returncode, "--draft" in done.stderr) == (1, True)


@pytest.mark.parametrize("exactness", ["bit-identical", "identical", "near-tie", "distribution"])
def test_a_near_tie_is_a_difference_where_equality_is_promised(llm, exactness):
    """Two tokens that tie exactly have a margin of 0; under the stricter tiers the lower id still had to come."""
    result = compare(llm, PROMPTS, PARAMS[0], DraftConfig(kv="full", gamma=3))
    tie = {"prompt": 0, "position": 1, "margin": 0.0, "near_tie": True}
    result = replace(result, exactness=exactness, divergences=[tie])
    assert result.held == (exactness in ("near-tie", "distribution"))
    assert not replace(result, errors=["failed"]).held
