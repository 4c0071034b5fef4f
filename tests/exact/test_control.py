"""Nothing that is chosen at a step changes an output, and choosing nothing is plain decoding, call for call."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from longdraft.config import AutoDraft, DraftConfig, EngineConfig
from longdraft.core import Choice
from longdraft.drafts.base import DraftRow
from longdraft.drafts.ngram import NGram
from longdraft.engine.engine import Engine
from longdraft.errors import InvalidValueError
from longdraft.kernels import native
from longdraft.planner.control import Controller
from longdraft.sampling_params import SamplingParams
from tests.conftest import greedy, make_engine
from tests.exact import test_native_identity as on_native
from tests.exact.fake_drafts import install
from tests.exact.test_contract import (
    DRAFTS,
    EOS,
    KINDS,
    RULES,
    Kit,
    check_all_same,
    drain,
    request_of,
    speculated,
)
from tests.unit.recorded import Flat, sequence

AUTO = AutoDraft()
ASKED = DraftConfig(weights="ngram", gamma=8)


class AtRandom:
    """At every step a random draft with a random γ for each row; others are told of the pass, or lose their state."""

    def __init__(self, drafts, seed=0):
        self.drafts, self.rng, self.used, self.deck = tuple(drafts), random.Random(seed), set(), []
        self.asked = ASKED

    def choose(self, seqs, guesses):
        asked = [seq for seq in seqs if isinstance(seq.draft, AutoDraft)]
        if self.rng.random() < 0.1:
            rows = [DraftRow(seq, ASKED.gamma) for seq in asked]
            assert list(guesses.values()) == NGram().propose(rows, sampled=False).tokens
        assert list(guesses) == [seq.id for seq in asked]
        return [self.choice() if isinstance(seq.draft, AutoDraft) else seq.own_choice for seq in seqs]

    def choice(self):
        rng, draft = self.rng, None
        if rng.random() < 0.8:
            self.deck = self.deck or rng.sample(self.drafts, len(self.drafts))  # each has its turn
            draft = replace(self.deck.pop(), gamma=rng.randint(1, 6))
            self.used.add(replace(draft, gamma=1))
        dropped = tuple(rng.sample(self.drafts, 2)) if rng.random() < 0.1 else ()
        return Choice(draft, tuple(rng.sample(self.drafts, 3)), dropped)

    def told(self, seq):
        return tuple(self.rng.sample(self.drafts, 3)) if isinstance(seq.draft, AutoDraft) else seq.own_choice.told

    def observe(self, rounds, seconds, draft_s, own_s=0.0):
        assert all(r.accepted <= r.asked <= r.row.room and r.tokens for r in rounds if not r.row.seq.error)

    def fork(self, source, child):
        pass

    def release(self, seq_id):
        pass


@pytest.fixture(scope="module")
def kit(tiny):
    return Kit(tiny)


@pytest.mark.parametrize("rule", RULES)
def test_every_parameter_under_choices_at_random(kit, rule):
    half = list(KINDS)[list(RULES).index(rule) :: 2]
    requests = [request_of(kit, kind, rule) for kind in half]
    control = AtRandom([replace(draft, gamma=1) for draft in DRAFTS.values()])
    config = EngineConfig(max_model_len=256, num_pages=400, max_num_batched_tokens=64)
    engine = install(Engine(kit.model, config, (EOS,), kit.tokenizer, kit.small, control))
    ids = [engine.add_all(list(prompt), params, AUTO) for prompt, params in requests]
    got = [[engine.sequence(i) for i in own] for own in ids]
    drain(engine)
    check_all_same(got, kit.batch(requests))
    drafted, accepted = speculated(got)
    assert 0 < accepted < drafted
    assert len(control.used) == len(DRAFTS)


@pytest.fixture(scope="module")
def models():
    """Those of the native tests in bfloat16."""
    return on_native.models_in(on_native.DTYPES["bfloat16"])


native_only = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")


@native_only
def test_choices_at_random_with_preemptions_and_forks(models):
    """Ids and log-probability bits, of the requests and of forks with and without a draft of their own."""
    rng = random.Random(1)
    asked = [request for sampling in on_native.SAMPLING[::3] for request in on_native.requests(sampling)]
    control = AtRandom([replace(draft, gamma=1) for draft in on_native.DRAFTS.values()])
    sizes = {"num_pages": 40, "max_num_seqs": 12, "max_num_batched_tokens": 48}
    engine = on_native.engine_of(models, control, **sizes)
    seqs = [engine.sequence(engine.add(prompt, params, AUTO)) for prompt, params in asked]
    forks = []
    while engine.has_work:
        running = engine.scheduler.running
        if running and rng.random() < 0.1:
            engine.scheduler.preempt(rng.choice(running))
        if running and rng.random() < 0.1:
            source = rng.choice(running)
            own = rng.choice([AUTO, AUTO, None, DraftConfig(budget=24, sinks=4)])
            forks.append((source.id, engine.sequence(engine.fork(source.id, draft=own))))
        engine.step()
    engine.store.check_integrity()
    assert engine.store.num_free_pages == engine.store.num_pages
    want = on_native.alone(models, asked)
    assert [(seq.output_ids, seq.logprobs) for seq in seqs] == want
    known = [(source, child) for source, child in forks if source < len(want)]
    assert len(known) > 2
    assert all((child.output_ids, child.logprobs) == want[source] for source, child in known)


SELF = DraftConfig(kv="full", gamma=1)


def calls_of(models, monkeypatch, control, draft):
    """What one engine asks of the native runtime until its requests have ended, and what it returned."""
    engine, made = on_native.engine_of(models, control, max_num_batched_tokens=48), []
    runtime = native.runtime()

    class Counted:
        isa, threads = runtime.isa, runtime.threads

        def __getattr__(self, name):
            call = getattr(runtime, name)

            def noted(*args):
                made.append((name, [x for x in args if isinstance(x, int) and 0 <= x < 2**20]))
                return call(*args)

            return noted

    with monkeypatch.context() as patched:
        patched.setattr(native, "runtime", Counted)
        seqs = [engine.sequence(engine.add(p, q, draft)) for p, q in on_native.requests(on_native.SAMPLING[1])[:4]]
        while engine.has_work:
            engine.step()
    return made, [seq.output_ids for seq in seqs], seqs


@native_only
def test_choosing_nothing_is_plain_decoding_call_for_call(models, monkeypatch):
    plain, want, _ = calls_of(models, monkeypatch, None, None)
    off, got, seqs = calls_of(models, monkeypatch, Controller(Flat(1e3), {SELF: 0.9}), AUTO)
    assert (off, got) == (plain, want)
    assert all(seq.stats.control.off.total() == seq.stats.verify_passes > 0 for seq in seqs)
    on, got, seqs = calls_of(models, monkeypatch, Controller(Flat(1e-3), {SELF: 0.9}), AUTO)
    assert got == want
    assert len(on) != len(plain)  # the count sees proposals
    assert all(seq.stats.control.rounds.total() > 0 for seq in seqs)


def test_the_real_control_in_a_crowded_engine(tiny):
    """It proposes, it is told what came of it, and it keeps nothing of those that are gone."""
    control = Controller(Flat(0.05), {SELF: 0.5, DraftConfig(budget=16, sinks=4, gamma=1): 0.5})
    engine = Engine(tiny, EngineConfig(max_model_len=256, num_pages=14, max_num_seqs=4), control=control)
    asked = [([(7 * i + n) % 128 for i in range(n)], SamplingParams(seed=n, max_tokens=100)) for n in (30, 33, 40, 44)]
    seqs = [engine.sequence(engine.add(prompt, params, AUTO)) for prompt, params in asked]
    while engine.has_work:
        engine.step()
    for seq, (prompt, params) in zip(seqs, asked, strict=True):
        alone = make_engine(tiny)
        other = alone.sequence(alone.add(prompt, params))
        while alone.has_work:
            alone.step()
        assert seq.output_ids == other.output_ids
    assert engine.stats.preemptions > 0
    assert control.evidence.pools[0].evidence(control._step) > 0
    assert not control._rows
    assert not control.evidence._own
    spent = control.stats
    assert spent.rounds.total() + spent.off.total() == sum(seq.stats.verify_passes for seq in seqs)
    assert sum(seq.stats.control.seconds for seq in seqs) == pytest.approx(spent.seconds)


def test_what_is_asked_says_its_guesses_before_the_choice(tiny):
    """Of the rows that leave the draft open, as many tokens as are asked for, up to date with the newest token."""
    engine = make_engine(tiny)
    engine.runner.control = SimpleNamespace(asked=ASKED, choose=lambda seqs, guesses: guesses)
    auto, plain = (replace(sequence(i, 0), ids=[1, 2, 3, 4] * 5, draft=draft) for i, draft in enumerate((AUTO, None)))
    assert engine.runner.choose([auto, plain]) == {0: [1, 2, 3, 4] * 2}
    auto.ids.append(1)
    assert engine.runner.choose([plain, auto]) == {0: [2, 3, 4, 1] * 2}
    engine.runner.control.asked = None
    assert engine.runner.choose([auto, plain]) == {}


def test_without_a_control_nothing_can_be_left_open(tiny):
    with pytest.raises(InvalidValueError, match="auto"):
        make_engine(tiny).add([1, 2], greedy(), AUTO)


class Scripted(AtRandom):
    """An n-gram draft that is dropped in the tenth step, and chosen again from the twentieth on."""

    def __init__(self):
        super().__init__([DraftConfig(weights="ngram", gamma=1)])
        self.steps, self.asked = 0, None

    def choose(self, seqs, guesses):
        return [self.choice() for _ in seqs]

    def choice(self):
        self.steps += 1
        (draft,) = self.drafts
        idle = 10 <= self.steps < 20
        if idle:
            return Choice(dropped=self.drafts if self.steps == 10 else ())
        return Choice(replace(draft, gamma=4), self.drafts)

    def told(self, seq):
        return ()


def test_a_state_that_is_dropped_is_gone_and_comes_back(tiny):
    control = Scripted()
    engine = Engine(tiny, EngineConfig(max_model_len=256, num_pages=64), control=control)
    prompt, params, known = [1, 2, 3, 4] * 10, greedy(40), []
    seq = engine.sequence(engine.add(prompt, params, AUTO))
    states = engine.runner.draft(control.drafts[0])._states
    while engine.has_work:
        engine.step()
        known.append(seq.id in states)
    assert known[0] == 0  # it was not told of the prompt
    assert known[1:10] == [True] * 9
    assert known[10:20] == [False] * 10
    assert known[20]
    alone = make_engine(tiny)
    other = alone.sequence(alone.add(prompt, params))
    while alone.has_work:
        alone.step()
    assert seq.output_ids == other.output_ids
