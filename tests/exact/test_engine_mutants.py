"""Classic mistakes of an engine that speculates, planted one by one: the identity check must see each of them."""

import dataclasses

import pytest
import torch

from longdraft.config import DraftConfig
from longdraft.core import Place
from longdraft.drafts.self_spec import SelfSpec
from longdraft.engine import decide
from longdraft.engine.scheduler import Scheduler
from longdraft.kv.select.full import Full
from longdraft.models import feed as feeding
from longdraft.sampling_params import SamplingParams
from tests.conftest import make_engine, run, run_alone

PROMPTS = [[(7 * i + n) % 128 for i in range(n)] for n in (4, 15, 16, 33)]
PARAMS = SamplingParams(seed=3, max_tokens=40)
DRAFT = DraftConfig(kv="streaming_llm", budget=24, gamma=4)


def identical(model) -> bool:
    """Whether a ragged batch under a sparse draft returns what each request returns alone and plainly."""
    want = [run_alone(model, prompt, PARAMS) for prompt in PROMPTS]
    engine = make_engine(model)
    ids = [engine.add(prompt, PARAMS, DRAFT) for prompt in PROMPTS]
    got = {i: [] for i in ids}
    for output in run(engine):
        got[output.seq.id] += output.tokens
    return [got[i] for i in ids] == want


def keep_one_rejected_token(monkeypatch):
    right = Scheduler.commit

    def commit(self, row, tokens):
        right(self, row, tokens)
        if len(tokens) <= len(row.proposal) and not row.seq.finish_reason:
            row.seq.num_committed += 1
            row.seq.ids.append(row.proposal[len(tokens) - 1])

    monkeypatch.setattr(Scheduler, "commit", commit)


def commit_the_pending_token(monkeypatch):
    """The length runs one ahead of the cache: a key that was never written is taken for final."""
    right = Scheduler.commit

    def commit(self, row, tokens):
        right(self, row, tokens)
        if row.proposal and len(tokens) == 1:
            row.seq.num_committed = len(row.seq.ids) - 1
            for layer in self.store.layers:  # what verification wrote is lost, the draft's tentative values stand
                slots = self.store.slots(row.seq.id, row.seq.num_committed - 1, row.seq.num_committed)
                self.store.layout.write(layer.k, slots, torch.zeros(1, *layer.k.shape[1::2], dtype=layer.k.dtype))

    monkeypatch.setattr(Scheduler, "commit", commit)


def verify_over_the_drafts_view(monkeypatch):
    """The target checks proposals with the draft's own sparse view."""
    from longdraft.engine import runner
    from longdraft.kv.select.streaming_llm import StreamingLLM

    select = StreamingLLM(24).select
    monkeypatch.setattr(runner, "feed", lambda *args, **more: feeding.feed(*args, select, **more))


def draw_at_the_wrong_position(monkeypatch):
    class Shifted(Place):
        @property
        def position(self):
            return super().position + bool(self.drafted)

    right = decide.draws
    shifted = lambda places: [Shifted(place.seq, place.drafted) for place in places]  # noqa: E731
    monkeypatch.setattr(decide, "draws", lambda logits, places: right(logits, shifted(places)))


def emit_the_drafts_token(monkeypatch):
    """The first mismatch is accepted, too."""
    right = decide.verify_draws

    def wrong(own, proposals):
        verdict = right(own, proposals)
        rows = zip(verdict.tokens, verdict.accepted, proposals, strict=True)
        tokens = [[*t[:n], x[n]] if n < len(x) else t for t, n, x in rows]
        return dataclasses.replace(verdict, tokens=tokens)

    monkeypatch.setattr(decide, "verify_draws", wrong)


def bonus_from_the_wrong_row(monkeypatch):
    right = decide.draws
    monkeypatch.setattr(decide, "draws", lambda logits, places: right(logits.roll(1, 0), places))


def write_the_drafts_keys_last(monkeypatch):
    """Tentative keys of the draft survive: verification does not overwrite the first proposal's slot."""
    right = SelfSpec.propose

    def propose(self, rows, *, sampled):
        proposal = right(self, rows, sampled=sampled)
        for row in rows:
            slots = self.store.slots(row.seq.id, 0, 1)
            for layer in self.store.layers:
                self.store.layout.write(layer.v, slots, self.store.layout.read(layer.v, slots) * 1.5)
        return proposal

    monkeypatch.setattr(SelfSpec, "propose", propose)


MUTANTS = [
    keep_one_rejected_token,
    commit_the_pending_token,
    verify_over_the_drafts_view,
    draw_at_the_wrong_position,
    emit_the_drafts_token,
    bonus_from_the_wrong_row,
    write_the_drafts_keys_last,
]


def test_the_real_engine_passes(tiny):
    assert identical(tiny)


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda f: f.__name__)
def test_every_mutant_is_seen(tiny, monkeypatch, mutate):
    want = [run_alone(tiny, prompt, PARAMS) for prompt in PROMPTS]
    mutate(monkeypatch)
    engine = make_engine(tiny)
    ids = [engine.add(prompt, PARAMS, DRAFT) for prompt in PROMPTS]
    got = {i: [] for i in ids}
    try:
        for output in run(engine):
            got[output.seq.id] += output.tokens
    except (AssertionError, IndexError, KeyError, RuntimeError):
        return  # seen, too
    assert [got[i] for i in ids] != want


def test_a_draft_that_is_not_the_target_is_seen(tiny, monkeypatch):
    """The full draft accepts everything only because it reads everything: one token less and it does not."""
    shifted = DraftConfig(kv="full", budget=1, gamma=4)
    engine = make_engine(tiny)
    seq = engine.sequence(engine.add(PROMPTS[3], PARAMS, shifted))
    list(run(engine))
    assert seq.stats.drafted == seq.stats.accepted
    from longdraft.kv.select.streaming_llm import StreamingLLM

    monkeypatch.setattr(Full, "select", lambda self, view: StreamingLLM(24).select(view))
    engine = make_engine(tiny)
    seq = engine.sequence(engine.add(PROMPTS[3], PARAMS, shifted))
    list(run(engine))
    assert sum(seq.stats.accepted) < sum(seq.stats.drafted)


@pytest.mark.parametrize("bad", [128, -1, 2**40])
def test_proposals_outside_the_vocabulary_are_dropped(tiny, bad):
    from tests.exact.fake_drafts import Constant, place

    engine = make_engine(tiny)
    place(engine, DRAFT, Constant(bad))
    seq = engine.sequence(engine.add(PROMPTS[0], PARAMS, DRAFT))
    list(run(engine))
    assert seq.output_ids == run_alone(tiny, PROMPTS[0], PARAMS)
    assert seq.stats.drafted == []
