"""Whatever happens around a request, it returns what it returns alone (float64 references)."""

import random

import pytest
import torch

from longdraft import SamplingParams
from longdraft.core import Place, Sequence
from longdraft.exactness import forced_logits
from longdraft.spec.next_tokens import next_tokens
from tests.conftest import greedy, make_engine, run, run_alone


def random_params(rng):
    seed = rng.randrange(2**63)
    kinds = (
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 12},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 40},
    )
    return SamplingParams(seed=seed, max_tokens=rng.randint(1, 40), **rng.choice(kinds))


def drawn(model, prompt, params, output):
    """The ids that plain decoding draws after the prompt and after each token of ``output``, by one pass over all.

    If they are ``output`` itself, step by step decoding of this request alone returns it: each token is what the
    tokens before it give.
    """
    seq = Sequence(0, prompt, len(prompt), params, params.seed, len(prompt) + len(output))
    logits = forced_logits(model, [[*prompt, *output]], len(output) + 1)
    return next_tokens(logits[:-1], [Place(seq, output[:i]) for i in range(len(output))])[0]


class World:
    """Random traffic through one engine that is short of pages, with a record of what each request should give."""

    def __init__(self, model, seed, **sizes):
        self.rng, self.model = random.Random(seed), model
        self.engine = make_engine(model, **sizes)
        self.live: dict[int, tuple] = {}  # id → (prompt, params, output so far)
        self.done: list[tuple] = []
        self.aborted = 0

    def join(self):
        length = self.rng.choice([1, 2, 15, 16, 17, 31, 33, self.rng.randint(1, 90)])
        prompt = [self.rng.randrange(128) for _ in range(length)]
        params = random_params(self.rng)
        self.live[self.engine.add(prompt, params)] = (prompt, params, [])

    def fork(self):
        source = self.rng.choice(list(self.live))
        prompt, params, output = self.live[source]
        self.live[self.engine.fork(source)] = (prompt, params, list(output))

    def abort(self):
        victim = self.rng.choice(list(self.live))
        prompt, params, output = self.live.pop(victim)
        self.engine.abort(victim)
        self.aborted += 1
        self.done.append((prompt, params, output, False))

    def preempt(self):
        running = self.engine.scheduler.running
        if running:
            self.engine.scheduler.preempt(self.rng.choice(running))

    def step(self):
        for output in self.engine.step():
            self.live[output.seq.id][2].extend(output.tokens)
            if output.finish_reason:
                self.done.append((*self.live.pop(output.seq.id), True))
        self.engine.store.check_integrity()

    def run(self, steps):
        """Random traffic for so many steps, and on until everybody is done."""
        for _ in range(steps):
            self.act()
        while self.live:
            self.step()

    def check(self):
        """Every output is that of its request alone, as far as it came, and nothing is left behind."""
        engine = self.engine
        assert engine.store.num_free_pages == engine.store.num_pages
        assert engine.stats.preemptions > 20
        assert self.aborted > 10
        assert len(self.done) > 100
        for prompt, params, output, complete in self.done:
            assert output == drawn(self.model, prompt, params, output)
            assert len(output) == params.max_tokens or not complete

    def act(self):
        if len(self.live) < 3 or self.rng.random() < 0.25:
            self.join()
        elif self.rng.random() < 0.08:
            self.fork()
        elif self.rng.random() < 0.06:
            self.abort()
        elif self.rng.random() < 0.08:
            self.preempt()
        self.step()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_thousand_random_steps(tiny, seed):
    """Join, leave, abort, preempt and fork at random for 1,000 steps: outputs equal isolated runs, no page leaks."""
    world = World(tiny, seed, num_pages=16, max_num_seqs=9, max_num_batched_tokens=32)
    world.run(1000)
    world.check()


def test_one_pass_is_the_oracle_of_step_by_step_decoding(tiny):
    """What the checks of random traffic rest on: true of a plain run, and of no other output."""
    rng = random.Random(3)
    for n in (1, 16, 40):
        prompt, params = [rng.randrange(128) for _ in range(n)], random_params(rng)
        want = run_alone(tiny, prompt, params)
        assert drawn(tiny, prompt, params, want) == want
        for i in range(len(want)):
            other = [*want[:i], (want[i] + 1) % 128, *want[i + 1 :]]
            assert drawn(tiny, prompt, params, other) != other


