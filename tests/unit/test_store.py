"""The paged store against the contiguous one, its copy-on-write, and its accounting."""

import random

import pytest
import torch

from longdraft.kernels.layout import PlainLayout
from longdraft.kv.contiguous import ContiguousStore
from longdraft.kv.store import PagedStore

LAYERS, HEADS, DIM = 2, 3, 4


def make(num_pages=32, page_size=4):
    return PagedStore(LAYERS, num_pages, PlainLayout(page_size, HEADS, DIM), torch.float64, "cpu")


def write_both(paged, plain, row, start, n):
    for layer in range(LAYERS):
        k, v = torch.randn(2, n, HEADS, DIM, dtype=torch.float64)
        paged.write(layer, k, v, paged.slots(row, start, start + n))
        plain.write(layer, row, start, k, v)
    assert paged.slots_at(row, range(start + n)) == paged.slots(row, 0, start + n).tolist()


def assert_same(paged, plain, row, length):
    for layer in range(LAYERS):
        for a, b in zip(paged.read(layer, row, length), plain.read(layer, row, length), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_match_the_contiguous_store(page_size, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    paged = make(num_pages=160 // page_size + 4, page_size=page_size)
    plain = ContiguousStore(LAYERS, HEADS, DIM, torch.float64)
    lengths: dict[int, int] = {}
    for step in range(300):
        row = rng.choice([*lengths, step]) if lengths else step
        action = rng.choice(["grow", "grow", "truncate", "fork", "free"])
        length = lengths.get(row, 0)
        if action == "grow" or row not in lengths:
            n = rng.randint(1, 9)
            before = paged.num_free_pages
            if paged.reserve(row, length, n):
                plain.reserve(row, length, n)
                write_both(paged, plain, row, length, n)
                lengths[row] = length + n
            else:
                assert paged.num_free_pages == before
        elif action == "truncate":
            lengths[row] = rng.randint(0, length)
            paged.truncate(row, lengths[row])
            plain.truncate(row, lengths[row])
        elif action == "fork":
            target, keep = 1000 + step, rng.randint(0, length)
            paged.fork(row, target, keep)
            plain.fork(row, target, keep)
            lengths[target] = keep
        else:
            for store in (paged, plain):
                store.free(row)
            del lengths[row]
        paged.check_integrity()
        for row, length in lengths.items():
            assert_same(paged, plain, row, length)
    for row in list(lengths):
        paged.free(row)
    assert paged.num_free_pages == paged.num_pages


@pytest.mark.parametrize("length", range(0, 13))
@pytest.mark.parametrize("back", range(0, 6))
def test_truncate_equals_never_having_written(length, back):
    """Write, take back, write anew: as if the first attempt had not been, at every page offset."""
    paged, plain = make(), ContiguousStore(LAYERS, HEADS, DIM, torch.float64)
    for store in (paged, plain):
        store.reserve(1, 0, length + back)
    write_both(paged, plain, 1, 0, length)
    for layer in range(LAYERS):
        junk = torch.full((back, HEADS, DIM), torch.nan, dtype=torch.float64)
        paged.write(layer, junk, junk, paged.slots(1, length, length + back))
    paged.truncate(1, length)
    assert paged.num_pages - paged.num_free_pages == paged.pages_for(length)
    paged.reserve(1, length, 3)
    plain.truncate(1, length)
    plain.reserve(1, length, 3)
    write_both(paged, plain, 1, length, 3)
    assert_same(paged, plain, 1, length + 3)


def test_a_fork_copies_only_the_page_it_writes():
    paged = make()
    paged.reserve(1, 0, 10)  # pages of 4: two full, one with two tokens
    paged.fork(1, 2, 10)
    assert paged.num_pages - paged.num_free_pages == 3
    paged.reserve(2, 10, 1)
    assert paged.num_pages - paged.num_free_pages == 4
    paged.reserve(1, 10, 1)  # the last holder of its page writes in place
    assert paged.num_pages - paged.num_free_pages == 4


def test_new_pages_are_zero_and_refusal_changes_nothing():
    paged = make(num_pages=3)
    paged.k.fill_(torch.nan)
    paged.v.fill_(torch.nan)
    assert paged.reserve(1, 0, 5)
    assert all(x.isfinite().all() for x in paged.read(0, 1, 8))
    assert not paged.reserve(2, 0, 5)
    assert paged.num_free_pages == 1
    paged.check_integrity()


def test_bytes_per_token():
    assert make().bytes_per_token == LAYERS * 2 * HEADS * DIM * 8
