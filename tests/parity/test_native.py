"""The native kernels against the references: values over a list of regimes, and bits where bits are promised."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from longdraft import SamplingParams
from longdraft.capture import Capture
from longdraft.config import DraftConfig
from longdraft.errors import InvalidValueError
from longdraft.exactness import forced_logits
from longdraft.kernels import native
from longdraft.kernels.attention.ref import ReferenceAttention
from longdraft.kernels.dispatch import CallSpec, explain
from longdraft.kernels.layout import BlockedLayout, PlainLayout
from longdraft.kernels.linear.native import NativeLinear
from longdraft.kernels.linear.ref import TorchLinear
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.kv.store import PagedStore
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import NEVER, AttnPlan, CompactView, PagesView
from tests.conftest import make_engine

pytestmark = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
HEADS = ((4, 4, 16), (9, 3, 64), (5, 1, 80), (6, 2, 96), (8, 2, 128), (2, 1, 256))  # query heads, KV heads, head_dim
ROWS = {  # (cached tokens, queries)
    "one key": [(0, 1)],
    "decode": [(1, 1), (15, 1), (16, 1), (17, 1), (63, 1), (64, 1), (200, 1)],
    "verify over page borders": [(5, 3), (31, 1), (14, 4), (90, 2), (62, 9)],
    "over the border of a piece": [(1022, 4), (1023, 1), (1024, 1), (2040, 9)],
    "chunks of a prompt": [(0, 50), (64, 33), (1100, 70), (3, 1)],
}


def spec_of(dtype, heads=9, kv_heads=3, dim=64):
    return CallSpec("cpu", dtype, dtype, dim, heads // kv_heads, 16)


class World:
    """The same keys and values in both layouts; every slot that no row owns is NaN."""

    def __init__(self, rows, heads, kv_heads, dim, dtype, scale=1.0):
        torch.manual_seed(0)
        self.spec = spec_of(dtype, heads, kv_heads, dim)
        self.layouts = PlainLayout(16, kv_heads, dim), native.NativeAttention.layout(16, kv_heads, dim, self.spec)
        pages = 8 + sum(-(-(c + q) // 16) for c, q in rows)
        self.stores = [PagedStore(1, pages, layout, dtype, "cpu") for layout in self.layouts]
        kept, slots = [torch.randn(2, c + q, kv_heads, dim) for c, q in rows], []
        for store in self.stores:
            for b, (c, q) in enumerate(rows):
                assert store.reserve(b, 0, c + q)
            store.k.fill_(torch.nan)
            store.v.fill_(torch.nan)
            for b, (k, v) in enumerate(kept):
                store.write(0, k * scale, v, store.slots(b, 0, k.shape[0]))
        for b, (c, q) in enumerate(rows):
            slots.append(self.stores[0].slots(b, c, c + q))
            assert torch.equal(slots[-1], self.stores[1].slots(b, c, c + q))
        self.lens = [c + q for c, q in rows]
        self.starts = torch.tensor([0, *(q for _, q in rows)]).cumsum(0)
        self.slots = torch.cat(slots)
        self.view = self.stores[0].view(range(len(rows)), self.lens)
        self.q = torch.randn(int(self.starts[-1]), heads, dim) * scale

    def run(self, kernel, number, view=None, q=None):
        plan = AttnPlan(view or self.view, self.starts, self.slots)
        layer = self.stores[number].layers[0]
        return kernel(plan, self.layouts[number], self.spec)(self.q if q is None else q, layer)

    def check(self, view=None):
        want, got = self.run(ReferenceAttention, 0, view), self.run(native.NativeAttention, 1, view)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[self.spec.kv_dtype])
        return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_attention_equals_the_reference(rows, heads, dtype):
    World(rows, *heads, dtype).check()


def page_masses(world, tokens):
    """By brute force: softmax over all that a query sees, added up page by page and head by head."""
    group, (_, heads, dim) = world.spec.group_size, world.q.shape
    layout, layer = world.layouts[0], world.stores[0].layers[0]
    mass = torch.zeros(len(tokens), heads // group, world.view.tables.shape[1])
    for i, token in enumerate(tokens.tolist()):
        row = int((world.starts <= token).sum()) - 1
        seen = world.lens[row] - int(world.starts[row + 1]) + token + 1
        k = layout.read_k(layer.k, world.stores[0].slots(row, 0, seen)).float().repeat_interleave(group, dim=1)
        q = world.q[token].to(world.spec.dtype).float()
        weights = torch.einsum("hd,shd->hs", q, k).div(dim**0.5).softmax(dim=1)
        for page in range(-(-seen // 16)):
            part = weights[:, page * 16 : page * 16 + 16].sum(dim=1)
            mass[i, :, page] = part.view(-1, group).sum(dim=1)
    return mass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, (7, 1, 32), (24, 3, 32)], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_masses_of_pages(rows, heads, dtype):
    """Of some tokens, in any order; they equal brute force, and noting them changes no bit of the output."""
    world = World(rows, *heads, dtype)
    tokens = torch.randperm(len(world.q))[:20]
    mass = torch.full((len(tokens), heads[1], world.view.tables.shape[1]), torch.nan)
    plan = AttnPlan(world.view, world.starts, world.slots)
    kernel, layer = native.NativeAttention(plan, world.layouts[1], world.spec), world.stores[1].layers[0]
    assert torch.equal(kernel(world.q, layer, tokens, mass), kernel(world.q, layer))
    torch.testing.assert_close(mass, page_masses(world, tokens), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(
        mass.sum(dim=2), torch.full(mass.shape[:2], float(world.spec.group_size)), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits(dtype):
    """Scores of several thousand: one key takes all, and nothing overflows."""
    world = World(ROWS["verify over page borders"], 9, 3, 64, dtype, scale=30.0)
    want, got = world.run(ReferenceAttention, 0), world.run(native.NativeAttention, 1)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("budget", [2, 5, 16, 33, 48, 100])
@pytest.mark.parametrize("sinks", [0, 4, 16])
def test_sinks_and_window(dtype, budget, sinks):
    world = World([(1, 1), (40, 1), (100, 2), (1300, 1), (64, 1)], 9, 3, 64, dtype)
    world.check(StreamingLLM(budget, sinks).select(world.view))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_of_each_head(dtype):
    """Other pages for every head, in any order, with gaps; the newest page is always there."""
    world, numbers = World([(200, 1), (70, 3), (16, 1)], 6, 3, 32, dtype), torch.full((3, 3, 9), -1)
    for b, length in enumerate(world.lens):
        last = (length - 1) // 16
        for g in range(3):
            kept = [last, *torch.randperm(last)[: g + 1].tolist()] + ([last - 1] if length % 16 < 3 and last else [])
            for i, number in enumerate(dict.fromkeys(kept)):
                numbers[b, g, (3 * i + g) % 9] = number
    world.check(PagesView(world.view.tables, numbers, world.view.lens, 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_compact_copy_with_a_tail(dtype):
    """Tokens copied in any order to a small store; unused slots hold NaN."""
    world = World([(200, 1), (70, 2)], 6, 3, 32, dtype)
    positions = torch.full((2, 3, 64), NEVER)
    for b, length in enumerate(world.lens):
        queries = int(world.starts[b + 1] - world.starts[b])
        for g in range(3):
            kept = [*torch.randperm(length - queries)[: 20 + 7 * g].tolist(), *range(length - queries, length)]
            positions[b, g, : len(kept)] = torch.tensor(kept)
    small = [PagedStore(1, 8, layout, dtype, "cpu") for layout in world.layouts]
    for i, store in enumerate(small):
        layer = world.stores[i].layers[0]
        for b in range(2):
            store.reserve(b, 0, 64)
        store.k.fill_(torch.nan)
        store.v.fill_(torch.nan)
        for b in range(2):
            slots = store.slots(b, 0, 64)
            for g in range(3):
                kept = positions[b, g][positions[b, g] != NEVER]
                source = world.stores[i].slots(b, 0, world.lens[b])[kept]
                for name in ("k", "v"):
                    read, write = (getattr(world.layouts[i], f"{verb}_{name}") for verb in ("read", "write"))
                    old = read(getattr(store, name)[0], slots[: len(kept)]).clone()
                    old[:, g] = read(getattr(layer, name), source)[:, g]
                    write(getattr(store, name)[0], slots[: len(kept)], old)
    view = CompactView(small[0].view([0, 1], [64, 64]).tables, positions, world.view.lens, 16)
    plan = AttnPlan(view, world.starts, world.slots)
    want = ReferenceAttention(plan, world.layouts[0], world.spec)(world.q, small[0].layers[0])
    got = native.NativeAttention(plan, world.layouts[1], world.spec)(world.q, small[1].layers[0])
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 1023, 1025, 2100])
def test_a_query_has_the_same_bits_alone_and_among_others(dtype, length):
    """The last 70 queries of a row: one by one, in fives, all at once, and beside another row."""
    count = min(70, length)
    world = World([(length - count, count)], 9, 3, 64, dtype)
    together = world.run(native.NativeAttention, 1)
    for size in (1, 5):
        for start in range(0, count, size):
            n = min(size, count - start)
            view = world.stores[1].view([0], [length - count + start + n])
            plan = AttnPlan(view, torch.tensor([0, n]), world.slots[start : start + n])
            part = native.NativeAttention(plan, world.layouts[1], world.spec)
            assert torch.equal(part(world.q[start : start + n], world.stores[1].layers[0]), together[start : start + n])
    mate = World([(length - count, count), (300, 3)], 9, 3, 64, dtype)
    for name in ("k", "v"):
        slots = [w.stores[1].slots(0, 0, length) for w in (world, mate)]
        read, write = (getattr(world.layouts[1], f"{verb}_{name}") for verb in ("read", "write"))
        write(getattr(mate.stores[1], name)[0], slots[1], read(getattr(world.stores[1], name)[0], slots[0]))
    beside = mate.run(native.NativeAttention, 1, q=torch.cat([world.q, mate.q[count:]]))
    assert torch.equal(beside[:count], together)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(128, 64), (576, 576), (100, 37), (1, 16), (50, 1536), (33, 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(shape, dtype, bias):
    """Any size, odd ones included; a row's bits do not depend on the number of rows."""
    torch.manual_seed(1)
    weight, x = torch.randn(shape).to(dtype), torch.randn(40, shape[1])
    b = torch.randn(shape[0]) if bias else None
    spec = spec_of(dtype)
    layer = NativeLinear(weight, b, spec)
    y = layer(x)
    torch.testing.assert_close(y, TorchLinear(weight, b, spec)(x), rtol=1e-5, atol=1e-3)
    for m in (1, 2, 5, 7, 12, 13, 25):
        assert torch.equal(layer(x[:m]), y[:m])
    assert torch.equal(layer.rows(torch.tensor([0, shape[0] - 1])), weight[[0, -1]])
    assert layer(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("pairs", [False, True])
def test_the_layout_gives_back_what_it_took(pairs):
    torch.manual_seed(0)
    layout, dtype = BlockedLayout(16, 3, 32, pairs), DTYPES[pairs]
    storage = torch.zeros(layout.shape(5), dtype=dtype)
    slots, x = torch.randperm(80)[:50], torch.randn(50, 3, 32).to(dtype)
    for kind in ("k", "v"):
        getattr(layout, f"write_{kind}")(storage, slots, x)
        assert torch.equal(getattr(layout, f"read_{kind}")(storage, slots), x)


FAMILIES = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "biases and norms": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True},
    "one KV head": {"num_kv_heads": 1, "head_dim": 32},
    "odd sizes": {"hidden_size": 52, "intermediate_size": 75, "vocab_size": 131, "tie_embeddings": True},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_pass_equals_its_parts(family, dtype):
    config = tiny_config(**FAMILIES[family])
    model = Transformer(config, RandomWeights(config, seed=3, std=0.1), dtype=dtype)
    assert model.fused
    rows = [[(7 * i + n) % 128 for i in range(n)] for n in (90, 33)]
    fused = forced_logits(model, rows, 20)
    assert torch.equal(fused, forced_logits(model, rows, 20, chunk=1))
    assert torch.equal(fused[:20], forced_logits(model, rows[:1], 20, chunk=3))
    model._fused = None
    torch.testing.assert_close(fused, forced_logits(model, rows, 20), rtol=0, atol=1e-4 if dtype == DTYPES[0] else 0.1)


