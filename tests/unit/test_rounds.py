"""Rounds on given texts: known results, the engine's own rounds, and means over all that might be drawn."""

from dataclasses import replace

import pytest
import torch

from longdraft.config import DraftConfig
from longdraft.kv.select.streaming_llm import StreamingLLM
from longdraft.models.feedback import MEMORY, FeedbackConfig
from longdraft.models.registry import RandomWeights, tiny_config
from longdraft.models.transformer import Transformer
from longdraft.sampling_params import SamplingParams
from longdraft.train.prune_init import initial_memory
from longdraft.train.rounds import FeedbackDrafter, Filled, ModelDrafter, Places, expected_to_stand, forced, rounds
from tests.conftest import make_engine, run_alone
from tests.spire_drafts import for_training, spire_of, tensors_of

F64 = torch.float64
SPIRE = FeedbackConfig((1, 2), window=6, sinks=2)
OWN = FeedbackConfig((1, 2), 6, 2, "off", "own")
ALL = FeedbackConfig((0, 1, 2), window=200)
NEAR = FeedbackConfig((0, 1, 2), window=14, sinks=2)  # untrained it is much like the target
PLACES = Places(context=17, count=3, k=4)  # a round begins behind the first token of a page
SEEDS = torch.tensor([3, 4])


@pytest.fixture(scope="module")
def source():
    return RandomWeights(tiny_config(), seed=6, std=0.2)


@pytest.fixture(scope="module")
def target(source):
    return Transformer(tiny_config(), source, dtype=F64)


def texts(rows=2, length=40):
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(1))


def filled(target, ids, config=SPIRE, places=PLACES):
    return Filled(target, ids, places, (*config.taps(3), 3))


def draft_of(target, source, config, trained=True):
    return for_training(target, source, config, tensors_of(target, source, config, trained))


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "maximal"), (1.0, "maximal"), (0.7, "coupled")])
def test_a_draft_that_is_the_target_gives_all_and_one_more(target, source, temperature, rule):
    """All layers, memories that are their inputs, a window over everything; and the target over its whole cache."""
    draft = draft_of(target, source, ALL, trained=False)
    with torch.no_grad():
        draft.memory.copy_(initial_memory(ALL, peak=60.0))
    texts_in = filled(target, texts(), ALL)
    for drafter in (FeedbackDrafter(draft, texts_in), ModelDrafter(texts_in)):
        stood = rounds(texts_in, drafter, temperature, SEEDS, rule)
        torch.testing.assert_close(stood, torch.ones(2, 3, 4, dtype=F64), rtol=0, atol=1e-9)


class Wrong:
    """Proposes as the target does, but from the ``right``-th token on what it holds least likely."""

    def __init__(self, inner, right):
        self.inner, self.right = inner, right
        self.begin, self.end = inner.begin, inner.end

    def logits(self, tokens):
        x = self.inner.logits(tokens)
        return x if tokens.shape[2] <= self.right else -x


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_draft_that_errs_at_a_known_place(target, right):
    texts_in = filled(target, texts())
    stood = rounds(texts_in, Wrong(ModelDrafter(texts_in), right), 0.0, SEEDS)
    assert stood.tolist() == [[[1.0] * right + [0.0] * (4 - right)] * 3] * 2


def test_the_chance_to_stand_is_the_mean_over_all_that_might_be_drawn():
    """Every pair of proposals with its probability, against the law of acceptance; greedy is one-hot."""
    random = torch.Generator().manual_seed(0)
    p1, q1 = torch.randn(2, 3, generator=random, dtype=F64).log_softmax(-1)
    p2, q2 = torch.randn(2, 3, 3, generator=random, dtype=F64).log_softmax(-1)
    proposals = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    log_p, log_q = (torch.stack([a.expand(9, -1), b[proposals[:, 0]]], 1) for a, b in ((p1, p2), (q1, q2)))
    weight = q1[proposals[:, 0]].exp() * q2[proposals[:, 0], proposals[:, 1]].exp()
    mean = (weight[:, None] * expected_to_stand(log_p, log_q, proposals)).sum(0)
    both = torch.minimum(p1, q1).exp()
    want = torch.stack([both.sum(), (both * torch.minimum(p2, q2).exp().sum(-1)).sum()])
    torch.testing.assert_close(mean, want)


