"""Exact top-k: its choice against brute force, the bound it is, and a choice for every round."""

import pytest
import torch

from longdraft.capture import Seen
from longdraft.config import DraftConfig
from longdraft.kv.select.base import top
from longdraft.kv.select.keys import Keys
from longdraft.kv.select.pages import page_scores
from longdraft.kv.select.snapkv import SnapKV
from longdraft.kv.select.streaming_llm import first_and_last
from longdraft.kv.select.topk import TopK
from tests.conftest import greedy, make_engine, run, run_alone
from tests.unit.test_pages import page_bounds

PROMPT = [(11 * i + i // 7) % 128 for i in range(150)]


def weights(query, keys):
    """Per KV head, the attention of all keys, summed over the heads of a group, in float64."""
    (heads, dim), (length, kv_heads, _) = query.shape, keys.shape
    total = torch.zeros(kv_heads, length, dtype=torch.float64)
    for h in range(heads):
        g = h * kv_heads // heads
        total[g] += (keys[:, g].double() @ query[h].double() / dim**0.5).softmax(dim=0)
    return total


def held(mass, chosen):
    """How much of ``mass [G, S]`` lies at ``chosen [G, count]``."""
    return mass.gather(1, chosen).sum(dim=1)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_the_choice_is_that_of_brute_force_and_bounds_all_others(group):
    """No selection of as many tokens holds more of the newest query's attention, whatever it chooses by."""
    torch.manual_seed(group)
    for length, count in ((50, 50), (51, 50), (130, 40), (90, 1), (33, 7)):
        kv_heads = 1 + length % 3
        keys = torch.randn(2, length, kv_heads, 16)
        queries = torch.randn(2, min(32, length), kv_heads * group, 16) * 2
        seen, read = Seen(length - queries.shape[1], queries), Keys(lambda layer, k=keys: k[layer])
        got = TopK(512).choose(seen, read, count)
        others = [SnapKV(512, window=w).choose(seen, read, count) for w in (1, 8, 32)]
        others += [first_and_last(length, count).expand(2, kv_heads, -1)]
        others += [torch.stack([torch.randperm(length)[:count] for _ in range(2 * kv_heads)]).view(2, kv_heads, -1)]
        for layer in range(2):
            mass = weights(queries[layer, -1], keys[layer])
            best = mass.sort(dim=-1, descending=True).indices[:, :count].sort().values
            assert torch.equal(got[layer], best)
            assert all((held(mass, got[layer]) + 1e-12 >= held(mass, other[layer])).all() for other in others)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_no_pages_hold_more(group):
    """Of as many tokens, whole pages hold at most as much, whether rated by their bounds or by their very mass."""
    torch.manual_seed(group)
    keys, query = torch.randn(1, 160, 2, 16), torch.randn(1, 1, 2 * group, 16) * 2
    mass = weights(query[0, 0], keys[0])
    for rating in (page_scores(query[0], page_bounds(keys[0])), mass.unflatten(1, (-1, 16)).sum(dim=2)):
        for count in (1, 4, 9):
            pages = top(rating[None], count)[0]
            tokens = (pages[..., None] * 16 + torch.arange(16)).flatten(1)
            best = TopK(512).choose(Seen(159, query), Keys(lambda layer: keys[layer]), 16 * count)[0]
            assert (held(mass, best) + 1e-12 >= held(mass, tokens)).all()


def test_ties_go_to_the_earlier_tokens():
    chosen = TopK(512).choose(Seen(39, torch.ones(1, 1, 2, 16)), Keys(lambda layer: torch.zeros(40, 1, 16)), 9)
    assert chosen.flatten().tolist() == list(range(9))


@pytest.mark.parametrize("refresh", [None, 3])
def test_every_round_chooses_by_the_newest_final_query(tiny, refresh):
    """All of the budget but the round's own tokens; with ``refresh`` less, since several rounds' must fit."""
    engine = make_engine(tiny)
    config = DraftConfig(kv="topk", budget=40, gamma=3, refresh=refresh)
    draft, made = engine.runner.draft(config), []
    fill = draft.copies.fill
    draft.copies.fill = lambda row, x: made.append((draft._states[row].seen.stop, x.shape[2])) or fill(row, x)
    seq = engine.sequence(engine.add(PROMPT, greedy(20), config))
    lengths, propose = [], draft.propose
    draft.propose = lambda rows, **kw: lengths.append(rows[0].seq.num_committed) or propose(rows, **kw)
    list(run(engine))
    assert [stop for stop, _ in made] == lengths[:: refresh or 1]
    assert made[0][1] == 40 - 3 - (0 if refresh is None else 7)  # at most a quarter of the budget
    assert seq.output_ids == run_alone(tiny, PROMPT, greedy(20))
    assert draft.note_bytes(150) == 3 * 4 * 16 * 4
