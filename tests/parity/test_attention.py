"""The padded attention against the reference, and both against what must never be seen."""

import pytest
import torch

from longdraft.errors import InvalidValueError
from longdraft.kernels.attention.padded import PaddedAttention, rectangles
from longdraft.kernels.attention.ref import ReferenceAttention
from longdraft.kernels.dispatch import CallSpec, explain, select
from longdraft.kernels.layout import PlainLayout
from longdraft.kv.store import PagedStore
from longdraft.view import AttnPlan

DIM = 8


def setup(rows, *, heads=6, kv_heads=2, page=16, dtype=torch.float64, kv_dtype=None, poison=False):
    """``rows`` = (cached tokens, queries) each. Pages are handed out interleaved, so no table is consecutive."""
    layout = PlainLayout(page, kv_heads, DIM)
    kv_dtype = kv_dtype or dtype
    store = PagedStore(1, 8 + sum(-(-(c + q) // page) for c, q in rows), layout, kv_dtype, "cpu")
    if poison:
        store.k.fill_(torch.nan)
        store.v.fill_(torch.nan)
    for page_end in range(page, page + max(c + q for c, q in rows), page):
        for b, (c, q) in enumerate(rows):
            if page_end - page < c + q:
                assert store.reserve(b, 0, min(page_end, c + q))
    if poison:  # every slot that no row may see, the rest of partly filled pages included
        store.k.fill_(torch.nan)
        store.v.fill_(torch.nan)
    slots, starts = [], [0]
    for b, (c, q) in enumerate(rows):
        k, v = torch.randn(2, c + q, kv_heads, DIM, dtype=dtype)
        store.write(0, k, v, store.slots(b, 0, c + q))
        slots.append(store.slots(b, c, c + q))
        starts.append(starts[-1] + q)
    view = store.view(range(len(rows)), [c + q for c, q in rows])
    plan = AttnPlan(view, torch.tensor(starts), torch.cat(slots))
    spec = CallSpec("cpu", dtype, kv_dtype, DIM, heads // kv_heads, page)
    q = torch.randn(starts[-1], heads, DIM, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return q, store, plan, layout, spec


REGIMES = {
    "one row, one query": [(40, 1)],
    "decode, ragged": [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (200, 1), (63, 1)],
    "verify, ragged": [(5, 3), (31, 1), (14, 4), (90, 2), (15, 2)],
    "prefill chunk": [(0, 50), (64, 33)],
    "prefill beside decode": [(0, 70), (100, 1), (12, 20), (3, 1)],
}


@pytest.mark.parametrize("rows", REGIMES.values(), ids=REGIMES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("page", [16, 4])
def test_padded_equals_reference(rows, heads, kv_heads, page):
    torch.manual_seed(0)
    q, store, plan, layout, spec = setup(rows, heads=heads, kv_heads=kv_heads, page=page)
    want = ReferenceAttention(plan, layout, spec)(q, store.layers[0])
    got = PaddedAttention(plan, layout, spec)(q, store.layers[0])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_padded_equals_reference_in_low_precision(kv_dtype):
    torch.manual_seed(0)
    q, store, plan, layout, spec = setup(REGIMES["prefill beside decode"], dtype=torch.float32, kv_dtype=kv_dtype)
    want = ReferenceAttention(plan, layout, spec)(q, store.layers[0])
    got = PaddedAttention(plan, layout, spec)(q, store.layers[0])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [PaddedAttention, ReferenceAttention])
@pytest.mark.parametrize("length", range(1, 36))
def test_slots_past_the_length_are_never_seen(kernel, length):
    """NaN in every slot ≥ len, at every page offset, beside a longer row (so that the short one is padded)."""
    torch.manual_seed(length)
    for queries in (1, min(3, length), length):
        rows = [(length - queries, queries), (40, queries)]
        q, store, plan, layout, spec = setup(rows, poison=True)
        out = kernel(plan, layout, spec)(q, store.layers[0])
        assert out.isfinite().all()
        clean = [x.nan_to_num() for x in (store.k, store.v)]
        store.k.copy_(clean[0])
        store.v.copy_(clean[1])
        assert torch.equal(out, kernel(plan, layout, spec)(q, store.layers[0]))


def test_rows_do_not_depend_on_their_mates():
    torch.manual_seed(0)
    q, store, plan, layout, spec = setup(REGIMES["prefill beside decode"])
    together = PaddedAttention(plan, layout, spec)(q, store.layers[0])
    for b in range(4):
        start, stop = plan.query_starts[b : b + 2].tolist()
        view = store.view([b], [int(plan.view.lens[b])])
        alone = AttnPlan(view, torch.tensor([0, stop - start]), plan.slots[start:stop])
        out = PaddedAttention(alone, layout, spec)(q[start:stop], store.layers[0])
        torch.testing.assert_close(together[start:stop], out, rtol=1e-12, atol=1e-12)


def test_rectangles_partition_the_rows_and_bound_the_padding():
    torch.manual_seed(0)
    for _ in range(50):
        n = int(torch.randint(1, 30, ()))
        queries = torch.randint(1, 40, (n,)).tolist()
        pages = torch.randint(1, 500, (n,)).tolist()
        groups = rectangles(queries, pages, max_pages=900)
        assert sorted(b for group in groups for b in group) == list(range(n))
        for group in groups:
            assert max(queries[b] for b in group) <= 2 * min(queries[b] for b in group)
            longest = max(pages[b] for b in group)
            assert longest <= 1.25 * min(pages[b] for b in group)
            assert len(group) == 1 or len(group) * longest <= 900


def test_dispatch_explains_and_obeys_the_switch(monkeypatch):
    spec = CallSpec("cpu", torch.float32, torch.float32, 64, 3, 16)
    monkeypatch.delenv("LONGDRAFT_KERNELS", raising=False)
    verdicts = explain("attention", spec)
    assert [name for name, _ in verdicts] == ["native", "torch", "ref"]
    assert [verdict for _, verdict in verdicts].count("used") == 1
    assert verdicts[2] == ("ref", "also fits")
    monkeypatch.setenv("LONGDRAFT_KERNELS", "torch")
    assert explain("attention", spec)[0] == ("torch", "used")
    monkeypatch.setenv("LONGDRAFT_KERNELS", "ref")
    assert select("attention", spec) is ReferenceAttention
    monkeypatch.setenv("LONGDRAFT_KERNELS", "fast")
    with pytest.raises(InvalidValueError, match="LONGDRAFT_KERNELS.*'fast'.*ref"):
        select("attention", spec)