def test_a_fork_with_another_seed_leaves_its_source_alone(tiny):
    prompt, params = list(range(40)), SamplingParams(seed=1, max_tokens=30)
    engine = make_engine(tiny)
    first = engine.add(prompt, params)
    for _ in range(9):
        engine.step()
    second = engine.fork(first, seed=99)
    tail = {first: [], second: []}
    for output in run(engine):
        tail[output.seq.id].extend(output.tokens)
    want = run_alone(tiny, prompt, params)
    shared = want[: len(want) - len(tail[first])]
    assert shared + tail[first] == want
    # From the fork on, the child is what its history under the new seed gives.
    rest = SamplingParams(seed=99, max_tokens=len(tail[second]))
    assert tail[second] == run_alone(tiny, prompt + shared, rest) != tail[first]


def test_unequal_prompts_in_one_batch(tiny):
    """Prompts of 1, 7, 33 and 64 ids together and alone, in both orders (case O10)."""
    prompts = [[(7 * i + n) % 128 for i in range(n)] for n in (1, 7, 33, 64)]
    alone = [run_alone(tiny, p, greedy(32)) for p in prompts]
    for order in (range(4), reversed(range(4))):
        engine, got = make_engine(tiny), {}
        ids = {engine.add(prompts[i], greedy(32)): i for i in order}
        for output in run(engine):
            got.setdefault(ids[output.seq.id], []).extend(output.tokens)
        assert [got[i] for i in range(4)] == alone


def poison(engine):
    """NaN into every slot that holds no committed token: free pages, and the rest of the pages that rows hold."""
    store, page = engine.store, engine.store.layout.page_size
    used = [store.slots(s.id, 0, s.num_committed) for s in engine.scheduler.running]
    unused = torch.ones(store.num_pages * page, dtype=torch.bool)
    unused[torch.cat(used) if used else []] = False
    slots = unused.nonzero().flatten()
    nan = torch.full((len(slots), store.layout.num_kv_heads, store.layout.head_dim), torch.nan, dtype=store.k.dtype)
    for layer in range(len(store.layers)):
        store.write(layer, nan, nan, slots)


@pytest.mark.parametrize("chunk", [7, 64])
def test_nothing_past_a_row_is_ever_seen(tiny, chunk):
    """NaN in every uncommitted slot before every step, rows of odd lengths that pass every page offset."""
    prompts = [[(5 * i + n) % 128 for i in range(n)] for n in (1, 3, 15, 16, 17, 40)]
    want = [run_alone(tiny, p, greedy(35)) for p in prompts]
    engine = make_engine(tiny, max_num_batched_tokens=chunk, num_pages=20)
    ids = [engine.add(p, greedy(35)) for p in prompts]
    got = {i: [] for i in ids}
    while engine.has_work:
        poison(engine)
        for output in engine.step():
            got[output.seq.id] += output.tokens
            assert output.finish_reason != "error"
    assert [got[i] for i in ids] == want


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 64, 200])
def test_prefill_chunking_changes_nothing(tiny, chunk):
    prompt = [(11 * i) % 128 for i in range(150)]
    want = run_alone(tiny, prompt, greedy(20))
    assert run_alone(tiny, prompt, greedy(20), max_num_batched_tokens=chunk) == want


@pytest.mark.parametrize("kernels", ["ref", "torch"])
def test_reference_and_padded_kernels_give_the_same_ids(tiny, kernels, monkeypatch):
    from longdraft.models.registry import RandomWeights
    from longdraft.models.transformer import Transformer

    want = run_alone(tiny, list(range(50)), greedy(40))
    monkeypatch.setenv("LONGDRAFT_KERNELS", kernels)
    model = Transformer(tiny.config, RandomWeights(tiny.config, seed=6), dtype=torch.float64)
    assert run_alone(model, list(range(50)), greedy(40)) == want


def test_a_seeded_request_gives_one_answer_in_every_company(tiny):
    """Alone, among unseeded mates, joining late (case O07)."""
    prompt, params = list(range(20)), SamplingParams(seed=42, max_tokens=48)
    alone = run_alone(tiny, prompt, params)
    engine = make_engine(tiny)
    for i in range(4):
        engine.add([i + 1] * 9, SamplingParams(max_tokens=48))
    for _ in range(5):
        engine.step()
    mine, got = engine.add(prompt, params), []
    for i in range(3):
        engine.add([i + 50] * 12, SamplingParams(max_tokens=30, seed=i))
    for output in run(engine):
        got += output.tokens if output.seq.id == mine else []
    assert got == alone


def test_unseeded_requests_differ_and_repeat(tiny):
    def outputs(seed):
        engine, got = make_engine(tiny, seed=seed), {}
        for _ in range(3):
            engine.add([1, 2, 3], SamplingParams(max_tokens=12))
        for output in run(engine):
            got.setdefault(output.seq.id, []).extend(output.tokens)
        return [tuple(x) for x in got.values()]

    assert len(set(outputs(0))) == 3
    assert outputs(0) == outputs(0) != outputs(1)
