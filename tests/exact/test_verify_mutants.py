"""Mistakes in the rules of acceptance: each must be caught by the checks that the rules themselves pass."""

import pytest
import torch

from longdraft import SamplingParams
from longdraft.spec import noise, verify
from longdraft.spec.noise import DRAFT
from longdraft.spec.sample import draw
from longdraft.spec.verify import acceptance_probability
from tests.exact.laws import (
    P,
    Q,
    Toy,
    counts,
    coupled,
    distance,
    first_tokens,
    g_test,
    generate,
    joint,
    maximal,
    plain,
    speculative_joint,
)

GOOD, BAD = 1e-3, 1e-6  # p-values: the right law's is above the first, a mutant's below the second
SEEDS = torch.arange(40_000)
TARGET, DRAFT_MODEL = Toy(4, 4, 9), Toy(4, 4, 10)
LAW = joint(TARGET, 3)


@pytest.fixture(autouse=True)
def wide_draws(monkeypatch):
    """Thousands of tiny rows at once."""
    monkeypatch.setattr(verify, "DRAW_ROWS", 1 << 20)


def p_value(verify=maximal):
    return g_test(counts(generate(TARGET, DRAFT_MODEL, 2, 3, SEEDS, verify), 4), LAW)


def one_hot(q):
    return torch.nn.functional.one_hot(q.argmax(-1), q.shape[-1]).double()


def absolute(p, q):
    return (p - q).abs() / (p - q).abs().sum(-1, keepdim=True)


def cooled(q):
    return (q.log() / 0.7).softmax(-1)


MUTANTS = {
    "resample from p after reject": {"replace": lambda p, q: p},
    "|p - q| residual": {"replace": absolute},
    "q before temperature": {"drawn": cooled},
    "argmax draft treated as sampled": {"drawn": one_hot},
    "acceptance / 0.9": {"accept": lambda p, q: (acceptance_probability(p, q) / 0.9).clamp(max=1)},
    "match, then fresh resample": {"accept": lambda p, q: p, "replace": lambda p, q: p},
    "bonus from the wrong row": {"bonus": 1},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_exact_law_shows(name):
    assert distance(speculative_joint(TARGET, DRAFT_MODEL, 2, 3), LAW) < 1e-12
    assert distance(speculative_joint(TARGET, DRAFT_MODEL, 2, 3, **MUTANTS[name]), LAW) > 1e-3


@pytest.mark.parametrize(
    "broken",
    [
        [(verify, "acceptance_probability", MUTANTS["acceptance / 0.9"]["accept"])],
        [(verify, "residual", absolute)],
        [(verify, "residual", lambda p, q: p)],
        [(verify, "RESIDUAL", DRAFT)],
        [(noise, "ACCEPT", DRAFT)],
        [(verify, "RESIDUAL", DRAFT), (noise, "ACCEPT", DRAFT)],  # one stream for all
    ],
    ids=["accept", "absolute", "resample", "residual and draft share noise", "accept and draft", "all three"],
)
def test_simulation_shows_what_is_broken_in_production_code(broken, monkeypatch):
    for module, name, mutant in broken:
        monkeypatch.setattr(module, name, mutant)
    assert p_value() < BAD


def wrong_bonus(log_p):
    """The last of each row's three logit rows replaced by the one before."""
    rows = log_p.unflatten(0, (-1, 3)).clone()
    rows[:, -1] = rows[:, -2]
    return rows.flatten(0, 1)


def test_both_rules_show_a_bonus_from_the_wrong_row():
    assert p_value() > GOOD
    assert p_value(lambda log_p, *rest: maximal(wrong_bonus(log_p), *rest)) < BAD
    own, wrong = plain(TARGET, 3, SEEDS), lambda log_p, *rest: coupled(wrong_bonus(log_p), *rest)
    assert torch.equal(generate(TARGET, DRAFT_MODEL, 2, 3, SEEDS, coupled, draw), own)
    assert not torch.equal(generate(TARGET, DRAFT_MODEL, 2, 3, SEEDS, wrong, draw), own)


@pytest.mark.parametrize(
    ("mistake", "gives"),
    [
        ({"claimed": Q}, (0.381, 0.254, 0.365, 0, 0, 0)),  # raw q in the ratio
        ({"choose": lambda log_q, *_: log_q.argmax(-1)}, (0.192, 0.160, 0.649, 0, 0, 0)),
        ({"target": P}, P.exp().tolist()),  # the target skips its filters
    ],
)
def test_recognisable_failures_are_rejected(mistake, gives):
    observed, law = first_tokens(SamplingParams(top_k=3), **mistake)
    assert g_test(observed, law) < BAD
    assert (observed / observed.sum()).tolist() == pytest.approx(gives, abs=0.01)
