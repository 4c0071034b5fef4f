"""Captured attention against sums of softmax weights by position, for every kind of view, and against transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from longdraft import LLM, DraftConfig, SamplingParams
from longdraft.bench.captured import Attention, Pass, captured, exact_attention, passes_of
from longdraft.drafts.base import DraftRow
from longdraft.kernels.layout import PlainLayout
from longdraft.view import NEVER, CompactView, LayerKV, PagesView, TableView
from tests.parity.models import tiny_checkpoint

SIZE, PAGES, LAYERS, HEADS, DIM, LENGTH = 4, 6, 2, 6, 8, 22  # the last page is not full


class Layered:
    """A view of which each layer sees something else."""

    def __init__(self, *views):
        self.views, self.lens, self.page_size = views, views[0].lens, SIZE

    def layer(self, i):
        return self.views[i]


def views(kv_heads):
    """Name → a view of two rows and, per layer, row and KV head, the positions it shows."""
    lens = torch.tensor([LENGTH, LENGTH])
    tables = torch.tensor([[3, 1, 5, 0, 2, 4], [9, 7, 11, 6, 8, 10]])
    numbers = torch.tensor([[[0, 5, -1], [2, 5, 1]], [[5, -1, -1], [3, 4, 5]]])[:, :kv_heads]
    pages = PagesView(tables, numbers, lens, SIZE)
    paged = [[[p for n in g if n >= 0 for p in range(4 * n, min(4 * n + 4, LENGTH))] for g in r] for r in numbers]
    ranges = TableView(tables, lens, SIZE, sinks=3, starts=torch.tensor([15, 10]))
    ranged = [[[0, 1, 2, *range(start, LENGTH)]] * kv_heads for start in (15, 10)]
    yield "ranges", ranges, [ranged] * LAYERS
    yield "pages", pages, [paged] * LAYERS
    yield "layers", Layered(ranges, pages), [ranged, paged]
    whole = TableView(tables, lens, SIZE)
    yield "all", whole, [[[list(range(LENGTH))] * kv_heads] * 2] * LAYERS


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_view_against_brute_force(kv_heads):
    random = torch.Generator().manual_seed(kv_heads)
    layout = PlainLayout(SIZE, kv_heads, DIM)
    storage = [torch.randn(layout.shape(2 * PAGES), generator=random, dtype=torch.float64) for _ in range(LAYERS)]
    queries = torch.randn(LAYERS, HEADS, DIM, generator=random, dtype=torch.float64)
    kv = [LayerKV(x.clone(), x) for x in storage]
    for name, view, shown in views(kv_heads):
        for row in range(2):
            table = list(views(kv_heads))[0][1].tables[row]
            at = torch.arange(LENGTH)
            slots = table[at // SIZE] * SIZE + at % SIZE
            scores = torch.stack(
                [
                    torch.stack([layout.read_k(x, slots)[:, h * kv_heads // HEADS] @ q[h] for h in range(HEADS)])
                    for x, q in zip(storage, queries, strict=True)
                ]
            )  # [L, H, S]
            exact = Attention(queries, scores[..., -1], scores.logsumexp(dim=-1))
            drafted = [LayerKV(x.k.clone(), x.v) for x in kv]
            for x in drafted:  # a draft's own key of the newest token does not count
                layout.write_k(x.k, slots[-1:], torch.full((1, kv_heads, DIM), 3.0, dtype=torch.float64))
            weights = scores.softmax(dim=-1)
            for layers in ([0, 1], [1]):
                right = [
                    weights[layer, h, shown[layer][row][h * kv_heads // HEADS]].sum()
                    for layer in layers
                    for h in range(HEADS)
                ]
                got = captured(exact, Pass(view, drafted.__getitem__, layers, layout), row)
                assert got == pytest.approx(float(sum(right)) / len(right), abs=1e-12), name
                assert name != "all" or got == pytest.approx(1, abs=1e-12)


def test_copies_count_like_what_they_are_copies_of():
    """A compact view over another store: keys of other tokens, in other pages, and empty slots."""
    random = torch.Generator().manual_seed(0)
    layout = PlainLayout(SIZE, 2, DIM)
    keys = torch.randn(LENGTH, 2, DIM, generator=random, dtype=torch.float64)
    query = torch.randn(1, HEADS, DIM, generator=random, dtype=torch.float64)
    scores = torch.stack([keys[:, h // 3] @ query[0, h] for h in range(HEADS)])[None]
    chosen = [[2, 7, LENGTH - 1], [0, 11, LENGTH - 1]]
    store = torch.full(layout.shape(2), torch.nan, dtype=torch.float64)
    for g, positions in enumerate(chosen):
        store[1, g, :3] = keys[positions, g]
    positions = torch.full((1, 2, SIZE), NEVER)
    positions[0, :, :3] = torch.tensor(chosen)
    view = CompactView(torch.tensor([[1]]), positions, torch.tensor([LENGTH]), SIZE)
    exact = Attention(query, scores[..., -1], scores.logsumexp(dim=-1))
    right = sum(scores.softmax(dim=-1)[0, h, chosen[h // 3]].sum() for h in range(HEADS)) / HEADS
    done = Pass(view, [LayerKV(store, store)].__getitem__, [0], layout)
    assert captured(exact, done, 0) == pytest.approx(float(right))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_exact_attention_is_that_of_transformers(family, tmp_path):
    llm = LLM(tiny_checkpoint(tmp_path, family, std=0.3), dtype="float64", kv_cache_memory_bytes=2**22)
    prompts = [[(7 * i + 3 * n) % 128 for i in range(40 + 9 * n)] for n in range(2)]
    engine, config = llm.engine, DraftConfig(budget=16, sinks=4, gamma=2)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    rows = [engine.sequence(engine.add(ids, params)) for ids in prompts]
    while not all(seq.decoding for seq in rows):
        engine.step()
    for seq in rows:
        engine.store.reserve(seq.id, seq.num_committed, 3)
    found, seen = exact_attention(llm, rows), []
    with passes_of(llm, config, lambda done: seen.append([captured(a, done, n) for n, a in enumerate(found)])):
        engine.runner.draft(config).propose([DraftRow(seq, 2) for seq in rows], sampled=False)
    assert len(seen) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    for n, seq in enumerate(rows):
        with torch.no_grad():
            weights = model(torch.tensor([seq.ids]), output_attentions=True).attentions  # of layers, [1, H, S, S]
        last = torch.stack(weights)[:, 0, :, -1]
        shown = [*range(4), *range(len(seq.ids) - 12, len(seq.ids))]
        assert seen[0][n] == pytest.approx(float(last[..., shown].sum(dim=-1).mean()), abs=1e-6)
    assert "forward" not in vars(llm.model)
