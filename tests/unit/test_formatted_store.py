"""The cache in a format: how groups lie in pages, what a query sees, and who holds what."""

import random
from dataclasses import replace

import pytest
import torch

from longdraft.drafts.registry import FORMATS, resolve_format
from longdraft.engine import sizing
from longdraft.errors import InvalidValueError, KVCapacityError
from longdraft.kernels.layout import BlockedLayout, PlainLayout
from longdraft.kv.contiguous import ContiguousStore
from longdraft.kv.format.quant import Quant8
from longdraft.kv.formatted import FormattedStore
from longdraft.kv.packing import Packing
from longdraft.kv.select.pages import PageBounds
from longdraft.models.registry import tiny_config

LAYERS = 2
KINDS = {  # layout, type, tokens to a group, pages to a group
    "bfloat16": (PlainLayout(16, 2, 8), torch.bfloat16, 32, 1),
    "float32, small pages": (PlainLayout(4, 1, 8), torch.float32, 32, 3),
    "blocked": (BlockedLayout(16, 1, 16, pairs=False), torch.float32, 64, 1),
    "pairs": (BlockedLayout(16, 3, 16, pairs=True), torch.bfloat16, 32, 1),
}


def make(kind, num_pages=60):
    layout, dtype, _, _ = KINDS[kind]
    return FormattedStore(LAYERS, num_pages, layout, dtype, "cpu", Quant8())


