"""Residual streams that passes hand out: which, of which tokens, and only of those that turn out final."""

import random
from functools import reduce
from operator import or_

import pytest
import torch

from longdraft.capture import Capture, Needs
from longdraft.config import DraftConfig
from longdraft.core import Row, Sequence
from longdraft.engine.observe import Observation
from longdraft.kernels import native
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams
from longdraft.train.teacher import Teacher
from tests.conftest import greedy, make_engine
from tests.exact.fake_drafts import Noisy, place

needs_native = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
TYPES = [
    pytest.param(torch.float64, id="float64"),
    pytest.param(torch.float32, id="float32", marks=needs_native),
    pytest.param(torch.bfloat16, id="bfloat16", marks=needs_native),
]


def rows_of(model, **kwargs):
    """One pass over two rows of 5 and 20 tokens, the first 17 of the second cached; all logits."""
    store = PagedStore(3, 4, model.layout, model.kv_dtype, "cpu")
    ids = [[(7 * i + 3) % 128 for i in range(n)] for n in (5, 20)]
    for row, tokens in enumerate(ids):
        assert store.reserve(row, 0, len(tokens))
    feed(model, store, [Feed(1, 0, ids[1][:17], 0)])
    feeds = [Feed(0, 0, ids[0], 5), Feed(1, 17, ids[1][17:], 3)]
    return feed(model, store, feeds, **kwargs), torch.tensor(ids[0] + ids[1][17:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("qkv", [{}, {"tie_embeddings": True}], ids=["untied", "tied"])
def test_a_stream_is_what_the_layers_before_leave(dtype, qkv):
    """Behind ℓ layers it is what a pass over these layers alone ends with; capturing changes no bit."""
    config = tiny_config(**qkv)
    model = Transformer(config, RandomWeights(config, seed=6), dtype=dtype)
    at = torch.tensor([1, 4, 0, 7])
    for taps in ((0, 1, 2, 3), (2,)):
        form = Capture(at, hidden=model.hidden_form(len(taps), 4), taps=taps)
        logits, ids = rows_of(model, capture=form)
        assert torch.equal(logits, rows_of(model)[0])
        for tap, stream in zip(taps, form.hidden, strict=True):
            # Rows of one tensor: products of another number of rows may be summed in another order on torch.
            part = rows_of(
                model, layers=range(tap), capture=(end := Capture(at, hidden=model.hidden_form(1, 4), taps=(tap,)))
            )
            assert torch.equal(stream, end.hidden[0])
            tolerance = 1e-9 if dtype == torch.float64 else 1e-4 if dtype == torch.float32 else 0.1
            own = model.head(model.norm(stream))
            torch.testing.assert_close(own, part[0][at], rtol=0, atol=tolerance)
            if tap == 0:
                rows = RandomWeights(config, seed=6).load("model.embed_tokens.weight").to(dtype)
                assert torch.equal(stream, rows[ids[at]].to(stream.dtype))


@needs_native
def test_the_fused_pass_gives_the_streams_of_the_parts():
    model = Transformer(tiny_config(), RandomWeights(tiny_config(), seed=6), dtype=torch.float32)
    forms = [Capture(torch.arange(8), hidden=model.hidden_form(4, 8), taps=(0, 1, 2, 3)) for _ in range(2)]
    rows_of(model, capture=forms[0])
    model.forward = model.forward_by_parts
    rows_of(model, capture=forms[1])
    assert all(forms[0].hidden[i].abs().max() > 0.1 for i in range(4))
    torch.testing.assert_close(forms[0].hidden, forms[1].hidden, rtol=0, atol=1e-3)


def test_which_tokens_are_wanted():
    """The first few and the last ones, each once, also where the two meet."""
    needs = Needs(hidden=4, sinks=3, taps=(1,))
    assert needs.ranges(20, 0, 8) == [(0, 3)]
    assert needs.ranges(20, 8, 16) == []
    assert needs.ranges(20, 8, 17) == [(16, 17)]
    assert needs.ranges(20, 0, 20) == [(0, 3), (16, 20)]
    assert needs.ranges(20, 2, 20) == [(2, 3), (16, 20)]
    assert needs.ranges(6, 0, 6) == [(0, 2), (2, 6)]
    assert needs.ranges(2, 0, 2) == [(0, 2)]
    assert needs.ranges(20, 19, 25) == [(19, 25)]  # a block of proposals
    assert Needs(queries=2).ranges(9, 3, 9) == [(7, 9)]


def test_drafts_of_one_row_are_told_what_each_asked_for(tiny):
    """Its own tokens, kinds and streams, these in its order; a row before it in the pass, refused proposals behind."""
    kinds = [
        Needs(hidden=4, sinks=3, taps=(2, 0)),
        Needs(hidden=9, sinks=1, taps=(0, 1, 2)),
        Needs(queries=6),
        Needs(page_mass=2),
        Needs(queries=1, hidden=3, taps=(1,)),
        Needs(),
    ]
    rng = random.Random(2)
    for _ in range(200):
        needs, known = rng.sample(kinds, rng.randint(1, 4)), rng.randint(1, 24)
        start = rng.randrange(known)
        fed = rng.randint(1, known - start)
        guesses = rng.randrange(4) if start + fed == known else 0
        seqs = [Sequence(i, [0] * n, n, SamplingParams(), 0, 99) for i, n in enumerate((5, known))]
        seqs[1].num_committed = start
        rows = [Row(seqs[0], 5, 0), Row(seqs[1], fed, 0, proposal=(0,) * guesses)]
        seen = Observation(tiny, rows, [Needs(hidden=2, taps=(0, 2)), reduce(or_, needs)])
        at = [*range(5), *range(start, start + fed + guesses)]
        flat = seen.capture.tokens.tolist()
        for i, token in enumerate(flat):
            for x in filter(lambda x: x is not None, (seen.capture.queries, seen.capture.page_mass)):
                x[:, i] = at[token]
            for n, tap in enumerate(seen.capture.taps):
                seen.capture.hidden[n, i] = 100 * tap + at[token]
        seqs[1].num_committed = final = rng.randint(start + fed, start + fed + guesses)
        for need in needs:
            told = [p for p in range(start, final) if p < need.sinks or p >= known - need.tokens] if need.tokens else []
            got = seen.of(seqs[1], need)
            assert [p for part in got for p in range(part.start, part.stop)] == told
            for part in got:
                values = torch.arange(part.start, part.stop)
                for wanted, x in zip((need.queries, need.page_mass), (part.queries, part.page_mass), strict=True):
                    assert (x is not None) == bool(wanted)
                    assert x is None or (x[0, :, 0, 0] == values).all()
                assert (part.hidden is not None) == bool(need.hidden)
                for n, tap in enumerate(need.taps):
                    assert (part.hidden[n, :, 0] == values + 100 * tap).all()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_drafts_are_told_of_final_tokens_only(tiny, chunk):
    """Refused proposals between accepted ones, chunks, a preemption: each stream is that of a pass over the outcome."""
    taps, told = (2, 0, 2), {}

    class Listening(Noisy):
        needs = Needs(hidden=6, sinks=2, taps=taps)

        def observe(self, seq, seen):
            assert seen.stop <= seq.num_committed
            told.setdefault(seq, []).append(seen)

    engine, config = make_engine(tiny, num_pages=100, max_num_batched_tokens=chunk), DraftConfig(kv="full", gamma=5)
    place(engine, config, Listening(engine, seed=3, rate=0.3))
    rng = random.Random(chunk)
    for n in (1, 5, 9, 40):
        engine.add([rng.randrange(128) for _ in range(n)], greedy(20), config)
    for step in range(10**6):
        if not engine.has_work:
            break
        if step == 30:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        engine.step()
    assert len(told) == 4
    for seq, parts in told.items():
        want = Teacher(tiny).residuals([seq.ids], taps)[:, 0]
        seen = [position for part in parts for position in range(part.start, part.stop)]
        wanted = {*range(min(2, seq.num_prompt)), *range(max(0, seq.num_prompt - 6), len(seq.ids))}
        # The last step's tokens are nobody's any more.
        assert wanted - {*range(len(seq.ids) - 7, len(seq.ids))} <= set(seen) <= wanted
        for part in parts:
            torch.testing.assert_close(part.hidden, want[:, part.start : part.stop], rtol=0, atol=1e-9)
    assert sum(sum(seq.stats.drafted) - sum(seq.stats.accepted) for seq in told) > 10