class Layered:
    """A step of three rows of a model, over views that differ by layer and KV head, and its captured queries."""

    def __init__(self, model):
        from longdraft.models.feed import Feed, feed

        self.model, self.feed = model, feed
        self.store = PagedStore(3, 30, model.layout, model.kv_dtype, "cpu")
        self.rows = [[(7 * i + n) % 128 for i in range(n)] for n in (203, 70, 16)]
        self.feeds = []
        for b, (ids, n) in enumerate(zip(self.rows, (3, 1, 5), strict=True)):
            assert self.store.reserve(b, 0, len(ids))
            feed(model, self.store, [Feed(b, 0, ids[:-n], 0)])
            self.feeds.append(Feed(b, len(ids) - n, ids[-n:], n))

    def step(self, select=None, layers=None, capture=True):
        kept = Capture(torch.tensor([0, 2, 3, 8]), torch.zeros(3, 4, 4, 16)) if capture else None
        logits = self.feed(self.model, self.store, self.feeds, select, layers, kept)
        return logits, kept.queries if kept else None


def pages_by_layer(view):
    """The pages of the queries, and one or two of the others."""
    numbers = torch.full((3, 3, 2, 4), -1)
    for (i, b, g), _ in np.ndenumerate(numbers[..., 0].numpy()):
        last = (int(view.lens[b]) - 1) // 16
        kept = {last, max(0, last - 1), (5 * i + 3 * b + 2 * g) % (last + 1), (7 * g + 3 * i) % (last + 1)}
        numbers[i, b, g, : len(kept)] = torch.tensor(sorted(kept, reverse=i == 1))
    return PagesView(view.tables, numbers, view.lens, 16)


