"""Where attention goes, by page: against brute force, whatever runs the pass, and nothing changes by asking."""

import pytest
import torch

from longdraft.capture import Capture, Seen
from longdraft.kernels.attention.mass import PageMass
from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.layout import BlockedLayout, PlainLayout
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import AttnPlan

PAGE = 16
LENGTHS, QUERIES = (40, 3, 97, 16), (9, 3, 1, 2)  # of four rows


def brute_force(query, keys, num_pages):
    """``[G, P]`` of one query ``[H, D]`` over the keys ``[S, G, D]`` that it sees, one head at a time, in float64."""
    (heads, dim), (length, kv_heads, _) = query.shape, keys.shape
    mass = torch.zeros(kv_heads, num_pages, dtype=torch.float64)
    for h in range(heads):
        g = h * kv_heads // heads
        weights = (keys[:, g].double() @ query[h].double() / dim**0.5).softmax(dim=0)
        for t in range(length):
            mass[g, t // PAGE] += weights[t]
    return mass


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("storage", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_mass_is_that_of_brute_force(group, storage):
    """Ragged rows, some tokens of each; slots that hold no token hold NaN; both layouts."""
    torch.manual_seed(group)
    layouts = [PlainLayout(PAGE, 2, 16)]
    if storage != torch.float64:
        layouts.append(BlockedLayout(PAGE, 2, 16, pairs=storage == torch.bfloat16))
    for layout in layouts:
        store = PagedStore(1, 20, layout, storage, "cpu")
        store.k.fill_(torch.nan)
        for row, length in enumerate(LENGTHS):
            assert store.reserve(row, 0, length)
            store.k[:, store.slots(row, 0, length)[::PAGE] // PAGE] = torch.nan
            x = torch.randn(length, 2, 16).to(storage)
            store.write(0, x, x, store.slots(row, 0, length))
        starts = torch.tensor([0, *QUERIES]).cumsum(0)
        plan = AttnPlan(store.view(range(4), LENGTHS), starts, torch.zeros(0))
        tokens = torch.tensor([14, 0, 4, 8, 10, 12, 13])
        q = torch.randn(len(tokens), 2 * group, 16).to(storage)
        compute = torch.promote_types(storage, torch.float32)
        spec = CallSpec("cpu", storage, storage, 16, group, PAGE)
        mass = PageMass(plan, tokens, layout, spec)(q.to(compute), store.layers[0])
        assert mass.dtype == compute and mass.shape == (7, 2, 7)
        torch.testing.assert_close(mass.sum(dim=-1), torch.full((7, 2), float(group), dtype=compute))
        rows = torch.searchsorted(starts, tokens, right=True) - 1
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            seen = LENGTHS[row] - int(starts[row + 1]) + token + 1
            want = brute_force(q[i], store.read(0, row, seen)[0], 7)
            torch.testing.assert_close(mass[i].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_pass_hands_it_out_and_its_logits_keep_their_bits(dtype, group):
    """By parts and fused alike, asked for alone or with queries; layers that do not run leave their part as it is."""
    config = tiny_config(num_heads=2 * group, num_kv_heads=2)
    model = Transformer(config, RandomWeights(config, seed=1, std=0.2), dtype=dtype)
    ids = [(7 * i + n) % 128 for n in (60, 20) for i in range(n)]
    want = run(model, ids, None)
    for queries in (True, False):
        for layers in (None, (0, 2)):
            capture = form(config, queries)
            logits, store = run(model, ids, capture, layers)
            assert torch.equal(logits, want[0] if layers is None else run(model, ids, None, layers)[0])
            check(capture, store, layers, group, dtype)


def form(config, queries):
    tokens = torch.tensor([0, 5, 8, 9, 12])  # of rows that feed ten and three
    asked = torch.zeros(3, 5, config.num_heads, config.head_dim) if queries else None
    return Capture(tokens, asked, torch.full((3, 5, 2, 4), -1.0))


def run(model, ids, capture, layers=None):
    """Two rows are filled to 50 and 17 tokens; then ten and three are fed."""
    store = PagedStore(3, 10, model.layout, model.kv_dtype, "cpu")
    for row, n in ((0, 60), (1, 20)):
        assert store.reserve(row, 0, n)
    feed(model, store, [Feed(0, 0, ids[:50], 0), Feed(1, 0, ids[60:77], 0)])
    logits = feed(model, store, [Feed(0, 50, ids[50:60], 10), Feed(1, 17, ids[77:], 3)], None, layers, capture)
    return logits, store


def check(capture, store, layers, group, dtype):
    at = [(0, 51), (0, 56), (0, 59), (0, 60), (1, 20)]
    for layer in range(3):
        if layers and layer not in layers:
            assert (capture.page_mass[layer] == -1).all()
            continue
        torch.testing.assert_close(capture.page_mass[layer].sum(dim=-1), torch.full((5, 2), float(group)))
        if capture.queries is None:
            continue
        for i, (row, seen) in enumerate(at):
            want = brute_force(capture.queries[layer, i].to(dtype), store.read(layer, row, seen)[0], 4)
            torch.testing.assert_close(capture.page_mass[layer, i].double(), want, rtol=1e-4, atol=1e-5)


def test_what_was_seen_is_cut_and_joined():
    """Of both kinds; of pages there may be more later on."""
    first = Seen(4, None, torch.ones(1, 2, 1, 2))
    both = first.then(Seen(6, None, torch.full((1, 3, 1, 3), 2.0)), 4)
    assert (both.start, both.stop) == (5, 9)
    assert both.page_mass[0, :, 0].tolist() == [[1, 1, 0], [2, 2, 2], [2, 2, 2], [2, 2, 2]]
    assert both.since(8).page_mass.shape[1] == 1
    assert both.until(7).page_mass.shape[1] == 2
    assert both.until(5) is None
    assert first.then(Seen(7, None, torch.zeros(1, 1, 1, 3)), 4).start == 7
    part = Capture(torch.arange(3), None, torch.arange(3.0).view(1, 3, 1, 1)).part(1, 3, 40)
    assert (part.start, part.stop, part.queries) == (40, 42, None)
    assert part.page_mass.flatten().tolist() == [1, 2]
