"""SPIRe drafts in the engine: the same as in training, whole identities, and no trace of what was refused."""

import random
from dataclasses import replace

import pytest
import torch

from longdraft.capture import Seen
from longdraft.config import DraftConfig
from longdraft.core import Sequence
from longdraft.drafts.base import DraftRow
from longdraft.drafts.spire import Spire, SpireModel
from longdraft.kernels import native
from longdraft.models.feedback import MEMORY, FeedbackConfig
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams
from longdraft.train.prune_init import initial_memory
from longdraft.train.teacher import Teacher
from tests.conftest import greedy, make_engine
from tests.exact.test_speculation_identity import GAMMAS, SAMPLING, SHAPES, requests_of
from tests.spire_drafts import Tensors, for_training, spire_of, tensors_of

SPIRE = DraftConfig(weights="spire")
ALL = FeedbackConfig((0, 1, 2), window=256)
needs_native = pytest.mark.skipif(native._native is None, reason=f"without the native extension: {native.WHY_NOT}")
TYPES = [
    pytest.param(torch.float64, 1e-9, id="float64"),
    pytest.param(torch.float32, 1e-4, id="float32", marks=needs_native),
]
NATIVE = (torch.float32, torch.bfloat16)


def target_of(dtype, **overrides):
    config = tiny_config(**overrides)
    source = RandomWeights(config, seed=6, std=0.2)
    return Transformer(config, source, dtype=dtype), source


def sequence(number, ids, committed):
    return Sequence(number, ids, len(ids), SamplingParams(), 0, 256, SPIRE, num_committed=committed)


def tell(draft, seq, y, start, sizes):
    """What passes over pieces of the given sizes would say of the tokens up to ``num_committed``."""
    while start < seq.num_committed:
        stop = min(start + next(sizes), seq.num_committed)
        for a, b in draft.needs.ranges(seq.num_committed, start, stop):
            draft.observe(seq, Seen(a, hidden=y[:, a:b]))
        start = stop


KINDS = [
    (FeedbackConfig((1, 2), 6, 2), {}),
    (FeedbackConfig((0, 2), 16, 0, "shared", "last"), {"num_kv_heads": 1, "qk_norm": True}),
    (FeedbackConfig((0, 1, 2), 5, 1, "off"), {"num_kv_heads": 4, "tie_embeddings": True}),
    (FeedbackConfig((1,), 40, 4, "per_layer", "embedding"), {"qkv_bias": True}),
]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("config", "overrides"), KINDS)
def test_drafting_gives_the_logits_of_training(config, overrides, dtype, tolerance):
    """Ragged rows, round after round of other lengths, against each block alone in plain torch."""
    target, source = target_of(dtype, **overrides)
    tensors = tensors_of(target, source, config)
    trained = for_training(target, source, config, {name: x.to(dtype) for name, x in tensors.items()})
    draft, rng = Spire(spire_of(target, source, config), max_rows=3), random.Random(1)
    ids = torch.randint(128, (3, 45), generator=torch.Generator().manual_seed(2))
    y = Teacher(target).residuals(ids.tolist(), trained.taps)
    seqs = [sequence(i, [], 0) for i in range(3)]
    for chunks in ((1, 9, 30), (2, 1, 5), (1, 6, 3), (4, 3, 2)):
        rows = []
        for seq, more in zip(seqs, chunks, strict=True):
            known = seq.num_committed
            seq.num_committed += more
            seq.ids = ids[seq.id, : seq.num_committed + 1].tolist()
            tell(draft, seq, y[:, seq.id], known, iter(lambda: rng.randint(1, 9), 0))
            rows.append(DraftRow(seq, rng.randint(1, 4)))
        feeds = draft.begin(rows)
        for step in range(max(row.gamma for row in rows)):
            active = [i for i, row in enumerate(rows) if row.gamma > step]
            if step:
                for i in active:
                    token = int(ids[i, rows[i].seq.num_committed + step])
                    feeds[i] = replace(feeds[i], start=feeds[i].start + 1, tokens=[token])
            logits = draft.run([feeds[i] for i in active])
            for i, got in zip(active, logits, strict=True):
                at = rows[i].seq.num_committed
                block = slice(0, at + step + 1)
                x = trained(ids[i : i + 1, block], y[:, i : i + 1, block], k=step + 1, first=at)
                torch.testing.assert_close(got, trained.logits(x)[0, step], rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, *(pytest.param(x, marks=needs_native) for x in NATIVE)], ids=str)