def tokens_by_layer(view):
    """Two thirds of the tokens, other ones everywhere, and the last five."""
    generator = torch.Generator().manual_seed(4)
    position = torch.arange(view.tables.shape[1] * 16)
    kept = torch.rand((3, 3, 2, len(position)), generator=generator) < 0.66
    kept |= position >= view.lens[:, None, None] - 5
    kept &= position < view.lens[:, None, None]
    return CompactView(view.tables, torch.where(kept, position, NEVER), view.lens, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("select", [pages_by_layer, tokens_by_layer])
def test_views_that_differ_by_layer(monkeypatch, select, dtype):
    """The fused pass, the same by parts, and both torch kernels; all layers and some of them."""
    config = tiny_config()
    models = {}
    for name in ("native", "parts", "torch", "ref"):
        if name in ("torch", "ref"):
            monkeypatch.setenv("LONGDRAFT_KERNELS", name)
        models[name] = Transformer(config, RandomWeights(config, seed=3, std=0.1), dtype=dtype)
        assert models[name].fused is (name in ("native", "parts"))
    models["parts"]._fused = None
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for layers in (None, [0, 2]):
        results = {name: Layered(model).step(select, layers) for name, model in models.items()}
        for logits, queries in results.values():
            torch.testing.assert_close(logits, results["ref"][0], rtol=0, atol=tolerance)
            torch.testing.assert_close(queries, results["ref"][1], rtol=0, atol=tolerance)
        wrong = Layered(models["native"]).step(lambda v: select(v).layer(0), layers)[0]
        assert (wrong - results["ref"][0]).abs().max() > 3 * tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capturing_changes_no_bit_and_the_queries_are_the_tokens_own(dtype):
    """The same queries whether a token is fed with others or alone, by the fused pass and by parts."""
    config = tiny_config(**FAMILIES["biases and norms"])
    model = Transformer(config, RandomWeights(config, seed=3, std=0.1), dtype=dtype)
    logits, queries = Layered(model).step()
    assert torch.equal(logits, Layered(model).step(capture=False)[0])
    assert all(queries[i].abs().max() > 0.1 for i in range(3))
    first = Layered(model)  # the first row's three tokens one after the other: tokens 0 and 2 of the step
    f, alone = first.feeds[0], []
    for n in range(3):
        capture = Capture(torch.tensor([0]), torch.zeros(3, 1, 4, 16))
        first.feed(
            model,
            first.store,
            [replace(f, start=f.start + n, tokens=f.tokens[n : n + 1], num_logits=1)],
            capture=capture,
        )
        alone.append(capture.queries)
    assert torch.equal(torch.cat([alone[0], alone[2]], dim=1), queries[:, :2])
    model._fused = None
    torch.testing.assert_close(Layered(model).step()[1], queries, rtol=0, atol=1e-4 if dtype == DTYPES[0] else 0.1)


def test_a_fused_pass_over_some_layers(monkeypatch):
    """Only the chosen layers run, and only their caches are written."""
    from longdraft.models.feed import Feed, feed

    config = tiny_config()
    logits = []
    for fused in (True, False):
        model = Transformer(config, RandomWeights(config, seed=3, std=0.1), dtype=torch.float32)
        model._fused = model._fused if fused else None
        store = PagedStore(3, 4, model.layout, torch.float32, "cpu")
        store.reserve(0, 0, 20)
        logits.append(feed(model, store, [Feed(0, 0, list(range(20)), 3)], layers=[0, 2]))
        assert [bool(x.any()) for x in store.k[:, : store.num_pages - store.num_free_pages]] == [True, False, True]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_nan_spreads_no_further_than_its_row():
    world = World([(40, 1), (20, 1)], 9, 3, 64, torch.float32)
    layer = world.stores[1].layers[0]
    clean = world.run(native.NativeAttention, 1)
    keys = world.layouts[1].read_k(layer.k, world.stores[1].slots(0, 5, 6))
    world.layouts[1].write_k(layer.k, world.stores[1].slots(0, 5, 6), torch.full_like(keys, torch.nan))
    spoilt = world.run(native.NativeAttention, 1)
    assert spoilt[0].isnan().any()
    assert torch.equal(spoilt[1], clean[1])


def test_what_the_kernels_do_not_serve_says_why():
    for spec, words in (
        (CallSpec("cuda", torch.float32, torch.float32, 64, 3, 16), "not on cuda"),
        (CallSpec("cpu", torch.float64, torch.float64, 64, 3, 16), "float64"),
        (CallSpec("cpu", torch.float32, torch.float32, 20, 3, 16), "head_dim.*20"),
        (CallSpec("cpu", torch.float32, torch.float32, 64, 3, 8), "16 tokens, not 8"),
    ):
        verdicts = dict(explain("attention", spec))
        assert re.search(words, verdicts["native"])
        assert "used" in verdicts.values()


def test_the_switch_puts_torch_first(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_KERNELS", "torch")
    model = Transformer(tiny_config(), RandomWeights(tiny_config()), dtype=torch.float32)
    assert not model.fused
    assert isinstance(model.layout, PlainLayout)


SCRIPT = """
import torch
from longdraft.kernels import native
from longdraft.kernels.linear.native import NativeLinear
from longdraft import SamplingParams
from longdraft.config import DraftConfig
from longdraft.errors import InvalidValueError
from longdraft.exactness import forced_logits
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
config = tiny_config()
out = []
for dtype in (torch.float32, torch.bfloat16):
    model = Transformer(config, RandomWeights(config, seed=3, std=0.1), dtype=dtype)
    assert model.fused
    rows = [[(7 * i) % 128 for i in range(200)], [3, 4, 5, 6] * 8]
    logits = forced_logits(model, rows, 30)
    assert torch.equal(logits, forced_logits(model, rows, 30, chunk=1))
    out.append(logits)
print(native.runtime().isa, native.runtime().threads)
print(*(f"{x:.6e}" for x in torch.cat(out).double().sum(-1).tolist()))
print(hash(tuple(torch.cat(out).flatten().tolist())))
"""


def run_with(**environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_forked_child_makes_threads_of_its_own():
    """The parent's threads do not exist there; neither using the kernels nor leaving may wait for them."""
    torch.manual_seed(0)
    layer, x = NativeLinear(torch.randn(64, 64), None, spec_of(torch.float32)), torch.randn(40, 64)
    want = layer(x)
    pid = os.fork()
    if pid == 0:
        same = torch.equal(layer(x), want)
        native.runtime.cache_clear()  # destroys what it holds
        os._exit(0 if same else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_threads_change_no_bit():
    outcomes = [run_with(LONGDRAFT_THREADS=n, OMP_NUM_THREADS="2") for n in ("1", "openmp", "3")]
    assert [out[0].split()[1] for out in outcomes] == ["1", "2", "3"]
    assert len({out[2] for out in outcomes}) == 1


@pytest.mark.parametrize("isa", native._native.isas() if native._native else [])
def test_every_instruction_set_of_this_processor(isa):
    """Each is invariant in itself (the script checks that), and all agree in value."""
    name, sums, _ = run_with(LONGDRAFT_ISA=isa)
    assert name.split()[0] == isa
    best = run_with()[1].split()
    torch.testing.assert_close(
        *(torch.tensor([float(x) for x in s]) for s in (sums.split(), best)), rtol=2e-2, atol=2.0
    )


@pytest.mark.parametrize("shape", [(960, 576), (100, 37), (1, 16), (50, 1536), (33, 3)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_eight_bit_weights(shape, bias):
    """Half a step of each scale at most off the weights; products are those of the rounded inputs and weights."""
    torch.manual_seed(2)
    n, k = shape
    weight, x = torch.randn(n, k) * torch.rand(n, 1), torch.randn(20, k)
    weight[n // 2] = 0
    b = torch.randn(n) if bias else None
    layer = NativeLinear(weight, b, spec_of(torch.float32)).quantised()
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((layer.weight - weight).abs() <= steps * 0.5001).all()
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    want = (x / scale).round() * scale @ layer.weight.T + (0 if b is None else b)
    y = layer(x)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=2e-2 * k**0.5 / 10)
    for m in (1, 3, 13):
        assert torch.equal(layer(x[:m]), y[:m])
    assert torch.equal(layer(torch.zeros(2, k)), torch.zeros(2, n) + (0 if b is None else b))


def test_an_eight_bit_twin_is_close_and_shares_the_caches():
    config = tiny_config()
    # With some seeds an input lies so near the border of two bytes that another order of sums carries it over.
    model = Transformer(config, RandomWeights(config, seed=4, std=0.1), dtype=torch.float32)
    twin = model.quantised()
    assert twin is model.quantised()
    assert twin.weight_bytes < 0.3 * model.weight_bytes
    assert (twin.head.dtype, model.head.dtype) == (torch.int8, torch.float32)
    rows = [[(7 * i + n) % 128 for i in range(n)] for n in (90, 33)]
    exact = forced_logits(model, rows, 20)
    model._fused, fused = twin._fused, model._fused
    rounded = forced_logits(model, rows, 20)
    model._fused, twin._fused = fused, None
    torch.testing.assert_close(forced_logits(twin, rows, 20), rounded, rtol=1e-4, atol=1e-4)  # by parts
    assert 0 < (rounded - exact).abs().max() < 0.2 * exact.std()


def test_eight_bit_drafts_need_the_native_kernels():
    config = tiny_config()
    engine = make_engine(Transformer(config, RandomWeights(config), dtype=torch.float64))
    with pytest.raises(InvalidValueError, match="target@int8.*native kernels.*float64"):
        engine.add([1, 2, 3], SamplingParams(), DraftConfig(weights="target@int8"))
