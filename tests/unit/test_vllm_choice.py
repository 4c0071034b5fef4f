"""Blocks chosen by their keys inside vLLM, over a cache of our own: what is read, and that no bound is out of date.

The engine here has vLLM's ways with blocks: it fills them in chunks, shares those of equal texts, takes them back and
deals them out again, and writes drafts into their ends. What should be chosen is computed from the texts alone.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from longdraft.errors import InvalidValueError
from longdraft.integrations.vllm.args import engine_args
from longdraft.integrations.vllm.choice import Chooser, split
from longdraft.integrations.vllm.notes import Notes
from longdraft.integrations.vllm.pages import PAGE, Pages
from longdraft.integrations.vllm.rows import Row
from longdraft.integrations.vllm.settings import Settings
from longdraft.integrations.vllm.tables import DraftTables
from longdraft.kernels import native
from longdraft.kernels.dispatch import CallSpec
from longdraft.sampling_params import SamplingParams
from tests.unit.test_vllm_glue import Runner, texts

needs_native = pytest.mark.skipif(native._native is None, reason=native.WHY_NOT)
LAYERS, MOST = ("a", "b"), 3


class Text:
    """Keys and queries of all layers, for each position."""

    def __init__(self, heads, dtype, length=420):
        h, g, d = heads
        self.keys = torch.randn(len(LAYERS), length, g, d).to(dtype)
        self.queries = (3 * torch.randn(len(LAYERS), length, h, d)).to(dtype)


class Engine:
    """Requests ``{name: [text, computed tokens, blocks]}`` over blocks that are dealt out again and again."""

    def __init__(self, rng, heads, dtype, size, blocks=60):
        self.rng, self.heads, self.dtype, self.size = rng, heads, dtype, size
        self.pages = Pages(size, heads[1], CallSpec("cpu", dtype, dtype, heads[2], heads[0] // heads[1], PAGE))
        self.caches = [torch.full((blocks, heads[1], size, 2 * heads[2]), 9.0, dtype=dtype) for _ in LAYERS]
        self.chooser = Chooser(self.pages, self.caches, LAYERS, MOST)
        self.texts = [Text(heads, dtype) for _ in range(3)]
        self.free, self.users = list(range(1, blocks)), dict.fromkeys(range(blocks), 0)
        self.requests, self.count = {}, 0

    def start(self, text):
        """With the full blocks of a request with the same text, if there is one: a cached prefix."""
        request = [text, 0, []]
        for other, computed, blocks in self.requests.values():
            if other is text and len(request[2]) < computed // self.size:
                request[1:] = computed // self.size * self.size, blocks[: computed // self.size]
        for block in request[2]:
            self.users[block] += 1
        self.count += 1
        self.requests[f"r{self.count}"] = request

    def drop(self, name):
        """Finished, aborted, or preempted; what was freed last is dealt out first."""
        for block in self.requests.pop(name)[2]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def slots(self, name, start, stop):
        _, _, blocks = self.requests[name]
        while len(blocks) * self.size < stop:
            blocks.append(self.free.pop())
            self.users[blocks[-1]] += 1
        at = torch.arange(start, stop)
        return torch.tensor(blocks)[at // self.size] * self.size + at % self.size

    def write(self, lens, starts, slots, keys):
        table = torch.zeros(len(lens), 1, dtype=torch.int32)
        plan = self.pages.plan(table, torch.ones(len(lens), dtype=torch.int32), starts, slots)
        attention = self.pages.attention(plan)
        for layer, cache in enumerate(self.caches):
            attention.write(self.pages.storage(cache), plan.slots, keys[layer], keys[layer])

    def step(self, chunks, rejected=()):
        """The target's pass: ``{name: tokens}``, of which the last ``rejected[name]`` are drafts that do not stand."""
        spans = {name: (self.requests[name][1], self.requests[name][1] + n) for name, n in chunks.items()}
        slots = torch.cat([self.slots(name, *span) for name, span in spans.items()])
        starts = torch.tensor([0, *chunks.values()]).cumsum(0)
        lens = torch.tensor([b for _, b in spans.values()])
        picked = [(self.requests[name][0], *span) for name, span in spans.items()]
        self.chooser.notes.begin(starts, lens, slots)
        keys = [text.keys[:, a:b].clone() for text, a, b in picked]
        for name, k in zip(chunks, keys, strict=True):
            k[:, chunks[name] - dict(rejected).get(name, 0) :] = 40.0
        self.write(lens, starts, slots, torch.cat(keys, dim=1))
        for layer, name in enumerate(LAYERS):
            self.chooser.notes.note(name, torch.cat([text.queries[layer, a:b] for text, a, b in picked]))

    def draft(self, name, known, count):
        """A draft's keys, in the places of tokens that are not final."""
        slots = self.slots(name, known - 1, known - 1 + count)
        keys = torch.full((len(LAYERS), count, *self.heads[1:]), 50.0, dtype=self.dtype)
        self.write(torch.tensor([count]), torch.tensor([0, count]), slots, keys)


