"""Drafting over chosen pages: what is read of them, within the budget, by what is final, whoever rates the pages."""

import random

import pytest
import torch

from longdraft import SamplingParams
from longdraft.config import DraftConfig
from longdraft.drafts.page_spec import PageSpec, budget_pages, split
from longdraft.drafts.registry import make
from longdraft.errors import InvalidValueError
from longdraft.kv.select.base import top
from longdraft.kv.select.pages import PageBounds, Pages
from longdraft.models.feed import feed
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.view import NEVER, CompactView
from tests.conftest import greedy, make_engine, run, run_alone

PROMPT = [(11 * i + i // 7) % 128 for i in range(150)]
KINDS = ["pages", "verified"]
SAMPLED = SamplingParams(seed=5, max_tokens=40, top_k=3)


def config_of(kv, **settings):
    return DraftConfig(kv=kv, **({"budget": 80, "gamma": 4} | settings))


# --- what the budget is spent on


@pytest.mark.parametrize("refresh", [0, 1, 3, "auto"])
def test_the_budget_is_spent_and_kept(refresh):
    """All pages of a context that fits; else as many as there may be. Sinks and recent tokens as far as they fit."""
    rng, roomy = random.Random(1), 0
    for _ in range(3000):
        size, gamma, length = rng.choice((4, 16)), rng.randint(1, 20), rng.randint(0, 400)
        selector = Pages(rng.randint(1, 300), rng.randint(0, 40), rng.choice((0, 8, 32)), refresh)
        cut = split(selector, length, gamma, size)
        stop, newest = -(-(length + gamma) // size), length // size
        read = cut.sinks + cut.count + stop - cut.first
        assert 0 <= cut.sinks <= cut.first <= newest
        assert 0 <= cut.count <= cut.first - cut.sinks
        total, own = budget_pages(selector, length, gamma, size)
        assert read <= total
        assert total * size <= selector.budget or (read == total == own == stop - newest)
        if refresh == 1:
            assert read == min(total, stop)  # nothing that may be read is left out
        left = total - own - cut.sinks
        recent = newest - max(0, length - selector.recent) // size
        assert cut.sinks == min(-(-selector.sinks // size), newest, total // 2, total - own)
        if refresh == 1 and recent <= (left + 1) // 2:
            assert cut.first * size <= max(cut.sinks * size, length - selector.recent)
            roomy += 1
    assert refresh != 1 or roomy > 500


def test_top_prefers_the_lower_page():
    rating = torch.tensor([[[1.0, 3, 3, 0, 3, 2]], [[0, 0, 0, 0, 0, 0]]])
    assert top(rating, 2).tolist() == [[[1, 2]], [[0, 1]]]
    assert top(rating, 4).tolist() == [[[1, 2, 4, 5]], [[0, 1, 2, 3]]]


# --- what is read


class Watched:
    """An engine whose page draft is checked in every step, against the same choice spelled out token by token."""

    def __init__(self, model, config, **sizes):
        self.engine, self.config = make_engine(model, **sizes), config
        self.draft = self.engine.runner.draft(config)
        assert isinstance(self.draft, PageSpec)
        self.steps, self.most = 0, 0
        begin, run_ = self.draft.begin, self.draft.run

        def poisoned(rows):
            for row in rows:
                spoil(self.engine.store, row.seq)
            feeds = begin(rows)
            for row in rows:
                check_choice(self.draft, row)
            return feeds

        def checked(feeds):
            self.steps += 1
            self.check_bounds(feeds)
            want = self.elsewhere(feeds)
            got = run_(feeds)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
            return got

        self.draft.begin, self.draft.run = poisoned, checked

    def check_bounds(self, feeds):
        """No page twice, none beyond the row; at most the budget's tokens, or the round's own."""
        for f in feeds:
            length = f.start + len(f.tokens)
            numbers = self.draft.pages_read(f.row, length)
            assert (numbers.diff(dim=-1) > 0).all()
            assert (numbers[..., -1] == (length - 1) // 16).all()
            read = 16 * (numbers.shape[-1] - 1) + (length - 1) % 16 + 1
            own = length - 16 * (self.engine.sequence(f.row).num_committed // 16)
            assert read <= max(self.config.budget, own)
            self.most = max(self.most, read)

    def elsewhere(self, feeds):
        """Logits where each layer and head sees the tokens of its pages, one by one."""

        def select(view):
            positions = torch.full((3, len(feeds), 2, view.tables.shape[1] * 16), NEVER)
            for b, f in enumerate(feeds):
                numbers = self.draft.pages_read(f.row, int(view.lens[b]))
                tokens = (numbers[..., None] * 16 + torch.arange(16)).flatten(2)
                positions[:, b].scatter_(2, tokens, tokens)
            positions[positions >= view.lens[:, None, None]] = NEVER
            return CompactView(view.tables, positions, view.lens, view.page_size)

        return feed(self.engine.model, self.engine.store, feeds, select, self.draft.layers)


def spoil(store, seq):
    """NaN into every reserved slot whose token is not final: rejected ones lie there."""
    slots = store.slots(seq.id, seq.num_committed, 16 * len(store._tables[seq.id]))
    junk = torch.full((len(slots), 2, 16), torch.nan, dtype=store.k.dtype)
    for layer in range(len(store.layers)):
        store.write(layer, junk, junk, slots)


def check_choice(draft, row):
    """What was chosen just now is the best by the memory's rating, which is made of numbers."""
    choice = draft._states[row.seq.id]
    if choice.since.rounds > 1 or choice.blind:
        return
    cut = split(draft.selector, row.seq.num_committed, row.gamma, 16)
    assert choice.first == cut.first
    rating = draft.memory.rate(row.seq.id, cut.first)
    assert rating.isfinite().all()
    best = sorted_by(rating, cut)
    assert torch.equal(choice.pages, best)


def sorted_by(rating, cut):
    chosen = []
    for values in rating.flatten(0, 1).tolist():
        best = sorted(range(cut.sinks, cut.first), key=lambda p, v=values: (-v[p], p))[: cut.count]
        chosen.append([*range(cut.sinks), *sorted(best)])
    return torch.tensor(chosen, dtype=torch.int64).view(*rating.shape[:2], -1)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize(
    ("params", "settings"),
    [(greedy(40), {}), (SAMPLED, {"refresh": 0, "budget": 96}), (SAMPLED, {"budget": 20})],
    ids=["greedy", "kept", "tight"],
)
def test_a_draft_reads_its_pages_and_nothing_else(tiny, kv, params, settings):
    """Rows of several lengths that join and leave; NaN wherever a rejected token may lie."""
    watched = Watched(tiny, config_of(kv, **settings), num_pages=100, max_num_batched_tokens=64)
    prompts = [PROMPT, PROMPT[:20], PROMPT[30:140], PROMPT[:5]]
    ids = []
    for prompt in prompts:
        ids.append(watched.engine.add(prompt, params, watched.config))
        watched.engine.step()
    seqs = [watched.engine.sequence(i) for i in ids]
    list(run(watched.engine))
    assert [seq.output_ids for seq in seqs] == [run_alone(tiny, p, params) for p in prompts]
    assert watched.steps > 60
    assert watched.most > watched.config.budget - 16
    assert watched.engine.stats.draft_s > watched.engine.stats.select_s > 0
    check_empty(watched.engine, watched.draft)


def check_empty(engine, draft):
    assert not draft._states
    assert not any(value for value in vars(draft.memory).values() if isinstance(value, dict))
    assert engine.store.num_free_pages == engine.store.num_pages


# --- what is chosen does not depend on how the text came in


def first_choice(model, config, chunk, prompt=PROMPT):
    engine = make_engine(model, max_num_batched_tokens=chunk)
    draft, made = engine.runner.draft(config), []
    choose = draft._choose
    draft._choose = lambda row: made.append(choose(row)) or made[-1]
    engine.add(prompt, greedy(3), config)
    list(run(engine))
    assert not made[0].blind
    return made[0].pages


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("length", [3, 97, 150])
def test_chunks_of_any_size_choose_alike(tiny, kv, length):
    config = config_of(kv)
    want = first_choice(tiny, config, 512, PROMPT[:length])
    for chunk in (1, 7, 16, 50, 149):
        assert torch.equal(first_choice(tiny, config, chunk, PROMPT[:length]), want)


@pytest.mark.parametrize("kv", KINDS)
def test_forks_and_resumed_sequences_know_what_they_rate_by(tiny, kv):
    engine, config = make_engine(tiny), config_of(kv)
    draft = engine.runner.draft(config)
    params = SamplingParams(seed=1, max_tokens=30, n=2)
    first, second = (engine.sequence(i) for i in engine.add_all(PROMPT, params, config))
    for _ in range(5):
        engine.step()
    assert not draft._states[second.id].blind
    child = engine.sequence(engine.fork(first.id, draft=config))
    pages = first.num_committed // 16
    assert torch.equal(draft.memory.rate(child.id, pages), draft.memory.rate(first.id, pages))
    engine.scheduler.preempt(first)
    assert first.id not in draft._states and draft.memory.rate(first.id, 0) is None
    while first.num_committed < 150:
        engine.step()
    assert draft.memory.rate(first.id, 9) is not None
    list(run(engine))
    assert child.output_ids == first.output_ids == run_alone(tiny, PROMPT, SamplingParams(seed=1, max_tokens=30))
    check_empty(engine, draft)


@pytest.mark.parametrize("kv", KINDS)
def test_a_fork_of_one_without_the_draft_reads_the_last_pages_for_one_round(tiny, kv):
    engine, config = make_engine(tiny), config_of(kv, budget=96, refresh=0)
    draft = engine.runner.draft(config)
    source = engine.add(PROMPT, greedy(12))
    engine.step()
    child = engine.sequence(engine.fork(source, draft=config))
    engine.step()
    blind = draft._states[child.id]
    assert blind.blind and blind.pages[2, 1].tolist() == [
        0,
        *range(blind.first - blind.pages.shape[2] + 1, blind.first),
    ]
    engine.step()
    assert not draft._states[child.id].blind
    list(run(engine))
    assert child.output_ids == run_alone(tiny, PROMPT, greedy(12))


# --- bounds, and all that a draft may be combined with


@pytest.mark.parametrize(("kv", "refresh", "length"), [("pages", 0, 800), ("verified", 1, 2000)])
def test_a_long_output_stays_within_the_budget(kv, refresh, length):
    """Without a date, a choice is made when the budget is full, and not before."""
    model_config = tiny_config(num_layers=1, max_position_embeddings=4096)
    model = Transformer(model_config, RandomWeights(model_config, seed=6), dtype=torch.float32)
    engine, config = make_engine(model, num_pages=200), config_of(kv, budget=128, refresh=refresh)
    draft, at, most = engine.runner.draft(config), [], 0
    choose = draft._choose
    draft._choose = lambda row: at.append(row.seq.num_committed) or choose(row)
    seq = engine.sequence(engine.add(PROMPT, greedy(length), config))
    while engine.has_work:
        engine.step()
        if seq.id in draft._states:
            most = max(most, draft.pages_read(seq.id, seq.num_committed).shape[2])
    assert len(seq.output_ids) == length
    assert most <= 8
    gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
    if refresh == 0:
        assert min(gaps) >= 28 and max(gaps) <= 52  # two pages of eight are left to what comes
    else:
        assert max(gaps) <= 5


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8])
def test_every_number_of_heads_and_every_kernel(kv, group):
    """Other ratios of heads, prompts on and off page borders; native kernels, 8-bit weights and few layers too."""
    config = tiny_config(num_heads=2 * group, num_kv_heads=2, num_layers=2)
    for dtype in (torch.float64, torch.float32):
        model = Transformer(config, RandomWeights(config, seed=group), dtype=dtype)
        drafts = [config_of(kv, budget=64), config_of(kv, budget=48, layers="first:1", sampling_rule="maximal")]
        drafts += [config_of(kv, budget=64, weights="target@int8")] if model.fused else []
        params, prompts = greedy(12), [PROMPT[:n] for n in (1, 64, 129)]
        plain = [run_alone(model, p, params) for p in prompts]
        for draft in drafts:
            engine = make_engine(model)
            seqs = [engine.sequence(engine.add(p, params, draft)) for p in prompts]
            list(run(engine))
            assert [seq.output_ids for seq in seqs] == plain
            assert sum(seq.stats.drafted[0] for seq in seqs) > 0
            check_empty(engine, engine.runner.draft(draft))


@pytest.mark.parametrize("kv", KINDS)
def test_nothing_is_copied_and_notes_are_what_they_are_said_to_be(tiny, kv):
    engine, config = make_engine(tiny), config_of(kv)
    draft = engine.runner.draft(config)
    seqs = [engine.sequence(engine.add(PROMPT[:n], greedy(20), config)) for n in (150, 33, 7)]
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            assert noted(draft.memory, seq.id) <= draft.note_bytes(len(seq.ids))
    assert all(seq.finish_reason == "length" for seq in seqs)
    assert draft.bytes(100_000) == 0
    page = {"pages": 3 * 2 * 2 * 16 * 8, "verified": 3 * 2 * 4}[kv]
    assert draft.note_bytes(1600) == 100 * page + (3 * 4 * 16 * 4 if kv == "pages" else 0)


def noted(memory, row):
    if isinstance(memory, PageBounds):
        seen = memory._seen.get(row)
        return memory._known.get(row, 0) * memory.bounds[:, 0].nbytes + (seen.queries.nbytes if seen else 0)
    return memory._rows[row].mass.nbytes if row in memory._rows else 0


@pytest.mark.parametrize("kv", KINDS)
def test_a_small_model_cannot_have_it(tiny, kv):
    with pytest.raises(InvalidValueError, match=f"kv is '{kv}'.*streaming_llm, full.*small model"):
        make(DraftConfig(weights="small", kv=kv), tiny, make_engine(tiny).store)
