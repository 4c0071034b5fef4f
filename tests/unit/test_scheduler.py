"""The scheduler without a model: alternation, admission, preemption order, limits."""

import torch

from longdraft.config import EngineConfig
from longdraft.core import Sequence, Status
from longdraft.engine.scheduler import Scheduler
from longdraft.kernels.layout import PlainLayout
from longdraft.kv.store import PagedStore
from longdraft.sampling_params import SamplingParams


def make(num_pages=8, **sizes):
    config = EngineConfig(max_model_len=1000, num_pages=num_pages, block_size=4, **sizes)
    return Scheduler(config, PagedStore(1, num_pages, PlainLayout(4, 1, 2), torch.float32, "cpu"))


def seq(number, length):
    return Sequence(number, list(range(length)), length, SamplingParams(), seed=0, max_total=1000)


def advance(scheduler):
    """One step as the engine would take it: every wanted logit gives a token."""
    batch = scheduler.schedule()
    for row in batch.rows:
        scheduler.commit(row, [7] * row.num_logits)
    return batch.prefill, [(row.seq.id, row.num_tokens, row.num_logits) for row in batch.rows]


def test_prefill_is_chunked_and_alternates_with_decoding():
    scheduler = make(num_pages=20, max_num_batched_tokens=5)
    scheduler.add(seq(0, 3))
    assert advance(scheduler) == (True, [(0, 3, 1)])
    scheduler.add(seq(1, 12))
    assert [advance(scheduler) for _ in range(6)] == [
        (False, [(0, 1, 1)]),
        (True, [(1, 5, 0)]),
        (False, [(0, 1, 1)]),  # a decoding row waits for one chunk at most
        (True, [(1, 5, 0)]),
        (False, [(0, 1, 1)]),
        (True, [(1, 2, 1)]),
    ]
    assert advance(scheduler) == (False, [(0, 1, 1), (1, 1, 1)])


def test_one_chunk_takes_in_several_short_prompts():
    scheduler = make(num_pages=20, max_num_batched_tokens=10)
    for number, length in enumerate((3, 4, 6)):
        scheduler.add(seq(number, length))
    assert advance(scheduler) == (True, [(0, 3, 1), (1, 4, 1), (2, 3, 0)])


def test_admission_waits_for_pages_and_seats():
    scheduler = make(num_pages=6)
    for number in range(3):
        scheduler.add(seq(number, 8))  # two pages each: the third would leave none for the running two to grow
    assert advance(scheduler) == (True, [(0, 8, 1), (1, 8, 1)])
    assert [s.id for s in scheduler.waiting] == [2]
    scheduler = make(num_pages=20, max_num_seqs=1)
    for number in range(2):
        scheduler.add(seq(number, 4))
    advance(scheduler)
    assert [s.id for s in scheduler.running] == [0]


def test_the_latest_arrival_makes_room_and_comes_back_first():
    scheduler = make(num_pages=5)
    first, second, third = seq(0, 8), seq(1, 8), seq(2, 3)
    for s in (first, second, third):
        scheduler.add(s)
    advance(scheduler)
    advance(scheduler)  # both rows need a third page and one is left; the second gives up its own
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
    assert (second.num_committed, second.stats.preemptions, scheduler.num_preemptions) == (0, 1, 1)
    assert [s.id for s in scheduler.waiting] == [1, 2]
    scheduler.finish(first, "stop")
    assert scheduler.store.num_free_pages == 5
    prefill, rows = advance(scheduler)
    assert prefill
    assert rows[0] == (1, 9, 1)  # prompt and the token it already had


def test_finishing_twice_or_while_waiting_is_harmless():
    scheduler = make()
    s = seq(0, 5)
    scheduler.add(s)
    scheduler.finish(s, "abort")
    scheduler.finish(s, "stop")
    assert (s.finish_reason, scheduler.has_work, scheduler.schedule()) == ("abort", False, None)
