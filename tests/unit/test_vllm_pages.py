"""vLLM's KV cache in the native kernels' pages against torch in float32; and what they are not used for."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from longdraft.integrations.vllm.guard import attention_refusals
from longdraft.integrations.vllm.pages import PAGE, Pages
from longdraft.integrations.vllm.tables import DraftTables
from longdraft.integrations.vllm.twin import Twin
from longdraft.kernels import native
from longdraft.kernels.dispatch import CallSpec
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer

pytestmark = pytest.mark.skipif(native._native is None, reason=native.WHY_NOT)
HEADS = ((4, 4, 16), (9, 3, 64), (5, 1, 80), (8, 2, 128))  # query heads, KV heads, head_dim
# Tokens that are cached, and fed: decoding, verifying, chunks of a prompt, over borders of blocks and of pieces.
ROWS = [(0, 1), (6, 4), (31, 1), (32, 3), (40, 70), (0, 33), (127, 2), (1022, 4), (1300, 50)]


class Cache:
    """A layer's cache with blocks dealt out at random, full of NaN, and what was written to it."""

    def __init__(self, rows, heads, block_size, dtype):
        rng = random.Random(0)
        torch.manual_seed(0)
        self.heads, self.kv_heads, self.dim = heads
        self.size, spec = block_size, CallSpec("cpu", dtype, dtype, self.dim, self.heads // self.kv_heads, PAGE)
        self.pages = Pages(block_size, self.kv_heads, spec)
        each = [-(-(cached + fed) // block_size) for cached, fed in rows]
        numbers = rng.sample(range(sum(each) + 9), sum(each))
        self.table = torch.full((len(rows), max(each) + 2), 10**6, dtype=torch.int32)  # never followed
        for row, count in enumerate(each):
            self.table[row, :count] = torch.tensor([numbers.pop() for _ in range(count)])
        self.blocks = torch.full((sum(each) + 9, self.kv_heads, block_size, 2 * self.dim), torch.nan, dtype=dtype)
        self.kv = self.pages.storage(self.blocks)
        self.k, self.v = ([torch.randn(a + b, self.kv_heads, self.dim, dtype=dtype) for a, b in rows] for _ in "kv")

    def slots(self, row, positions):
        block = self.table[row][torch.tensor(positions) // self.size].long()
        return block * self.size + torch.tensor(positions) % self.size

    def step(self, rows, q, keep=None):
        """Feeds tokens ``[from, to)`` of each row and attends; tokens that ``keep`` says no to go nowhere."""
        slots = torch.cat([self.slots(row, range(*span)) for row, span in enumerate(rows)])
        slots = slots if keep is None else torch.where(keep, slots, -1)
        starts = torch.tensor([0, *(b - a for a, b in rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor([b for _, b in rows], dtype=torch.int32)
        plan = self.pages.plan(self.table, lens, starts, slots)
        attention = self.pages.attention(plan)
        k, v = (torch.cat([x[row][a:b] for row, (a, b) in enumerate(rows)]) for x in (self.k, self.v))
        attention.write(self.kv, plan.slots, k, v)
        return attention(q, self.kv)

    def expected(self, rows, q):
        """In float32, of what was fed."""
        out, at = [], 0
        for row, (a, b) in enumerate(rows):
            seen = torch.arange(b) <= torch.arange(a, b)[:, None]
            k, v = (x[row][:b].float().repeat_interleave(self.heads // self.kv_heads, 1) for x in (self.k, self.v))
            queries = q[at : at + b - a].float()
            parts = (x.transpose(0, 1)[None] for x in (queries, k, v))
            out.append(scaled_dot_product_attention(*parts, attn_mask=seen)[0].transpose(0, 1))
            at += b - a
        return torch.cat(out)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 16), (torch.bfloat16, 32), (torch.bfloat16, 128)])
def test_ragged_rows_attend_as_in_torch(dtype, block_size, heads):
    cache = Cache(ROWS, heads, block_size, dtype)
    middle = [(0, max(1, cached)) for cached, _ in ROWS]  # what is cached comes in two chunks
    for rows in ([(0, b // 2 + 1) for _, b in middle], [(b // 2, b) if b > 1 else (0, b) for _, b in middle]):
        cache.step(rows, torch.zeros(sum(b - a for a, b in rows), heads[0], heads[2], dtype=dtype))
    rows = [(cached, cached + fed) for cached, fed in ROWS]
    q = torch.randn(sum(fed for _, fed in ROWS), heads[0], heads[2], dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(cache.step(rows, q), cache.expected(rows, q), rtol=tolerance, atol=tolerance)


def test_a_token_without_a_slot_is_written_nowhere_and_the_rows_own_blocks_alone_change():
    cache = Cache([(0, 40), (0, 7)], (4, 2, 32), 32, torch.float32)
    keep = torch.ones(47, dtype=torch.bool)
    keep[[3, 46]] = False
    cache.step([(0, 40), (0, 7)], torch.zeros(47, 4, 32), keep)
    written = ~cache.blocks.isnan()
    assert int(written.sum()) == 45 * 2 * 2 * 32
    own = {int(number) for row, count in ((0, 2), (1, 1)) for number in cache.table[row, :count]}
    assert set(written.flatten(1).any(1).nonzero()[:, 0].tolist()) == own


def test_a_twin_over_vllms_blocks_says_what_it_says_over_its_own_pages():
    """Token by token, two rows of which one stops early, then over a window: bit for bit the same logits."""
    config = tiny_config(num_layers=2)
    model = Transformer(config, RandomWeights(config, seed=3)).quantised()
    size, texts = 32, [torch.randint(config.vocab_size, (n,)).tolist() for n in (290, 33)]
    pages, store = Pages(size, config.num_kv_heads, model.spec), model.new_store(24)
    blocks = [[7, 2, 11, 3, 9, 1, 13, 12, 8, 10], [4, 5] + 8 * [10**6]]
    caches = [torch.full((15, config.num_kv_heads, size, 2 * config.head_dim), torch.nan) for _ in model.layers]
    twin = Twin(model, 320)
    assert twin.fits(pages) and not twin.fits(None)
    assert not twin.fits(replace(pages, spec=replace(model.spec, kv_dtype=torch.bfloat16)))

    def say(at, budget, sinks):
        known, wanted = [min(at + 1, len(text)) for text in texts], [int(at < len(text)) for text in texts]
        table = torch.tensor(blocks, dtype=torch.int32)
        tables = DraftTables.build(table, known, wanted, [budget] * 2, sinks, size)
        ids = torch.tensor([text[n - 1] for text, n in zip(texts, known, strict=True)], dtype=torch.int32)
        return twin.forward(ids, tables.step(0), tables, pages, caches)[[row for row in (0, 1) if wanted[row]]]

    for at in range(len(texts[0])):
        fed = [row for row in (0, 1) if at < len(texts[row])]
        assert all(store.reserve(row, at, 1) for row in fed)
        feeds = [Feed(row, at, [texts[row][at]], 1) for row in fed]
        assert torch.equal(say(at, 320, 0), feed(model, store, feeds)), at
    assert caches[0][[0, 6, 14]].isnan().all()
    seen = feed(model, store, feeds, lambda view: replace(view, sinks=32, starts=torch.tensor([224])))
    assert torch.equal(say(at, 60, 20), seen)  # whole blocks: of 20 sinks 32, of the last 60 tokens 66


def layer(**changes):
    has = dict(sliding_window=-1, alibi_slopes=None, logits_soft_cap=0, sinks=None, attn_type="decoder")
    has |= dict(kv_sharing_target_layer_name=None, scale=0.125, head_size=64)
    return SimpleNamespace(impl=SimpleNamespace(**{**has, **changes}))


def attention_config(kv_transfer_config=None, **model):
    model = SimpleNamespace(**{"is_mm_prefix_lm": False, "is_hybrid": False, **model})
    return SimpleNamespace(kv_transfer_config=kv_transfer_config, model_config=model)


def test_what_the_native_attention_has_not_is_refused_in_a_sentence():
    spec, plain = CallSpec("cpu", torch.bfloat16, torch.bfloat16, 64, 3, 16), attention_config()
    assert not list(attention_refusals(spec, 32, plain, [layer(), layer(sliding_window=None)]))
    unfit = dict(
        sliding_window=128,
        alibi_slopes=[0.5],
        logits_soft_cap=30.0,
        sinks=[1.0],
        attn_type="encoder_only",
        kv_sharing_target_layer_name="a",
        scale=0.2,
    )
    for name, value in unfit.items():
        assert len(list(attention_refusals(spec, 32, plain, [layer(), layer(**{name: value})]))) == 1, name
    assert "24" in next(attention_refusals(spec, 24, plain, [layer()]))
    for name in ("kv_transfer_config", "is_mm_prefix_lm", "is_hybrid"):
        assert len(list(attention_refusals(spec, 32, attention_config(**{name: True}), [layer()]))) == 1
    for change in (dict(device="cuda"), dict(kv_dtype=torch.uint8), dict(dtype=torch.float16), dict(head_dim=72)):
        assert len(list(attention_refusals(replace(spec, **change), 32, plain, [layer()]))) == 1, change
