"""Requests' limits and ends, refusals, and faults that stay with their request."""

import pytest
import torch

from longdraft import DraftConfig, SamplingParams
from longdraft.core import Sequence
from longdraft.engine import runner
from longdraft.engine.stops import cut
from longdraft.errors import ContextLengthError, InvalidValueError
from tests.conftest import greedy, make_engine, run, run_alone


def finished(engine):
    return {o.seq.id: o.seq for o in run(engine) if o.finish_reason}


@pytest.mark.parametrize("m", range(11))
def test_an_eos_ends_the_request_where_it_appears(tiny, m):
    """Late declaration: whatever token plain decoding gives at index m becomes the EOS (case O03)."""
    plain = run_alone(tiny, list(range(5, 13)), greedy(20))
    eos = plain[m]
    engine = make_engine(tiny, eos_token_ids=(127, eos))  # several, one of them never drawn
    engine.add(list(range(5, 13)), greedy(20))
    (seq,) = finished(engine).values()
    assert seq.output_ids == plain[: plain.index(eos) + 1]
    assert seq.finish_reason == "stop"
    assert run_alone(tiny, list(range(5, 13)), greedy(20, ignore_eos=True), eos_token_ids=(eos,)) == plain
    assert run_alone(tiny, list(range(5, 13)), greedy(20, stop_token_ids=(eos,))) == seq.output_ids


@pytest.mark.parametrize(
    ("tokens", "cap", "kept", "reason"),
    [
        ([1, 2, 9, 4, 5, 6], 5, [1, 2, 9], "stop"),  # a stop inside the budget wins over the cap (case O05)
        ([1, 2, 3, 4, 5, 9], 5, [1, 2, 3, 4, 5], "length"),  # a stop beyond it does not
        ([1, 2, 3, 4, 9], 5, [1, 2, 3, 4, 9], "stop"),
        ([1, 2], 5, [1, 2], None),
        ([1, 2], 2, [1, 2], "length"),
    ],
)
def test_a_run_of_tokens_is_cut_at_its_end(tokens, cap, kept, reason):
    seq = Sequence(0, [0, 0, 0], 3, SamplingParams(), seed=0, max_total=3 + cap, stop_ids=frozenset({9}))
    assert cut(seq, tokens) == (kept, reason)


@pytest.mark.parametrize(("prompt", "new"), [(58, 6), (62, 2), (63, 1)])
def test_the_context_limit(tiny, prompt, new):
    """Prompt + output fill the limit exactly (case O14)."""
    engine = make_engine(tiny, max_model_len=64)
    for cap in (100, 2**62, None):
        engine.add([1] * prompt, greedy(cap))
    for seq in finished(engine).values():
        assert (len(seq.output_ids), seq.finish_reason) == (new, "length")


@pytest.mark.parametrize("prompt", [64, 65, 500])
def test_a_prompt_that_leaves_no_room_is_refused(tiny, prompt):
    engine = make_engine(tiny, max_model_len=64)
    with pytest.raises(ContextLengthError, match=rf"{prompt}.*64 \(max_model_len\).*[Ss]horten"):
        engine.add([1] * prompt, greedy())
    assert not engine.has_work


def test_requests_that_the_pool_can_never_hold(tiny):
    """A pool of 128 tokens under a context of 256 (case O13)."""
    engine = make_engine(tiny, num_pages=8)
    big = engine.add([1] * 120, greedy(40))  # ends at the pool's size, by the documented rule
    fits = engine.add([2] * 120, greedy(8))
    endless = [engine.add([3] * 10, greedy(cap)) for cap in (10_000, 10**9, 2**63 - 1)]
    twins = [engine.add([i] * 60, greedy(60)) for i in (4, 5)]
    done = finished(engine)
    assert (len(done[big].output_ids), done[big].finish_reason) == (8, "length")
    assert (len(done[fits].output_ids), done[fits].finish_reason) == (8, "length")
    assert all(len(done[i].output_ids) == 118 for i in endless)
    for i, twin in zip((4, 5), twins, strict=True):
        assert done[twin].output_ids == run_alone(tiny, [i] * 60, greedy(60))
    with pytest.raises(ContextLengthError, match="size of the KV cache"):
        engine.add([1] * 128, greedy())
    assert engine.store.num_free_pages == 8


@pytest.mark.parametrize("bad", [[], [128], [-1], [1.0], ["a"], [True], [2**63]])
def test_prompts_with_bad_ids_are_refused_and_hurt_nobody(tiny, bad):
    engine = make_engine(tiny)
    good = engine.add([0], greedy(3))  # a prompt of token 0 is a prompt (case O29)
    with pytest.raises(InvalidValueError, match="prompt"):
        engine.add(bad, greedy())
    assert finished(engine)[good].output_ids == run_alone(tiny, [0], greedy(3))


def test_stop_ids_outside_the_vocabulary_are_refused(tiny):
    with pytest.raises(InvalidValueError, match="stop_token_ids"):
        make_engine(tiny).add([1], greedy(stop_token_ids=(128,)))