def test_before_training_keys_and_values_are_the_targets_own(dtype):
    """The same bits on the native kernels."""
    target, source = target_of(dtype)
    config = FeedbackConfig((0, 2), 6, 2)
    engine = make_engine(target)
    ids = [(5 * i + 1) % 128 for i in range(30)]
    draft = install(engine, spire_of(target, source, config, trained=False))
    seq = engine.sequence(engine.add(ids, greedy(4), SPIRE))
    engine.step()
    for i, layer in enumerate(config.layers):
        for got, want in zip(held(draft, seq, i), engine.store.read(layer, seq.id, 30), strict=True):
            assert got.keys() == {0, 1, *range(24, 30)}
            for position, x in got.items():
                torch.testing.assert_close(x, want[position], rtol=0, atol=1e-12 if dtype == torch.float64 else 0)


def install(engine, spire):
    engine.runner.small["spire"] = spire
    return engine.runner.draft(SPIRE)


def held(draft, seq, layer):
    """Keys and values of the verified tokens that the draft holds of a sequence, by position."""
    draft._take_in([seq.id])
    state, window = draft._states[seq.id], draft.needs.hidden
    positions = [*range(state.first), *range(max(state.start, state.stop - window), state.stop)]
    place = [p if p < state.first else state.first + (p - state.start) % window for p in positions]
    k, v = draft.store.read(layer, seq.id, state.size(window))
    return [dict(zip(positions, x[place], strict=True)) for x in (k, v)]


# --- identities


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("memory", ["per_layer", "off"])
def test_all_layers_one_hot_and_a_full_window_accept_everything(tiny, gamma, memory):
    """γ + 1 tokens in every round but the last, which the length cuts."""
    config, source = replace(ALL, memory=memory), RandomWeights(tiny_config(), seed=6)
    tensors = tensors_of(tiny, source, config, trained=False)
    if memory == "per_layer":
        tensors[MEMORY] = initial_memory(config, peak=60.0).double()
    engine = make_engine(tiny, num_pages=100)
    engine.runner.small["spire"] = SpireModel(config, Tensors(tensors), tiny)
    shape = list(SHAPES)[gamma % 5]
    steps = {}
    for prompt, params in requests_of(shape, SAMPLING[gamma % 5], gamma):
        engine.add(prompt, params, replace(SPIRE, gamma=gamma))
    while engine.has_work:
        for output in engine.step():
            steps.setdefault(output.seq, []).append(len(output.tokens))
    for seq, (_, *rounds) in steps.items():
        assert all(n == gamma + 1 for n in rounds[:-1])
        assert seq.stats.accepted == seq.stats.drafted


def test_no_prefill_and_no_more_keys_than_sinks_window_and_a_block(tiny, monkeypatch):
    """Whatever the prompt's length a pass of the draft feeds one token a row, and only while it proposes."""
    config, source = FeedbackConfig((1, 2), window=20, sinks=3), RandomWeights(tiny_config(), seed=6)
    engine = make_engine(tiny, num_pages=100, max_num_batched_tokens=32)
    draft = install(engine, spire_of(tiny, source, config))
    passes, proposing, propose = [], [], engine.runner.propose
    forward = draft.runs.forward

    def counted(ids, positions, plan, *args):
        passes.append((len(ids), len(plan.view.lens), int(plan.view.lens.max()), bool(proposing)))
        return forward(ids, positions, plan, *args)

    def watched(batch):
        proposing.append(batch)
        try:
            return propose(batch)
        finally:
            proposing.clear()

    monkeypatch.setattr(draft.runs, "forward", counted)
    monkeypatch.setattr(engine.runner, "propose", watched)
    for prompt, params in requests_of("long", SAMPLING[0], 0):
        engine.add(prompt, params, replace(SPIRE, gamma=4))
    while engine.has_work:
        engine.step()
        held = draft.store.num_pages - draft.store.num_free_pages
        assert held <= len(engine.scheduler.running) * draft.store.pages_for(20 + 3 + 4)
    assert all(tokens == rows and during for tokens, rows, _, during in passes)
    assert max(length for _, _, length, _ in passes) == 20 + 3 + 4
    assert draft.store.num_free_pages == draft.store.num_pages
    assert not draft._states


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_was_refused_leaves_no_trace(tiny, seed):
    """After any round, preemption or fork a row holds what one pass over its final tokens says, and that alone."""
    config, source = FeedbackConfig((0, 2), window=19, sinks=2), RandomWeights(tiny_config(), seed=6)
    engine, rng = make_engine(tiny, num_pages=100, max_num_batched_tokens=24), random.Random(seed)
    draft = install(engine, spire_of(tiny, source, config))
    for n in (1, 2, 9, 12, 40):
        prompt, own = [rng.randrange(128) for _ in range(n)], None if n == 9 else replace(SPIRE, gamma=1 + n % 5)
        engine.add_all(prompt, SamplingParams(seed=n, max_tokens=24, n=1 + n % 2), own)
    compared, step, since = 0, 0, {}
    while engine.has_work:
        step += 1
        running = engine.scheduler.running
        if running and step % 11 == 0:
            engine.scheduler.preempt(rng.choice(running))
        if running and step % 5 == 0:
            parent = rng.choice(running)
            child = engine.fork(parent.id, seed=step, draft=replace(SPIRE, gamma=3))
            if parent.draft is None:  # nobody has said anything of its past
                since[child] = parent.num_committed
            elif parent.id in since and not parent.stats.preemptions:
                since[child] = since[parent.id]
        engine.step()
        for seq in rng.sample(running, min(3, len(running))):
            if not seq.decoding or seq.id not in draft._states:
                continue
            known = [*range(2), *range(2, seq.num_committed)[-19:]]
            if seq.id in since and not seq.stats.preemptions:
                known = range(since[seq.id], seq.num_committed)[-19:]
            check_held(tiny, draft, seq, known)
            compared += 1
    assert compared > 30
    assert since
    draft.store.check_integrity()
    assert draft.store.num_free_pages == draft.store.num_pages


