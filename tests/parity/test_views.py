"""The three kinds of view through both torch kernels, against a softmax over the explicitly listed tokens."""

import pytest
import torch

from longdraft.kernels.attention.padded import FUSED_FROM, PaddedAttention
from longdraft.kernels.attention.ref import ReferenceAttention
from longdraft.kernels.dispatch import CallSpec
from longdraft.kernels.layout import PlainLayout
from longdraft.kv.store import PagedStore
from longdraft.view import NEVER, AttnPlan, CompactView, PagesView, TableView

DIM, PAGE = 8, 4
KERNELS = [PaddedAttention, ReferenceAttention]
HEADS = [(3, 1), (6, 3), (5, 1), (10, 2)]  # (KV heads, query heads per KV head) = (3, 1), (3, 2), (1, 5), (2, 5)
ROWS = {
    "one": [(23, 1)],
    "decode": [(1, 1), (4, 1), (5, 1), (40, 1), (17, 1)],
    "verify": [(12, 3), (9, 1), (38, 5), (16, 4), (33, 2), (4, 4)],
    "chunk": [(70, 30), (20, 20), (9, 1), (60, 50)],
}  # (length, queries), the queries being the last tokens


class World:
    """Rows with known K and V in a paged store whose pages are shuffled, and NaN in all slots of no row."""

    def __init__(self, rows, kv_heads, group):
        torch.manual_seed(len(rows) * 100 + kv_heads * 10 + group)
        self.rows, self.kv_heads, self.heads = rows, kv_heads, kv_heads * group
        self.layout = PlainLayout(PAGE, kv_heads, DIM)
        self.spec = CallSpec("cpu", torch.float64, torch.float64, DIM, group, PAGE)
        self.store = PagedStore(1, 8 + sum(-(-n // PAGE) for n, _ in rows), self.layout, torch.float64, "cpu")
        for end in range(PAGE, PAGE + max(n for n, _ in rows), PAGE):  # interleaved: no table is consecutive
            for b, (n, _) in enumerate(rows):
                if end - PAGE < n:
                    assert self.store.reserve(b, 0, min(end, n))
        self.store.k.fill_(torch.nan)
        self.store.v.fill_(torch.nan)
        self.k, self.v = ([torch.randn(n, kv_heads, DIM, dtype=torch.float64) for n, _ in rows] for _ in range(2))
        self.lens = torch.tensor([n for n, _ in rows])
        self.starts = torch.tensor([0, *(q for _, q in rows)]).cumsum(0)
        self.q = torch.randn(int(self.starts[-1]), self.heads, DIM, dtype=torch.float64)
        self.tables = self.store.view(range(len(rows)), self.lens.tolist()).tables

    def fill(self, seen):
        """Write K and V of the tokens that some query may see: ``seen[b][g]`` lists positions."""
        for b, (n, _) in enumerate(self.rows):
            slots = self.store.slots(b, 0, n)
            for g in range(self.kv_heads):
                for t in seen[b][g]:
                    page, offset = divmod(int(slots[t]), PAGE)
                    self.store.k[0, page, g, offset] = self.k[b][t, g]
                    self.store.v[0, page, g, offset] = self.v[b][t, g]

    def expected(self, seen):
        """softmax(q kᵀ / √D) v over the listed tokens at or before each query."""
        out = torch.empty_like(self.q)
        for b, (n, num_q) in enumerate(self.rows):
            for i in range(num_q):
                for h in range(self.heads):
                    g = h // (self.heads // self.kv_heads)
                    kept = [t for t in seen[b][g] if t <= n - num_q + i]
                    query = self.q[int(self.starts[b]) + i, h]
                    weights = (self.k[b][kept, g] @ query / DIM**0.5).softmax(dim=-1)
                    out[int(self.starts[b]) + i, h] = weights @ self.v[b][kept, g]
        return out

    def check(self, kernel, view, seen, kv=None):
        plan = AttnPlan(view, self.starts, torch.zeros(len(self.q), dtype=torch.int64))
        got = kernel(plan, self.layout, self.spec)(self.q, kv or self.store.layers[0])
        torch.testing.assert_close(got, self.expected(seen), rtol=1e-12, atol=1e-12)


def per_head(world, choose):
    """``seen[b][g]``: the queries' own tokens, which stay visible, and what ``choose(b, g, cached)`` adds."""
    return [
        [sorted({*choose(b, g, n - q), *range(n - q, n)}) for g in range(world.kv_heads)]
        for b, (n, q) in enumerate(world.rows)
    ]


def test_the_cases_reach_the_fused_path():
    assert any(q * 2 >= FUSED_FROM for rows in ROWS.values() for _, q in rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("kv_heads", "group"), HEADS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (1, 1), (3, 6), (5, 9), (16, 100)])
def test_token_ranges(kernel, kv_heads, group, rows, sinks, window):
    """Sinks and a window that begin and end anywhere in a page, also overlapping or empty."""
    world = World(rows, kv_heads, group)
    starts = torch.tensor([min(max(0, n - q - window), n) for n, q in rows])
    seen = [
        [[t for t in range(n) if t < sinks or t >= start] for _ in range(kv_heads)]
        for (n, _), start in zip(rows, starts.tolist(), strict=True)
    ]
    world.fill(seen)
    world.check(kernel, TableView(world.tables, world.lens, PAGE, sinks, starts), seen)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_table_without_ranges_shows_everything(kernel, rows):
    world = World(rows, 2, 2)
    seen = [[range(n)] * 2 for n, _ in rows]
    world.fill(seen)
    world.check(kernel, TableView(world.tables, world.lens, PAGE), seen)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("kv_heads", "group"), HEADS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_chosen_pages_per_head(kernel, kv_heads, group, rows):
    """Other pages for each head, in any order, with unused entries; a page is visible up to the row's length."""
    world = World(rows, kv_heads, group)
    generator = torch.Generator().manual_seed(1)
    lists, seen = [], []
    for n, q in rows:
        own = set(range((n - q) // PAGE, -(-n // PAGE)))  # the pages of the queries' own tokens
        lists.append([])
        seen.append([])
        for _ in range(kv_heads):
            chosen = {i for i in range(-(-n // PAGE)) if torch.rand((), generator=generator) < 0.4} | own
            order = torch.randperm(len(chosen), generator=generator)
            lists[-1].append([sorted(chosen)[i] for i in order])
            seen[-1].append([t for t in range(n) if t // PAGE in chosen])
    width = 1 + max(len(pages) for row in lists for pages in row)
    numbers = torch.tensor([[pages + [-1] * (width - len(pages)) for pages in row] for row in lists])
    world.fill(seen)
    world.check(kernel, PagesView(world.tables, numbers, world.lens, PAGE), seen)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("kv_heads", "group"), HEADS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_copies_per_head_with_a_growing_tail(kernel, kv_heads, group, rows):
    """A small store of its own: other tokens for each head, holes between them, then the queries' own tokens."""
    world = World(rows, kv_heads, group)
    generator = torch.Generator().manual_seed(2)
    seen = per_head(world, lambda b, g, cached: torch.randperm(cached, generator=generator)[: 3 + 2 * g + b].tolist())
    copies = max(len(tokens) for row in seen for tokens in row) + 2  # slots per head: always some that stay unused
    small = PagedStore(1, 4 + len(rows) * -(-copies // PAGE), world.layout, torch.float64, "cpu")
    for b in reversed(range(len(rows))):
        assert small.reserve(b, 0, copies)
    small.k.fill_(torch.nan)
    small.v.fill_(torch.nan)
    width = -(-copies // PAGE) * PAGE
    positions = torch.full((len(rows), kv_heads, width), NEVER)
    for b in range(len(rows)):
        slots = small.slots(b, 0, copies)
        for g, tokens in enumerate(seen[b]):
            places = torch.randperm(copies, generator=generator)[: len(tokens)].tolist()
            for t, place in zip(tokens, places, strict=True):
                page, offset = divmod(int(slots[place]), PAGE)
                small.k[0, page, g, offset], small.v[0, page, g, offset] = world.k[b][t, g], world.v[b][t, g]
                positions[b, g, place] = t
    # A copy that lies past the row's length (a tail that was rolled back) is not seen either.
    for b, (n, _) in enumerate(rows):
        free = (positions[b, 0] == NEVER).nonzero().flatten()
        positions[b, 0, free[0]] = n + 3
    tables = small.view(range(len(rows)), [copies] * len(rows)).tables
    world.check(kernel, CompactView(tables, positions, world.lens, PAGE), seen, small.layers[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_lists_give_equal_results_whatever_the_view(kernel):
    """The three kinds agree on what all of them can say: whole pages, the same for all heads."""
    rows = ROWS["verify"]
    world = World(rows, 2, 2)
    starts = torch.tensor([max(0, (n - q) // PAGE * PAGE - 8) for n, q in rows])
    seen = [
        [[t for t in range(n) if t < PAGE or t >= s] for _ in range(2)]
        for (n, _), s in zip(rows, starts.tolist(), strict=True)
    ]
    world.fill(seen)
    numbers = torch.full((len(rows), 1, 12), -1)
    for b, row in enumerate(seen):
        pages = sorted({t // PAGE for t in row[0]})
        numbers[b, 0, : len(pages)] = torch.tensor(pages)
    table = TableView(world.tables, world.lens, PAGE, PAGE, starts)
    pages, positions = table.expand()
    compact = CompactView(pages[:, 0], positions, world.lens, PAGE)
    for view in (table, PagesView(world.tables, numbers, world.lens, PAGE), compact):
        world.check(kernel, view, seen)
