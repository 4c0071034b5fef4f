"""SnapKV's choice against brute force, and the copies that a draft reads: what is in them, and what never shows."""

import random

import pytest
import torch

from longdraft import SamplingParams
from longdraft.capture import Seen
from longdraft.config import DraftConfig
from longdraft.drafts.copy_spec import CopySpec
from longdraft.drafts.registry import make
from longdraft.errors import InvalidValueError
from longdraft.kv.copies import Copies
from longdraft.kv.select.keys import Keys
from longdraft.kv.select.snapkv import SnapKV
from longdraft.kv.select.streaming_llm import first_and_last
from longdraft.kv.store import PagedStore
from longdraft.models.feed import Feed, feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import NEVER, CompactView
from tests.conftest import greedy, make_engine, run, run_alone

DRAFT = DraftConfig(kv="snapkv", budget=48, gamma=4)
PROMPT = [(11 * i + i // 7) % 128 for i in range(150)]


# --- the choice


def brute_force(queries, keys, start, count, recent, pool=5):
    """One KV head at a time, one query at a time, in float64; the pool runs over the tokens before the recent ones."""
    (n, heads, dim), (length, kv_heads, _) = queries.shape, keys.shape
    past, chosen = length - recent, []
    for g in range(kv_heads):
        rating = [0.0] * length
        for h in range(g * heads // kv_heads, (g + 1) * heads // kv_heads):
            for i in range(n):
                scores = keys[: start + i + 1, g].double() @ queries[i, h].double() / dim**0.5
                for t, weight in enumerate(scores.softmax(dim=0).tolist()):
                    rating[t] += weight
        around = [sum(rating[max(0, t - pool // 2) : min(past, t + pool // 2 + 1)]) / pool for t in range(past)]
        best = sorted(range(past), key=lambda t: (-around[t], t))[: count - recent]
        chosen.append([*sorted(best), *range(past, length)])
    return torch.tensor(chosen)


@pytest.mark.parametrize("window", [8, 16, 32, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_the_choice_is_that_of_brute_force(group, window):
    """A context below, at and above what may be chosen, every number of query heads per KV head, every window."""
    torch.manual_seed(10 * group + window)
    for length, count in ((70, 70), (71, 70), (99, 40), (140, 100), (80, 9), (80, 1)):
        kv_heads = 1 + length % 3
        keys = torch.randn(2, length, kv_heads, 16)
        queries = torch.randn(2, min(window, length), kv_heads * group, 16) * 2
        start = length - queries.shape[1]
        got = SnapKV(512, window=window).choose(Seen(start, queries), Keys(lambda layer, k=keys: k[layer]), count)
        recent = min(window, count // 2)
        want = [brute_force(queries[i], keys[i], start, count, recent) for i in range(2)]
        assert torch.equal(got, torch.stack(want))


def test_few_queries_and_large_scores():
    """One query decides alone; a key that takes all is found wherever it lies, its neighbours with it."""
    keys = torch.zeros(60, 1, 16)
    keys[31] = 100.0
    chosen = SnapKV(512).choose(Seen(59, torch.full((1, 1, 4, 16), 50.0)), Keys(lambda layer: keys), 8)
    assert chosen[0, 0].tolist()[-4:] == [56, 57, 58, 59]
    assert set(chosen[0, 0].tolist()[:4]) < {29, 30, 31, 32, 33}


def test_first_and_last():
    assert first_and_last(10, 4, sinks=1).tolist() == [0, 7, 8, 9]
    assert first_and_last(10, 4).tolist() == [0, 1, 8, 9]
    assert first_and_last(3, 3).tolist() == [0, 1, 2]
    assert first_and_last(5, 0).tolist() == []


# --- the copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_copies_are_the_sources_bits(dtype):
    """Other tokens for each layer and head, then tails in pieces; in whatever layout the model's kernels have."""
    config = tiny_config()
    model = Transformer(config, RandomWeights(config), dtype=dtype)
    source = PagedStore(3, 40, model.layout, dtype, "cpu")
    source.k.normal_()
    source.v.normal_()
    assert source.reserve(7, 0, 200)
    assert source.reserve(8, 0, 90)
    for layer in range(3):
        for row, length in ((7, 200), (8, 90)):
            source.write(layer, *torch.randn(2, length, 2, 16), source.slots(row, 0, length))
    copies, chosen = Copies(source, 12), {}
    for row, length in ((7, 150), (8, 40)):
        chosen[row] = torch.stack([torch.randperm(length)[:30].sort().values for _ in range(6)]).view(3, 2, 30)
        assert copies.open(row, 30, length, 0)
        copies.fill(row, chosen[row])
    for lengths in ({7: 151, 8: 40}, {7: 158, 8: 57}, {7: 158, 8: 58}):
        for row, length in lengths.items():
            assert copies.reserve(row, length, 5)
        copies.catch_up(lengths)
        for row, length in lengths.items():
            check_copy(copies, row, chosen[row], length)
            copies.settle(row)
        copies.store.check_integrity()
    assert not copies.open(9, 200, 200, 0)
    assert copies.get(9) is None
    for row in (7, 8, 9):
        copies.free(row)
    assert copies.store.num_free_pages == 12


def check_copy(copies, row, chosen, length):
    """Bit for bit: the chosen tokens, and the tail up to ``length``."""
    source, copy = copies.source, copies.get(row)
    assert copy.known == length
    for layer in range(len(source.layers)):
        have = copies.store.read(layer, row, copy.place(length))
        want = source.read(layer, row, length)
        for ours, theirs in zip(have, want, strict=True):
            for g in range(ours.shape[1]):
                assert torch.equal(ours[: copy.size, g], theirs[chosen[layer, g], g])
            assert torch.equal(ours[copy.size :], theirs[copy.start :])


class Watched:
    """An engine whose SnapKV draft is checked in every draft step, against the same choice as a view of the target."""

    def __init__(self, model, config=DRAFT, **sizes):
        self.engine, self.config = make_engine(model, **sizes), config
        self.draft = self.engine.runner.draft(config)
        assert isinstance(self.draft, CopySpec)
        self.copies, self.chosen, self.steps = self.draft.copies, {}, 0
        fill, run = self.copies.fill, self.draft.run

        def filled(row, chosen):
            self.chosen[row] = chosen
            fill(row, chosen)

        def checked(feeds):
            self.steps += 1
            for f in feeds:
                self.check(f)
            want = self.elsewhere(feeds)
            self.poison(feeds)
            got = run(feeds)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
            return got

        self.copies.fill, self.draft.run = filled, checked

    def check(self, f):
        copy = self.copies.get(f.row)
        size = self.config.budget
        assert f.start + len(f.tokens) <= size
        assert len(self.copies.store._tables[f.row]) <= self.copies.store.pages_for(size)
        seq = self.engine.sequence(f.row)
        check_copy(self.copies, f.row, self.chosen[f.row], seq.num_committed)
        assert f.start + f.shift >= seq.num_committed == copy.known

    def elsewhere(self, feeds):
        """Logits over the target's own pages, of which each layer and head sees its chosen tokens and all since."""

        def select(view):
            positions = torch.full((3, len(feeds), 2, view.tables.shape[1] * 16), NEVER)
            for b, f in enumerate(feeds):
                start = self.copies.get(f.row).start
                positions[:, b, :, start : int(view.lens[b])] = torch.arange(start, int(view.lens[b]))
                positions[:, b].scatter_(2, self.chosen[f.row], self.chosen[f.row])
            return CompactView(view.tables, positions, view.lens, view.page_size)

        there = [Feed(f.row, f.start + f.shift, f.tokens, f.num_logits) for f in feeds]
        return feed(self.engine.model, self.engine.store, there, select)

    def poison(self, feeds):
        """NaN into every slot of the copies' store that no query of the step may see."""
        store = self.copies.store
        seen = torch.zeros(store.num_pages * 16, dtype=torch.bool)
        for row in self.copies._rows:
            kept = self.copies.get(row)
            here = [f.start for f in feeds if f.row == row]
            seen[store.slots(row, 0, max([kept.place(kept.known), *here]))] = True
        hidden = (~seen).nonzero().flatten()
        junk = torch.full((len(hidden), 2, 16), torch.nan, dtype=store.k.dtype)
        for layer in range(3):
            store.write(layer, junk, junk, hidden)


@pytest.mark.parametrize(
    "params", [greedy(40), SamplingParams(seed=5, max_tokens=40, top_k=3)], ids=["greedy", "top_k"]
)
def test_a_draft_reads_its_choice_and_the_accepted_tokens_and_nothing_else(tiny, params):
    """Rows of several lengths that join and leave; after any number of accepted tokens the tail is the target's."""
    watched = Watched(tiny, num_pages=100, max_num_batched_tokens=64)
    prompts = [PROMPT, PROMPT[:20], PROMPT[50:110], PROMPT[:5]]
    ids = []
    for prompt in prompts:
        ids.append(watched.engine.add(prompt, params, DRAFT))
        watched.engine.step()
    seqs = [watched.engine.sequence(i) for i in ids]
    list(run(watched.engine))
    assert [seq.output_ids for seq in seqs] == [run_alone(tiny, p, params) for p in prompts]
    assert {0, 1} <= {min(1, a) for seq in seqs for a in seq.stats.accepted}
    assert watched.steps > 60
    check_empty(watched.engine, watched.draft)


def check_empty(engine, draft):
    draft.copies.store.check_integrity()
    assert draft.copies.store.num_free_pages == draft.copies.store.num_pages
    assert not draft._states and not draft.copies._rows
    assert engine.store.num_free_pages == engine.store.num_pages


# --- what the choice is made by


def choices(model, chunk, prompt=PROMPT, draft=DRAFT):
    """What is chosen for a prompt that is filled ``chunk`` tokens at a time, and by which queries."""
    engine = make_engine(model, max_num_batched_tokens=chunk)
    made, chosen = engine.runner.draft(draft), []
    fill = made.copies.fill
    made.copies.fill = lambda row, x: chosen.append((x, made._states[row].seen)) or fill(row, x)
    engine.add(prompt, greedy(3), draft)
    list(run(engine))
    positions, seen = chosen[0]
    assert (seen.start, seen.stop) == (max(0, len(prompt) - 32), len(prompt))
    return positions, seen


@pytest.mark.parametrize("length", [3, 31, 33, 150])
def test_chunks_of_any_size_choose_alike(length):
    """The observation window straddles chunks. On native kernels bit for bit, so that near-ties cannot matter."""
    config = tiny_config()
    model = Transformer(config, RandomWeights(config, seed=6), dtype=torch.float32)
    want, at_once = choices(model, 512, PROMPT[:length])
    for chunk in (1, 7, 16, 50, 149):
        got, seen = choices(model, chunk, PROMPT[:length])
        assert torch.equal(got, want)
        if model.fused:
            assert torch.equal(seen.queries, at_once.queries)


def test_only_accepted_queries_are_kept(tiny):
    """Always the last 32 final tokens, and what a fresh pass over them says of each."""
    engine = make_engine(tiny)
    seq = engine.sequence(engine.add(PROMPT[:60], SamplingParams(seed=2, max_tokens=40, top_k=2), DRAFT))
    draft = engine.runner.draft(DRAFT)
    while len(seq.output_ids) < 34:
        engine.step()
    assert 0 < sum(seq.stats.accepted) < sum(seq.stats.drafted)
    seen = draft._states[seq.id].seen
    assert (seen.start, seen.stop) == (seq.num_committed - 32, seq.num_committed)
    _, fresh = choices(tiny, 512, seq.ids[: seq.num_committed])
    torch.testing.assert_close(seen.queries, fresh.queries, rtol=1e-5, atol=1e-5)


def test_what_does_not_join_on_is_forgotten():
    first, next_, later = (Seen(start, torch.full((1, 3, 1, 1), float(start))) for start in (0, 3, 7))
    assert first.then(next_, 4).queries.flatten().tolist() == [0, 3, 3, 3]
    assert first.then(next_, 4).start == 2
    assert (first.then(later, 4).start, first.then(later, 4).queries.flatten().tolist()) == (7, [7, 7, 7])
    assert first.until(0) is None
    assert first.until(2).stop == 2


def test_nothing_is_captured_for_those_who_need_nothing(tiny):
    engine = make_engine(tiny)
    captured = []
    follow = engine.runner.follow

    def watched(batch):
        capture = engine.runner._observation.capture
        captured.append(None if capture is None else capture.queries.shape[1])
        follow(batch)

    engine.runner.follow = watched
    for draft in (None, DraftConfig(budget=16)):
        engine.add(PROMPT, greedy(6), draft)
        list(run(engine))
    assert set(captured) == {None}
    captured.clear()
    engine.add(PROMPT[:100], greedy(6), None)
    engine.add(PROMPT[:40], greedy(2), DRAFT)
    engine.step()
    assert captured == [32]


def test_a_fork_without_queries_reads_the_first_and_last_tokens_for_one_round(tiny):
    engine = make_engine(tiny)
    draft = engine.runner.draft(DRAFT)
    source = engine.add(PROMPT, greedy(12))
    engine.step()
    child = engine.sequence(engine.fork(source, draft=DRAFT))
    chosen, fill = [], draft.copies.fill
    draft.copies.fill = lambda row, x: chosen.append(x) or fill(row, x)
    engine.step()
    assert torch.equal(chosen[0][2, 1], first_and_last(150, 36))
    assert draft._states[child.id].seen.stop == child.num_committed
    list(run(engine))
    assert len(chosen) == 2 and chosen[1].shape == (3, 2, 36)
    assert child.output_ids == run_alone(tiny, PROMPT, greedy(12))


def test_forks_and_resumed_sequences_know_their_queries(tiny):
    """A fork shares what its source knows; who was preempted is told again while its cache is refilled."""
    engine = make_engine(tiny)
    draft = engine.runner.draft(DRAFT)
    first, second = (
        engine.sequence(i) for i in engine.add_all(PROMPT, SamplingParams(seed=1, max_tokens=30, n=2), DRAFT)
    )
    for _ in range(4):
        engine.step()
    assert draft._states[second.id].seen.queries.shape[1] == 32
    child = engine.sequence(engine.fork(first.id, draft=DRAFT))
    assert draft._states[child.id].seen.stop == first.num_committed
    engine.scheduler.preempt(first)
    assert first.id not in draft._states and draft.copies.get(first.id) is None
    while first.num_committed < 150:
        engine.step()
    assert draft._states[first.id].seen.stop == first.num_committed
    list(run(engine))
    assert child.output_ids == first.output_ids == run_alone(tiny, PROMPT, SamplingParams(seed=1, max_tokens=30))
    check_empty(engine, draft)


# --- bounds


def test_a_long_output_stays_within_the_budget():
    """2,000 tokens: the choice is made anew when the tail has no room left, and not before."""
    config = tiny_config(num_layers=1, max_position_embeddings=4096)
    model = Transformer(config, RandomWeights(config, seed=6), dtype=torch.float32)
    engine = make_engine(model, num_pages=200)
    draft, chosen, most = engine.runner.draft(DRAFT), [], 0
    fill = draft.copies.fill
    draft.copies.fill = lambda row, x: chosen.append(draft.copies.get(row).start) or fill(row, x)
    seq = engine.sequence(engine.add(PROMPT, greedy(2000), DRAFT))
    while engine.has_work:
        engine.step()
        most = max(most, draft.copies.store.num_pages - draft.copies.store.num_free_pages)
        copy = draft.copies.get(seq.id)
        assert copy is None or copy.place(copy.known) <= 48
    assert len(seq.output_ids) == 2000
    assert most <= 3  # 48 tokens
    steps = [b - a for a, b in zip(chosen, chosen[1:], strict=False)]
    assert min(steps) >= 9 and max(steps) <= 12  # 12 tokens of tail, 4 of them for proposals
    assert engine.stats.select_s > 0
    assert engine.stats.select_s < engine.stats.draft_s


@pytest.mark.parametrize("refresh", [1, 3])
def test_refresh_chooses_anew_after_so_many_rounds(tiny, refresh):
    engine = make_engine(tiny)
    config = DraftConfig(kv="snapkv", budget=120, gamma=1, refresh=refresh)
    draft, chosen = engine.runner.draft(config), []
    fill = draft.copies.fill
    draft.copies.fill = lambda row, x: chosen.append(row) or fill(row, x)
    seq = engine.sequence(engine.add(PROMPT, greedy(14), config))
    list(run(engine))
    rounds = sum(seq.stats.drafted[:1])
    assert len(chosen) == -(-rounds // refresh)


def test_memory_is_what_bytes_says(tiny):
    """Pages of all rows together, and the queries; a row that finds no page proposes nothing, and loses nothing."""
    engine = make_engine(tiny, num_pages=60, max_num_seqs=6)
    draft = engine.runner.draft(DRAFT)
    rng = random.Random(1)
    prompts = [PROMPT[: rng.randint(1, 100)] for _ in range(6)]
    seqs = [engine.sequence(engine.add(p, greedy(30), DRAFT)) for p in prompts]
    while engine.has_work:
        engine.step()
        store = draft.copies.store
        for seq in engine.scheduler.running:
            kept = len(store._tables.get(seq.id, [])) * 16 * store.bytes_per_token
            state = draft._states.get(seq.id)
            assert kept <= draft.bytes(len(seq.ids))
            noted = state.seen.queries.nbytes if state and state.seen else 0
            assert noted <= draft.note_bytes(len(seq.ids))
    tight = make(DRAFT, tiny, engine.store, max_rows=1)
    assert tight.copies.store.num_pages == 4
    assert [seq.output_ids for seq in seqs] == [run_alone(tiny, p, greedy(30)) for p in prompts]


def test_where_there_is_no_page_nothing_is_proposed(tiny):
    engine = make_engine(tiny)
    draft = engine.runner.draft(DRAFT)
    assert draft.copies.store.reserve(-1, 0, draft.copies.store.num_pages * 16 - 20)
    prompts = [PROMPT[:10], PROMPT[:90]]
    seqs = [engine.sequence(engine.add(p, greedy(10), DRAFT)) for p in prompts]
    list(run(engine))
    assert [bool(seq.stats.drafted) for seq in seqs] == [True, False]
    assert [seq.output_ids for seq in seqs] == [run_alone(tiny, p, greedy(10)) for p in prompts]


def test_a_refresh_that_cannot_be_meant():
    with pytest.raises(InvalidValueError, match="refresh"):
        DraftConfig(kv="snapkv", refresh=-1)