def check_held(target, draft, seq, known):
    """Keys and values of just these positions, as the draft makes them of the target's streams."""
    y = Teacher(target).residuals([seq.ids], draft.spire.taps)[:, 0]
    at = torch.tensor([position for position in known if position < seq.num_committed])
    for i, layer in enumerate(draft.spire.model.layers):
        want = layer.keys_values(y[i, at], draft.spire.model._rotary.lookup(at))
        for got, right in zip(held(draft, seq, i), want, strict=True):
            assert list(got) == at.tolist()
            torch.testing.assert_close(torch.stack(list(got.values())), right, rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_row_that_sits_out_keeps_a_window_of_what_it_hears(tiny):
    """Three tokens at a time, of which the window's first one is the last, the middle or the first."""
    source = RandomWeights(tiny_config(), seed=6)
    draft = Spire(spire_of(tiny, source, FeedbackConfig((1, 2), window=5, sinks=2)), max_rows=1)
    seq = sequence(0, [(5 * i + 1) % 128 for i in range(31)], 0)
    y = Teacher(tiny).residuals([seq.ids], draft.spire.taps)[:, 0]
    for stop in range(3, 31, 3):
        seq.num_committed = stop
        draft.observe(seq, Seen(stop - 3, hidden=y[:, stop - 3 : stop]))
        draft.settle([seq])
        assert len(draft._states[0].news) < 5
        if stop in (15, 27, 30):
            check_held(tiny, draft, seq, [0, 1, *range(stop - 5, stop)])


def test_a_fork_that_comes_late_shares_nothing(tiny):
    """A completion that finds a seat when the first one is far beyond the prompt; it begins with its last token."""
    engine = make_engine(tiny, max_num_seqs=1)
    source = RandomWeights(tiny_config(), seed=6)
    draft = install(engine, spire_of(tiny, source, FeedbackConfig((2,), window=6)))
    first, child = (engine.sequence(i) for i in engine.add_all([1, 2, 3], greedy(9, n=2), SPIRE))
    for _ in range(5):
        engine.step()
    child.num_committed = 2
    draft.fork(first, child)
    assert draft._states[first.id].stop > 4
    assert child.id not in draft._states
    child.num_committed = draft._states[first.id].stop - 1  # the next token is the same in both
    draft.fork(first, child)
    assert draft._states[child.id].stop == child.num_committed + 1


def test_a_row_that_sat_out_catches_up_without_a_pass(tiny):
    """Steps without proposals leave streams that wait, never more than a window of them; then it is up to date."""
    config, source = FeedbackConfig((2,), window=6), RandomWeights(tiny_config(), seed=6)
    engine = make_engine(tiny)
    draft = install(engine, spire_of(tiny, source, config))
    seq = engine.sequence(engine.add([1, 2, 3], greedy(40), SPIRE))
    room, engine.scheduler._room = engine.scheduler._room, lambda seq, draft: 0
    for _ in range(16):
        engine.step()
        assert len(draft._states[seq.id].news) <= 6
    assert seq.stats.drafted == []
    engine.scheduler._room = room
    engine.step()
    assert seq.stats.drafted[0] == 1
    assert set(held(draft, seq, 0)[0]) == {0, *range(seq.num_committed)[-6:]}