def expected(engine, text, known, budget, sinks, wanted):
    """Block numbers of a row from the definition: those always read, those to choose from, how many, their worth."""
    size, first = engine.size, -(-sinks // engine.size)
    end, gap = -(-(known + wanted - 1) // size), max(0, (known - budget) // size - first)
    recent = max(first + gap, min(known - 1, known - budget // 2) // size) if gap else first
    count, worth = recent - first - gap if gap else 0, {}
    h, g, d = engine.heads
    if count:
        keys = text.keys[:, : recent * size].float().unflatten(1, (recent, size))  # [L, P, S, G, D]
        queries = text.queries[:, known - 2].float().unflatten(1, (g, h // g))[:, None]  # [L, 1, G, group, D]
        low, high = (x[:, :, :, None] for x in (keys.amin(2), keys.amax(2)))
        bound = torch.maximum(queries * low, queries * high).sum(-1).mean(-1)  # [L, P, G]
        share = (bound[:, first:] * d**-0.5).softmax(dim=1).sum(dim=(0, 2))
        worth = {first + i: float(x) for i, x in enumerate(share)}
    always = {*range(first), *range(recent, end)} if gap else set(range(end))
    return always, worth, count


def check(engine, names, knowns, budgets, sinks, wanted):
    """What the rows read now, against the definition; rows of the pass in its order."""
    rows = [
        Row(i, name, known, 0, w, budget, True, 10**6, SamplingParams(), None)
        for i, (name, known, budget, w) in enumerate(zip(names, knowns, budgets, wanted, strict=True))
        if known
    ]
    for row in rows:
        engine.slots(row.request, row.known - 1, row.known + row.wanted - 1)
    table = torch.zeros(len(rows), 64, dtype=torch.int32)
    for i, row in enumerate(rows):
        blocks = engine.requests[row.request][2]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    known, wants, reads = [r.known for r in rows], [r.wanted for r in rows], [r.budget for r in rows]
    plain = DraftTables.build(table, known, wants, reads, sinks, engine.size)
    tables = engine.chooser.choose(plain, table, rows, sinks)
    assert (tables.table.shape, tables.longest) == (plain.table.shape, plain.longest)
    differ = 0
    for i, row in enumerate(rows):
        text, _, blocks = engine.requests[row.request]
        always, worth, count = expected(engine, text, row.known, row.budget, sinks, row.wanted)
        read = tables.table[i, : len(always) + count].tolist()
        at = [blocks.index(block) for block in read]
        assert at == sorted(set(at)) and always <= set(at), "in order, once each, with sinks and recent ones"
        chosen = set(at) - always
        assert len(chosen) == count and chosen <= set(worth)
        if count:
            others = max((worth[n] for n in set(worth) - chosen), default=0.0)
            assert min(worth[n] for n in chosen) >= others * (1 - 1e-4), "the best"
        for j in range(row.wanted):  # the newest token ends the table, at its place in the text
            step, position = tables.step(j), row.known - 1 + j
            assert int(step.positions[i]) == position
            assert int(step.slots[i]) == blocks[position // engine.size] * engine.size + position % engine.size
            place = at.index(position // engine.size) * engine.size + position % engine.size
            assert int(step.lengths[i]) == place + 1
        differ += read != plain.table[i, : len(read)].tolist()
    return differ


@needs_native
@pytest.mark.parametrize(
    ("heads", "dtype", "size"),
    [((4, 2, 16), torch.float32, 16), ((3, 1, 32), torch.bfloat16, 32), ((5, 5, 16), torch.bfloat16, 16)],
    ids=str,
)
def test_rows_that_come_go_and_share_blocks_read_what_the_texts_say(heads, dtype, size):
    torch.manual_seed(0)
    rng = random.Random(1)
    engine, differ = Engine(rng, heads, dtype, size), 0
    for _ in range(70):
        names = list(engine.requests)
        for name in names:
            if rng.random() < 0.1 or len(engine.free) < 16 or engine.requests[name][1] > 380:
                engine.drop(name)
        while len(engine.requests) < 3:
            engine.start(rng.choice(engine.texts))
        names = rng.sample(list(engine.requests), rng.randint(1, 3))  # a batch in any order; some sit a step out
        chunks, rejected, ends, knowns = {}, {}, [], []
        for name in names:
            computed = engine.requests[name][1]
            chunk = rng.randint(40, 150) if computed < 100 else rng.randint(1, 1 + MOST)
            stood = chunk if computed < 100 else rng.randint(1, chunk)
            chunks[name], rejected[name] = chunk, chunk - stood
            ends.append(computed + stood)
            knowns.append(0 if computed < 100 and rng.random() < 0.5 else ends[-1] + 1)  # some are in their prompts yet
        engine.step(chunks, rejected)
        for name, end in zip(names, ends, strict=True):
            engine.requests[name][1] = end
        if any(knowns):
            budgets = [rng.choice((1, 40, 70, 130, 1000)) for _ in names]
            wanted = [rng.randint(1, MOST) for _ in names]
            differ += check(engine, names, knowns, budgets, rng.choice((0, 4, 20)), wanted)
            for name, known, w in zip(names, knowns, wanted, strict=True):
                if known:
                    engine.draft(name, known, w)
    assert differ > 25  # else nothing was tried


@needs_native
def test_rows_that_no_query_is_known_of_read_their_last_blocks():
    torch.manual_seed(0)
    engine = Engine(random.Random(2), (4, 2, 16), torch.float32, 16)
    engine.start(engine.texts[0])
    engine.step({"r1": 300})
    row = Row(0, "r1", 301, 0, 2, 64, True, 10**6, SamplingParams(), None)
    engine.slots("r1", 300, 302)
    table = torch.tensor([engine.requests["r1"][2]], dtype=torch.int32)
    plain = DraftTables.build(table, [301], [2], [64], 16, 16)
    assert not torch.equal(engine.chooser.choose(plain, table, [row], 16).table, plain.table)
    assert not engine.chooser.notes.written[table[0, 1:16].long()].any()  # what is known is not made again
    engine.chooser.notes._queries.pop("b")  # a layer that did not run
    assert torch.equal(engine.chooser.choose(plain, table, [row], 16).table, plain.table)


def test_notes_are_of_each_rows_last_tokens_by_their_positions():
    notes = Notes(LAYERS, 12, 4, keep=2)
    assert notes.written.all() and notes.queries([0], [3])[1] == [False]
    notes.written[:] = False
    starts, lens = torch.tensor([0, 1, 6, 8], dtype=torch.int32), torch.tensor([9, 5, 20], dtype=torch.int32)
    notes.begin(starts, lens, torch.tensor([8, 0, 1, 2, 3, 20, -1, 47]))
    assert notes.written[:12].nonzero()[:, 0].tolist() == [0, 2, 5, 11]
    queries = torch.arange(8.0)[:, None, None].expand(8, 3, 2)  # token n says n, in layer b 10 + n
    notes.note("a", queries)
    assert notes.queries([0], [8])[1] == [False]
    notes.note("b", (queries + 10).bfloat16())
    found, known = notes.queries([0, 0, 1, 1, 1, 2, 2, 2], [8, 7, 4, 3, 2, 19, 18, 20])
    assert known == [True, False, True, True, False, True, True, False]
    assert found.shape == (2, 8, 3, 2) and found.dtype == torch.float32
    assert found[:, known, 0, 0].tolist() == [[0, 5, 4, 7, 6], [10, 15, 14, 17, 16]]
    notes.begin(torch.tensor([0, 1]), torch.tensor([9]), torch.tensor([8]))
    assert notes.queries([0], [8])[1] == [False]  # those were of another pass


def test_half_of_the_budget_stays_with_the_last_tokens_and_full_blocks_alone_are_chosen():
    def of(known, budget, dropped, sinks=16):
        cut = split(SimpleNamespace(known=known, budget=budget), dropped, sinks, 16)
        return cut.sinks, cut.recent, cut.count

    assert of(100, 200, 0) == (1, 1, 0)
    assert of(321, 64, 16 * 15) == (1, 18, 2)
    assert of(321, 1, 16 * 19) == (1, 20, 0)
    assert of(320, 1, 16 * 18) == (1, 19, 0)  # the newest token's own block is not full


def test_the_drafter_asks_for_a_choice_where_settings_say_so():
    runner, calls = Runner(texts(random.Random(0), 3, 60)), []

    def choose(tables, table, rows):
        calls.append((table.shape[0], [row.index for row in rows]))
        return tables

    for settings, asked in (
        (Settings(budget=8), 0),
        (Settings(budget=8, attention="native", selection="pages"), 1),
        (Settings("full", attention="native", selection="pages"), 0),
    ):
        drafter = runner.drafter(settings)
        drafter._choose = choose
        drafter.propose(*runner.arguments(rows=(0, 2)))
        assert calls == [(2, [0, 2])] * asked and not runner.said
        calls.clear()


def test_a_choice_goes_with_the_native_attention():
    with pytest.raises(InvalidValueError, match="attention native"):
        Settings(selection="pages")
    with pytest.raises(InvalidValueError, match="streaming_llm, pages"):
        Settings(attention="native", selection="quest")
    ours = engine_args(Settings(attention="native", selection="pages"), 3, "cpu")
    assert ours["additional_config"]["longdraft"]["selection"] == "pages"
