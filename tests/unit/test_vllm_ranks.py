"""Ranks of a tensor-parallel group, over the runner of ``test_vllm_glue.py``: they draft alike, or fail together."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import distributed

from longdraft.errors import RankError
from longdraft.integrations.vllm.ranks import parted
from longdraft.integrations.vllm.settings import Settings
from tests.unit.test_vllm_glue import Runner, params, texts

WAIT = timedelta(seconds=0.2)


def test_ranks_draft_the_same_tokens_from_the_same_distributions_round_by_round():
    rng = random.Random(0)
    rounds = [texts(rng, 4, 5), texts(rng, 4, 5), texts(rng, 4, 5)]
    wishes = [params(1.0), params(0.7, seed=3), params(), params(1.0, top_k=4)]
    names = [["a", "b", "c", "d"], ["d", "a", "e", "c"], ["f", "e", "d", "a"]]
    said = []
    for rank in range(2):
        torch.manual_seed(rank)  # what else a process draws is its own affair
        drafter, out = None, []
        for step, rows in enumerate(rounds):
            runner = Runner(rows, wishes, seed=step)
            runner.requests = dict(zip(names[step], runner.requests.values(), strict=True))
            runner.input_batch.req_ids = names[step]
            fresh = runner.drafter(Settings(budget=20))
            drafter, forward = drafter or fresh, fresh._forward
            drafter.runner, drafter._forward = runner, forward
            out.append((drafter.propose(*runner.arguments()), runner._draft_prob_req_ids, runner._draft_probs))
        said.append(out)
    for one, two in zip(*said, strict=True):
        assert one[:2] == two[:2] and torch.equal(one[2], two[2])
    assert len({tuple(tokens) for drafts, *_ in said[0] for tokens in drafts}) > 6


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_steps_aside_with_all_others_or_ends_the_engine(alone):
    runner = Runner(texts(random.Random(1), 2), [params(1.0), params(1.0)])
    drafter = runner.drafter()
    drafter.propose(*runner.arguments())
    drafter.parted = lambda: alone
    drafter._forward = lambda *_: 1 / 0
    if alone:
        with pytest.raises(RankError, match="division") as caught:
            drafter.propose(*runner.arguments())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    else:
        assert drafter.propose(*runner.arguments()) == [[], []]
    drafter.parted = lambda: 1 / 0  # asked when something fails, and not again
    assert drafter.propose(*runner.arguments()) == [[], []]
    assert runner._draft_probs is None and len(runner.said) == 1


def test_a_rank_finds_out_whether_it_failed_alone():
    """Two ranks of gloo's in threads: both come, or one of them."""
    assert not parted(None)
    store = distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: distributed.ProcessGroupGloo(store, rank, 2, WAIT), range(2)))
        assert list(pool.map(lambda group: parted(group, timedelta(seconds=20)), groups)) == [False, False]
        assert parted(groups[1], WAIT)