@pytest.mark.parametrize("config", [SPIRE, OWN], ids=["spire", "own"])
def test_rounds_do_not_touch_each_other(target, source, config):
    """All at once as each alone, from its own beginning."""
    draft, ids = draft_of(target, source, config), texts()
    texts_in = filled(target, ids, config)
    together = rounds(texts_in, FeedbackDrafter(draft, texts_in), 1.0, SEEDS)
    for j, start in enumerate(PLACES.starts):
        alone_in = filled(target, ids, config, Places(start, 1, 4))
        drafter = FeedbackDrafter(draft, alone_in)
        drafter.residuals = FeedbackDrafter(draft, texts_in).residuals[:, :, : start + 4]
        alone = rounds(alone_in, drafter, 1.0, SEEDS)
        torch.testing.assert_close(alone[:, 0], together[:, j], rtol=1e-9, atol=1e-12)
    assert 0.0 < float(together[..., 0].mean()) < 1.0
    assert texts_in.store.num_free_pages == 2 * 3 * 2  # nothing is held but the texts


@pytest.mark.parametrize(("kind", "temperature"), [("spire", 0.9), ("streaming_llm", 0.0)])
def test_rounds_are_those_of_the_engine(target, source, temperature, kind):
    """On a text of the target's own, at every beginning: as many of the first proposals stand, by the same noise."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=36, ignore_eos=True)
    text = [1, 2, 3, *run_alone(target, [1, 2, 3], params)]
    config = DraftConfig(weights="spire") if kind == "spire" else DraftConfig(budget=22, sinks=2)
    texts_in = filled(target, torch.tensor([text]), NEAR)
    if kind == "spire":
        drafter = FeedbackDrafter(draft_of(target, source, NEAR, trained=False), texts_in)
    else:
        drafter = ModelDrafter(texts_in, StreamingLLM(budget=22, sinks=2).select)
    stood = rounds(texts_in, drafter, temperature, torch.tensor([7]), "coupled")[0].sum(-1)
    engine = make_engine(target)
    engine.runner.small["spire"] = spire_of(target, source, NEAR, trained=False)
    for start, want in zip(PLACES.starts, stood.tolist(), strict=True):
        seq = engine.sequence(engine.add(text[:start], params, replace(config, gamma=4)))
        while not sum(seq.stats.drafted):
            engine.step()
        assert sum(seq.stats.accepted) == want
        engine.abort(seq.id)
    assert 0 < stood.sum() < 12


def test_forced_rounds_of_a_text_that_the_target_wrote_are_real_ones(target, source):
    """Greedy: what stands is the text. Sampled: the first proposals' acceptance is the real one."""
    text = [5, 6, *run_alone(target, [5, 6], SamplingParams(temperature=0, max_tokens=31, ignore_eos=True))]
    texts_in, draft = filled(target, torch.tensor([text]), NEAR), draft_of(target, source, NEAR, trained=False)
    chain = forced(draft, texts_in, draft.logits, 0.0).cumprod(-1)
    assert torch.equal(chain, rounds(texts_in, FeedbackDrafter(draft, texts_in), 0.0, SEEDS[:1]))
    assert 0 < chain.sum() < 12
    first = forced(draft, texts_in, draft.logits, 1.0)[..., 0]
    real = rounds(texts_in, FeedbackDrafter(draft, texts_in), 1.0, SEEDS[:1])[..., 0]
    torch.testing.assert_close(first, real)


def test_the_memory_takes_part(target, source):
    """A draft with and one without its memories differ from the second proposal on, not before."""
    ids, tensors = texts(), tensors_of(target, source, SPIRE)
    texts_in = filled(target, ids)
    with_it = for_training(target, source, SPIRE, tensors)
    less = {name: x for name, x in tensors.items() if name != MEMORY}
    without = for_training(target, source, replace(SPIRE, memory="off"), less)
    a, b = (forced(d, texts_in, d.logits) for d in (with_it, without))
    torch.testing.assert_close(a[..., 0], b[..., 0])
    assert (a[..., 1:] - b[..., 1:]).abs().max() > 1e-4
