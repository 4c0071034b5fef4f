"""Quest's bounds of pages: against brute force, above every score, and never of a token that was refused."""

import pytest
import torch

from longdraft import SamplingParams
from longdraft.config import DraftConfig
from longdraft.kernels.layout import PlainLayout
from longdraft.kv.select.pages import page_scores
from tests.conftest import make_engine
from tests.unit.test_page_spec import PROMPT, spoil

DRAFT = DraftConfig(kv="pages", budget=64, gamma=4)


def page_bounds(keys):
    """``keys [S, G, D]`` → ``[P, G, 2, D]``: the smallest and the largest of each 16 tokens."""
    pages = keys.unflatten(0, (-1, 16))
    return torch.stack([pages.amin(dim=1), pages.amax(dim=1)], dim=2)


def brute_force(queries, keys, size):
    """``[G, P]``: each head's sum over channels of the larger of q · min and q · max, in float64."""
    (n, heads, _), (length, kv_heads, _) = queries.shape, keys.shape
    scores = torch.zeros(kv_heads, length // size, dtype=torch.float64)
    for h in range(heads):
        g = h * kv_heads // heads
        for p in range(length // size):
            page = keys[p * size : (p + 1) * size, g].double()
            for i in range(n):
                q = queries[i, h].double()
                scores[g, p] += torch.maximum(q * page.min(dim=0).values, q * page.max(dim=0).values).sum()
    return scores


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("window", [1, 3])
def test_scores_are_those_of_brute_force_and_bound_every_key(group, window):
    torch.manual_seed(group)
    keys, queries = torch.randn(96, 3, 16), torch.randn(window, 3 * group, 16)
    scores = page_scores(queries, page_bounds(keys))
    torch.testing.assert_close(scores.double(), brute_force(queries, keys, 16), rtol=1e-5, atol=1e-5)
    # The sum of a group's best scores in a page is no larger.
    exact = torch.einsum("sgd,nghd->nghs", keys, queries.view(window, 3, group, 16))
    best = exact.unflatten(-1, (6, 16)).amax(dim=-1).sum(dim=(0, 2))
    assert (scores >= best - 1e-4).all()


@pytest.mark.parametrize("top_k", [2, 20])
def test_bounds_are_of_final_tokens_whatever_was_accepted(tiny, top_k):
    """After any rounds, of every full page, though huge keys lie where tokens were refused; bits of the keys' own."""
    engine = make_engine(tiny)
    draft = engine.runner.draft(DRAFT)
    memory, begin, checked = draft.memory, draft.begin, 0

    def spoilt(rows):
        for row in rows:
            spoil(engine.store, row.seq)
        return begin(rows)

    draft.begin = spoilt
    params = SamplingParams(seed=top_k, max_tokens=60, top_k=top_k)
    seqs = [engine.sequence(engine.add(PROMPT[:n], params, DRAFT)) for n in (150, 95, 64)]
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            known = memory._known.get(seq.id, 0)
            table = memory._table(seq.id, 0, known)
            for layer in range(3):
                keys = engine.store.read(layer, seq.id, known * 16)[0].unflatten(0, (-1, 16)) if known else None
                if keys is not None:
                    assert torch.equal(memory.bounds[layer, table, :, 0], keys.min(dim=1).values)
                    assert torch.equal(memory.bounds[layer, table, :, 1], keys.max(dim=1).values)
                    checked += 1
            seen = memory._seen.get(seq.id)
            assert (
                seen is None or not seq.decoding or (seen.start, seen.stop) == (seq.num_committed - 1, seen.start + 1)
            )
    assert checked > 100
    assert 0 < sum(sum(s.stats.accepted) for s in seqs) < sum(sum(s.stats.drafted) for s in seqs)


def test_rows_that_share_pages_share_bounds(tiny, monkeypatch):
    """Made chunk by chunk as a prompt is filled; what a fork knows already is not made again."""
    engine = make_engine(tiny, max_num_batched_tokens=100)
    draft, made = engine.runner.draft(DRAFT), []
    bounds = PlainLayout.bounds_k
    monkeypatch.setattr(PlainLayout, "bounds_k", lambda self, k, p: made.append(len(p)) or bounds(self, k, p))
    engine.add_all(PROMPT, SamplingParams(seed=3, max_tokens=8, n=2), DRAFT)
    while engine.has_work:
        engine.step()
    assert made == [6, 3]  # of 150 tokens; the eight that are generated fill no page
    source = engine.sequence(engine.add(PROMPT, SamplingParams(seed=3, max_tokens=20), DRAFT))
    for _ in range(3):
        engine.step()
    child = engine.fork(source.id, draft=DRAFT)
    assert draft.memory._known[child] == draft.memory._known[source.id] > 0