# --- groups in pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("page", "dim"), [(16, 64), (16, 8), (1, 16), (5, 80), (48, 128), (32, 64)])
def test_a_group_fills_its_pages(page, dim, dtype):
    packing = Packing(Quant8(), page, dim, dtype)
    own, whole = Quant8().group_bytes(packing.group, dim, dtype), 2 * page * dim * dtype.itemsize
    assert packing.group % page == 0
    assert packing.pages * whole <= own <= packing.pages * packing.page_bytes < own + packing.pages
    assert packing.group in (32, 35) or Quant8().group_bytes(packing.group - page, dim, dtype) < whole
    assert packing.group * whole / page > 1.4 * packing.pages * packing.page_bytes  # smaller indeed
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 2, packing.group, dim).to(dtype)
    parts = Quant8().encode(k, v)
    blocks = packing.pack(parts)
    assert [x.shape for x in blocks] == [(3 * packing.pages, 2, n) for n in (whole // 2, whole // 2, packing.spill)]
    for x, y in zip(parts, packing.unpack(blocks), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_what_is_saved_of_a_usual_head():
    """64 channels in bfloat16: 140 bytes of K and V against 256; a page is 9 % larger for it."""
    packing = Packing(Quant8(), 16, 64, torch.bfloat16)
    assert (packing.group, packing.pages, packing.spill) == (32, 1, 384)
    assert packing.page_bytes / packing.group == 140
    store = make("bfloat16")
    assert store.page_bytes == (store.k[:, 0].nbytes + store.v[:, 0].nbytes) + LAYERS * 2 * store.packing.spill
    assert store.bytes_per_token * 32 == store.page_bytes
    assert store.bytes_of(98) == store.page_bytes + 66 * LAYERS * 2 * 8 * 2 * 2
    assert store.bytes_of(97) == 97 * LAYERS * 2 * 8 * 2 * 2


# --- what queries see


def expected(plain, packing, row, length, encoded):
    """K and V of a row by layer, so many groups of them as the format gives them back."""
    old = encoded * packing.group
    for layer in range(LAYERS):
        own = plain.read(layer, row, length)
        parts = [x[:old].unflatten(0, (-1, packing.group)).transpose(1, 2) for x in own]
        back = packing.format.decode(packing.format.encode(*parts), own[0].dtype) if old else [x[:0] for x in own]
        yield [
            torch.cat([(x.transpose(1, 2).flatten(0, 1) if old else x), y[old:]])
            for x, y in zip(back, own, strict=True)
        ]


def shown(store, rows, stops):
    """What the last query of each row sees, by row and layer, as a pass reads it."""
    view, decode = store.lay_out(store.view(rows, stops))
    for b, stop in enumerate(stops):
        at = torch.arange(stop)
        slots = view.tables[b, at // view.page_size] * view.page_size + at % view.page_size
        yield [
            [read(x, slots) for read, x in zip((store.layout.read_k, store.layout.read_v), (kv.k, kv.v), strict=True)]
            for kv in (decode(i, kv) for i, kv in enumerate(store.layers))
        ]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_show_every_query_what_the_rule_says(kind):
    """Rows grow by up to as much as a pass may feed, of which some stands; they fork and end; pages run out."""
    rng, store = random.Random(kind), make(kind, 2 * make(kind, 1).takes(120))
    torch.manual_seed(1)
    packing, heads, dim = store.packing, store.layout.num_kv_heads, store.layout.head_dim
    plain = ContiguousStore(LAYERS, heads, dim, store.k.dtype)
    lengths, failed, forked = {}, 0, 0
    for step in range(45):
        row = rng.choice([*lengths, step]) if len(lengths) < 3 else rng.choice([*lengths])
        length, n = lengths.get(row, 0), rng.choice((1, 5, 65, 65))
        free = store.num_free_pages
        if row in lengths and rng.random() < 0.1:
            store.free(row)
            plain.free(row)
            del lengths[row]
        elif row in lengths and rng.random() < 0.15:
            keep = length - rng.randint(0, 1)
            if store.can_fork(row, keep):
                store.fork(row, 1000 + step, keep)
                plain.fork(row, 1000 + step, keep)
                lengths[1000 + step] = keep
                forked += 1
        elif store.reserve(row, length, n):
            plain.reserve(row, length, n)
            for layer in range(LAYERS):
                k, v = torch.randn(2, n, heads, dim).to(store.k.dtype)
                store.write(layer, k, v, store.slots(row, length, length + n))
                plain.write(layer, row, length, k, v)
            stops = store.cut(length, length + n)
            assert [packing.seen(q) for q in range(length, length + n)] == [
                packing.seen(stop - 1) for a, stop in zip([length, *stops], stops, strict=False) for _ in range(a, stop)
            ]
            for stop, got in zip(stops, shown(store, [row] * len(stops), stops), strict=True):
                assert_equal(got, expected(plain, packing, row, stop, packing.seen(stop - 1)))
            lengths[row] = length + rng.randint(1, n)
            for each in (store, plain):
                each.truncate(row, lengths[row])
        else:
            assert store.num_free_pages == free
            failed += 1
        store.check_integrity()
        for row, length in lengths.items():
            encoded = store.settled_pages(row) * store.layout.page_size // packing.group
            assert encoded <= packing.seen(length)
            got = [store.read(i, row, length) for i in range(LAYERS)]
            assert_equal(got, expected(plain, packing, row, length, encoded))
            slots = store.slots(row, 0, length).expand(LAYERS, -1)
            assert store.slots_at(row, range(length)) == slots[0].tolist()
            assert store.slots_at(row, iter(range(length)[-1:])) == slots[0, -1:].tolist()
            assert_equal([[x] for x in store.gather(slots)], [[torch.cat(x)] for x in zip(*got, strict=True)])
    assert failed
    assert forked
    for row in [*lengths]:
        store.free(row)
    store.check_integrity()
    assert store.num_free_pages == store.num_pages


def test_a_view_decodes_what_it_shows_and_no_more():
    store = make("bfloat16")
    for start in range(0, 260, 65):
        store.reserve(1, start, 65)
    view = store.view([1], [260])
    some = replace(view, sinks=4, starts=torch.tensor([200]))
    sizes = []
    store.decoded, inner = lambda i, first: sizes.append(len(first)) or inner(i, first), store.decoded
    for shows in (view, some):
        store.lay_out(shows)[1](0, store.layers[0])
    assert sizes == [6, 1]  # (259 - 65) // 32, and that of the first tokens


@pytest.mark.parametrize("kind", ["bfloat16", "pairs"])
def test_bounds_of_pages_are_those_of_the_keys_that_are_there(kind):
    """As a row grows and its pages are encoded, and of a fork of it."""
    store = make(kind)
    memory, layout = PageBounds(store, 1), store.layout
    torch.manual_seed(2)

    def check(row, length):
        pages = length // 16
        memory.follow(row, pages)
        bounds = memory.bounds[:, store.pages(row, 0, pages)]
        for i in range(LAYERS):
            keys = store.read(i, row, length)[0][: pages * 16].unflatten(0, (pages, 16))
            assert torch.equal(bounds[i], torch.stack([keys.amin(dim=1), keys.amax(dim=1)], dim=2))

    for length in range(0, 325, 65):
        store.reserve(1, length, 65)
        for layer in range(LAYERS):
            new = torch.randn(2, 65, layout.num_kv_heads, layout.head_dim).to(store.k.dtype)
            store.write(layer, *new, store.slots(1, length, length + 65))
        check(1, length + 65)
    store.fork(1, 2, 325)
    memory.fork(1, 2, 325)
    store.reserve(1, 325, 1)
    for row in (1, 2):
        check(row, 325)


# --- who holds what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [40, 65, 97, 130, 200, 331])
def test_a_row_fits_in_the_pages_that_it_takes(kind, n):
    """However it comes: a prompt held ahead and fed in chunks, steps of any length, proposals refused or not."""
    packing, rng = make(kind, 1).packing, random.Random(n)
    assert packing.longest(packing.takes(n)) >= n > packing.longest(packing.takes(n) - 1)
    for prompt in (0, n // 2, n):
        store = make(kind, packing.takes(n))
        length = 0
        assert store.longest >= n
        if prompt:
            assert store.reserve(1, 0, prompt)
            while length < prompt:
                fed = min(65, prompt - length)
                assert store.reserve(1, length, fed)
                length += fed
        while length < n:
            fed = min(rng.randint(1, 65), n - length)
            assert store.reserve(1, length, 1)
            assert store.reserve(1, length, fed)
            length += rng.randint(1, fed)
            store.truncate(1, length)
        store.check_integrity()


def test_a_row_is_no_longer_shared_once_what_the_next_query_sees_is_encoded():
    store = make("bfloat16")
    for start, n in ((0, 65), (65, 64)):
        store.reserve(1, start, n)
    assert store.can_fork(1, 128)
    store.reserve(1, 129, 1)  # of which the first 64 tokens are old
    assert store.can_fork(1, 129)
    assert not store.can_fork(1, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_pass_sees_encoded_is_there_before_it(kind):
    packing = make(kind, 1).packing
    for start in range(300):
        assert packing.seen(start + FormattedStore.longest_feed - 1) * packing.group <= start


def test_a_fork_within_a_prompt_shares_nothing_that_is_held_ahead():
    """The two may go on differently: each encodes groups of its own."""
    store = make("bfloat16")
    assert store.reserve(1, 0, 300)
    assert len(store._groups[1].pages) == 7
    store.fork(1, 2, 65)
    assert store._groups[2].pages == []
    store.check_integrity()


def test_pages_that_a_fork_holds_are_not_counted_as_given_back():
    store = make("bfloat16", 12)
    for start, n in ((0, 65), (65, 64)):
        assert store.reserve(1, start, n)
    store.fork(1, 2, 129)
    assert store.num_free_pages == 2  # of twelve: nine of tokens, one of a group
    assert not store.reserve(1, 129, 40)  # two groups, two pages and a copy, while the old ones stay with the fork
    assert store.num_free_pages == 2
    store.free(2)
    assert store.reserve(1, 129, 40)
    assert store.num_free_pages == 2  # four pages went
    store.check_integrity()


def test_pages_fill_the_memory_with_what_is_decoded_counted():
    """One layer of all tokens besides; about twice as many tokens fit at 30 layers of 64 channels in bfloat16."""
    config = tiny_config(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, max_position_embeddings=8192)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "block_size": 16, "seed": 0, "max_model_len": None}
    half, memory = torch.bfloat16, 64 * 2**20
    plain, ours = (
        sizing.size_engine(
            config, half, half, torch.device("cpu"), kv_format=fmt, kv_cache_memory_bytes=memory, **sizes
        )
        for fmt in (None, Quant8())
    )
    packing = Packing(Quant8(), 16, 64, half)
    page = 30 * 3 * packing.page_bytes + 32 * 3 * 64 * 2 * 2
    assert ours.num_pages == memory // page
    assert packing.longest(ours.num_pages) > 1.6 * 16 * plain.num_pages
    with pytest.raises(KVCapacityError, match="8192 tokens"):
        sizing.size_engine(
            config,
            half,
            half,
            torch.device("cpu"),
            kv_format=Quant8(),
            kv_cache_memory_bytes=memory,
            **sizes | {"max_model_len": 8192},
        )


def test_formats_go_by_name():
    assert resolve_format(None) is None
    assert [type(resolve_format(name)) for name in FORMATS] == [*FORMATS.values()]
    with pytest.raises(InvalidValueError, match="kv_format is 'quant3'.*None or one of quant8"):
        resolve_format("quant3")
