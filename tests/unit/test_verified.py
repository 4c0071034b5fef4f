"""Masses of verify passes: of accepted tokens only, each once, decayed by the tokens after it."""

import pytest
import torch

from longdraft import SamplingParams
from longdraft.capture import MASS_EVERY, Seen
from longdraft.config import DraftConfig
from longdraft.kernels.layout import PlainLayout
from longdraft.kv.select.verified import PageMasses
from longdraft.kv.store import PagedStore
from tests.conftest import make_engine
from tests.unit.test_page_mass import brute_force
from tests.unit.test_page_spec import PROMPT
from tests.unit.test_snapkv import choices

DRAFT = DraftConfig(kv="verified", budget=128, gamma=4)


@pytest.mark.parametrize(("prompt", "top_k"), [(150, 2), (97, 3)])
def test_masses_are_those_of_a_fresh_pass_over_the_final_tokens(tiny, prompt, top_k):
    """After rounds of all kinds: as if the text had been read at once and each token's attention written down."""
    engine = make_engine(tiny)
    params = SamplingParams(seed=2, max_tokens=30, top_k=top_k)
    seq = engine.sequence(engine.add(PROMPT[:prompt], params, DRAFT))
    memory, stop = engine.runner.draft(DRAFT).memory, 0
    while engine.has_work and len(seq.output_ids) < 25:
        engine.step()
        if not seq.decoding or seq.num_committed < stop:
            continue
        known, stop = memory._rows[seq.id], seq.num_committed + 8
        assert known.stop == seq.num_committed
        first = max(0, prompt - 32)
        want = fresh(tiny, seq.ids[: known.stop], first)
        torch.testing.assert_close(known.mass.double(), want, rtol=1e-4, atol=1e-5)
    assert 0 < sum(seq.stats.accepted)
    assert seq.stats.rejections or prompt < 128  # the budget


def fresh(model, ids, first):
    """``[L, G, P]``: the decayed masses of the tokens from ``first`` on, by brute force, from one pass over ``ids``."""
    queries = last_queries(model, ids, len(ids) - first)
    engine = make_engine(model)
    seq = engine.sequence(engine.add(ids, SamplingParams(temperature=0, max_tokens=2)))
    engine.step()
    pages = engine.store.pages_for(len(ids))
    mass = torch.zeros(3, 2, pages, dtype=torch.float64)
    for layer in range(3):
        keys = engine.store.read(layer, seq.id, len(ids))[0]
        last = (len(ids) - 1) // MASS_EVERY * MASS_EVERY
        for p in range(last, first - 1, -MASS_EVERY):
            weight = 0.9 ** (last - p)
            mass[layer] += weight * brute_force(queries[layer, p - first], keys[: p + 1], pages)
    return mass


def last_queries(model, ids, count):
    """Queries of the last ``count`` tokens, 32 at a time, as SnapKV is told them."""
    parts, stop = [], len(ids)
    while count > 0:
        _, seen = choices(model, 512, ids[:stop])
        parts.insert(0, seen.queries[:, -count:])
        count, stop = count - parts[0].shape[1], stop - parts[0].shape[1]
    return torch.cat(parts, dim=1)


def told(start, *masses):
    return Seen(start, None, torch.tensor(masses, dtype=torch.float32).view(1, len(masses), 1, -1))


def memory_of(*seen, page_size=4):
    memory = PageMasses(PagedStore(1, 16, PlainLayout(page_size, 1, 8), torch.float32, "cpu"), 0.5 ** (1 / MASS_EVERY))
    for part in seen:
        memory.observe(7, part)
    return memory


def test_each_token_counts_once_and_less_by_the_tokens_after_it():
    """Those whose turn it is: of the others nothing was noted."""
    unasked, one, two, three = [999, 999], [4, 0], [0, 8], [1, 1]
    quiet = [unasked] * (MASS_EVERY - 1)
    at_once = memory_of(told(MASS_EVERY, one, *quiet, two, *quiet, three), page_size=8).rate(7, 2)
    assert at_once.flatten().tolist() == [2, 5]
    parts = told(MASS_EVERY, one), told(MASS_EVERY, one, *quiet, two), told(2 * MASS_EVERY, two, *quiet, three)
    assert memory_of(*parts, told(3 * MASS_EVERY, three), page_size=8).rate(7, 2).flatten().tolist() == [2, 5]


def test_what_does_not_join_on_is_forgotten_and_other_rows_pages_are_cut_off():
    memory = memory_of(told(0, [4, 0, 9]), told(MASS_EVERY, [1, 2, 9]))
    assert memory.rate(7, 2).flatten().tolist() == [1, 2]
    assert memory._rows[7].mass.shape == (1, 1, 2)
    memory.release(7)
    memory.release(7)
    assert memory.rate(7, 2) is None


@pytest.mark.parametrize(("length", "shared"), [(7, False), (8, True), (9, True)])
def test_a_fork_shares_what_is_its_own(length, shared):
    """The source has seen nine tokens: a child that has eight, and the ninth to feed, has all of them."""
    memory = memory_of(told(8, [1, 1, 1]))
    memory.fork(7, 8, length)
    assert (memory.rate(8, 3) is not None) == shared
    memory.fork(99, 9, 3)
    if shared:
        memory.observe(8, told(8, [1, 1, 1]))
        assert memory.rate(8, 3).flatten().tolist() == [1, 1, 1]


@pytest.mark.parametrize("other", [None, "snapkv"])
def test_masses_that_would_take_too_much_memory_are_left_out(tiny, monkeypatch, other):
    """The output is the same, and a batch-mate that wants queries still gets them."""
    from longdraft.engine import observe

    def outputs():
        engine = make_engine(tiny)
        drafts = [DRAFT, DRAFT if other is None else DraftConfig(kv=other, budget=64, gamma=2)]
        params = SamplingParams(seed=2, max_tokens=12)
        seqs = [engine.sequence(engine.add(PROMPT[: 60 + 9 * i], params, d)) for i, d in enumerate(drafts)]
        while engine.has_work:
            engine.step()
        return [seq.output_ids for seq in seqs]

    want = outputs()
    monkeypatch.setattr(observe, "MOST_MASS", 100)
    assert outputs() == want
