"""A small model over copies of its own cache: what it reads and chooses by, that it knows its place, and what it holds.

The small model is the tiny target without its middle layer, or the target itself.
"""

from dataclasses import replace

import pytest
import torch

from longdraft import SamplingParams
from longdraft.capture import Capture
from longdraft.config import DraftConfig
from longdraft.drafts.base import DraftRow
from longdraft.drafts.registry import make
from longdraft.drafts.small_copies import SmallCopies
from longdraft.engine.sizing import size_engine
from longdraft.errors import InvalidValueError
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import NEVER, CompactView
from tests.conftest import greedy, make_engine, run, run_alone
from tests.exact.test_contract import check_nothing_left
from tests.exact.test_small_model import accepted, drafted, with_models

DRAFT = DraftConfig(weights="small", kv="snapkv", budget=48, gamma=4)
PROMPT = [(11 * i + i // 7) % 128 for i in range(120)]


class Pruned:
    """The tiny target's weights without the middle layer."""

    path = "two of three layers"

    def __init__(self):
        self.inner, self.config = RandomWeights(tiny_config(), 6), tiny_config(num_layers=2)

    def shapes(self):
        return RandomWeights(self.config).shapes()

    def load(self, name):
        return self.inner.load(name.replace("layers.1.", "layers.2."))


@pytest.fixture(scope="module")
def pruned():
    return Transformer(tiny_config(num_layers=2), Pruned(), dtype=torch.float64)


class Watched:
    """An engine whose draft is checked in every step against the same choice as a view of a cache of its own."""

    def __init__(self, target, model, config=DRAFT, **sizes):
        self.engine, self.model, self.config = (
            with_models(make_engine(target, **sizes), {"small": model}),
            model,
            config,
        )
        self.draft, self.chosen, self.texts, self.steps = self.engine.runner.draft(config), {}, {}, 0
        assert isinstance(self.draft, SmallCopies)
        fill, run = self.draft.copies.fill, self.draft.run

        def filled(row, chosen):
            self.chosen[row] = chosen
            self.check_queries(row)
            fill(row, chosen)

        def checked(feeds):
            got = run(feeds)
            for f, logits in zip(feeds, got, strict=True):
                assert f.start + len(f.tokens) <= config.budget
                torch.testing.assert_close(logits, self.elsewhere(f)[0], rtol=1e-9, atol=1e-9)
            self.steps += len(feeds)
            return got

        self.draft.copies.fill, self.draft.run = filled, checked

    def check_queries(self, row):
        """Those of the last 32 tokens before the newest, at full attention."""
        ids, seen = self.engine.sequence(row).ids[:-1], self.draft._states[row].seen
        n, config = min(32, len(ids)), self.model.config
        asked = torch.empty(config.num_layers, n, config.num_heads, config.head_dim)
        form = Capture(torch.arange(len(ids) - n, len(ids)), asked)
        feed(self.model, self.store(len(ids)), [Feed(0, 0, ids, 0)], capture=form)
        assert (seen.start, seen.stop) == (len(ids) - n, len(ids))
        torch.testing.assert_close(seen.queries, asked, rtol=1e-5, atol=1e-5)

    def elsewhere(self, f):
        """Logits of the step: all up to the choice at full attention, what came then over the choice and itself."""
        start, position = self.draft.copies.get(f.row).start, f.start + f.shift
        ids = self.engine.sequence(f.row).ids
        before = ids[:position] if position < len(ids) else self.texts[f.row]
        text = self.texts[f.row] = [*before, *f.tokens]
        assert len(text) == position + len(f.tokens)
        store = self.store(len(text))
        if start:
            feed(self.model, store, [Feed(0, 0, text[:start], 0)])

        def select(view):
            positions = torch.full((len(store.layers), 1, 2, view.tables.shape[1] * 16), NEVER)
            positions[..., start : len(text)] = torch.arange(start, len(text))
            chosen = self.chosen[f.row][:, None]
            return CompactView(view.tables, positions.scatter(3, chosen, chosen), view.lens, view.page_size)

        return feed(self.model, store, [Feed(0, start, text[start:], 1)], select)

    def store(self, length):
        store = PagedStore(self.model.config.num_layers, 20, self.model.layout, self.model.kv_dtype, "cpu")
        assert store.reserve(0, 0, length)
        return store


@pytest.mark.parametrize("refresh", [0, 2])
def test_a_draft_reads_its_choice_and_the_tokens_since(tiny, pruned, refresh):
    """Rows that join in chunks, several lengths, one preempted, one forked; any number of accepted tokens."""
    config, params = replace(DRAFT, refresh=refresh), SamplingParams(seed=5, max_tokens=14, top_k=2)
    watched = Watched(tiny, pruned, config, num_pages=100, max_num_batched_tokens=50)
    engine = watched.engine
    seqs = []
    for prompt in (PROMPT, PROMPT[:20], PROMPT[:1]):
        seqs.append(engine.sequence(engine.add(prompt, params, config)))
        engine.step()
    while len(seqs[0].output_ids) < 8:
        engine.step()
    seqs.append(engine.sequence(engine.fork(seqs[0].id, draft=config)))
    engine.scheduler.preempt(seqs[1])
    list(run(engine))
    assert [seq.output_ids for seq in seqs[:3]] == [run_alone(tiny, PROMPT[:n], params) for n in (120, 20, 1)]
    assert seqs[3].output_ids == seqs[0].output_ids
    assert {0, 1} <= {min(1, a) for seq in seqs for a in seq.stats.accepted}
    assert 0 < accepted(seqs) < drafted(seqs)
    assert watched.steps > 40
    check_nothing_left(engine)


@pytest.mark.parametrize("right", (0, 2, 4))
def test_a_text_that_went_on_in_its_own_way(tiny, pruned, right):
    """Nobody tells the draft how many of its guesses stood, and that other tokens came instead of the rest."""
    watched = Watched(tiny, pruned)
    seq = watched.engine.sequence(watched.engine.add(PROMPT, greedy(100), DRAFT))
    watched.engine.step()
    for _ in range(4):
        (own,) = watched.draft.propose([DraftRow(seq, 4)], sampled=False).tokens
        seq.ids += [*own[:right], *((token + 1) % 128 for token in own[right:]), 5]
        seq.num_committed = len(seq.ids) - 1
    assert watched.steps == 16


@pytest.mark.parametrize("params", [greedy(50), SamplingParams(seed=2, max_tokens=50)], ids=["greedy", "sampled"])
def test_the_target_itself_with_room_for_everything_accepts_everything(tiny, params):
    """Through rests, interrupted steps, preemption and forks: it never loses its place in the text."""
    engine = with_models(make_engine(tiny, max_num_batched_tokens=24), {"small": tiny})
    config = replace(DRAFT, budget=400)
    seqs = [engine.sequence(engine.add(PROMPT[:n], params, config)) for n in (1, 16, 50)]
    forward, steps = engine.runner.forward, 0

    def interrupted(batch):
        nonlocal steps
        steps += 1
        if steps % 3 == 0:
            raise KeyboardInterrupt
        return forward(batch)

    engine.runner.forward = interrupted
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            if steps == 9:
                seqs.append(engine.sequence(engine.fork(seqs[2].id, draft=config)))
            if steps == 12:
                engine.scheduler.preempt(seqs[1])
    assert accepted(seqs) == drafted(seqs) > 100
    assert [seq.output_ids for seq in seqs[:3]] == [run_alone(tiny, PROMPT[:n], params) for n in (1, 16, 50)]
    check_nothing_left(engine)


def test_a_long_output_stays_within_the_budget():
    """2,000 tokens: the cache is read as a whole when the copy is full, and never else; stores hold what is said."""
    config = tiny_config(num_layers=1, max_position_embeddings=4096)
    model = Transformer(config, RandomWeights(config, seed=6), dtype=torch.float32)
    engine = with_models(make_engine(model, num_pages=200), {"small": model})
    draft, wide = engine.runner.draft(DRAFT), []
    small, copies = draft.draft.store, draft.copies.store
    watched = draft.draft.feed

    def fed(store, feeds, *rest, **kwargs):
        for f in feeds:
            if store is small:
                wide.append(f.start + len(f.tokens))
            else:
                assert store is copies
                assert f.start + len(f.tokens) <= 48
        return watched(store, feeds, *rest, **kwargs)

    draft.draft.feed = fed
    seq = engine.sequence(engine.add(PROMPT, greedy(2000), DRAFT))
    while engine.has_work:
        engine.step()
        held = (s.num_pages - s.num_free_pages for s in (small, copies))
        assert sum(held) * 16 * small.bytes_per_token <= draft.bytes(len(seq.ids)) + 15 * small.bytes_per_token
    assert len(seq.output_ids) == 2000
    steps = [b - a for a, b in zip(wide, wide[1:], strict=False)]
    assert wide[0] == 120 and min(steps) >= 8 and max(steps) <= 12  # 12 tokens of tail, 4 of them for proposals
    assert draft.bytes_read(2000) == 48 * small.bytes_per_token
    assert draft.note_bytes(2000) == 32 * 4 * 16 * 4


def test_drafting_ends_at_the_small_models_range(tiny):
    short = Transformer(
        tiny_config(max_position_embeddings=64), RandomWeights(tiny_config(), seed=6), dtype=torch.float64
    )
    engine = with_models(make_engine(tiny), {"small": short})
    proposed = {}
    draft = engine.runner.draft(DRAFT)
    propose = draft.propose

    def watched(rows, *, sampled):
        proposal = propose(rows, sampled=sampled)
        proposed.update({row.seq.num_committed: len(own) for row, own in zip(rows, proposal.tokens, strict=True)})
        return proposal

    draft.propose = watched
    seqs = [engine.sequence(engine.add(PROMPT[:n], greedy(30), DRAFT)) for n in (50, 100)]
    list(run(engine))
    assert (
        {length for length, n in proposed.items() if n} == {length for length in proposed if length + 4 <= 64} != set()
    )
    assert [seq.output_ids for seq in seqs] == [run_alone(tiny, PROMPT[:n], greedy(30)) for n in (50, 100)]


@pytest.mark.parametrize("full", ["cache", "copies"])
def test_where_there_is_no_page_nothing_is_proposed(tiny, pruned, full):
    engine = with_models(make_engine(tiny), {"small": pruned})
    draft = engine.runner.draft(DRAFT)
    store = draft.draft.store if full == "cache" else draft.copies.store
    assert store.reserve(-1, 0, store.num_pages * 16 - 40)
    seqs = [engine.sequence(engine.add(PROMPT[:n], greedy(10), DRAFT)) for n in (10, 90)]
    list(run(engine))
    assert [bool(seq.stats.drafted) for seq in seqs] == [True, False]
    assert [seq.output_ids for seq in seqs] == [run_alone(tiny, PROMPT[:n], greedy(10)) for n in (10, 90)]


def test_what_small_models_cannot_read(tiny):
    for kv in ("pages", "verified"):
        with pytest.raises(InvalidValueError, match=f"kv is '{kv}'.*streaming_llm, full, snapkv, topk.*small model"):
            make(DraftConfig(weights="small", kv=kv), tiny, make_engine(tiny).store)


def test_the_copies_share_of_the_memory():
    """Copies and queries are the small model's, whatever the target's sizes are."""
    sizes = {"max_model_len": None, "max_num_seqs": 2, "max_num_batched_tokens": 512, "block_size": 16, "seed": 0}
    types = (tiny_config(max_position_embeddings=10**5), torch.float32, torch.float32, torch.device("cpu"))
    layer, query, memory = 2 * 2 * 16 * 4, 4 * 16 * 4, 2**22
    got = size_engine(
        *types, draft=tiny_config(num_layers=1), copied=64, observed=32, kv_cache_memory_bytes=memory, **sizes
    )
    assert got.num_pages == (memory - 2 * (64 * layer + 32 * query)) // (16 * 4 * layer)