def test_abort_frees_pages_in_every_state(tiny):
    engine = make_engine(tiny, num_pages=8, max_num_batched_tokens=16)
    ids = [engine.add([i] * 40, greedy(50)) for i in range(4)]  # the last ones wait
    for _ in range(4):
        engine.step()
    for i in ids:
        engine.abort(i)
        engine.store.check_integrity()
    assert (engine.store.num_free_pages, engine.has_work) == (8, False)
    with pytest.raises(InvalidValueError, match="unfinished"):
        engine.abort(ids[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_end_their_own_request_only(tiny, value, monkeypatch):
    """NaN in one row (case R8): that request ends with an error, its mates are untouched."""
    prompts = [list(range(n)) for n in (5, 9, 20)]
    want = [run_alone(tiny, p, greedy(12)) for p in prompts]
    engine = make_engine(tiny)
    ids = [engine.add(p, greedy(12)) for p in prompts]
    forward = engine.runner.forward

    def poisoned(batch):
        logits = forward(batch)
        for r, row in enumerate(batch.rows):
            if row.seq.id == ids[1] and len(row.seq.output_ids) == 4:
                logits = logits.clone()
                logits[r, 3] = value
        return logits

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    done = finished(engine)
    assert [done[i].finish_reason for i in ids] == ["length", "error", "length"]
    assert "not finite" in done[ids[1]].error
    assert [done[i].output_ids for i in ids] == [want[0], want[1][:4], want[2]]
    assert engine.store.num_free_pages == engine.store.num_pages


def test_two_engines_share_a_model_but_no_state(tiny):
    a, b = make_engine(tiny), make_engine(tiny, block_size=16, num_pages=20)
    for engine in (a, b):
        engine.add([1, 2, 3], greedy(10))
    outputs = [[], []]
    while a.has_work or b.has_work:
        for engine, got in zip((a, b), outputs, strict=True):
            got += [t for o in engine.step() for t in o.tokens]
    assert outputs[0] == outputs[1] == run_alone(tiny, [1, 2, 3], greedy(10))


def test_statistics_count_tokens_and_phases(tiny):
    engine = make_engine(tiny, max_num_batched_tokens=16)
    engine.add([1] * 40, greedy(5))
    (seq,) = finished(engine).values()
    assert (engine.stats.prefill_tokens, engine.stats.decode_tokens, engine.stats.decode_steps) == (40, 4, 4)
    assert seq.stats.prefill_tokens == 40
    assert 0 < seq.stats.prefill_s <= engine.stats.prefill_s
    assert engine.stats.peak_kv_pages == 3


def test_kv_dtype_of_the_store_follows_the_model(tiny):
    assert make_engine(tiny).store.k.dtype == torch.float64


@pytest.mark.parametrize("prompt", [1, 17, 33])
def test_a_prompts_last_chunk_is_prefill_whatever_its_length(tiny, prompt):
    """A chunk of one token that ends a prompt is not decoding."""
    engine = make_engine(tiny, max_num_batched_tokens=16)
    engine.add([1] * prompt, greedy(3))
    (seq,) = finished(engine).values()
    assert (engine.stats.prefill_tokens, engine.stats.decode_steps, engine.stats.decode_tokens) == (prompt, 2, 2)
    assert seq.stats.prefill_tokens == prompt


def test_a_request_of_one_token_is_seen_in_the_peak(tiny):
    engine = make_engine(tiny)
    engine.add([1] * 40, greedy(1))
    list(run(engine))
    assert engine.stats.peak_kv_pages == 3


@pytest.mark.parametrize("seed", [2**64, -1, 1.5, "x", True])
def test_a_fork_with_a_bad_seed_is_refused(tiny, seed):
    engine = make_engine(tiny)
    source = engine.add([1, 2, 3], greedy(4))
    with pytest.raises(InvalidValueError, match="seed"):
        engine.fork(source, seed=seed)
    assert len(finished(engine)) == 1


def test_preemptions_are_counted_once_and_at_once(tiny):
    engine = make_engine(tiny, num_pages=6)
    ids = [engine.add([i] * 30, greedy(40)) for i in range(2)]
    while not engine.stats.preemptions:
        engine.step()
    engine.fork(ids[1])
    done = finished(engine)
    assert engine.stats.preemptions == sum(seq.stats.preemptions for seq in done.values())


def test_a_step_that_fails_is_timed_and_can_be_repeated(tiny, monkeypatch):
    want = run_alone(tiny, [1, 2, 3], greedy(6))
    engine = make_engine(tiny)
    engine.add([1, 2, 3], greedy(6))
    forward, calls = engine.runner.forward, iter([True, False, True])

    def failing(batch):
        if next(calls, False):
            raise RuntimeError("out of memory")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", failing)
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.stats.prefill_s > 0
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    (seq,) = finished(engine).values()
    assert seq.output_ids == want


def test_drafts_that_nobody_uses_are_given_up(tiny, monkeypatch):
    """The ones asked for longest ago, when a new one is made; never one that knows a sequence, whatever comes."""
    monkeypatch.setattr(runner, "MOST_IDLE", 2)
    engine = make_engine(tiny)
    drafts = [DraftConfig(kv="snapkv", budget=32 + i) for i in range(6)]
    seq = engine.sequence(engine.add(list(range(40)), greedy(30), drafts[0]))
    engine.step()
    used, known = engine.runner.draft(drafts[0]), engine.runner._drafts
    engine.hold(seq.id)
    for draft in drafts[1:]:
        engine.add(list(range(40)), greedy(3), draft)
        for _ in range(4):
            engine.step()
    assert engine.runner.draft(drafts[0]) is used
    assert [d.budget for d in known] == [35, 36, 37, 32]
    before = engine.runner.select_s
    engine.hold(seq.id, False)
    list(run(engine))
    assert sum(seq.stats.drafted) > 0
    engine.runner.draft(drafts[4]), engine.runner.draft(drafts[2])
    assert [d.budget for d in known] == [32, 36, 34]
    assert engine.runner.select_s >= before > 0
