"""What drafts rate tokens and pages by: whole pages in either layout, and the native kernels against plain torch."""

import pytest
import torch

from longdraft.kernels import native
from longdraft.kernels.layout import BlockedLayout, PlainLayout
from longdraft.kv.select.keys import Keys, StoredKeys
from longdraft.kv.select.pages import page_scores, parts_of
from longdraft.kv.store import PagedStore
from tests.parity.test_native import HEADS

WITH_NATIVE = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
ISAS = native._native.isas() if native._native else []


def store_of(layout, dtype, length, dim):
    """A store with a row of random keys in pages that do not lie in order, and junk everywhere else."""
    torch.manual_seed(dim + length)
    store = PagedStore(2, 8 + length // 16, layout, dtype, "cpu")
    store.k.fill_(torch.nan)
    assert store.reserve(8, 0, 33) and store.reserve(9, 0, 20)
    store.free(8)
    assert store.reserve(7, 0, length)
    keys = torch.randn(2, length, layout.num_kv_heads, dim).to(dtype)
    for page in store.pages(7, 0, store.pages_for(length)):
        store.k[:, page] = 1e30
    for layer in range(2):
        store.write(layer, keys[layer], keys[layer], store.slots(7, 0, length))
    return store, keys


def layouts_of(kv_heads, dim):
    return [
        (PlainLayout(16, kv_heads, dim), torch.float64),
        (BlockedLayout(16, kv_heads, dim, pairs=False), torch.float32),
        (BlockedLayout(16, kv_heads, dim, pairs=True), torch.bfloat16),
    ]


@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 16), (3, 64), (2, 256)])
@pytest.mark.parametrize("kind", range(3), ids=["plain", "blocked", "pairs"])
def test_whole_pages_are_the_tokens_bits(kv_heads, dim, kind):
    layout, dtype = layouts_of(kv_heads, dim)[kind]
    store, keys = store_of(layout, dtype, 100, dim)
    stored, pages = StoredKeys(store, 7, 100), store.pages(7, 1, 6)
    bounds = layout.bounds_k(store.k, pages)
    for layer in range(2):
        assert torch.equal(stored(layer), keys[layer])
        whole = keys[layer, 16:96].unflatten(0, (5, 16))
        assert torch.equal(bounds[layer], torch.stack([whole.amin(dim=1), whole.amax(dim=1)], dim=2))


@WITH_NATIVE
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [1, 2], ids=["float32", "bfloat16"])
def test_native_ratings_are_those_of_torch(monkeypatch, isa, kind):
    """Every ratio of heads, one and many queries, lengths on and off page borders; on three threads the same bits."""
    asked = [(1, 1), (32, 100), (5, 64), (40, 47), (7, 200), (2, 16)]
    runtimes = [native._native.Runtime(isa, threads) for threads in (1, 3)]
    for (heads, kv_heads, dim), (n, length) in zip(HEADS, asked, strict=True):
        layout, dtype = layouts_of(kv_heads, dim)[kind]
        store, keys = store_of(layout, dtype, length, dim)
        queries, start = torch.randn(2, n, heads, dim) * 2, length - n
        bounds, table = torch.randn(2, 20, kv_heads, 2, dim).to(dtype), torch.randperm(20)[: 1 + n % 17]
        found = []
        for one in runtimes:
            monkeypatch.setattr(native, "runtime", lambda one=one: one)
            scores = native.page_scores(parts_of(queries, kv_heads), bounds, table)
            found.append((StoredKeys(store, 7, length).mass(queries, start), scores))
        mass, scores = found[0]
        want = Keys(lambda layer, k=keys: k[layer]).mass(queries, start)
        torch.testing.assert_close(mass, want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(mass.sum(dim=2), torch.full((2, kv_heads), float(n * heads // kv_heads)))
        want = torch.stack([page_scores(q, b[table]) for q, b in zip(queries, bounds, strict=True)])
        torch.testing.assert_close(scores, want, rtol=2e-5, atol=2e-4)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
